#!/usr/bin/env bash
# loop.sh ZEROPLAN MACHINE OUT: plan, run and compare four Llamas on 2 and 4 ranks, ZeRO-0 and 3 (RS="1:0 ..." other
# ranks:stages, STEPS steps); prints the errors. MACHINE: what zeroplan probe wrote.
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../../.." && pwd -P)"
Z=$1 M=$2 O=$3; mkdir -p $O; cd $O
model() { cat >$1.json <<J
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": $2, "intermediate_size": $3, "num_hidden_layers": $4, "num_attention_heads": $5, "num_key_value_heads": $5, "vocab_size": $6, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false}
J
}
cp "$root"/examples/tiny-llama.json m07.json
model m3 256 704 3 4 1024; model m6 320 864 4 5 1024; cp "$root"/examples/text-model.json m10.json
for m in m07 m3 m6 m10; do for rs in ${RS:-2:0 2:3 4:0 4:3}; do r=${rs%:*} s=${rs#*:}
 n=$m-$r-$s; seq=64 mb=2; [ $m = m10 ] && seq=128 
 timeout 30 $Z plan --model $m.json --machine $M --gpus $r --seq-len $seq --micro-batch $mb --global-batch $((mb*r)) --zero $s --offload none --recompute none --out $n --force >/dev/null 2>$n.err || { echo plan $n failed; tail -1 $n.err; continue; }
 timeout 60 $Z run $n/plan.json --data synthetic --steps ${STEPS:-40} --measure $n/measured.json --force >/dev/null 2>$n.err || { echo run $n failed; tail -1 $n.err; continue; }
 timeout 30 $Z compare $n/plan.json $n/measured.json --json > $n.json 2>$n.err || tail -1 $n.err
 timeout 30 $Z compare $n/plan.json $n/measured.json > $n.txt
 python3 - $n.json $n <<'P'
import json,sys
c=json.load(open(sys.argv[1])); 
ks={k:c[k] for k in c if 'error' in k or 'step' in k}
print(sys.argv[2], {k:(round(v,4) if isinstance(v,float) else v) for k,v in ks.items()})
P
done; done
