#pragma once
// What tests of the cases in docs/user-cases.md share: the reported facts (tests/data/user_cases) and ways to ask.

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "models/config_text.h"
#include "models/eager_step.h"
#include "planner/check_parts.h"
#include "planner/check_prediction.h"
#include "planner/lint_parts.h"

namespace zeroplan::tests {

using Json = nlohmann::ordered_json;

inline constexpr double kGb = 1e9;

inline const Json& fact(const std::string& id) {
  static const std::map<std::string, Json> facts = [] {
    std::ifstream in(std::string(ZEROPLAN_TESTS_DIR) + "/data/user_cases/facts.jsonl");
    std::map<std::string, Json> all;
    for (std::string line; std::getline(in, line);) {
      const Json j = Json::parse(line);
      all.emplace(j.at("id").get<std::string>(), j);
    }
    return all;
  }();
  return facts.at(id);
}
inline double number(const std::string& id, const char* key) { return fact(id).at(key).get<double>(); }

inline ConfigText text_of(const std::string& text) { return ConfigText::parse(text, "ds.json"); }
inline DeepSpeedConfig config_of(const std::string& zero, const std::string& precision = "bf16") {
  return read_deepspeed_config(text_of(
      fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "{}": {{"enabled": true}}, "zero_optimization": {{{}}}}})",
                  precision, zero)));
}

inline MachineSpec machine_of(const std::string& gpus, int nodes = 1) {
  return machine_for(parse_gpu_request(gpus), nodes);
}

/// A configuration with what it is checked against; outlives its answers.
struct Case {
  ConfigText file;
  ModelSpec model;
  MachineSpec machine;

  Case(const std::string& text, ModelSpec m, MachineSpec on)
      : file(text_of(text)), model(std::move(m)), machine(std::move(on)) {}
  CheckInput input() const { return {file, &model, &machine}; }
  CheckAnswer lint() const { return check_deepspeed(input()); }
  CheckPrediction predicted(const CheckWorkload& flags) const { return predict_check(input(), lint(), flags); }
};

inline CheckWorkload tokens(std::int64_t seq_len, bool checkpointing = true, std::int64_t lora_rank = 0) {
  CheckWorkload flags;
  flags.seq_len = seq_len;
  flags.checkpointing = checkpointing;
  flags.lora_rank = lora_rank;
  return flags;
}

inline CheckAnswer linted(const std::string& text, const std::string& gpus = "") {
  static std::deque<ConfigText> kept;  // answers point into them
  kept.push_back(text_of(text));
  if (gpus.empty()) return check_deepspeed({kept.back(), nullptr, nullptr});
  const MachineSpec machine = machine_of(gpus);
  return check_deepspeed({kept.back(), nullptr, &machine});
}
inline const Finding* find(const CheckAnswer& answer, std::string_view rule) {
  const auto found = std::ranges::find_if(answer.findings, [&](const Finding& f) { return f.rule->id == rule; });
  return found == answer.findings.end() ? nullptr : &*found;
}

inline bool remarks(const CheckPrediction& p, std::string_view words) {
  return std::ranges::any_of(p.remarks, [&](const std::string& r) { return r.find(words) != std::string::npos; });
}

inline EagerStep eager(const ModelSpec& model, TokenShape shape, bool checkpointing, DType type = DType::bf16) {
  EagerOptions options;
  options.tokens = shape;
  options.checkpointing = checkpointing;
  options.type = type;
  return eager_step(model, options);
}

/// A Llama-shaped decoder of any size.
inline ModelSpec decoder(std::int64_t hidden, std::int64_t layers, std::int64_t ffn, std::int64_t heads,
                         std::int64_t vocab) {
  return read_model(fmt::format(R"({{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": {},
      "num_hidden_layers": {}, "intermediate_size": {}, "num_attention_heads": {}, "vocab_size": {},
      "max_position_embeddings": 32768, "tie_word_embeddings": false}})",
                                hidden, layers, ffn, heads, vocab),
                    "decoder.json");
}

}  // namespace zeroplan::tests
