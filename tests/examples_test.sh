#!/usr/bin/env bash
# examples/train_text.sh on a model of a few thousand parameters: fp32 losses of both runs have the same bits, wrong calls are
# refused. Arguments: the zeroplan program, the repository.
set -euo pipefail
program=$1 root=$2
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
fail() { echo "examples_test: $*" >&2; exit 1; }

cat >"$work/config.json" <<'JSON'
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
 "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256,
 "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false}
JSON
train() { "$root/examples/train_text.sh" --program "$program" --model "$work/config.json" --seq-len 32 --ranks 2 "$@" 2>&1; }

output="$(train --steps 6 --precision fp32 --out "$work/run")" || fail "exit $?: $output"
[[ $output == *"the same bits as ZeRO-3 on 2 ranks (fp32) in all 6 steps"* ]] || fail "other bits: $output"
for file in losses.svg losses.csv sharded.compare.txt single.compare.txt; do
  [[ -s $work/run/$file ]] || fail "$file was not written"
done
(($(wc -l <"$work/run/losses.csv") == 7)) || fail "losses.csv: expected a head and 6 steps"

# A chart of other losses must say so.
sed '3s/,[^,]*$/,1.5/' "$work/run/losses.csv" >"$work/other.csv"
output="$("$root/examples/plot_losses.py" "a=$work/run/losses.csv:ZeRO-3 on 2 ranks (fp32)" \
  "b=$work/other.csv:ZeRO-0 on one rank (fp32)" --out "$work/other")" && [[ $output == *"differs from a from step 2 on"* ]] ||
  fail "a difference went unseen: $output"

refused() { local rc=0; "$@" >/dev/null 2>&1 || rc=$?; ((rc == 2)) || fail "expected exit 2, got $rc: $*"; }
refused train --steps
refused train --stages 3
refused "$root/examples/train_text.sh" --program "$work/none"
