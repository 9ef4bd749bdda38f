#!/usr/bin/env bash
# trace.sh ZEROPLAN EXAMPLES: traces that simulate writes are what Perfetto reads (check_trace.py), and the check refuses
# traces that are broken in one place.
set -uo pipefail
zeroplan="$(realpath -- "${1:?the program}")"
examples="$(realpath -- "${2:?the folder of examples}")"
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
failed=0 traces=()
if ! command -v python3 >/dev/null; then echo "trace: skipped, there is no python3"; exit 0; fi

# One plan for every stream and kind of link.
for name in batch_4_none pcie update_device states_nvme reduce_step; do
  plan="$examples/remedies/$name.json"
  timeout 600 "$zeroplan" simulate "$plan" --trace "$name.trace" >/dev/null || { echo "FAILED: $name"; ((failed += 1)); continue; }
  traces+=("$name.trace")
done
# Names that JSON must escape, and 200,000 events; 300 micro-steps, a million, were checked once (docs/simulator.md).
python3 - "$examples/remedies/reduce_step.json" <<'PY' || { echo "FAILED: cannot make the long plan"; ((failed += 1)); }
import json, sys
plan = json.load(open(sys.argv[1]))
plan["plan"]["accumulation"] = 60
plan["machine"]["name"] = 'quotes " and \\ \u0001 \u2028 \U0001F600'
plan["model"]["name"] = 'a"b\\c\nd'
json.dump(plan, open("long.json", "w"))
PY
if timeout 600 "$zeroplan" simulate long.json --trace long.trace >/dev/null; then traces+=(long.trace); else echo "FAILED: long"; ((failed += 1)); fi
python3 "$here/check_trace.py" "${traces[@]}" || ((failed += 1))

# plan --out writes the bytes that simulate --trace gives, whoever runs the plan; a long step is cut to whole micro-steps in both.
# beside NAME ARGUMENT...
beside() {
  local name="$1"
  shift
  if ! timeout 600 "$zeroplan" plan "$@" --out "$name" >out 2>"$name.notes"; then echo "FAILED: plan $*"; ((failed += 1)); return; fi
  timeout 600 "$zeroplan" simulate "$name/plan.json" --trace "$name/again.json" >/dev/null 2>>"$name.notes"
  if ! cmp "$name/trace.json" "$name/again.json" || ! grep -q 'written to.* trace.json' out; then
    echo "FAILED: plan --out and simulate --trace differ: $*"
    ((failed += 1))
  fi
  if [[ "$name" != long_step* ]]; then python3 "$here/check_trace.py" "$name/trace.json" || ((failed += 1)); fi  # seconds of Python
}
for engine in zeroplan deepspeed fsdp2; do
  beside "$engine" --model gpt2 --gpus 2x3090-24G --host-memory 64GiB --global-batch 32 --micro-batch 2 --engine "$engine"
done
grep -q 'trace.json holds a step of 3 of the plan.s 8 micro-steps' fsdp2.notes || { echo "FAILED: what the trace holds"; ((failed += 1)); }
beside long_step --model 7B --gpus 8xA100-80G --zero 3 --recompute full --micro-batch 1 --global-batch 1040
grep -q 'trace.json holds a step of 125 of the plan.s 130 micro-steps' long_step.notes || { echo "FAILED: the bound"; ((failed += 1)); }

# Folders that were not there are made, and said.
timeout 600 "$zeroplan" simulate "$examples/remedies/pcie.json" --trace new/er/step.json >/dev/null 2>err
if [[ ! -s new/er/step.json ]] || ! grep -q 'note: --trace: made the folder new$' err || ! grep -q 'folder new/er$' err; then
  echo "FAILED: made folders are said: $(cat err)"
  ((failed += 1))
fi
# A micro-step of many layers: one of them, whole.
printf '{"model_type":"llama","hidden_size":64,"num_hidden_layers":3000,"num_attention_heads":4,"intermediate_size":128,"vocab_size":512}' >deep.json
beside long_step_of_layers --model deep.json --gpus 2xH100 --seq-len 64 --global-batch 8 --zero 0 --recompute none --micro-batch 1
grep -q 'trace.json holds a step of 1 of the plan.s 4 micro-steps' long_step_of_layers.notes || { echo "FAILED: a deep model"; ((failed += 1)); }

# broken NAME PYTHON: the first trace with `e`, its events, changed is refused.
broken() {
  python3 - "${traces[0]}" "$2" <<'PY' || { echo "FAILED: cannot make $1"; ((failed += 1)); return; }
import json, sys
trace = json.load(open(sys.argv[1]))
e = trace["traceEvents"]
first = lambda phase: next(x for x in e if x["ph"] == phase)
exec(sys.argv[2])
json.dump(trace, open("broken.trace", "w"))
PY
  if python3 "$here/check_trace.py" broken.trace >out; then echo "FAILED: not refused: $1"; ((failed += 1)); fi
}
broken 'an arrow without an end' 'e.remove(first("f"))'
broken 'an arrow that begins outside slices' 'first("s")["ts"] = 1e12'
broken 'a negative duration' 'first("X")["dur"] = -1'
broken 'a slice over its neighbour' 'x = [y for y in e if y["ph"] == "X" and y["tid"] == first("X")["tid"]]; x[0]["dur"] += x[1]["dur"] + 1000'
broken 'a counter that is no number' 'first("C")["args"] = {"bytes": "many"}'
broken 'a counter that runs back' 'c = [y for y in e if y["ph"] == "C" and y["name"] == first("C")["name"]]; c[0]["ts"] = c[-1]["ts"] + 1'
broken 'a track without a name' 'e[:] = [x for x in e if x.get("name") != "thread_name"]'
broken 'an unknown phase' 'first("X")["ph"] = "Y"'
broken 'a slice without a start' 'del first("X")["ts"]'
broken 'no slices' 'e[:] = [x for x in e if x["ph"] == "M"]'
broken 'not a number' 'first("X")["dur"] = float("nan")'
((failed == 0)) && echo "traces: all as they should be"
exit $((failed > 0))
