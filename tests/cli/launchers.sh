#!/usr/bin/env bash
# launchers.sh ZEROPLAN: ranks as processes under real launchers, on one host and on two. Equal loss bits with threads.
#   Debian: openmpi-bin, mpich, slurmctld, slurmd, slurm-client, munge; torchrun: pip's torch, or ZEROPLAN_TORCHRUN=FILE
# What is not installed is skipped by name; exit 77 when nothing ran. The two hosts are network namespaces joined by
# a veth pair, each with a host name of its own, in a process namespace: nothing outlives this script.
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/expect.sh"
zeroplan="$(realpath -- "${1:?the program}")"
if [[ -z ${ZEROPLAN_INSIDE:-} ]]; then
  work="$(TMPDIR='' mktemp -d)"  # launchers take command lines apart at spaces
  trap 'rm -rf -- "$work"' EXIT
  export ZEROPLAN_INSIDE="$work"
  namespaces=(--mount --net --uts --pid --fork --kill-child --mount-proc)
  ((EUID == 0)) || namespaces+=(--user --map-root-user)
  unshare "${namespaces[@]}" true 2>/dev/null || namespaces=()
  if ((${#namespaces[@]})); then
    timeout 1500 unshare "${namespaces[@]}" bash -- "$0" "$zeroplan"
  else
    ZEROPLAN_ONE_HOST=1 timeout 1500 bash -- "$0" "$zeroplan"
  fi
  exit
fi
work="$ZEROPLAN_INSIDE"
cd -- "$work" || exit 2
launched=0
torchrun="${ZEROPLAN_TORCHRUN:-$(command -v torchrun || true)}"
export OMP_NUM_THREADS=1
ln -s -- "$zeroplan" zeroplan
zeroplan="$work/zeroplan"
# Session folders of mpirun: process numbers in a namespace are those of other namespaces too.
mkdir tmp
export TMPDIR="$work/tmp"

skip() { printf 'skipped: %s: %s\n' "$1" "$2"; }
has() { command -v "$1" >/dev/null; }

cat >model.json <<'JSON'
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 176,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
 "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false}
JSON
# plan NAME FLAG...: a plan of four ranks.
plan() {
  "$zeroplan" plan --model model.json --host-memory 64GiB --seq-len 32 --micro-batch 2 --global-batch 8 \
    --precision fp32 --zero 3 --out "$@" >out 2>err </dev/null
}
training() { echo "$zeroplan" run "$1/plan.json" --data synthetic --steps 4 --force --measure "$2.json"; }
# same PLAN NAME: NAME.json has the losses of PLAN's threads.
same() {
  python3 - "$1.json" "$2.json" <<'PY'
import json, os, sys
threads, other = (json.load(open(path))['losses'] if os.path.exists(path) else [] for path in sys.argv[1:])
sys.exit(not (len(threads) == 4 and threads == other))
PY
}
# quietly COMMAND...: output to out and err; the limit is for what hangs.
quietly() { timeout 300 "$@" >out 2>err </dev/null; }
quietly2() { timeout 300 "$@" >out2 2>err2 </dev/null; }
# equal PLAN NAME COMMAND...: it ends well, with the losses of PLAN's threads, and only rank 0 prints.
equal() {
  ((launched += 1))
  rm -f "$2.json"
  expect "$2 runs" quietly "${@:3}"
  expect "$2: the losses of threads" same "$1" "$2"
  expect "$2: one report" test "$(grep -c 'median step' out)" = 1
}

expect 'plan for one host' plan one --gpus 4x3090-24G
expect 'plan for two hosts' plan two --gpus 2x3090-24G --nodes 2
for name in one two; do expect "threads: $name" quietly $(training $name $name); done

# ---- one host
ip link set lo up 2>/dev/null  # this namespace's own
if has mpirun.openmpi; then
  as_root=()
  ((EUID)) || as_root=(--allow-run-as-root)
  openmpi=(mpirun.openmpi "${as_root[@]}" --oversubscribe)
  equal one openmpi "${openmpi[@]}" -n 4 $(training one openmpi)
  # Two equal jobs at once on one host keep apart.
  # Each with a session folder of its own: two mpirun that make the same one at once fail in Open MPI.
  openmpi_pair() {
    mkdir -p session1 session2
    quietly2 env TMPDIR="$PWD/session1" "${openmpi[@]}" -n 4 $(training one pair1) &
    local other=$!
    quietly env TMPDIR="$PWD/session2" "${openmpi[@]}" -n 4 $(training one pair2) && wait $other
  }
  ((launched += 2))
  expect 'two jobs at once' openmpi_pair
  for name in pair1 pair2; do expect "$name: the losses of threads" same one $name; done
  expect 'a wrong number of ranks is refused' eval '! quietly "${openmpi[@]}" -n 3 $(training one openmpi)'
  expect 'and named' grep -q 'world size: expected 4' err
else
  skip 'Open MPI' 'mpirun.openmpi not found'
fi
if has mpiexec.hydra; then equal one mpich mpiexec.hydra -n 4 $(training one mpich); else skip MPICH 'mpiexec.hydra not found'; fi
if [[ -n $torchrun ]]; then
  equal one torchrun "$torchrun" --nproc-per-node 4 --no-python $(training one torchrun)
else
  skip torchrun 'not found'
fi

finish() {
  printf '%d checks, %d failed, %d launches\n' "$total" "$failed" "$launched"
  ((failed == 0)) || exit 1
  ((launched > 0)) || exit 77
  exit 0
}
[[ -z ${ZEROPLAN_ONE_HOST:-} ]] || { skip 'two hosts' 'no namespaces here'; finish; }

# ---- two hosts: 10.77.0.1 is host-a, 10.77.0.2 is host-b
printf '127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n' >hosts
mount --bind hosts /etc/hosts
for host in a b; do
  unshare --net --uts sleep 1000 &
  declare "pid_$host=$!"
done
for pid in $pid_a $pid_b; do
  until [[ $(readlink /proc/$pid/ns/net) != $(readlink /proc/self/ns/net) ]]; do sleep 0.02; done
done
# on HOST COMMAND...
cat >on <<SH
#!/usr/bin/env bash
declare -A holder=([host-a]=$pid_a [host-b]=$pid_b)
host=\$1
shift
exec nsenter --net=/proc/\${holder[\$host]}/ns/net --uts=/proc/\${holder[\$host]}/ns/uts -- "\$@"
SH
# Stands in for ssh: agent [OPTION] HOST COMMAND...
cat >agent <<SH
#!/usr/bin/env bash
while [[ \$1 == -* ]]; do shift; done
host=\$1
shift
exec "$work/on" "\$host" bash -c "\$*"
SH
chmod +x on agent
PATH="$work:$PATH"
wire() {
  ip link add wire-a type veth peer name wire-b && ip link set wire-a netns $pid_a && ip link set wire-b netns $pid_b &&
    for host in a b; do
      on host-$host hostname host-$host && on host-$host ip link set lo up && on host-$host ip link set wire-$host up &&
        on host-$host ip addr add 10.77.0.$([[ $host == a ]] && echo 1 || echo 2)/24 dev wire-$host || return 1
    done
}
wire >err 2>&1 || { skip 'two hosts' "$(head -1 err)"; finish; }
wired_bytes() { on host-a cat /proc/net/dev | awk '/wire-a/ {print $2 + $10}'; }
# crossed BEFORE: at least the weights' bytes went over the wire since.
crossed() { (($(wired_bytes) - $1 > 500000)); }

# direct RANK COMMAND...: what a launcher would start; ranks 0 and 1 on host-a.
direct() {
  local rank=$1 host=host-a
  ((rank < 2)) || host=host-b
  on $host env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) MASTER_ADDR=host-a MASTER_PORT=29600 "${@:2}"
}
all_direct() {
  local rank jobs=() bad=0
  for rank in 1 2 3; do direct $rank "$@" >out.$rank 2>err.$rank </dev/null & jobs+=($!); done
  direct 0 "$@" || bad=1
  wait "${jobs[@]}"
  return $bad
}
before=$(wired_bytes)
((launched += 1))
expect 'four processes on two hosts' eval 'all_direct $(training one direct) >out 2>err'
expect 'direct: the losses of threads' same one direct
expect 'the weights crossed the wire' crossed "$before"

if has mpirun.openmpi; then
  mpi_hosts=(on host-a mpirun.openmpi "${as_root[@]}" --mca plm_rsh_agent "$work/agent" --mca orte_tmpdir_base "$work"
    --host host-a:2,host-b:2 -n 4)
  before=$(wired_bytes)
  equal two openmpi-hosts "${mpi_hosts[@]}" -x MASTER_ADDR=host-a $(training two openmpi-hosts)
  expect 'the weights crossed the wire' crossed "$before"
  expect 'without MASTER_ADDR it is refused' eval '! quietly "${mpi_hosts[@]}" $(training two openmpi-hosts)'
  expect 'and the variable is named' grep -q 'MASTER_ADDR is not set' err
fi
if [[ -n $torchrun ]]; then
  torch_node() {
    on "host-$1" "$torchrun" --nnodes 2 --node-rank "$2" --master-addr host-a --master-port 29610 \
      --nproc-per-node 2 --no-python $(training two torchrun-hosts)
  }
  both_nodes() {
    torch_node b 1 >out.b 2>err.b &
    local other=$!
    torch_node a 0 && wait $other
  }
  export -f both_nodes torch_node training
  export torchrun zeroplan
  equal two torchrun-hosts bash -c both_nodes
fi

# ---- Slurm: a controller and two daemons, which believe in two hosts
slurm_up() {
  local dir="$work/slurm"
  mkdir -p "$dir/state"
  export SLURM_CONF="$dir/slurm.conf"
  head -c 1024 /dev/urandom >"$dir/key" && chmod 400 "$dir/key"
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=host-a(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=host-a NodeAddr=10.77.0.1 CPUs=2 RealMemory=1000
NodeName=host-b NodeAddr=10.77.0.2 CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$dir/cgroup.conf"
  munged --force --key-file="$dir/key" --socket="$dir/munge" --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" \
    --seed-file="$dir/seed" || return 1
  on host-a slurmctld -c && on host-a slurmd && on host-b slurmd || return 1
  local tries=0
  until [[ $(on host-a sinfo -h -o %D -t idle 2>/dev/null) == 2 ]]; do
    ((++tries < 500)) || { tail -n 2 "$dir"/*.log; return 1; }
    sleep 0.2
  done
}
if ! { has srun && has slurmctld && has slurmd && has munged && ((EUID == 0)); }; then
  skip Slurm 'srun, slurmctld, slurmd or munged not found, or not root'
elif ! slurm_up >err 2>&1; then
  skip Slurm "its daemons did not start: $(tail -n 1 err)"
else
  before=$(wired_bytes)
  equal two srun on host-a srun -N2 -n4 $(training two srun)
  expect 'the weights crossed the wire' crossed "$before"
  # A batch script is no task, though it has SLURM_PROCID; a step on the second host has rank 0 there.
  cat >batch.sh <<SH
#!/usr/bin/env bash
set -e
$(training one batch)
srun --overcommit -N1 -n4 -w host-b $(training one step)
SH
  ((launched += 2))
  expect 'a batch script' quietly on host-a sbatch --wait -N2 -n4 -o batch.log batch.sh
  cp batch.log err 2>/dev/null
  expect 'in it, threads' same one batch
  expect 'in it, a step on the second host' same one step
fi

# ---- a cable is cut in the middle of training: both sides name it in seconds
long_run() { echo "$zeroplan" run one/plan.json --data synthetic --steps 100000000 --checkpoint cut --checkpoint-every 20; }
cut() {
  local rank pids=() codes=() tries=0
  for rank in 0 1 2 3; do direct $rank $(long_run) >out.$rank 2>err.$rank </dev/null & pids+=($!); done
  until compgen -G 'cut/step-*/manifest.json' >/dev/null || ((++tries > 2000)); do sleep 0.1; done
  on host-a ip link set wire-a down
  local start=$SECONDS
  for rank in 0 1 2 3; do
    wait "${pids[rank]}"
    codes+=($?)
  done
  cat err.? >err
  printf 'exit codes %s after %d s\n' "${codes[*]}" $((SECONDS - start)) >>err
  [[ ${codes[*]} == '3 3 3 3' ]] && ((SECONDS - start < 60))
}
expect 'a cut cable ends every rank with exit 3, long before they would give up waiting' cut
for rank in 0 1 2 3; do expect "rank $rank says why" grep -q 'silent\|closed\|lost' err.$rank; done
expect 'the checkpoint before it resumes' quietly "$zeroplan" run one/plan.json --data synthetic --steps 1 --checkpoint cut --resume
finish
