#!/usr/bin/env bash
# host.sh ZEROPLAN EXAMPLES: plan, run and compare on a probed host; what probe and compare refuse.
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/expect.sh"
zeroplan="$(realpath -- "${1:?the program}")"
examples="$(realpath -- "${2:?the examples}")"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2

machine="$examples/host/machine.json"
workload=(--model "$examples/tiny-llama.json" --machine "$machine" --seq-len 32 --micro-batch 1 --global-batch 2)
for stage in 0 3; do
  expect "a probed host is planned for" run plan "${workload[@]}" --gpus 2 --zero "$stage" --out "zero$stage"
  expect "its plan runs" run run "zero$stage/plan.json" --data synthetic --steps 3 --measure "zero$stage.json"
  expect "and is compared" run compare "zero$stage/plan.json" "zero$stage.json"
  for part in matmul attention Adam unattributed 'waits for peers' equal; do
    expect "the comparison names $part" out_has "$part"
  done
  expect "and as JSON" run compare "zero$stage/plan.json" "zero$stage.json" --json
  expect "with equal memory and every op" python3 - <<'PY'
import json
c = json.load(open('out'))
assert c['memory'] and all(t['predicted_bytes'] == t['measured_bytes'] for t in c['memory']), c['memory']
assert len(c['ops']) >= 20 and {'op', 'kind', 'phase', 'predicted_seconds', 'measured_seconds'} <= set(c['ops'][0])
assert 'unattributed_seconds' in c and 0 < c['predicted_step_seconds'] < 60
PY
done
refused 'another plan' compare zero0/plan.json zero3.json
refused 'expected PLAN.json MEASURED.json' compare zero0/plan.json
refused 'no-such.json' compare zero0/plan.json no-such.json
refused 'zero0/plan.json' compare zero0/plan.json zero0/plan.json

expect "several devices have their part of the memory" run machines "$machine"
refused 'network was not measured' plan "${workload[@]}" --gpus 4 --nodes 2
refused 'host' plan "${workload[@]}" --gpus 2xH100

touch taken.json
refused 'taken.json' probe --out taken.json
refused '--out' probe --out .
refused 'no-such-folder' probe --disk no-such-folder
refused 'no such flag' probe --gpus 2

printf '%d checks, %d failed\n' "$total" "$failed"
((failed == 0))
