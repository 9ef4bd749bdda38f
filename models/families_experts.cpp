// Mixture of experts. Facts: see families.cpp.

#include "models/family_rows.h"

namespace zeroplan {
namespace {

Family deepseek_v2() {
  Family f;
  f.model_type = "deepseek_v2";
  f.mla = true;
  f.bias_keys = {{"attention_bias", kQkvOut}};
  f.keys.experts = "n_routed_experts";
  f.keys.experts_per_token = "num_experts_per_tok";
  f.keys.expert_width = "moe_intermediate_size";
  f.keys.shared_experts = "n_shared_experts";
  f.keys.first_dense = "first_k_dense_replace";
  f.keys.moe_step = "moe_layer_freq";
  return f;
}

Family deepseek_v3() {
  Family f = deepseek_v2();
  f.model_type = "deepseek_v3";
  f.names.router_correction = "mlp.gate.e_score_correction_bias";
  return f;
}

Family gpt_oss() {
  Family f;
  f.model_type = "gpt_oss";
  f.default_kv_heads = 8;
  f.default_head_dim = 64;
  f.bias_keys = {{"attention_bias", kQkvOut, false, true}};
  f.expert_bias = true;
  f.router_bias = true;
  f.expert_in_out = true;
  f.all_moe = true;
  f.window = WindowRule::alternating;
  f.default_window = 128;
  f.keys.experts = "num_local_experts";
  f.keys.experts_per_token = "num_experts_per_tok|experts_per_token";
  f.keys.expert_width = "intermediate_size";
  f.names.sinks = "self_attn.sinks";
  f.names.router = "mlp.router";
  f.names.expert_gate_up = "mlp.experts.{copy}.gate_up_proj";
  f.names.expert_down = "mlp.experts.{copy}.down_proj";
  return f;
}

Family llama4_text() {
  Family f;
  f.model_type = "llama4_text";
  f.qk_norm = QkNorm::no_weights;
  f.qk_norm_key = "use_qk_norm";
  f.default_kv_heads = 8;
  f.default_head_dim = 128;
  f.bias_keys = {{"attention_bias", kQkvOut}};
  f.expert_in_out = true;
  f.default_shared_experts = 1;
  f.moe_step_from_one = true;
  f.window = WindowRule::chunked;
  f.default_window = 8192;
  f.keys.width = "intermediate_size_mlp";
  f.keys.window = "attention_chunk_size";
  f.keys.experts = "num_local_experts";
  f.keys.experts_per_token = "num_experts_per_tok";
  f.keys.expert_width = "intermediate_size";
  f.keys.moe_step = "interleave_moe_layer_step";
  f.names.gate = "feed_forward.gate_proj";
  f.names.up = "feed_forward.up_proj";
  f.names.down = "feed_forward.down_proj";
  f.names.router = "feed_forward.router";
  f.names.expert_gate_up = "feed_forward.experts.{copy}.gate_up_proj";
  f.names.expert_down = "feed_forward.experts.{copy}.down_proj";
  f.names.shared_gate = "feed_forward.shared_expert.gate_proj";
  f.names.shared_up = "feed_forward.shared_expert.up_proj";
  f.names.shared_down = "feed_forward.shared_expert.down_proj";
  return f;
}

Family dbrx() {
  Family f;
  f.model_type = "dbrx";
  f.norm = NormKind::layer_no_bias;
  f.expert_in_out = true;
  f.all_moe = true;
  f.keys = {.hidden = "d_model|hidden_size",
            .layers = "n_layers|num_hidden_layers",
            .decoder_layers = {},
            .heads = "n_heads|num_attention_heads",
            .kv_heads = "attn_config/kv_n_heads",
            .head_dim = {},
            .width = {},
            .vocab = "vocab_size",
            .positions = "max_seq_len|max_position_embeddings",
            .activation = "ffn_config/ffn_act_fn/name",
            .window = {},
            .experts = "ffn_config/moe_num_experts",
            .experts_per_token = "ffn_config/moe_top_k",
            .expert_width = "ffn_config/ffn_hidden_size",
            .shared_experts = {},
            .first_dense = {},
            .moe_step = {}};
  f.names.embedding = "transformer.wte.weight";
  f.names.layer = "transformer.blocks.{layer}.";
  f.names.norm1 = "norm_attn_norm.norm_1";
  f.names.norm2 = "norm_attn_norm.norm_2";
  f.names.qkv = "norm_attn_norm.attn.Wqkv";
  f.names.out = "norm_attn_norm.attn.out_proj";
  f.names.router = "ffn.router.layer";
  f.names.expert_gate = "ffn.experts.mlp.{copy}.w1";
  f.names.expert_up = "ffn.experts.mlp.{copy}.v1";
  f.names.expert_down = "ffn.experts.mlp.{copy}.w2";
  f.names.final_norm = "transformer.norm_f";
  return f;
}

}  // namespace

std::vector<Family> expert_families() { return {deepseek_v2(), deepseek_v3(), gpt_oss(), llama4_text(), dbrx()}; }

}  // namespace zeroplan
