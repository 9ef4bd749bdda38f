// Encoders, and T5. Facts: see families.cpp.

#include "models/family_rows.h"
#include "models/family_rules.h"

namespace zeroplan {
namespace {

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

}  // namespace

std::vector<Family> encoder_families() { return {bert(), vit(), t5()}; }

}  // namespace zeroplan
