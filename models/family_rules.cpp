#include "models/family_rules.h"

namespace zeroplan {

void adjust_gpt_neox(ConfigReader& reader, Architecture& a) {
  if (!reader.flag("use_parallel_residual", true)) a.family.residual = Residual::pre_norm;
}

void adjust_opt(ConfigReader& reader, Architecture& a) {
  if (!reader.flag("do_layer_norm_before", true)) {
    a.family.residual = Residual::post_add;
    a.final_norm = false;
  }
  if (!reader.flag("layer_norm_elementwise_affine", true)) {
    reader.fail("layer_norm_elementwise_affine", "norms without weights are not supported (expected true)");
  }
  if (reader.optional("word_embed_proj_dim", 1, 1'000'000, a.hidden, "hidden_size") != a.hidden) {
    reader.fail("word_embed_proj_dim", "expected hidden_size; projected embeddings (opt-350m) are not supported");
  }
}

// Falcon has three layouts: grouped heads with two parallel norms (40B, 180B), multi-query with one parallel norm
// (7B), and plain GPT with ALiBi (rw-1b).
void adjust_falcon(ConfigReader& reader, Architecture& a) {
  const bool grouped = reader.flag("new_decoder_architecture", false);
  const bool multi_query = reader.flag("multi_query", true);
  const bool parallel = reader.flag("parallel_attn", true);
  if (!grouped) {
    if (multi_query) {
      a.kv_heads = 1;
    } else {
      a.kv_heads = a.heads;
    }
  }
  const bool two_norms =
      grouped && reader.optional("num_ln_in_parallel_attn", 1, 2, 2, "two norms in the new architecture") == 2;
  if (grouped && two_norms) {
    a.family.residual = Residual::parallel_two_norms;
    a.family.names.norm1 = "ln_attn";
    a.family.names.norm2 = "ln_mlp";
  } else {
    a.family.residual = grouped || parallel ? Residual::parallel_one_norm : Residual::pre_norm;
  }
  if (reader.flag("alibi", false)) a.family.positions = Positions::internal;
}

void adjust_mpt(ConfigReader& reader, Architecture& a) {
  const bool alibi = reader.flag("attn_config/alibi|alibi", false);
  const bool learned = reader.flag("learned_pos_emb", true);
  a.family.positions = !alibi && learned ? Positions::learned : Positions::internal;
  a.family.norm = reader.flag("no_bias", false) ? NormKind::layer_no_bias : NormKind::layer;
  if (reader.text("attn_config/attn_type|attn_type", "multihead_attention") == "multiquery_attention") a.kv_heads = 1;
  if (reader.text("norm_type", "low_precision_layernorm").find("layernorm") == std::string::npos) {
    reader.fail("norm_type", "expected \"layernorm\" or \"low_precision_layernorm\"");
  }
  a.width = a.hidden * reader.optional("expansion_ratio", 1, 64, 4, "transformers default");
}

// ChatGLM's num_layers counts blocks; multi_query_group_num holds only with multi_query_attention.
void adjust_chatglm(ConfigReader& reader, Architecture& a) {
  reader.find("vocab_size");  // the tokenizer's size; the matrices have padded_vocab_size rows
  a.kv_heads = a.heads;
  if (reader.flag("multi_query_attention", false)) {
    a.kv_heads = reader.required("multi_query_group_num", 1, a.heads);
  }
  if (!reader.flag("rmsnorm", true)) a.family.norm = NormKind::layer;
  a.final_norm = reader.flag("post_layer_norm", true);
}

void adjust_bert(ConfigReader& reader, Architecture& a) {
  if (reader.text("position_embedding_type", "absolute") != "absolute") {
    reader.fail("position_embedding_type", "expected \"absolute\"; relative positions add tensors we do not know");
  }
  a.token_types = reader.optional("type_vocab_size", 1, 1'000'000, 2, "transformers default");
  a.final_norm = false;
  reader.assume("BERT head", "masked language model", "architecture BertForMaskedLM: no pooler, no classifier");
}

void adjust_vit(ConfigReader& reader, Architecture& a) {
  const std::int64_t image = reader.required("image_size", 1, 100'000);
  a.patch_size = reader.required("patch_size", 1, image);
  a.channels = reader.optional("num_channels", 1, 1000, 3, "transformers default");
  if (image % a.patch_size != 0) reader.fail("patch_size", "expected a divisor of image_size");
  const std::int64_t side = image / a.patch_size;
  a.patch_inputs = a.channels * a.patch_size * a.patch_size;
  a.position_rows = side * side + 1;  // the class token has a position too
  a.max_positions = a.position_rows;
  reader.assume("ViT head", "none", "ViTModel without pooler or classifier");
}

// "relu", or "gated-gelu" of T5 v1.1.
void adjust_t5(ConfigReader& reader, Architecture& a) {
  constexpr std::string_view kGated = "gated-";
  a.activation = reader.text("feed_forward_proj", "relu");
  a.family.gated = a.activation.starts_with(kGated);
  if (a.family.gated) {
    a.activation.erase(0, kGated.size());
    a.family.names.gate = "layer.1.DenseReluDense.wi_0";
    a.family.names.up = "layer.1.DenseReluDense.wi_1";
    a.family.decoder_names.gate = "layer.2.DenseReluDense.wi_0";
    a.family.decoder_names.up = "layer.2.DenseReluDense.wi_1";
  }
  a.relative_buckets = reader.optional("relative_attention_num_buckets", 1, 1'000'000, 32, "transformers default");
}

}  // namespace zeroplan
