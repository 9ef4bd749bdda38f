// Families of decoder-only models as transformers 5.17 builds them (src/transformers/models/*/modeling_*.py).

#include <algorithm>

#include "models/eager_decoder.h"

namespace zeroplan::eager {
namespace {

std::vector<DecoderStyle> make_rows() {
  std::vector<DecoderStyle> rows;
  const auto add = [&](std::string_view family, std::string_view classes) -> DecoderStyle& {
    DecoderStyle& row = rows.emplace_back();
    row.family = family;
    row.classes = classes;
    return row;
  };
  add("llama", "Llama");
  add("mistral", "Mistral").positions_first = true;
  add("qwen2", "Qwen2").masks = MaskKind::by_layer;
  add("qwen3", "Qwen3").masks = MaskKind::by_layer;
  {
    DecoderStyle& row = add("gemma", "Gemma");
    row.norm = NormStyle::rms_gemma;
    row.positions_first = true;
    row.scaled_embedding = true;
  }
  {
    DecoderStyle& row = add("gemma2", "Gemma2");
    row.norm = NormStyle::rms_gemma;
    row.masks = MaskKind::both;
    row.scaled_embedding = true;
    row.softcap = 30;
    row.attention_softcap = 50;
  }
  {
    DecoderStyle& row = add("gemma3_text", "Gemma3");
    row.norm = NormStyle::rms_gemma;
    row.masks = MaskKind::both;
    row.scaled_embedding = true;
    row.qk_norm_transposed = true;
    row.rotary_per_type = true;
  }
  {
    DecoderStyle& row = add("phi3", "Phi3");
    row.positions_first = true;
    row.mlp = MlpKind::fused_gated;
    row.rotary = RotaryKind::part_joined;
    row.fused_qkv = true;
    row.residual_dropout = "resid_pdrop";
    row.dropout_modules = true;
  }
  {
    DecoderStyle& row = add("olmo2", "Olmo2");
    row.norm = NormStyle::rms_fp32_weight;
    row.rotary = RotaryKind::wide_tables;
  }
  {
    DecoderStyle& row = add("starcoder2", "Starcoder2");
    row.norm = NormStyle::layer;
    row.positions_first = true;
    row.mlp = MlpKind::plain;
    row.residual_dropout = "residual_dropout";
    row.embedding_dropout = "embedding_dropout";
  }
  {
    DecoderStyle& row = add("cohere", "Cohere");
    row.norm = NormStyle::layer_fp32;
    row.norm_class = "LayerNorm";
    row.rotary = RotaryKind::wide_interleaved;
    row.scaled_logits = true;
  }
  {
    DecoderStyle& row = add("phi", "Phi");
    row.norm = NormStyle::layer;
    row.positions_first = true;
    row.mlp = MlpKind::plain;
    row.rotary = RotaryKind::part_kept;
    row.rotary_part = 0.5;
    row.qk_norm_transposed = true;
    row.residual_dropout = "resid_pdrop";
    row.dropout_modules = true;
    row.embedding_dropout = "embd_pdrop";
  }
  {
    DecoderStyle& row = add("mixtral", "Mixtral");
    row.positions_first = true;
    row.moe_class = "SparseMoeBlock";
    row.router_class = "TopKRouter";
    row.router_first = true;
  }
  {
    DecoderStyle& row = add("qwen3_moe", "Qwen3Moe");
    row.positions_first = true;
    row.moe_class = "SparseMoeBlock";
    row.router_class = "TopKRouter";
    row.narrow_routing = true;
  }
  {
    DecoderStyle& row = add("deepseek_v2", "DeepseekV2");
    row.moe_class = "Moe";
    row.router_class = "TopkRouter";
    row.router = RouterKind::groups_softmax;
    row.complex_tables = true;
  }
  {
    DecoderStyle& row = add("deepseek_v3", "DeepseekV3");
    row.moe_class = "MoE";
    row.router_class = "TopkRouter";
    row.router = RouterKind::groups_sigmoid;
  }
  {
    DecoderStyle& row = add("gpt_oss", "GptOss");
    row.norm = NormStyle::rms_fp32_weight;
    row.masks = MaskKind::both;
    row.rotary = RotaryKind::halves;
    row.rotary_part = 0.5;
    row.sinks = true;
    row.moe_class = "MLP";
    row.router_class = "TopKRouter";
    row.router_first = true;
    row.router = RouterKind::after_topk;
    row.expert_biases = true;
    row.returns_routing = true;
  }
  return rows;
}

}  // namespace

const DecoderStyle* find_decoder_style(std::string_view family) {
  static const std::vector<DecoderStyle> rows = make_rows();
  const auto found = std::ranges::find(rows, family, &DecoderStyle::family);
  return found != rows.end() ? &*found : nullptr;
}

}  // namespace zeroplan::eager
