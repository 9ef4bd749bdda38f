#pragma once
// Models that are not built like Llama.

#include "models/eager_causal.h"

namespace zeroplan::eager {

std::unique_ptr<EagerModel> make_gpt2(Context& context);
std::unique_ptr<EagerModel> make_gpt_neox(Context& context);
std::unique_ptr<EagerModel> make_opt(Context& context);
std::unique_ptr<EagerModel> make_t5(Context& context);
std::unique_ptr<EagerModel> make_falcon(Context& context);
std::unique_ptr<EagerModel> make_bloom(Context& context);
std::unique_ptr<EagerModel> make_bert(Context& context);
std::unique_ptr<EagerModel> make_gptj(Context& context);
std::unique_ptr<EagerModel> make_mpt(Context& context);
/// MPT as MosaicML's llm-foundry runs it. Throws InputError for what its graph does not hold.
std::unique_ptr<EagerModel> make_llm_foundry(Context& context);

}  // namespace zeroplan::eager
