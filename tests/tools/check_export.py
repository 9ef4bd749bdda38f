#!/usr/bin/env python3
"""Loads what we export with the safetensors and transformers packages, and compares every value with an independent
computation of the initial weights (docs/files.md). For development: needs torch, transformers and safetensors.

    ninja -C build export_initial && tests/tools/check_export.py build/tests/export_initial
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open

LLAMA = dict(hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             vocab_size=80, max_position_embeddings=64, rms_norm_eps=1e-5, hidden_act="silu")
MODELS = {
    "gpt2": dict(architectures=["GPT2LMHeadModel"], n_embd=32, n_layer=2, n_head=4, n_positions=24, vocab_size=96,
                 bos_token_id=0, eos_token_id=0),
    "llama": dict(LLAMA, architectures=["LlamaForCausalLM"], initializer_range=0.05),
    "llama tied": dict(LLAMA, architectures=["LlamaForCausalLM"], tie_word_embeddings=True),
    "mistral": dict(LLAMA, architectures=["MistralForCausalLM"]),
    "qwen2": dict(LLAMA, architectures=["Qwen2ForCausalLM"]),
    "qwen3": dict(LLAMA, architectures=["Qwen3ForCausalLM"], head_dim=8),
}
SEED = 5
MASK = (1 << 64) - 1


def mix(bits):
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def random_bits(key, index):
    return mix((key + (index + 1) * 0x9E3779B97F4A7C15) & MASK)


def weights(number, name, shape, deviation, layers):
    """runtime/initial_weights.h, in Python."""
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
    if any(end in name for end in ("c_proj", "o_proj", "down_proj")):
        deviation /= (2 * layers) ** 0.5
    key = mix(random_bits(SEED, number) ^ 0xD1B54A32D192ED03)
    normal = statistics.NormalDist()
    count = shape[0] * shape[1]
    values = [deviation * normal.inv_cdf(((random_bits(key, i) >> 12) + 0.5) * 2.0**-52) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(shape)


def our_tensors(model, gpt2):
    """(name, shape as [out, in]) in the order of our blocks: embedding, layers, final norm, head."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    turned = {n: s[::-1] if gpt2 and ".h." in n and len(s) == 2 else s for n, s in shapes.items()}
    if gpt2:
        return list(turned.items())
    return in_llama_order(turned, model.config.num_hidden_layers)


def in_llama_order(shapes, layers):
    parts = ["input_layernorm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj", "post_attention_layernorm",
             "gate_proj", "up_proj", "down_proj"]
    order = ["model.embed_tokens.weight"]
    for layer in range(layers):
        prefix = "model.layers.%d." % layer
        inside = [n for n in shapes if n.startswith(prefix)]
        order += sorted(inside, key=lambda n: (next(i for i, p in enumerate(parts) if p in n), n.endswith("bias")))
    order += ["model.norm.weight", "lm_head.weight"]
    assert sorted(order) == sorted(shapes), set(order) ^ set(shapes)
    return [(name, shapes[name]) for name in order]


def check(program, name, config, dtype, limit, folder):
    out = os.path.join(folder, "%s-%s-%d" % (name.replace(" ", "-"), dtype, limit))
    file = os.path.join(folder, "config.json")
    with open(file, "w") as text:
        json.dump(dict(config, model_type=name.split()[0]), text)
    subprocess.run([program, file, out, dtype, str(limit), str(SEED)], check=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    problems = {key: value for key, value in info.items() if value}
    assert not problems, problems
    state = model.state_dict()
    gpt2 = name == "gpt2"
    layers = model.config.num_hidden_layers
    files = sorted(f for f in os.listdir(out) if f.endswith(".safetensors"))
    stored = {}
    for each in files:
        with safe_open(os.path.join(out, each), "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            stored.update({key: tensors.get_tensor(key) for key in tensors.keys()})
    compared = 0
    for number, (tensor, shape) in enumerate(our_tensors(model, gpt2)):
        if tensor == "lm_head.weight" and model.config.tie_word_embeddings:
            assert tensor not in stored and model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
            continue
        right = weights(number, tensor, shape, config.get("initializer_range", 0.02), layers).to(state[tensor].dtype)
        if gpt2 and ".h." in tensor and len(shape) == 2:
            right = right.T
        assert torch.equal(state[tensor], right), tensor
        assert torch.equal(stored.pop(tensor), right), tensor
        compared += right.numel()
    assert not stored, stored.keys()
    print("%-10s %s in %d file%s: %d values equal, nothing missing or unexpected" %
          (name, dtype, len(files), "" if len(files) == 1 else "s", compared))


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print("transformers %s, torch %s" % (transformers.__version__, torch.__version__))
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            for dtype, limit in (("bf16", 5_000_000_000), ("fp16", 20_000), ("fp32", 5_000_000_000)):
                check(os.path.abspath(sys.argv[1]), name, config, dtype, limit, folder)


if __name__ == "__main__":
    main()
