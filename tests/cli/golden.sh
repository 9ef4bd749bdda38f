#!/usr/bin/env bash
# golden.sh ZEROPLAN FOLDER: whole answers compared with FOLDER/NAME.txt. ZEROPLAN_UPDATE_GOLDEN=1 rewrites the files:
# read the diff before you commit it. Times of the search are taken out; the exit code is the last line.
set -uo pipefail
zeroplan="$(realpath -- "${1:?the program}")"
folder="$(realpath -- "${2:?the folder of the golden files}")"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
failed=0 total=0

# golden NAME ARGUMENT...
golden() {
  local name="$1" code
  shift
  ((total += 1))
  timeout 600 "$zeroplan" "$@" >out 2>err </dev/null
  code=$?
  {
    printf '$ zeroplan %s\n' "$*"
    sed -E 's/, in [0-9]+ ms$/, in N ms/; s/"seconds": [0-9.e-]+/"seconds": N/' out
    sed 's/^/stderr: /' err
    printf 'exit %d\n' "$code"
  } >"$name.txt"
  if [[ -n "${ZEROPLAN_UPDATE_GOLDEN:-}" ]]; then
    cp -- "$name.txt" "$folder/$name.txt"
  elif ! diff -u -- "$folder/$name.txt" "$name.txt"; then
    ((failed += 1))
  fi
}

golden 70b_4xa100 --model 70B --gpus 4xA100-80G
golden 70b_4xa100_1tib --model 70B --gpus 4xA100-80G --host-memory 1TiB
golden 13b_2x3090_short --model 13B --gpus 2x3090-24G --host-memory 128GiB --micro-batch 4 --recompute full
golden 13b_2x3090_nvme --model 13B --gpus 2x3090-24G --host-memory 128GiB --micro-batch 4 --recompute full --nvme 1x2TB
golden 70b_8xa100_stages --model 70B --gpus 8xA100-80G --zero 0,1,2,3
golden 70b_8xa100_offload --model 70B --gpus 8xA100-80G --zero 3 --offload optimizer
golden 13b_8xa100_stages --model 13B --gpus 8xA100-80G --zero 0,1,2,3
golden 13b_8xa100_offload --model 13B --gpus 8xA100-80G --zero 3 --offload optimizer
golden 13b_whatif whatif --model 13B --hardware 8xA100-80G,8xH100,2x8xH100,4xA100-80G@13USD --tokens 300B
golden 8b_whatif_limits whatif --model 8B --hardware 8xH100,8xA100-80G,4xL40S,HGX-H100-8 --tokens 100B --budget 60kUSD --deadline 14days
golden 8b_whatif_missed whatif --model 8B --hardware 8xA100-80G,2x4xL40S --tokens 300B --budget 60kUSD --deadline 3weeks
# Other engines: a plan, the same plan played, adapters, drives, a shortfall, experts.
golden 7b_deepspeed --model 7B --gpus 8xA100-80G --engine deepspeed --zero 3 --out ds
golden 7b_deepspeed_simulate simulate ds/plan.json
golden 8b_fsdp2 --model 8B --gpus 8xH100 --engine fsdp2 --recompute full --out fsdp
golden 8b_fsdp2_simulate simulate fsdp/plan.json
golden 13b_deepspeed_lora --model 13B --gpus 2x3090-24G --engine deepspeed --seq-len 1024 --trainable lora:r=16
golden 13b_deepspeed_nvme --model 13B --gpus 2x3090-24G --host-memory 96GiB --nvme 1x2TB@3GB/s --seq-len 1024 --engine deepspeed
golden 70b_4xa100_deepspeed --model 70B --gpus 4xA100-80G --engine deepspeed
golden mixtral_fsdp2 --model mixtral-8x7b --gpus 8xH100 --nodes 2 --engine fsdp2

if [[ -n "${ZEROPLAN_UPDATE_GOLDEN:-}" ]]; then echo "$total golden files rewritten: read the diff"; exit 0; fi
printf '%d golden answers, %d differ\n' "$total" "$failed"
((failed == 0))
