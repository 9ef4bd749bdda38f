#!/usr/bin/env bash
# Trains a 10.8 M parameter Llama on text, byte by byte, twice: ZeRO-3 on several ranks and ZeRO-0 on one, the same
# batches. Compares the losses and each run with its plan (docs/training-run.md).
#
#   examples/train_text.sh                                   # this repository's documents, 30 steps: minutes on 2 cores
#   apt-get install bible-kjv && bible gen1:1-rev22:21 > bible.txt
#   examples/train_text.sh --text bible.txt --steps 1500 --out build/bible
set -euo pipefail

usage() {
  cat <<'USAGE'
examples/train_text.sh [OPTIONS]
  --text FILE        plain text [README.md and docs/*.md of this repository]
  --steps K          training steps of each run [30]
  --ranks N          ranks of the ZeRO-3 run, and sequences a step of both [4]
  --model FILE       config.json with a vocabulary of at least 256 [examples/text-model.json]
  --seq-len TOKENS   [512]
  --precision TYPE   bf16, or fp32: then both runs give the same bits [bf16]
  --machine FILE     machine.json of `zeroplan probe`, for predicted times that mean something [a catalog machine]
  --program FILE     the zeroplan program [build/release/zeroplan]
  --out DIR          plans, measurements, losses.csv and losses.svg [build/train_text]
USAGE
}

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
root="$(dirname -- "$here")"
text=("$root/README.md" "$root"/docs/*.md)
steps=30 ranks=4 model="$here/text-model.json" length=512 precision=bf16 machine=
program="$root/build/release/zeroplan" out="$root/build/train_text"
while (($#)); do
  if [[ $1 == --help || $1 == -h ]]; then usage; exit 0; fi
  if (($# < 2)); then echo "train_text.sh: $1: expected a value; see --help" >&2; exit 2; fi
  case $1 in
    --text) text=("$2") ;;
    --steps) steps=$2 ;;
    --ranks) ranks=$2 ;;
    --model) model=$2 ;;
    --seq-len) length=$2 ;;
    --precision) precision=$2 ;;
    --machine) machine=$2 ;;
    --program) program=$2 ;;
    --out) out=$2 ;;
    *) echo "train_text.sh: unknown option $1; see --help" >&2; exit 2 ;;
  esac
  shift 2
done
if [[ ! -x $program ]]; then
  echo "train_text.sh: $program: not there; ./scripts/run models builds it" >&2
  exit 2
fi

# plan NAME STAGE RANKS: one sequence a rank and micro-step, so both runs add the same gradients in the same order.
plan() {
  local where=(--gpus "$3x3090-24G")  # ranks are threads of this machine; a catalog machine only bounds the memory
  if [[ -n $machine ]]; then where=(--machine "$machine" --gpus "$3"); fi
  "$program" plan --model "$model" "${where[@]}" --seq-len "$length" --global-batch "$ranks" --micro-batch 1 \
    --zero "$2" --offload none --recompute none --precision "$precision" --out "$out/$1" --force >"$out/$1.plan.txt"
}

# train NAME
train() {
  "$program" run "$out/$1/plan.json" --data "$out/text.tokens" --steps "$steps" --learning-rate 1e-3 \
    --warmup "$((steps < 1000 ? steps / 10 : 100))" --measure "$out/$1.measured.json" --force
  "$program" compare "$out/$1/plan.json" "$out/$1.measured.json" >"$out/$1.compare.txt"
}

mkdir -p "$out"
"$here/make_tokens.py" "${text[@]}" --out "$out/text.tokens"
plan sharded 3 "$ranks"
plan single 0 1
train sharded
train single
"$here/plot_losses.py" "ZeRO-3 on $ranks ranks ($precision)=$out/sharded.measured.json" \
  "ZeRO-0 on one rank ($precision)=$out/single.measured.json" --out "$out/losses"
echo "$out: losses.svg, losses.csv, *.compare.txt"
