#pragma once
// Rows of the table in families.cpp, by relationship.

#include <vector>

#include "models/families.h"

namespace zeroplan {

inline constexpr Biases kAll{true, true, true};
inline constexpr Biases kQkvOut{true, true, false};

std::vector<Family> llama_families();
std::vector<Family> expert_families();
std::vector<Family> gpt2_families();
std::vector<Family> encoder_families();

}  // namespace zeroplan
