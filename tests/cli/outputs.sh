#!/usr/bin/env bash
# outputs.sh ZEROPLAN: what goes where: stdout and stderr, files whole or not at all, colour, help, exit codes.
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/expect.sh"
zeroplan="$(realpath -- "${1:?the program}")"
work="$(mktemp -d)"
trap 'chmod -R u+w -- "$work"; rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
small=(--model gpt2 --gpus 2x3090-24G --host-memory 64GiB --global-batch 16)

silent() { [[ ! -s err ]]; }
no_escapes() { ! grep -q $'\x1b' out; }

# Help and version: on stdout, exit 0.
for words in '' --help -h --version 'plan --help' 'simulate --help' 'whatif -h' 'models --help' 'machines --help' '--model x --help'; do
  read -ra arguments <<<"$words"
  expect "zeroplan $words" exits 0 "${arguments[@]}"
  expect "zeroplan $words prints" test -s out
  expect "zeroplan $words is silent on stderr" silent
done
for command in plan simulate whatif models machines; do
  run "$command" --help
  expect "$command --help has an example" out_has 'Example:'
done
run --help
for later in report; do
  expect "--help does not promise $later" bash -c "! grep -qE '^ +$later ' out"
done

# The default command is plan, and both give the same answer.
run "${small[@]}"
sed 's/, in .* ms$//' out >default.txt
run plan "${small[@]}"
sed 's/, in .* ms$//' out >named.txt
expect "plan is the default command" cmp -s default.txt named.txt
expect "--flag=value reads as --flag value" exits 0 plan --model=gpt2 --gpus=2x3090-24G
expect "no colour off a terminal" no_escapes
# Needs a pseudo-terminal, which a bare chroot has not.
if ! script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
  echo "skipped: colour, there is no pseudo-terminal here"
else
  script -qec "env -u NO_COLOR TERM=xterm '$zeroplan' ${small[*]}" /dev/null >out </dev/null
  expect "colour on a terminal" bash -c "grep -q \$'\\x1b' out"
  script -qec "env NO_COLOR=1 TERM=xterm '$zeroplan' ${small[*]}" /dev/null >out </dev/null
  expect "NO_COLOR is obeyed" no_escapes
fi

# Exit codes and streams.
expect "a plan that fits: exit 0" exits 0 "${small[@]}" --json
expect "JSON only on stdout" silent
expect "it says feasible" out_has '"feasible": true'
for engine in zeroplan deepspeed fsdp2; do
  expect "a GPU without a rate in fp32 has plans in bf16, $engine" exits 0 --model 8B --gpus 8xGaudi2 --engine "$engine" --zero 3
done
expect "nothing fits: exit 1" exits 1 --model 70B --gpus 1x3090-24G --host-memory 16GiB --json
expect "and the answer says so" out_has '"feasible": false'
expect "and what is missing" out_has '"missing_bytes"'
expect "warnings go to stderr" exits 0 --model gpt2 --gpus 2x3090-24G --seq-len 2048 --json
expect "the warning names the flag" grep -q 'warning: --seq-len' err
expect "no null in JSON" bash -c '! grep -qE "null|nan|inf" out'

# Files.
expect "--out writes" exits 0 "${small[@]}" --out made/plan
expect "plan.json" test -s made/plan/plan.json
expect "deepspeed.json" test -s made/plan/deepspeed.json
expect "launch.sh runs" bash -n made/plan/launch.sh
expect "launch.sh is executable" test -x made/plan/launch.sh
expect "no temporary file is left" bash -c '[[ -z "$(find made -name "*.tmp")" ]]'
expect "--out through a folder that is not there yet" exits 0 "${small[@]}" --out made/new/../beside
expect "lies where mkdir -p puts it" test -s made/beside/plan.json
cp made/plan/plan.json before.json
expect "a second --out is refused" exits 2 "${small[@]}" --out made/plan --zero 0
expect "and stdout is empty" test ! -s out
expect "and the file is as it was" cmp -s before.json made/plan/plan.json
expect "--force overwrites" exits 0 "${small[@]}" --out made/plan --zero 0 --force
expect "with another plan" bash -c '! cmp -s before.json made/plan/plan.json'
expect "nothing fits: exit 1 with --out" exits 1 --model 70B --gpus 1x3090-24G --host-memory 16GiB --out none/fits
expect "and no folder is left" test ! -e none
mkdir blocked blocked/launch.sh
expect "a folder in the way of a file" exits 2 "${small[@]}" --out blocked --force
expect "leaves nothing new" bash -c '[[ "$(ls -A blocked)" == launch.sh ]]'
if ((EUID != 0)); then
  mkdir locked && chmod a-w locked
  expect "a folder that cannot be written" exits 2 "${small[@]}" --out locked
  expect "and stdout is empty" test ! -s out
fi

# Names that are no UTF-8 do not stop plan.json.
mkdir $'name\xff' && printf '{"model_type":"gpt2","n_embd":768,"n_layer":12,"n_head":12,"n_positions":1024,"vocab_size":50257}' >$'name\xff/config.json'
expect "a name that is no UTF-8" exits 0 --model $'name\xff' --gpus 2x3090-24G --out foreign
expect "and simulate reads its plan" exits 0 simulate foreign/plan.json --estimate

# Other engines: what the report tells to run next runs, what is not known is left out.
for engine in deepspeed fsdp2; do
  on=(--model gpt2 --gpus 2x3090-24G --host-memory 64GiB --global-batch 16 --zero 3 --engine "$engine")
  expect "$engine: --out" exits 0 "${on[@]}" --out "$engine"
  expect "$engine: simulate is next" out_has "zeroplan simulate $engine/plan.json"
  expect "$engine: what would help" out_has 'What would help'
  step="$(grep -oE '^  [0-9.]+ m?s a step' out)"
  expect "$engine: launch.sh starts it" grep -qF "engine=\${1:-$engine}" "$engine/launch.sh"
  expect "$engine: launch.sh is a script" bash -n "$engine/launch.sh"
  expect "$engine: simulate plays it" exits 0 simulate "$engine/plan.json" --trace "$engine/step.json"
  expect "$engine: with the plan's step" out_has "$step"
  expect "$engine: and the played one beside it" out_has 'The same step played op by op'
  expect "$engine: a trace" test -s "$engine/step.json"
  expect "$engine: every rank" exits 0 simulate "$engine/plan.json" --ranks all --json
  expect "$engine: no second time without a name" out_has '"played"'
  expect "$engine: no longest path" exits 2 simulate "$engine/plan.json" --estimate
  expect "$engine: and it says which flag" grep -qF -- '--estimate: expected' err
  expect "$engine: run refuses" exits 2 run "$engine/plan.json" --data synthetic
  expect "$engine: with the file" grep -qF "$engine/plan.json: plan/engine" err
  expect "$engine: adapters" exits 0 "${on[@]}" --trainable lora:r=8
  expect "$engine: which alone are trained" out_has 'of adapters, which alone are trained'
  expect "$engine: --json" exits 0 "${on[@]}" --json
  expect "$engine: traffic" grep -qE '"all_gather_bytes": [1-9]' out
done
expect "states that exceed the card: exit 1" exits 1 --model 70B --gpus 8xH100 --engine deepspeed --zero 0 --json
expect "with what is missing" out_has '"missing_bytes"'

# Rows with any bytes.
printf '{"model": "caf\xe9"}\n' >latin.jsonl
expect "validate of bytes that are no UTF-8" exits 2 validate latin.jsonl --json

# A plan file gives the prediction that the search gave.
run "${small[@]}" --zero 3 --out again --json
simulated_step="$(grep -m1 -o '"step_seconds": [0-9.e-]*' out)"
expect "simulate --estimate reads plan.json" exits 0 simulate again/plan.json --estimate --json
expect "simulate --estimate has a step" out_has '"step_seconds"'
expect "simulate counts ops" grep -qE '"ops": [1-9]' out
expect "simulate as text" exits 0 simulate again/plan.json --estimate
expect "with the streams" out_has 'Streams by phase'
expect "simulate by events" exits 0 simulate again/plan.json --json
expect "and gives the step of the plan too" out_has "$simulated_step"
expect "all ranks" exits 0 simulate again/plan.json --ranks all
expect "says what sharing costs" out_has 'slowed by sharing'
expect "a trace" exits 0 simulate again/plan.json --trace step.json
expect "that is JSON" python3 -c 'import json; assert json.load(open("step.json"))'
expect "is not overwritten" exits 2 simulate again/plan.json --trace step.json
expect "without --force" exits 0 simulate again/plan.json --trace step.json --force
sed 's/"zero_stage": 3/"zero_stage": 7/' again/plan.json >wrong.json
expect "a plan that is wrong: exit 2" exits 2 simulate wrong.json --estimate
expect "with its line" grep -q 'wrong.json:[0-9]*: /plan/zero_stage' err

# The user's machine and prices.
expect "--machine with ranks" exits 0 --model gpt2 --machine p4de.24xlarge --gpus 4 --json
expect "uses that many" out_has '"gpus": 4'
expect "--machine with nodes" exits 0 --model gpt2 --machine p4de.24xlarge --gpus 16 --json
expect "on two nodes" out_has '"nodes": 2'
run machines p4de.24xlarge --json
cp out machine.json
expect "a machine file" exits 0 --model gpt2 --machine machine.json --gpus 2xA100-80G --json
expect "whatif with the user's price" exits 0 whatif --model gpt2 --hardware 8xA100-80G,2x3090-24G@1.5USD --tokens 10B --json
expect "has that price" out_has '"usd_per_hour": 1.5'
expect "marks one as cheapest" bash -c '(($(grep -c "\"cheapest\": true" out) == 1))'
expect "marks one as fastest" bash -c '(($(grep -c "\"fastest\": true" out) == 1))'
expect "whatif: nothing fits anywhere" exits 1 whatif --model 405B --hardware 1x3090-24G

printf '%d expectations, %d failed\n' "$total" "$failed"
((failed == 0))
