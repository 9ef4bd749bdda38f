#!/usr/bin/env bash
# run.sh ZEROPLAN EXAMPLES: training from outside: plan -> run -> compare, checkpoints, processes, and every fault with its
# exit code, in seconds and never with a hang.
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/expect.sh"
zeroplan="$(realpath -- "${1:?the program}")"
examples="$(realpath -- "${2:?the examples folder}")"
work="$(mktemp -d)"
trap 'kill $(jobs -p) $holder 2>/dev/null; chmod -R u+w -- "$work"; rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
holder=

says() { grep -qF -- "$1" err; }
same() { cmp -s -- "$1" "$2"; }
# losses FILE: the losses of a measured.json, one a line.
losses() { python3 -c 'import json,sys; print("\n".join(repr(x) for x in json.load(open(sys.argv[1]))["losses"]))' "$1"; }
equal_losses() { [[ "$(losses "$1")" == "$(losses "$2")" && -n "$(losses "$1")" ]]; }

cat >model.json <<'JSON'
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 176,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
 "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false}
JSON
# plan NAME FLAG...: NAME/plan.json for two ranks.
plan() { exits 0 plan --model model.json --gpus 2x3090-24G --host-memory 64GiB --seq-len 32 --micro-batch 2 --global-batch 4 --precision fp32 --out "$@"; }

expect 'plan ZeRO-0' plan z0 --zero 0
expect 'plan ZeRO-3' plan z3 --zero 3
expect 'plan ZeRO-3 with everything offloaded' plan z3o --zero 3 --offload all --recompute full
expect 'plan ZeRO-2 on NVMe' plan z2n --zero 2 --offload optimizer:nvme --nvme 1x1TB@3GB/s
mkdir disk
for name in z0 z3 z3o; do
  expect "run $name" exits 0 run $name/plan.json --data synthetic --steps 4 --ranks 2 --measure $name/measured.json
done
expect 'run with NVMe' exits 0 run z2n/plan.json --data synthetic --steps 4 --nvme-dir disk --measure z2n/measured.json
expect 'nothing stays on the disk' test -z "$(ls -A disk)"
for name in z3 z3o z2n; do expect "$name: losses as ZeRO-0" equal_losses z0/measured.json $name/measured.json; done
for name in z0 z3 z3o z2n; do
  expect "compare $name" exits 0 compare $name/plan.json $name/measured.json --json
  expect "$name: memory equal to the byte" python3 - <<'PY'
import json, sys
memory = json.load(open('out'))['memory']
sys.exit(not memory or any(t['predicted_bytes'] != t['measured_bytes'] for t in memory))
PY
done
expect 'compare refuses the measurement of another plan' exits 2 compare z0/plan.json z3/measured.json
expect 'measured.json is not overwritten' exits 2 run z0/plan.json --data synthetic --steps 1 --measure z0/measured.json
# A folder that was not there is made, and said; without a measurement it goes again.
expect 'measured into a new folder' exits 0 run z0/plan.json --data synthetic --steps 1 --measure new/er/measured.json
expect 'is there' test -s new/er/measured.json
expect 'is said' says 'note: --measure: made the folder new/er'
expect 'nothing to train with' exits 2 run z0/plan.json --data none.tokens --measure gone/measured.json
expect 'leaves no folder' test ! -e gone
refused '--measure: expected a file, got "new/"' run z0/plan.json --data synthetic --measure new/
refused '--measure: z0/plan.json is the plan itself' run z0/plan.json --data synthetic --measure z0/plan.json --force

# Text as data.
yes 'All happy families are alike; each unhappy family is unhappy in its own way. ' | head -c 40000 >text.txt
expect 'make_tokens.py' python3 "$examples/make_tokens.py" text.txt --out text.tokens
expect 'run on text' exits 0 run z3/plan.json --data text.tokens --steps 30 --learning-rate 5e-3 --json
expect 'the loss falls' python3 -c 'import json; l = json.load(open("out"))["losses"]; raise SystemExit(not l[-1] < 0.7 * l[0])'

# Checkpoints: on at another stage, with the bits of a run that never stopped.
expect 'whole run' exits 0 run z0/plan.json --data synthetic --steps 6 --measure whole.json
expect 'first part' exits 0 run z3/plan.json --data synthetic --steps 4 --checkpoint ck
expect 'second part' exits 0 run z0/plan.json --data synthetic --steps 2 --checkpoint ck --resume --measure rest.json
expect 'the same losses' test "$(losses whole.json | tail -2)" = "$(losses rest.json)"
expect 'export' exits 0 run z3/plan.json --data synthetic --steps 1 --export weights
expect 'exported weights' test -s weights/model.safetensors
expect 'start from them' exits 0 run z0/plan.json --data synthetic --steps 1 --weights weights

# Damage: named, exit 2, and the checkpoint before stays.
expect 'two checkpoints' exits 0 run z3/plan.json --data synthetic --steps 2 --checkpoint two --checkpoint-every 1
cp -r two flipped
python3 - <<'PY'
import glob
path = sorted(glob.glob('flipped/step-*/rank-00001*'))[-1]
data = bytearray(open(path, 'rb').read())
data[len(data) // 2] ^= 0x10
open(path, 'wb').write(data)
PY
expect 'a flipped byte' exits 2 run z3/plan.json --data synthetic --steps 1 --checkpoint flipped --resume
expect 'a flipped byte is named' says 'rank-00001'
cp -r two short
file="$(ls short/step-*/rank-00000* | tail -1)"
truncate -s -100 "$file"
expect 'a truncated checkpoint' exits 2 run z3/plan.json --data synthetic --steps 1 --checkpoint short --resume
expect 'a truncated checkpoint is named' says 'rank-00000'
expect 'no checkpoint' exits 2 run z3/plan.json --data synthetic --steps 1 --checkpoint empty --resume
expect 'no data' exits 2 run z3/plan.json --data missing.tokens --steps 1
expect 'data is needed' exits 2 run z3/plan.json
expect 'another rank count' exits 2 run z3/plan.json --data synthetic --ranks 4
expect 'no CUDA' exits 2 run z3/plan.json --data synthetic --backend cuda
expect 'steps' exits 2 run z3/plan.json --data synthetic --steps 0
expect 'NVMe without a directory' exits 2 run z2n/plan.json --data synthetic --steps 1
expect 'a directory for NVMe that nothing needs' exits 2 run z3/plan.json --data synthetic --steps 1 --nvme-dir disk
expect 'NVMe in a missing directory' exits 2 run z2n/plan.json --data synthetic --steps 1 --nvme-dir nowhere
# A limit on file size stands for a full disk: this needs no rights.
limited() { (trap '' XFSZ; ulimit -f 100; exits 3 "$@"); }
expect 'a disk with no room for a checkpoint' limited run z3/plan.json --data synthetic --steps 1 --checkpoint two --resume
expect 'two checkpoints are left' test "$(ls -d two/step-*/manifest.json | wc -l)" = 2
expect 'and the newest resumes' exits 0 run z3/plan.json --data synthetic --steps 1 --checkpoint two --resume
expect 'a disk with no room for states' limited run z2n/plan.json --data synthetic --steps 1 --nvme-dir disk

expect 'divergence' exits 3 run z3/plan.json --data synthetic --steps 9 --learning-rate 1e37
expect 'divergence is named' says 'diverged at step 2'

# Signals end a run as they end any program; what was committed stays.
interrupted() {  # interrupted SIGNAL DIR
  python3 - "$zeroplan" "$1" "$2" <<'PY'
import glob, signal, subprocess, sys, time
program, name, folder = sys.argv[1:]
number = getattr(signal, name)
command = [program, 'run', 'z3/plan.json', '--data', 'synthetic', '--checkpoint', folder]
run = subprocess.Popen(command + ['--steps', '10000000', '--checkpoint-every', '3'], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=open('err', 'w'),
                       preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
deadline = time.time() + 200
while not glob.glob(folder + '/step-*/manifest.json') and time.time() < deadline and run.poll() is None:
    time.sleep(0.02)
second = subprocess.run(command + ['--steps', '1', '--resume'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE, text=True, timeout=600)
run.send_signal(number)
code = run.wait(timeout=600)
sys.exit(not (code == -number and second.returncode == 2 and 'another run' in second.stderr))
PY
}
for signal in SIGINT SIGTERM; do
  expect "$signal ends a run, and a second one beside it was refused" interrupted $signal "stop$signal"
  expect "$signal: the checkpoint resumes" exits 0 run z0/plan.json --data synthetic --steps 1 --checkpoint "stop$signal" --resume
done

# Ranks as processes, as torchrun starts them.
# Their stores' ports: the system gives them to nobody else while the holder lives; who asks for one by number gets it.
exec {ports}< <(exec python3 -c '
import signal, socket
held = [socket.socket() for _ in range(3)]
for s in held:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", 0))
    print(s.getsockname()[1], flush=True)
signal.pause()')
holder=$!
next_port() { read -r port <&$ports && port=$((port - 1)); }  # the store listens on the one after MASTER_PORT
next_port
rank() {  # rank R SIZE ARGUMENT...
  local r="$1" size="$2"
  RANK=$r WORLD_SIZE=$size LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 600 "$zeroplan" "${@:3}" >out.$r 2>err.$r </dev/null
}
both() {
  rank 1 2 "$@" &
  local other=$!
  rank 0 2 "$@"
  local first=$?
  wait $other
  local second=$?
  cp err.0 err
  ((first == 0 && second == 0))
}
expect 'two processes' both run z3/plan.json --data synthetic --steps 4 --measure of/processes.json
expect 'two processes: the losses of two threads' equal_losses z3/measured.json of/processes.json
expect 'only rank 0 makes the folder' test ! -s err.1
expect 'only rank 0 prints' test ! -s out.1
next_port
wrong_size() {
  rank 0 3 run z3/plan.json --data synthetic --steps 1
  local code=$?
  cp err.0 err
  ((code == 2))
}
expect 'the wrong world size' wrong_size
expect 'the wrong world size is named' says 'world size'
next_port
killed() {  # one process dies in the middle of training
  rm -rf pk
  rank 0 2 run z3/plan.json --data synthetic --steps 100000 --checkpoint pk --checkpoint-every 5 &
  local first=$!
  RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$zeroplan" run z3/plan.json --data synthetic \
    --steps 100000 --checkpoint pk --checkpoint-every 5 >out.1 2>err.1 </dev/null &
  local victim=$!
  local tries=0
  until compgen -G 'pk/step-*/manifest.json' >/dev/null || ((++tries > 2000)); do sleep 0.1; done
  kill -9 $victim
  local start=$SECONDS
  wait $first
  local code=$?
  wait $victim 2>/dev/null
  cp err.0 err
  ((code == 3 && SECONDS - start < 60))  # rank 0 would wait ten minutes
}
expect 'a killed rank ends the others with exit 3 in seconds' killed
expect 'a killed rank is named' says 'rank 1'
expect 'the checkpoint before the kill resumes' exits 0 run z3/plan.json --data synthetic --steps 1 --checkpoint pk --resume

printf '%d checks, %d failed\n' "$total" "$failed"
((failed == 0))
