#!/usr/bin/env bash
# bad_input.sh ZEROPLAN: hostile command lines. Each ends with exit 2, one line on stderr that says what was expected, and
# nothing on stdout. The first word of a case must be part of that line.
set -uo pipefail
zeroplan="$(realpath -- "${1:?the program}")"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit 2
failed=0 total=0

# refused EXPECTED-PART ARGUMENT...
refused() {
  local part="$1" code lines
  shift
  ((total += 1))
  timeout 600 "$zeroplan" "$@" >out 2>err </dev/null
  code=$?
  lines="$(wc -l <err)"
  if [[ -n "${ZEROPLAN_SHOW_MESSAGES:-}" ]]; then printf '%s\n    %s\n' "${*@Q}" "$(cut -c1-300 err)"; fi
  if ((code != 2)) || [[ -s out ]] || ((lines != 1)) || ! grep -qF -- "$part" err; then
    printf 'FAILED (exit %d, %d lines on stderr, %d bytes on stdout, wanted "%s"): %s\n  %s\n' \
      "$code" "$lines" "$(wc -c <out)" "$part" "${*@Q}" "$(head -c 300 err)"
    ((failed += 1))
  fi
}
# plan EXPECTED-PART ARGUMENT...: added to a healthy command line.
plan() {
  local part="$1"
  shift
  refused "$part" plan --model 7B --gpus 8xH100 "$@"
}
model_file() { printf '%s' "$2" >"$1"; }

# Commands.
refused 'expected a command' frobnicate
refused 'did you mean plan' plna
refused 'expected a command' ''
refused 'expected a command' 70B
refused 'no such flag' plan -m 70B
refused 'no such flag; did you mean --model' --modle 70B --gpus 8xH100
refused 'no such flag' --model 7B --gpus 8xH100 --frobnicate
for later in report; do refused "zeroplan $later: not built yet" "$later"; done
refused 'expected a command' $'plan\n'
refused 'unexpected argument "now"' plan --model 7B --gpus 8xH100 now
refused 'unexpected argument' models 7B 13B
refused 'unexpected argument' machines H100 A100
refused 'no such flag' models --frobnicate

# Flags.
refused '--adam: expected one of fused, foreach, loop' --model 7B --gpus 8xH100 --engine fsdp2 --adam sgd
refused '--adam: expected --engine fsdp2' --model 7B --gpus 8xH100 --engine deepspeed --adam foreach
refused '--adam fused: expected loop beside --offload' --model 7B --gpus 8xH100 --engine fsdp2 --adam fused --offload all
refused 'expected --engine deepspeed or fsdp2' --model 7B --gpus 8xH100 --alloc-conf expandable_segments:True
refused 'no rule for expandable:True' --model 7B --gpus 8xH100 --engine fsdp2 --alloc-conf expandable:True
refused '--model: expected MODEL, got the flag --gpus' --model --gpus 4xA100-80G
refused '--model: expected MODEL, got an empty text' --model= --gpus=4xA100-80G
refused '--model: expected MODEL, got an empty text' --model '' --gpus 4xA100-80G
refused '--gpus: expected NxGPU, got nothing' --model 70B --gpus
refused '--gpus: expected NxGPU, got an empty text' --model 70B --gpus ''
refused '--gpus: expected' --model 70B
refused '--model: expected' --gpus 4xA100-80G
refused '--model: given twice' --model 70B --model 13B --gpus 4xA100-80G
refused '--json: given twice' --model 7B --gpus 8xH100 --json --json
refused '--json: takes no value' --model 7B --gpus 8xH100 --json=yes
refused '--force: takes no value' --model 7B --gpus 8xH100 --force=
refused 'expected an argument, got an empty text' plan '' --model 7B --gpus 8xH100

# Models.
model_file empty.json ''
model_file blank.json $'  \n \n'
model_file short.json '{"model_type":"llama","hidden_size":40'
model_file negative.json '{"model_type":"llama","hidden_size":-4096,"num_hidden_layers":32,"num_attention_heads":32,"intermediate_size":11008,"vocab_size":32000}'
model_file heads.json '{"model_type":"llama","hidden_size":4097,"num_hidden_layers":32,"num_attention_heads":32,"intermediate_size":11008,"vocab_size":32000}'
model_file family.json '{"model_type":"lama","hidden_size":4096}'
model_file text.json '{"model_type":"llama","hidden_size":"4096","num_hidden_layers":32,"num_attention_heads":32,"intermediate_size":11008,"vocab_size":32000}'
model_file huge.json '{"model_type":"llama","hidden_size":1e300,"num_hidden_layers":32,"num_attention_heads":32,"intermediate_size":11008,"vocab_size":32000}'
model_file array.json '[1, 2, 3]'
model_file number.json '7'
model_file twice.json '{"model_type":"llama","model_type":"gpt2"}'
model_file binary.json "$(printf '\x01\xff\xfe')"
head -c 200000 /dev/zero | tr '\0' '[' >deep.json
head -c 20000000 /dev/zero | tr '\0' ' ' >large.json
mkdir folder
refused 'empty.json:1' --model empty.json --gpus 8xH100
refused 'blank.json' --model blank.json --gpus 8xH100
refused 'short.json:1' --model short.json --gpus 8xH100
refused 'hidden_size' --model negative.json --gpus 8xH100
refused 'num_attention_heads' --model heads.json --gpus 8xH100
refused 'llama' --model family.json --gpus 8xH100
refused 'text.json:1' --model text.json --gpus 8xH100
refused 'huge.json:1' --model huge.json --gpus 8xH100
refused 'array.json:1' --model array.json --gpus 8xH100
printf '{"model_type":"gpt2"}\n\0{"hidden_size":1}' >nul.json
refused 'nul.json:2' --model nul.json --gpus 8xH100
refused 'number.json:1' --model number.json --gpus 8xH100
refused 'model_type' --model twice.json --gpus 8xH100
refused 'binary.json:1' --model binary.json --gpus 8xH100
refused 'deep.json' --model deep.json --gpus 8xH100
refused 'large.json' --model large.json --gpus 8xH100
refused 'folder' --model folder --gpus 8xH100
refused '/dev/null' --model /dev/null --gpus 8xH100
refused '/dev/zero' --model /dev/zero --gpus 8xH100
refused 'missing.json' --model missing.json --gpus 8xH100
refused 'llama' --model llama-2-71b --gpus 8xH100
refused 'nearest sizes' --model 71B --gpus 8xH100
refused '--model' --model $'70B\nrm -rf' --gpus 8xH100
refused '--model' --model "$(printf 'x%.0s' {1..5000})" --gpus 8xH100

# Machines.
refused '--gpus' --model 70B --gpus 0xA100-80G
refused 'A100' --model 70B --gpus 4xA10O-80G
refused '--gpus' --model 70B --gpus -4xA100-80G
refused '--gpus' --model 70B --gpus 4.5xA100-80G
refused '--gpus' --model 70B --gpus 4
refused '--gpus' --model 70B --gpus A100-80G
refused '--gpus' --model 70B --gpus 4x
refused '--gpus' --model 70B --gpus 4xA100-81G
refused '--gpus' --model 7B --gpus 99999999999xH100
refused '--nodes' --model 7B --gpus 64xH100
refused '--nodes' --model 7B --gpus 8xH100 --nodes 0
refused '--nodes' --model 7B --gpus 8xH100 --nodes -1
refused '--nodes' --model 7B --gpus 8xH100 --nodes 1e3
refused '--nodes' --model 7B --gpus 8xH100 --nodes 99999999999999999999
refused 'machine' --model 7B --machine frobnicate
refused 'machine.json' --model 7B --machine machine.json
refused 'empty.json' --model 7B --machine empty.json
refused 'expected the GPU of --machine' --model 7B --machine p4de.24xlarge --gpus 8xH100
refused '--gpus' --model 7B --machine p4de.24xlarge --gpus 9
refused '--gpus' --model 7B --machine p4de.24xlarge --gpus 0
refused '--gpus' --model 7B --machine p4de.24xlarge --gpus 8 --nodes 3
plan '--host-memory' --host-memory -1TiB
plan '--host-memory' --host-memory 12
plan '--host-memory' --host-memory 0GiB
plan '--host-memory' --host-memory nanGiB
plan '--host-memory' --host-memory 1e300TiB
plan '--host-memory' --host-memory 1TiBB
plan '--nvme' --nvme 2TB
plan '--nvme' --nvme 0x2TB
plan '--nvme' --nvme 4x0TB
plan '--nvme' --nvme 4x2TB@
plan '--nvme' --nvme 4x2TB@6.5GB
plan '--nvme' --nvme 4x2e30TB

# Workload and choices.
for text in 0 -1 nan inf 4k 4096.5 1e4 '4096 ' 99999999999999999999 0x1000; do plan '--seq-len' --seq-len "$text"; done
for text in 0 -8 nan 8.5 many 99999999999999999999; do plan '--global-batch' --global-batch "$text"; done
for text in 0 -1 nan 1.5 99999999999999999999; do plan '--micro-batch' --micro-batch "$text"; done
refused 'batch' --model 7B --gpus 8xH100 --global-batch 7 --micro-batch 4
plan 'batch' --global-batch 7
for text in 4 -1 0,4 0,,1 , 3,3 01 '0 1' all; do plan '--zero' --zero "$text"; done
for text in cpu optimizer:ssd none:cpu optimizer: :cpu OPTIMIZER optimizer:cpu:nvme; do plan '--offload' --offload "$text"; done
plan 'one of none, selective, full' --recompute some
plan 'one of bf16, fp16, fp32' --precision fp8
plan 'one of zeroplan, deepspeed, fsdp2' --engine megatron
plan 'one of time, cost, memory' --objective speed
plan '--trainable lora:r=16: expected all' --trainable lora:r=16
plan '--trainable lora:r=9000: expected a rank' --trainable lora:r=9000 --engine deepspeed
for text in none lora lora:r= lora:r=0 lora:r=-1 lora:r=16x lora:r=99999999999; do plan '--trainable' --trainable "$text"; done
for text in 200% -5% 5 0.05 nan% % 5%% 1e400%; do plan '--margin' --margin "$text"; done
for text in 0 -1 nan inf 300X 300BB 1e19 1e400 B '300 B'; do plan '--tokens' --tokens "$text"; done
for text in 0 -1 1.5 99999999999; do plan '--top' --top "$text"; done

# Output folders.
: >file
mkdir taken && : >taken/plan.json
refused '/proc/x' --model 7B --gpus 8xH100 --out /proc/x
refused 'file' --model 7B --gpus 8xH100 --out file
refused 'file' --model 7B --gpus 8xH100 --out file/below
refused 'taken/plan.json' --model 7B --gpus 8xH100 --out taken
refused 'no-model' --model no-model --gpus 8xH100 --out fresh
[[ -s taken/plan.json || -e taken/launch.sh || -e fresh ]] && echo 'FAILED: files left behind' && ((failed += 1))

mkfifo fifo
mkdir odd && mkfifo odd/plan.json
refused 'expected a regular file to overwrite' --model 7B --gpus 8xH100 --out odd --force
refused 'odd/launch.sh' --model 7B --gpus 8xH100 --out odd/launch.sh/../plan.json
[[ -p odd/plan.json && "$(ls -A odd)" == plan.json ]] || { echo 'FAILED: a pipe was overwritten'; ((failed += 1)); }
# A limit on the size of files, as of a full disk.
((total += 1))
(ulimit -f 1 && timeout 600 "$zeroplan" --model 7B --gpus 8xH100 --out limited >out 2>err)
if (($? != 2)) || [[ -s out || -e limited ]] || ! grep -q 'expected room' err; then echo 'FAILED: ulimit -f'; ((failed += 1)); fi

# Other commands.
refused 'PLAN.json' simulate
refused '/nonexistent' simulate /nonexistent --estimate
refused '/dev/null' simulate /dev/null --estimate
refused 'empty.json' simulate empty.json --estimate
refused 'array.json:1' simulate array.json --estimate
refused 'number.json:1' simulate number.json --estimate
refused 'PLAN.json' simulate --ranks all
refused '--ranks' simulate x.json --ranks some
refused 'x.json' simulate x.json --trace=t.json
refused '--hardware' whatif --model 7B
refused '--hardware' whatif --model 7B --hardware ,
refused '--hardware' whatif --model 7B --hardware 8xH100,
refused 'twice' whatif --model 7B --hardware 8xH100,8xH100
refused '--hardware' whatif --model 7B --hardware 8xH100@free
refused '--hardware' whatif --model 7B --hardware 8xH100@0USD
refused '--hardware' whatif --model 7B --hardware 8xH100@-3USD
refused '--hardware' whatif --model 7B --hardware @3USD
refused 'H100' whatif --model 7B --hardware 8xH1000
refused '--model' whatif --hardware 8xH100
refused '--tokens' whatif --model 7B --hardware 8xH100 --tokens soon
refused 'frobnicate' models frobnicate
refused 'heads.json' models heads.json --json
refused 'frobnicate' machines frobnicate

# Other engines.
refused '--engine' --model 7B --gpus 8xH100 --engine horovod
refused '--zero 0' --model 7B --gpus 8xH100 --engine fsdp2 --zero 0,1,2,3
refused '--zero 1' --model 7B --gpus 8xH100 --engine fsdp2 --zero 1
refused '--offload optimizer' --model 7B --gpus 8xH100 --engine fsdp2 --offload optimizer
refused '--offload: no plan exists in this space: expected --zero' --model 7B --gpus 8xH100 --engine deepspeed --offload parameters --zero 2
refused '--recompute selective' --model 7B --gpus 8xH100 --engine deepspeed --recompute selective
refused '--offload ...:nvme' --model 7B --gpus 8xH100 --nvme 1x2TB --engine fsdp2 --offload all:nvme
refused '--engine deepspeed: eager step' --model vit-base-patch16-224 --gpus 8xH100 --engine deepspeed
refused '--precision bf16 (the default): expected fp16 or fp32' --model 7B --gpus 8xV100-32G --engine deepspeed
refused '--precision fp16: expected bf16: Gaudi2' --model 7B --gpus 8xGaudi2 --precision fp16
refused 'no rule for backend:cudaMallocAsync, expected native' --model 7B --gpus 8xH100 --engine fsdp2 --alloc-conf backend:cudaMallocAsync
refused '--disk: expected a directory' probe --disk nowhere --out here.json

# Tables that are none.
printf 'a,b\n1,2\n' >other.csv
refused 'empty.json:1' validate empty.json
refused 'other.csv:1' validate other.csv
refused 'data/published' validate other.csv

# A plan whose states this machine cannot hold would be killed half-way.
timeout 600 "$zeroplan" --model 405B --gpus 8xH100 --nodes 16 --out enormous >out 2>err
refused 'enormous/plan.json' run enormous/plan.json --data synthetic --steps 1
refused 'is the plan itself' simulate enormous/plan.json --trace enormous/../enormous/plan.json --force
rm -rf enormous

# stdout that takes nothing.
if [[ -w /dev/full ]]; then
  ((total += 1))
  timeout 600 "$zeroplan" models >/dev/full 2>err
  if (($? != 2)) || ! grep -q stdout err; then echo 'FAILED: /dev/full'; ((failed += 1)); fi
fi
((total += 1))
timeout 600 "$zeroplan" models >&- 2>err
if (($? != 2)) || ! grep -q stdout err; then echo 'FAILED: closed stdout'; ((failed += 1)); fi
((total += 1))
timeout 600 "$zeroplan" models 2>err | true
if ((PIPESTATUS[0] != 0)) || [[ -s err ]]; then echo 'FAILED: a reader that stops'; ((failed += 1)); fi

printf '%d command lines, %d wrong\n' "$total" "$failed"
((failed == 0))
