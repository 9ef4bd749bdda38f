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
  timeout 20 "$zeroplan" check "$@" >out 2>err </dev/null
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

printf '%d expectations, %d failed\n' "$total" "$failed"
((failed == 0))
