#!/usr/bin/env bash
# Host benches, then probe -> plan -> run -> compare of the text model on a quiet machine (docs/benchmarks.md):
#   measure.sh BINARIES OUT       BINARIES holds zeroplan, adam_bench, kernels_bench, collectives_bench
set -uo pipefail
bin=$1 out=$2
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd -P)"
cores=$(nproc)
mkdir -p "$out"
{
  date -u
  uname -a
  lscpu
  lscpu -e
  grep -E 'MemTotal|MemAvailable|HugePages_Total' /proc/meminfo
  cat /sys/kernel/mm/transparent_hugepage/enabled
  cat /proc/loadavg
} >"$out/machine.txt" 2>&1

step() { # step LIMIT NAME COMMAND...: its output to NAME.txt; a failure does not stop the others
  local begin=$SECONDS limit=$1 name=$2 rc=0
  shift 2
  { echo "\$ $*"; timeout "$limit" "$@"; } >"$out/$name.txt" 2>&1 || rc=$?
  echo "$name: exit $rc, $((SECONDS - begin)) s" | tee -a "$out/steps.txt"
}

step 70 adam "$bin/adam_bench" 128 1 2 4 8 "$cores"
for threads in 1 4 "$cores"; do step 30 "kernels-$threads" "$bin/kernels_bench" "$threads"; done
for ranks in 2 4 8; do
  step 15 "collectives-thread-$ranks" "$bin/collectives_bench" thread "$ranks"
  step 15 "collectives-shared-$ranks" "$bin/collectives_bench" shared "$ranks"
done
step 15 collectives-tcp-4 "$bin/collectives_bench" tcp 4
step 80 probe "$bin/zeroplan" probe --out "$out/machine.json" --disk "$out" --force

# loop NAME RANKS STAGE [OPTION...]: 16 sequences of 256 tokens a step, micro-batches of 4
loop() {
  local name=$1 ranks=$2 stage=$3
  shift 3
  step 20 "$name.plan" "$bin/zeroplan" plan --model "$root/examples/text-model.json" --machine "$out/machine.json" \
    --gpus "$ranks" --seq-len 256 --global-batch 16 --micro-batch 4 --zero "$stage" --recompute none \
    --out "$out/$name" --force "$@"
  step 60 "$name.run" "$bin/zeroplan" run "$out/$name/plan.json" --data synthetic --steps 20 \
    --measure "$out/$name/measured.json" --force
  step 20 "$name.compare" "$bin/zeroplan" compare "$out/$name/plan.json" "$out/$name/measured.json"
}
loop ranks1-zero0 1 0 --offload none
loop ranks2-zero3 2 3 --offload none
loop ranks4-zero3 4 3 --offload none
loop ranks4-zero2-host 4 2 --offload optimizer
