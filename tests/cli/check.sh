#!/usr/bin/env bash
# check.sh ZEROPLAN DATA: `zeroplan check` from outside: exit codes, --fix, --out, hostile files. DATA is tests/data/lint.
set -uo pipefail
zeroplan="$(realpath -- "${1:?the program}")"
data="$(realpath -- "${2:?the configurations}")"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
failed=0 total=0

# check EXIT STDOUT-PART STDERR-PART ARGUMENT...: an empty part means that the stream is empty, * anything.
check() {
  local code="$1" out_part="$2" err_part="$3" got part
  shift 3
  ((total += 1))
  timeout 600 "$zeroplan" check "$@" >out 2>err </dev/null
  got=$?
  local bad=""
  ((got == code)) || bad="exit $got, wanted $code"
  for stream in out err; do
    part="$out_part"
    [[ "$stream" == err ]] && part="$err_part"
    if [[ -z "$part" ]]; then
      [[ ! -s "$stream" ]] || bad+=" $stream is not empty"
    elif [[ "$part" != '*' ]] && ! grep -qF -- "$part" "$stream"; then
      bad+=" no \"$part\" in $stream"
    fi
  done
  if [[ -n "$bad" ]]; then
    printf 'FAILED (%s): check %s\n%s\n' "$bad" "${*@Q}" "$(head -c 400 out err)"
    ((failed += 1))
  fi
}

train="$data/bad/tutorial_70b_train.json"
cp "$train" train.json
check 1 'offload-nested' '' train.json
check 1 '1 x 8 x 2 = 16' '' train.json --model 70B --gpus 2xA100-80G
check 1 '"severity": "error"' '' train.json --json
check 0 '0 errors, 0 warnings' '' "$data/good/03_zero2.json" --model gpt2-xl --gpus 8xA100-80G
check 0 'rules not run without --model and --gpus' '' "$data/good/03_zero2.json"
check 0 '"sub_group_size": 1e9' '2 corrected' train.json --fix
cp out fixed.json
check 0 '0 errors' '' fixed.json
check 0 '*' '0 corrected' fixed.json --fix
((total += 1))
cmp -s out fixed.json || { echo 'FAILED: --fix of a corrected file changes it'; ((failed += 1)); }

check 0 '' 'corrected' train.json --fix --out written.json
((total += 1))
cmp -s written.json fixed.json || { echo 'FAILED: --out differs from stdout'; ((failed += 1)); }
check 2 '' 'written.json' train.json --fix --out written.json
check 0 '' 'corrected' train.json --fix --out written.json --force
check 0 '' 'note: --out: made the folder new/er' train.json --fix --out new/er/written.json
((total += 1))
cmp -s new/er/written.json fixed.json || { echo 'FAILED: --out in a new folder'; ((failed += 1)); }
check 2 '' '--out: expected a file, got "new/"' train.json --fix --out new/
check 2 '' '--out' train.json --out x.json
check 2 '' '--force' train.json --fix --force
check 2 '' '--json' train.json --fix --json
check 2 '' '/dev/null' train.json --fix --out /dev/null --force
((total += 1))
cmp -s train.json "$train" || { echo 'FAILED: the checked file was changed'; ((failed += 1)); }

check 2 '' 'expected DS_CONFIG.json'
check 2 '' 'nothing.json' nothing.json
check 2 '' '.' .
printf '{"a": 1,\n"b": True}' >python.json
check 2 '' 'python.json:2: True is no JSON' python.json
head -c 200000 /dev/zero | tr '\0' '[' >deep.json
check 2 '' 'levels of nesting' deep.json
printf '[]' >list.json
check 1 'top-level-shape' '' list.json
: >empty.json
check 2 '' 'the file is empty' empty.json
printf '{"a\\u001b[31m": "\\u001b[31m"}' >escape.json
check 1 'unknown-key-ignored' '' escape.json
((total += 1))
! grep -q $'\x1b' out || { echo 'FAILED: control characters of a key reach the terminal'; ((failed += 1)); }
check 2 '' '--gpus' train.json --nodes 2
check 2 '' 'nearest sizes' train.json --model 71B
check 2 '' 'no such flag' train.json --frobnicate

# The prediction: memory by phase, host, step time, the nearest configuration; exit 1 when it does not fit.
good="$data/good/03_zero2.json"
small=(--model smollm2-135m --gpus 4xA100-80G --seq-len 512)
check 0 'backward, peak' '' "$good" "${small[@]}"
check 0 'limited by' '' "$good" "${small[@]}"
check 0 '"step_seconds"' '' "$good" "${small[@]}" --json
check 1 'does not fit' '' "$good" --model 70B --gpus 4xA100-80G
check 1 '+ zero_optimization.stage: 3' '' "$good" --model 70B --gpus 4xA100-80G --host-memory 2TiB --seq-len 1024
check 1 'Nothing near it fits' '' "$good" --model 70B --gpus 1xRTX-4090 --host-memory 64GiB
check 1 '"nvme"' '' train.json --model 70B --gpus 4xA100-80G --host-memory 1TiB --nvme 4x2TB
check 0 'every layer checkpointed' '' "$good" "${small[@]}" --recompute full
check 0 'LoRA of rank 8' 'rules of sizes' "$good" "${small[@]}" --trainable lora:r=8
printf '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "sequence_parallel_size": 2, "zero_optimization": {"stage": 3}}' >ulysses.json
check 0 'memory not predicted: ' '' ulysses.json "${small[@]}"
check 2 '' '--release: expected a month' ulysses.json "${small[@]}" --release 0.3
check 2 '' '--release: has no meaning without' ulysses.json --release 2021-03
check 2 '' 'whole layers' "$good" "${small[@]}" --recompute selective
check 2 '' 'the configuration says' "$good" "${small[@]}" --micro-batch 3
check 2 '' '--seq-len' "$good" --seq-len 512
check 2 '' '--margin' "$good" "${small[@]:0:4}" --fix --margin 3%
timeout 600 "$zeroplan" check "$good" --model 70B --gpus 4xA100-80G --json >first.json
timeout 600 "$zeroplan" check "$good" --model 70B --gpus 4xA100-80G --json >second.json
((total += 1))
cmp -s first.json second.json || { echo 'FAILED: two predictions differ'; ((failed += 1)); }
((total += 1))
python3 - first.json <<'PYTHON' || ((failed += 1))
import json, sys
answer = json.load(open(sys.argv[1]))
gpu, host, time = (answer["prediction"][key] for key in ("gpu", "host", "time"))
assert gpu["verdict"] == "does not fit" and not answer["prediction"]["fits"]
assert gpu["reserved_low"] <= gpu["reserved"] <= gpu["reserved_high"] <= gpu["device_used"]
assert gpu["allocated"] >= 2 * 68976648192  # 16-bit weights on every GPU at stage 2
assert abs(sum(time["parts"].values()) - time["step_seconds"]) < 1e-9 * time["step_seconds"]
assert host["pinned"] <= host["per_node"] and answer["nearest"]["aim"] == "fits"
PYTHON

printf '%d expectations, %d failed\n' "$total" "$failed"
((failed == 0))
