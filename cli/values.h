#pragma once
// The values of flags, as text. Each parser takes the text and the flag's name, and throws InputError that says what
// was expected, what was found, and the nearest choice.

#include <cstdint>
#include <string_view>
#include <vector>

#include "models/plan.h"
#include "planner/search.h"

namespace zeroplan {

/// "bf16", "fp16", "fp32".
DType parse_precision(std::string_view text, std::string_view flag);
/// "none", "selective", "full".
Recompute parse_recompute(std::string_view text, std::string_view flag);
/// "zeroplan", "deepspeed", "fsdp2".
Engine parse_engine(std::string_view text, std::string_view flag);
/// "fused", "foreach", "loop".
AdamForm parse_adam_form(std::string_view text, std::string_view flag);
/// "time", "cost", "memory".
Objective parse_objective(std::string_view text, std::string_view flag);
/// "none", "optimizer", "parameters:cpu", "all:nvme". Without a tier: the host's memory.
Offload parse_offload(std::string_view text, std::string_view flag);
/// "3" or "0,1,2,3": different stages from 0 to 3, in the order given.
std::vector<int> parse_stages(std::string_view text, std::string_view flag);
/// "5%" -> 0.05; 0 % to 90 %.
double parse_margin(std::string_view text, std::string_view flag);
/// A number of tokens: "300B", "1.5T", "2e12", "100000000". 1 to 10^18.
double parse_tokens(std::string_view text, std::string_view flag);
/// "all" -> 0; "lora:r=16" -> 16.
std::int64_t parse_trainable(std::string_view text, std::string_view flag);
/// "31.5USD" -> 31.5: above 0, at most 10^6.
double parse_usd(std::string_view text, std::string_view flag);

}  // namespace zeroplan
