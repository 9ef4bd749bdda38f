// GPT-2 and its relatives: LayerNorm, plain MLP of 4 x hidden. Facts: see families.cpp.

#include "models/family_rows.h"
#include "models/family_rules.h"

namespace zeroplan {
namespace {

Family gpt2() {
  Family f;
  f.model_type = "gpt2";
  f.norm = NormKind::layer;
  f.positions = Positions::learned;
  f.gated = false;
  f.default_activation = "gelu_new";
  f.width_factor = 4;
  f.biases = kAll;
  f.tied = true;
  f.keys.hidden = "n_embd|hidden_size";
  f.keys.layers = "n_layer|num_hidden_layers";
  f.keys.heads = "n_head|num_attention_heads";
  f.keys.kv_heads = {};
  f.keys.head_dim = {};
  f.keys.width = "n_inner";
  f.keys.positions = "n_positions|max_position_embeddings";
  f.keys.activation = "activation_function";
  f.names.embedding = "transformer.wte.weight";
  f.names.position = "transformer.wpe.weight";
  f.names.layer = "transformer.h.{layer}.";
  f.names.norm1 = "ln_1";
  f.names.norm2 = "ln_2";
  f.names.qkv = "attn.c_attn";
  f.names.out = "attn.c_proj";
  f.names.up = "mlp.c_fc";
  f.names.down = "mlp.c_proj";
  f.names.final_norm = "transformer.ln_f";
  return f;
}

Family gptj() {
  Family f = gpt2();
  f.model_type = "gptj";
  f.residual = Residual::parallel_one_norm;
  f.positions = Positions::rotary;
  f.biases = {false, false, true};
  f.tied = false;
  f.names.position = {};
  f.names.qkv = {};
  f.names.q = "attn.q_proj";
  f.names.k = "attn.k_proj";
  f.names.v = "attn.v_proj";
  f.names.out = "attn.out_proj";
  f.names.up = "mlp.fc_in";
  f.names.down = "mlp.fc_out";
  f.names.head_bias = "lm_head.bias";
  return f;
}

Family gpt_neox() {
  Family f;
  f.model_type = "gpt_neox";
  f.norm = NormKind::layer;
  f.residual = Residual::parallel_two_norms;
  f.gated = false;
  f.default_activation = "gelu";
  f.biases = kAll;
  f.bias_keys = {{"attention_bias", kQkvOut, false, true}};
  f.keys.kv_heads = {};
  f.keys.head_dim = {};
  f.names.embedding = "gpt_neox.embed_in.weight";
  f.names.layer = "gpt_neox.layers.{layer}.";
  f.names.qkv = "attention.query_key_value";
  f.names.out = "attention.dense";
  f.names.up = "mlp.dense_h_to_4h";
  f.names.down = "mlp.dense_4h_to_h";
  f.names.final_norm = "gpt_neox.final_layer_norm";
  f.names.head = "embed_out.weight";
  f.adjust = adjust_gpt_neox;
  return f;
}

Family opt() {
  Family f;
  f.model_type = "opt";
  f.norm = NormKind::layer;
  f.positions = Positions::learned;
  f.extra_position_rows = 2;
  f.gated = false;
  f.default_activation = "relu";
  f.bias_keys = {{"enable_bias", kAll, false, true}};
  f.tied = true;
  f.keys.kv_heads = {};
  f.keys.head_dim = {};
  f.keys.width = "ffn_dim";
  f.keys.activation = "activation_function";
  f.names.embedding = "model.decoder.embed_tokens.weight";
  f.names.position = "model.decoder.embed_positions.weight";
  f.names.layer = "model.decoder.layers.{layer}.";
  f.names.norm1 = "self_attn_layer_norm";
  f.names.norm2 = "final_layer_norm";
  f.names.out = "self_attn.out_proj";
  f.names.up = "fc1";
  f.names.down = "fc2";
  f.names.final_norm = "model.decoder.final_layer_norm";
  f.adjust = adjust_opt;
  return f;
}

Family bloom() {
  Family f = gpt2();
  f.model_type = "bloom";
  f.positions = Positions::internal;
  f.default_activation = "gelu";
  f.keys.hidden = "hidden_size|n_embed";
  f.keys.width = {};
  f.keys.positions = "seq_length";
  f.keys.activation = {};
  f.names.embedding = "transformer.word_embeddings.weight";
  f.names.embedding_norm = "transformer.word_embeddings_layernorm";
  f.names.position = {};
  f.names.norm1 = "input_layernorm";
  f.names.norm2 = "post_attention_layernorm";
  f.names.qkv = "self_attention.query_key_value";
  f.names.out = "self_attention.dense";
  f.names.up = "mlp.dense_h_to_4h";
  f.names.down = "mlp.dense_4h_to_h";
  return f;
}

Family falcon() {
  Family f = bloom();
  f.model_type = "falcon";
  f.positions = Positions::rotary;
  f.biases = {};
  f.bias_keys = {{"bias", kAll}};
  f.keys = {};
  f.keys.layers = "num_hidden_layers|n_layer";
  f.keys.heads = "num_attention_heads|n_head";
  f.keys.kv_heads = "num_kv_heads|n_head_kv";
  f.keys.head_dim = {};
  f.keys.width = "ffn_hidden_size";
  f.keys.activation = "activation";
  f.names.embedding_norm = {};
  f.adjust = adjust_falcon;
  return f;
}

Family mpt() {
  Family f = gpt2();
  f.model_type = "mpt";
  f.norm = NormKind::layer_no_bias;
  f.qk_norm = QkNorm::per_projection;
  f.qk_norm_kind = NormKind::layer_no_bias;
  f.qk_norm_key = "attn_config/qk_ln|qk_ln";
  f.default_activation = "gelu";
  f.bias_keys = {{"no_bias", kAll, true, false}};
  f.keys = {};
  f.keys.hidden = "d_model|hidden_size";
  f.keys.layers = "n_layers|num_hidden_layers";
  f.keys.heads = "n_heads|num_attention_heads";
  f.keys.kv_heads = "attn_config/kv_n_heads";
  f.keys.head_dim = {};
  f.keys.width = {};
  f.keys.positions = "max_seq_len";
  f.keys.activation = {};
  f.names.layer = "transformer.blocks.{layer}.";
  f.names.norm1 = "norm_1";
  f.names.norm2 = "norm_2";
  f.names.qkv = "attn.Wqkv";
  f.names.out = "attn.out_proj";
  f.names.q_norm = "attn.q_ln";
  f.names.k_norm = "attn.k_ln";
  f.names.up = "ffn.up_proj";
  f.names.down = "ffn.down_proj";
  f.names.final_norm = "transformer.norm_f";
  f.adjust = adjust_mpt;
  return f;
}

Family chatglm() {
  Family f;
  f.model_type = "chatglm";
  f.bias_keys = {{"add_bias_linear", kAll}, {"add_qkv_bias", {true, false, false}}};
  f.keys.layers = "num_layers|num_hidden_layers";
  f.keys.kv_heads = {};
  f.keys.head_dim = "kv_channels";
  f.keys.width = "ffn_hidden_size";
  f.keys.vocab = "padded_vocab_size";
  f.keys.positions = "seq_length";
  f.keys.activation = {};
  f.names.embedding = "transformer.embedding.word_embeddings.weight";
  f.names.layer = "transformer.encoder.layers.{layer}.";
  f.names.qkv = "self_attention.query_key_value";
  f.names.out = "self_attention.dense";
  f.names.gate_up = "mlp.dense_h_to_4h";
  f.names.down = "mlp.dense_4h_to_h";
  f.names.final_norm = "transformer.encoder.final_layernorm";
  f.names.head = "transformer.output_layer.weight";
  f.adjust = adjust_chatglm;
  return f;
}

}  // namespace

std::vector<Family> gpt2_families() { return {gpt2(), gptj(), gpt_neox(), opt(), bloom(), falcon(), mpt(), chatglm()}; }

}  // namespace zeroplan
