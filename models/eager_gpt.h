#pragma once
// GPT-2 and its relatives: LayerNorm, plain MLP.

#include "models/eager_causal.h"

namespace zeroplan::eager {

std::unique_ptr<EagerModel> make_gpt2(Context& context);
std::unique_ptr<EagerModel> make_gpt_neox(Context& context);
std::unique_ptr<EagerModel> make_opt(Context& context);

}  // namespace zeroplan::eager
