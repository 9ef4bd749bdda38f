// Families that differ from Llama in a few words. Facts: see families.cpp.

#include "models/family_rows.h"

namespace zeroplan {
namespace {

Family llama() {
  Family f;
  f.bias_keys = {{"attention_bias", kQkvOut}, {"mlp_bias", {false, false, true}}};
  return f;
}

Family mistral() {
  Family f;
  f.model_type = "mistral";
  f.default_kv_heads = 8;
  f.window = WindowRule::all;
  f.default_window = 4096;
  return f;
}

Family mixtral() {
  Family f = mistral();
  f.model_type = "mixtral";
  f.default_window = 0;
  f.all_moe = true;
  f.keys.experts = "num_local_experts";
  f.keys.experts_per_token = "num_experts_per_tok";
  f.keys.expert_width = "intermediate_size";
  f.names.router = "block_sparse_moe.gate";
  f.names.expert_gate = "block_sparse_moe.experts.{copy}.w1.weight";
  f.names.expert_up = "block_sparse_moe.experts.{copy}.w3.weight";
  f.names.expert_down = "block_sparse_moe.experts.{copy}.w2.weight";
  return f;
}

Family qwen2() {
  Family f;
  f.model_type = "qwen2";
  f.biases = {true, false, false};
  f.default_kv_heads = 32;
  f.window = WindowRule::optional;
  f.default_window = 4096;
  return f;
}

Family qwen3() {
  Family f;
  f.model_type = "qwen3";
  f.qk_norm = QkNorm::per_head;
  f.default_kv_heads = 32;
  f.default_head_dim = 128;
  f.bias_keys = {{"attention_bias", kQkvOut}};
  f.window = WindowRule::optional;
  f.default_window = 4096;
  return f;
}

Family qwen3_moe() {
  Family f = qwen3();
  f.model_type = "qwen3_moe";
  f.default_kv_heads = 4;
  f.default_head_dim = 0;
  f.moe_step_from_one = true;
  f.keys.experts = "num_experts";
  f.keys.experts_per_token = "num_experts_per_tok";
  f.keys.expert_width = "moe_intermediate_size";
  f.keys.moe_step = "decoder_sparse_step";
  return f;
}

Family gemma() {
  Family f;
  f.model_type = "gemma";
  f.default_kv_heads = 16;
  f.default_head_dim = 256;
  f.default_activation = "gelu_pytorch_tanh";
  f.bias_keys = {{"attention_bias", kQkvOut}};
  f.tied = true;
  f.keys.activation = "hidden_activation|hidden_act";
  return f;
}

Family gemma2() {
  Family f = gemma();
  f.model_type = "gemma2";
  f.residual = Residual::sandwich;
  f.default_kv_heads = 4;
  f.window = WindowRule::alternating;
  f.default_window = 4096;
  f.names.norm3 = "pre_feedforward_layernorm";
  f.names.norm4 = "post_feedforward_layernorm";
  return f;
}

Family gemma3_text() {
  Family f = gemma2();
  f.model_type = "gemma3_text";
  f.qk_norm = QkNorm::per_head;
  f.window = WindowRule::pattern;
  return f;
}

Family phi3() {
  Family f;
  f.model_type = "phi3";
  f.bias_keys = {{"attention_bias", {}}};
  f.window = WindowRule::all;
  return f;
}

Family olmo2() {
  Family f;
  f.model_type = "olmo2";
  f.residual = Residual::post_sublayer;
  f.qk_norm = QkNorm::per_projection;
  f.bias_keys = {{"attention_bias", kQkvOut}};
  f.names.norm1 = "post_attention_layernorm";
  f.names.norm2 = "post_feedforward_layernorm";
  return f;
}

Family cohere() {
  Family f;
  f.model_type = "cohere";
  f.norm = NormKind::layer_no_bias;
  f.residual = Residual::parallel_one_norm;
  f.qk_norm = QkNorm::head_weights;
  f.qk_norm_kind = NormKind::layer_no_bias;
  f.qk_norm_key = "use_qk_norm";
  f.bias_keys = {{"attention_bias", kQkvOut}};
  f.tied = true;
  return f;
}

Family starcoder2() {
  Family f;
  f.model_type = "starcoder2";
  f.norm = NormKind::layer;
  f.gated = false;
  f.default_activation = "gelu_pytorch_tanh";
  f.default_kv_heads = 2;
  f.bias_keys = {{"use_bias", kAll, false, true}};
  f.window = WindowRule::all;
  f.tied = true;
  f.names.up = "mlp.c_fc";
  f.names.down = "mlp.c_proj";
  return f;
}

Family phi() {
  Family f;
  f.model_type = "phi";
  f.norm = NormKind::layer;
  f.residual = Residual::parallel_one_norm;
  f.qk_norm = QkNorm::per_head;
  f.qk_norm_kind = NormKind::layer;
  f.qk_norm_key = "qk_layernorm";
  f.gated = false;
  f.default_activation = "gelu_new";
  f.biases = kAll;
  f.names.out = "self_attn.dense";
  f.names.q_norm = "self_attn.q_layernorm";
  f.names.k_norm = "self_attn.k_layernorm";
  f.names.up = "mlp.fc1";
  f.names.down = "mlp.fc2";
  f.names.final_norm = "model.final_layernorm";
  f.names.head_bias = "lm_head.bias";
  return f;
}

}  // namespace

std::vector<Family> llama_families() {
  return {llama(),  mistral(),     mixtral(), qwen2(), qwen3(),  qwen3_moe(),  gemma(),
          gemma2(), gemma3_text(), phi3(),    olmo2(), cohere(), starcoder2(), phi()};
}

}  // namespace zeroplan
