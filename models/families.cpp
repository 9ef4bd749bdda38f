#include "models/families.h"

#include <algorithm>

#include "models/family_rules.h"

// Facts: Hugging Face configuration and modelling files of each family, as collected with sources in
// models/catalog/models ("_source") and checked by tests/model_counts_test.cpp against published totals.

namespace zeroplan {
namespace {

constexpr Biases kAll{true, true, true};
constexpr Biases kQkvOut{true, true, false};

// --- families that differ from Llama in a few words ---------------------------------------------

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

// --- mixture of experts ---------------------------------------------------------------------------

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

// --- GPT-2 and its relatives: LayerNorm, plain MLP of 4 x hidden -----------------------------------

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

// --- encoders -------------------------------------------------------------------------------------

Family bert() {
  Family f;
  f.model_type = "bert";
  f.stack = Stack::encoder;
  f.norm = NormKind::layer;
  f.residual = Residual::post_add;
  f.positions = Positions::learned;
  f.gated = false;
  f.default_activation = "gelu";
  f.biases = kAll;
  f.tied = true;
  f.keys.kv_heads = {};
  f.keys.head_dim = {};
  f.names.embedding = "bert.embeddings.word_embeddings.weight";
  f.names.position = "bert.embeddings.position_embeddings.weight";
  f.names.token_type = "bert.embeddings.token_type_embeddings.weight";
  f.names.embedding_norm = "bert.embeddings.LayerNorm";
  f.names.layer = "bert.encoder.layer.{layer}.";
  f.names.norm1 = "attention.output.LayerNorm";
  f.names.norm2 = "output.LayerNorm";
  f.names.q = "attention.self.query";
  f.names.k = "attention.self.key";
  f.names.v = "attention.self.value";
  f.names.out = "attention.output.dense";
  f.names.up = "intermediate.dense";
  f.names.down = "output.dense";
  f.names.head = "cls.predictions.decoder.weight";
  f.names.head_bias = "cls.predictions.bias";
  f.names.head_transform = "cls.predictions.transform.dense";
  f.names.head_transform_norm = "cls.predictions.transform.LayerNorm";
  f.adjust = adjust_bert;
  return f;
}

Family vit() {
  Family f = bert();
  f.model_type = "vit";
  f.image = true;
  f.residual = Residual::pre_norm;
  f.tied = false;
  f.bias_keys = {{"qkv_bias", {true, false, false}, false, true}};
  f.keys.vocab = {};
  f.keys.positions = {};
  f.names.embedding = "vit.embeddings.patch_embeddings.projection";
  f.names.position = "vit.embeddings.position_embeddings";
  f.names.token_type = "vit.embeddings.cls_token";
  f.names.embedding_norm = {};
  f.names.layer = "vit.encoder.layer.{layer}.";
  f.names.norm1 = "layernorm_before";
  f.names.norm2 = "layernorm_after";
  f.names.q = "attention.attention.query";
  f.names.k = "attention.attention.key";
  f.names.v = "attention.attention.value";
  f.names.final_norm = "vit.layernorm";
  f.names.head = {};
  f.names.head_bias = {};
  f.names.head_transform = {};
  f.adjust = adjust_vit;
  return f;
}

Family t5() {
  Family f;
  f.model_type = "t5";
  f.stack = Stack::encoder_decoder;
  f.positions = Positions::internal;
  f.gated = false;
  f.default_activation = "relu";
  f.tied = true;
  f.keys.hidden = "d_model|hidden_size";
  f.keys.layers = "num_layers|num_hidden_layers";
  f.keys.decoder_layers = "num_decoder_layers";
  f.keys.heads = "num_heads|num_attention_heads";
  f.keys.kv_heads = {};
  f.keys.head_dim = "d_kv";
  f.keys.width = "d_ff";
  f.keys.positions = {};
  f.keys.activation = {};
  f.names.embedding = "shared.weight";
  f.names.layer = "encoder.block.{layer}.";
  f.names.norm1 = "layer.0.layer_norm";
  f.names.norm2 = "layer.1.layer_norm";
  f.names.q = "layer.0.SelfAttention.q";
  f.names.k = "layer.0.SelfAttention.k";
  f.names.v = "layer.0.SelfAttention.v";
  f.names.out = "layer.0.SelfAttention.o";
  f.names.relative_bias = "layer.0.SelfAttention.relative_attention_bias.weight";
  f.names.up = "layer.1.DenseReluDense.wi";
  f.names.down = "layer.1.DenseReluDense.wo";
  f.names.final_norm = "encoder.final_layer_norm";
  f.decoder_names = f.names;
  f.decoder_names.embedding = "decoder.embed_tokens.weight";
  f.decoder_names.layer = "decoder.block.{layer}.";
  f.decoder_names.cross_norm = "layer.1.layer_norm";
  f.decoder_names.cross_q = "layer.1.EncDecAttention.q";
  f.decoder_names.cross_k = "layer.1.EncDecAttention.k";
  f.decoder_names.cross_v = "layer.1.EncDecAttention.v";
  f.decoder_names.cross_out = "layer.1.EncDecAttention.o";
  f.decoder_names.norm2 = "layer.2.layer_norm";
  f.decoder_names.up = "layer.2.DenseReluDense.wi";
  f.decoder_names.down = "layer.2.DenseReluDense.wo";
  f.decoder_names.final_norm = "decoder.final_layer_norm";
  f.adjust = adjust_t5;
  return f;
}

std::vector<Family> make_families() {
  std::vector<Family> rows = {bert(),        bloom(),   chatglm(),   cohere(),     dbrx(),        deepseek_v2(),
                              deepseek_v3(), falcon(),  gemma(),     gemma2(),     gemma3_text(), gpt2(),
                              gpt_neox(),    gpt_oss(), gptj(),      llama(),      llama4_text(), mistral(),
                              mixtral(),     mpt(),     olmo2(),     opt(),        phi(),         phi3(),
                              qwen2(),       qwen3(),   qwen3_moe(), starcoder2(), t5(),          vit()};
  std::ranges::sort(rows, {}, &Family::model_type);
  return rows;
}

}  // namespace

std::span<const Family> families() {
  static const std::vector<Family> rows = make_families();
  return rows;
}

const Family* find_family(std::string_view model_type) {
  const auto rows = families();
  const auto found = std::ranges::lower_bound(rows, model_type, {}, &Family::model_type);
  return found != rows.end() && found->model_type == model_type ? &*found : nullptr;
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const Family& family : families()) names.emplace_back(family.model_type);
  return names;
}

}  // namespace zeroplan
