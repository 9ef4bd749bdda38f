#!/usr/bin/env python3
"""Reference results from PyTorch (CPU, fp64), written to tests/data/reference: one forward and backward of every kernel,
steps of AdamW, and 20 training steps of a tiny GPT-2 and two tiny Llamas. Needs torch; the tests need only the files:

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch && /tmp/venv/bin/python tests/tools/make_reference.py

Inputs are not stored: element i of array `seed` is value(i, seed), multiples of 1/64 in [-2, 2] that every type holds exactly.
"""

import json
import math
import pathlib

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "data" / "reference"


def value(i, seed):
    return ((31 * i * (i + seed) + 17 * i + 101 * seed) % 257 - 128) / 64


def array(seed, *shape):
    count = math.prod(shape)
    return torch.tensor([value(i, seed) for i in range(count)]).reshape(shape)


def flat(tensor):
    return [float(f"{x:.15g}") for x in tensor.detach().reshape(-1).tolist()]


def record(function, *inputs):
    """Output and the gradients of the inputs for the output gradient array(99)."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    y.backward(array(99, *y.shape))
    return {"output": flat(y), "gradients": [flat(x.grad) for x in inputs]}


# --- pieces, with the conventions of Hugging Face's modelling files ---------------------------------


def rotate(x, theta=10000.0):
    """x [batch, heads, seq, d]: elements i and i + d/2 are a pair."""
    d, seq = x.shape[-1], x.shape[-2]
    frequency = theta ** (-torch.arange(0, d, 2) / d)
    angle = torch.outer(torch.arange(seq, dtype=torch.float64), frequency)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    low, high = x[..., : d // 2], x[..., d // 2 :]
    return x * cos + torch.cat([-high, low], -1) * sin


def split_heads(qkv, batch, heads, kv_heads, d):
    """Packed [tokens, (heads + 2 kv_heads) d] as q, k, v [batch, heads, seq, d]."""
    x = qkv.reshape(batch, -1, heads + 2 * kv_heads, d).transpose(1, 2)
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]


def attend(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[-1])


def kernels():
    ids = torch.tensor([3, 1, 3, 6, 0, 3, 1, 1, 2, 6])
    targets = torch.tensor([0, 8, -100, 3])
    gated = lambda f: lambda x: f(x[:, :6]) * x[:, 6:]
    logits = array(1, 4, 9)
    cases = {
        "linear": record(F.linear, array(1, 5, 7), array(2, 6, 7), array(3, 6)),
        "rms_norm": record(lambda x, w: F.rms_norm(x, (9,), w, 1e-5), array(1, 4, 9), array(2, 9)),
        "layer_norm": record(lambda x, w, b: F.layer_norm(x, (9,), w, b, 1e-5), array(1, 4, 9), array(2, 9), array(3, 9)),
        "attention": record(lambda x: attend(*split_heads(x, 2, 4, 2, 6)), array(1, 14, 48)),
        "rotary_attention": record(
            lambda x: (lambda q, k, v: attend(rotate(q), rotate(k), v))(*split_heads(x, 2, 4, 2, 6)), array(1, 14, 48)
        ),
        "gelu_tanh": record(lambda x: F.gelu(x, approximate="tanh"), array(1, 3, 12)),
        "gelu_erf": record(F.gelu, array(1, 3, 12)),
        "silu_gated": record(gated(F.silu), array(1, 3, 12)),
        "gelu_tanh_gated": record(gated(lambda x: F.gelu(x, approximate="tanh")), array(1, 3, 12)),
        "relu": record(F.relu, array(1, 3, 12)),
        "embedding": record(lambda w, p: F.embedding(ids, w) + p[:5].repeat(2, 1), array(1, 7, 4), array(2, 6, 4)),
    }
    x = logits.clone().requires_grad_()
    loss = F.cross_entropy(x, targets, reduction="sum")
    loss.backward()
    cases["cross_entropy"] = {"output": [loss.item()], "gradients": [flat(x.grad)]}
    cases["adamw"] = adamw()
    return cases


def adamw():
    p = torch.nn.Parameter(array(1, 40))
    optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        p.grad = array(step + 2, 40) * 0.5
        optimizer.step()
    return {"output": flat(p), "gradients": []}


# --- tiny models ------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": 61,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 67, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False}
BATCH, SEQ, STEPS = 2, 16, 20
SETTINGS = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}


def tensors_of(config):
    """Names and shapes in the order of zeroplan's blocks; weights are [out, in] (c_attn too)."""
    if config["model_type"] == "gpt2":
        h = config["n_embd"]
        yield "transformer.wte.weight", (config["vocab_size"], h)
        yield "transformer.wpe.weight", (config["n_positions"], h)
        for i in range(config["n_layer"]):
            at = f"transformer.h.{i}."
            yield at + "ln_1.weight", (h,)
            yield at + "ln_1.bias", (h,)
            for name, out, inner in [("attn.c_attn", 3 * h, h), ("attn.c_proj", h, h)]:
                yield at + name + ".weight", (out, inner)
                yield at + name + ".bias", (out,)
            yield at + "ln_2.weight", (h,)
            yield at + "ln_2.bias", (h,)
            for name, out, inner in [("mlp.c_fc", 4 * h, h), ("mlp.c_proj", h, 4 * h)]:
                yield at + name + ".weight", (out, inner)
                yield at + name + ".bias", (out,)
        yield "transformer.ln_f.weight", (h,)
        yield "transformer.ln_f.bias", (h,)
        return
    h, d = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    kv, f = config["num_key_value_heads"] * d, config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (h,)
        for name, out, inner in [("q", h, h), ("k", kv, h), ("v", kv, h), ("o", h, h)]:
            yield at + f"self_attn.{name}_proj.weight", (out, inner)
        yield at + "post_attention_layernorm.weight", (h,)
        for name, out, inner in [("gate", f, h), ("up", f, h), ("down", h, f)]:
            yield at + f"mlp.{name}_proj.weight", (out, inner)
    yield "model.norm.weight", (h,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], h)


def initial(name, shape, seed):
    """Exact in bf16: matrices value / 16, norm weights 1 + value / 2, biases value / 32."""
    x = array(seed, *shape)
    if name.endswith(".bias"):
        return x / 32
    return x / 16 if len(shape) == 2 else 1 + x / 2


def tokens_of(step, vocab):
    """[BATCH, SEQ + 1]: inputs are the first SEQ columns, targets the last SEQ. Four batches in turn, so the loss falls."""
    rows = [[(7 * i * i + 3 * i + 13 * (step % 4)) % vocab for i in range(b * (SEQ + 1), (b + 1) * (SEQ + 1))] for b in range(BATCH)]
    return torch.tensor(rows)


def gpt2(w, config, ids):
    h, heads, eps = config["n_embd"], config["n_head"], config["layer_norm_epsilon"]
    norm = lambda x, at: F.layer_norm(x, (h,), w[at + ".weight"], w[at + ".bias"], eps)
    linear = lambda x, at: F.linear(x, w[at + ".weight"], w[at + ".bias"])
    x = (w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: ids.shape[1]]).reshape(-1, h)
    for i in range(config["n_layer"]):
        at = f"transformer.h.{i}."
        qkv = linear(norm(x, at + "ln_1"), at + "attn.c_attn")
        x = x + linear(attend(*split_heads(qkv, ids.shape[0], heads, heads, h // heads)), at + "attn.c_proj")
        inner = F.gelu(linear(norm(x, at + "ln_2"), at + "mlp.c_fc"), approximate="tanh")
        x = x + linear(inner, at + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def llama(w, config, ids):
    h, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    norm = lambda x, at: F.rms_norm(x, (h,), w[at + ".weight"], config["rms_norm_eps"])
    x = w["model.embed_tokens.weight"][ids].reshape(-1, h)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        n = norm(x, at + "input_layernorm")
        qkv = torch.cat([F.linear(n, w[at + f"self_attn.{p}_proj.weight"]) for p in "qkv"], -1)
        q, k, v = split_heads(qkv, ids.shape[0], heads, kv_heads, h // heads)
        theta = config["rope_theta"]
        x = x + F.linear(attend(rotate(q, theta), rotate(k, theta), v), w[at + "self_attn.o_proj.weight"])
        n = norm(x, at + "post_attention_layernorm")
        gate, up = (F.linear(n, w[at + f"mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[at + "mlp.down_proj.weight"])
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return F.linear(norm(x, "model.norm"), w[head])


def train(config):
    forward = gpt2 if config["model_type"] == "gpt2" else llama
    w = {name: torch.nn.Parameter(initial(name, shape, seed)) for seed, (name, shape) in enumerate(tensors_of(config))}
    optimizer = torch.optim.AdamW(
        w.values(), lr=SETTINGS["lr"], betas=SETTINGS["betas"], eps=SETTINGS["eps"], weight_decay=SETTINGS["weight_decay"]
    )
    result = {"config": config, "batch": BATCH, "seq_len": SEQ, "settings": SETTINGS, "losses": [], "norms": [], "gradients": {}}
    for step in range(STEPS):
        tokens = tokens_of(step, config["vocab_size"])
        loss = F.cross_entropy(forward(w, config, tokens[:, :-1]), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:  # each tensor's gradient as two numbers: its norm and its product with array(7)
            for name, p in w.items():
                dot = (p.grad.reshape(-1) * array(7, p.numel())).sum()
                result["gradients"][name] = [p.grad.norm().item(), dot.item()]
        norm = torch.nn.utils.clip_grad_norm_(w.values(), SETTINGS["clip_norm"])
        result["losses"].append(loss.item())
        result["norms"].append(norm.item())
        optimizer.step()
    return result


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = {"_source": f"PyTorch {torch.__version__}, CPU, fp64: tests/tools/make_reference.py"}
    (FOLDER / "kernels.json").write_text(json.dumps(source | kernels(), separators=(",", ":")).replace('},"', '},\n"') + "\n")
    models = {"gpt2": train(GPT2), "llama": train(LLAMA), "llama_tied": train(LLAMA | {"tie_word_embeddings": True})}
    (FOLDER / "models.json").write_text(json.dumps(source | models, indent=1) + "\n")


if __name__ == "__main__":
    main()
