#!/usr/bin/env bash
# The training runs of docs/training-run.md, on a machine of 16 cores:
#   train.sh PROGRAM TOKENS OUT SECONDS       SECONDS: for the two long runs, at most one pass over the text
# Two runs at a time, each on half of the cores. PLANS of examples/train_text.sh, made here too.
set -uo pipefail
program=$1 tokens=$2 out=$3 seconds=$4
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd -P)"
half=$(($(nproc) / 2))
low="0-$((half - 1))" high="$half-$((2 * half - 1))"
mkdir -p "$out"

plan() { # plan NAME STAGE RANKS PRECISION
  "$program" plan --model "$root/examples/text-model.json" --gpus "$3x3090-24G" --seq-len 512 --global-batch 4 \
    --micro-batch 1 --zero "$2" --offload none --recompute none --precision "$4" --out "$out/$1" --force \
    >"$out/$1/plan.txt" 2>&1
}
run() { # run NAME CORES STEPS FILE
  taskset -c "$2" "$program" run "$out/$1/plan.json" --data "$tokens" --steps "$3" --learning-rate 1e-3 --warmup 100 \
    --measure "$out/$1/$4.json" --force >"$out/$1/$4.txt" 2>&1
  echo "$1 $4: exit $?, $3 steps on cores $2, at $SECONDS s" | tee -a "$out/steps.txt"
}
pair() { # pair A B STEPS FILE: both at the same time
  run "$1" "$low" "$3" "$4" &
  run "$2" "$high" "$3" "$4"
  wait
}

for name in bf16-z3x4 bf16-z0x1 bf16-z0x4 fp32-z3x4 fp32-z0x1; do mkdir -p "$out/$name"; done
plan bf16-z3x4 3 4 bf16
plan bf16-z0x1 0 1 bf16
plan bf16-z0x4 0 4 bf16
plan fp32-z3x4 3 4 fp32
plan fp32-z0x1 0 1 fp32

pair bf16-z3x4 bf16-z0x1 12 rate
steps=$(python3 - "$seconds" "$tokens" "$out"/bf16-z3x4/rate.json "$out"/bf16-z0x1/rate.json <<'PYTHON'
import json, os, sys
slowest = max(sorted(json.load(open(f))["step_seconds"])[6] for f in sys.argv[3:])
one_pass = (os.path.getsize(sys.argv[2]) - 40) // 2 // 512 // 4
print(min(one_pass, int(float(sys.argv[1]) / slowest)))
PYTHON
)
pair bf16-z3x4 bf16-z0x1 "$steps" measured
pair fp32-z3x4 fp32-z0x1 "$((steps / 8))" measured
run bf16-z0x4 "0-$((2 * half - 1))" "$((steps / 8))" measured
