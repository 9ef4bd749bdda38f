#pragma once
// Keys that change a family's row itself: layouts chosen by flags. Called after the sizes were read, before experts,
// widths and windows are.

#include "models/model_config.h"

namespace zeroplan {

/// Token types; refuses relative positions.
void adjust_bert(ConfigReader& reader, Architecture& a);
/// Key groups, norm kind, final norm.
void adjust_chatglm(ConfigReader& reader, Architecture& a);
/// Its three layouts.
void adjust_falcon(ConfigReader& reader, Architecture& a);
/// Sequential residuals when asked.
void adjust_gpt_neox(ConfigReader& reader, Architecture& a);
/// ALiBi or learned positions, biases, the expansion ratio.
void adjust_mpt(ConfigReader& reader, Architecture& a);
/// Norms before or after; refuses projected embeddings.
void adjust_opt(ConfigReader& reader, Architecture& a);
/// Gated or plain MLP, relative positions.
void adjust_t5(ConfigReader& reader, Architecture& a);
/// Patches and their positions.
void adjust_vit(ConfigReader& reader, Architecture& a);

}  // namespace zeroplan
