#include "planner/validate_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "models/model_spec.h"
#include "planner/engine_prediction.h"
#include "planner/row_config.h"
#include "planner/row_values.h"
#include "planner/validate_user_cases.h"

namespace zeroplan {
namespace {

Bytes gib(const JsonValue& value) { return Bytes(value.as_real(0, 1e9) * kGiB); }

/// A row's own values of the model's configuration.
void override_config(nlohmann::json& config, const JsonValue& changes) {
  for (const auto& [key, value] : changes.members()) {
    switch (value.kind()) {
      case JsonValue::Kind::null:
        config[key] = nullptr;
        break;
      case JsonValue::Kind::boolean:
        config[key] = value.as_bool();
        break;
      case JsonValue::Kind::integer:
        config[key] = value.as_int(0, kManyInRow);
        break;
      case JsonValue::Kind::real:
        config[key] = value.as_real(-1e9, 1e9);
        break;
      case JsonValue::Kind::string:
        config[key] = value.as_string();
        break;
      case JsonValue::Kind::array:
      case JsonValue::Kind::object:
        value.fail("a number, a text, true, false or null");
    }
  }
}

/// What the measuring scripts change in a published configuration: no dropout, no sliding window, embeddings of Llama's
/// relatives not tied (data/groundtruth/README.md), and what the row's `override` says.
ModelSpec as_measured(const ModelSpec& published, const JsonValue* changes = nullptr) {
  nlohmann::json config = nlohmann::json::parse(published.config);
  for (auto& [key, value] : config.items()) {
    const bool dropout = key.find("drop") != std::string::npos && value.is_number();
    if (dropout) value = 0.0;
    if (key == "sliding_window") value = nullptr;
    if (key == "use_sliding_window") value = false;
  }
  if (published.family == "gpt2") {  // its defaults are not 0
    for (const char* key : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) config[key] = 0.0;
  }
  for (const char* family : {"llama", "mistral", "qwen2"}) {
    if (published.family == family) config["tie_word_embeddings"] = false;
  }
  if (changes != nullptr) override_config(config, *changes);
  ModelSpec model = read_model(config.dump(), published.name);
  model.name = published.name;
  return model;
}

/// Two of the measured names are not the catalog's.
std::string catalog_name(const std::string& name) { return name == "mistral-7b" ? "mistral-7b-v0.1" : name; }

EagerOptions eager_options(const JsonValue& row) {
  EagerOptions options;
  options.tokens = {row_integer(row, "mb", 1), row_integer(row, "seq", 1)};
  options.checkpointing = row_flag(row, "ac", false);
  options.reentrant = row_flag(row, "reentrant", false);
  const std::string attention = row_text(row, "attn", "sdpa");
  if (attention != "sdpa" && attention != "eager") {
    throw InputError(fmt::format("attn: expected sdpa or eager, found \"{}\"", attention));
  }
  options.attention = attention == "eager" ? EagerAttention::eager : EagerAttention::sdpa;
  options.type = row_precision(row);
  options.lora_rank = row_integer(row, "lora", 0);
  return options;
}

DeepSpeedJob deepspeed_job(const JsonValue& row, std::string_view text) {
  DeepSpeedJob job;
  job.config = read_deepspeed_config(row_deepspeed_config(row, text));
  job.ranks = static_cast<int>(row.at("n").as_int(1, 1 << 20));
  job.accumulation = static_cast<int>(row_integer(row, "gas", 1));
  job.zero_init = row_flag(row, "zero_init", false);
  job.ranks_per_node = static_cast<int>(row_integer(row, "ndev", 0));  // as the measuring script told DeepSpeed
  return job;
}

Fsdp2Options fsdp2_options(const JsonValue& row) {
  Fsdp2Options options;
  options.ranks = static_cast<int>(row.at("n").as_int(1, 1 << 20));
  options.shard_ranks = static_cast<int>(row_integer(row, "shard", 0));
  options.reshard_after_forward = options.reshard_root = row_flag(row, "reshard", true);
  options.offload = row_flag(row, "offload", false);
  if (row_flag(row, "pure_bf16", false)) {
    options.parameters = options.reduction = DType::bf16;
  } else if (!row_flag(row, "reduce_fp32", true)) {
    options.reduction = DType::bf16;
  }
  return options;
}

/// A row of another model of that name would be compared in vain.
void check_parameters(const JsonValue& row, const EagerStep& step, bool with_adapters) {
  const JsonValue* measured = row.find("params");
  if (measured == nullptr) return;
  const bool adapters = row_integer(row, "lora", 0) > 0;
  std::int64_t count = 0;
  for (const EagerParameter& parameter : step.parameters) {
    if (!adapters || with_adapters || !parameter.trainable) count += parameter.elements;
  }
  const std::int64_t expected = measured->as_int(0, kManyInRow);
  if (count != expected) {
    throw InputError(
        fmt::format("the model has {} parameters, the row says {}", format_count(count), format_count(expected)));
  }
}

/// 139.8 GiB of an H200 are usable (data/groundtruth/README.md); nothing: another card.
std::optional<Bytes> card_of(const JsonValue& row) {
  return row_text(row, "gpu", "NVIDIA H200") == "NVIDIA H200" ? std::optional(139.8_GiB) : std::nullopt;
}

/// What PyTorch can have of the card that a row names.
AllocatorOptions allocator_of(const JsonValue& row, const EngineEnvironment& environment) {
  AllocatorOptions options = parse_allocator_options(row_text(row, "env", ""));
  if (const auto card = card_of(row))
    options.capacity = static_cast<std::int64_t>((*card - environment.context - environment.libraries).base());
  return options;
}

/// Those that the row tells of.
int measured_steps(const JsonValue& row) {
  constexpr std::size_t kMost = 16;  // more would only take time
  return static_cast<int>(std::min(row.at("peaks").items().size(), kMost));
}

class Comparisons {
 public:
  Comparisons(const JsonValue& row, std::string label, RowGroup group)
      : row_(row), label_(std::move(label)), group_(group) {}
  void add(Measured quantity, Bytes predicted, const JsonValue* measured) {
    if (measured == nullptr) return;
    list_.push_back({quantity, group_, row_.line(), label_, predicted, gib(*measured), {}, {}});
  }
  /// Of the quantity added last.
  void interval(Bytes low, Bytes high) {
    list_.back().low = low;
    list_.back().high = high;
  }
  std::vector<Comparison> take() { return std::move(list_); }

 private:
  const JsonValue& row_;
  std::string label_;
  RowGroup group_;
  std::vector<Comparison> list_;
};

void compare_steady(Comparisons& list, const JsonValue& row, const EnginePrediction& prediction, bool stage_3) {
  const auto peaks = row.at("peaks").items();
  const StepMemory& steady = prediction.memory.steps.back();
  const JsonValue& last = peaks.back();
  list.add(Measured::allocated_after, steady.after, last.find("after"));
  list.add(Measured::allocated_fwd, steady.forward, last.find("fwd"));
  list.add(Measured::allocated_bwd, steady.backward, last.find("bwd"));
  list.add(Measured::allocated_step, steady.step, last.find("step"));
  list.add(Measured::reserved, prediction.reserved, last.find("reserved"));
  if (stage_3 && last.find("reserved") != nullptr) list.interval(prediction.reserved_low, prediction.reserved_high);
  // Read when the run has ended: what the allocator still has, not its peak.
  list.add(Measured::device_used, prediction.device_used - prediction.reserved + steady.reserved_after,
           row.find("device_used_gib"));
}

/// On the card with `margin` of it left free: what needs more is played again within that, as the allocator may give
/// cached memory back. `predict(environment)` as `prediction` came from.
template <class Predict>
Verdict verdict_of(const JsonValue& row, const std::string& label, const EnginePrediction& prediction,
                   EngineEnvironment environment, double margin, Predict predict) {
  Verdict verdict;
  verdict.line = row.line();
  verdict.row = label;
  verdict.measured_fits = row.find("oom") == nullptr;
  const Bytes outside = prediction.device_used - prediction.reserved;
  verdict.need = std::max(prediction.memory.peak_reserved, prediction.reserved_low) + outside;
  RunMemory memory = prediction.memory;
  if (const auto card = card_of(row)) {
    verdict.capacity = *card * (1 - margin);
    if (!memory.out_of_memory && verdict.need > verdict.capacity) {
      environment.allocator.capacity = static_cast<std::int64_t>((verdict.capacity - outside).base());
      memory = predict(environment).memory;
    }
  }
  verdict.predicted_fits = !memory.out_of_memory.has_value();
  if (!verdict.predicted_fits) verdict.why = memory.failed_at + ": " + memory.out_of_memory->message();
  return verdict;
}

}  // namespace

ModelSpec model_as_measured(const std::string& name) { return as_measured(find_model(catalog_name(name))); }

std::string RowPredictor::describe(const JsonValue& row) {
  std::string text = row_text(row, "model", "?");
  if (row.find("n") != nullptr) text += fmt::format(", {} ranks", row_integer(row, "n", 1));
  if (row.find("stage") != nullptr) text += fmt::format(", stage {}", row_integer(row, "stage", 0));
  text += fmt::format(", {} x {}", row_integer(row, "mb", 1), row_integer(row, "seq", 1));
  if (row_integer(row, "gas", 1) > 1) text += fmt::format(" x {}", row_integer(row, "gas", 1));
  if (row_flag(row, "ac", false)) text += ", checkpointed";
  for (const char* key : {"attn", "prec", "prec_opts", "clip", "env", "zero", "extra", "lora", "shard", "reshard",
                          "offload", "pure_bf16", "reduce_fp32", "reentrant", "zero_init", "override"}) {
    const JsonValue* value = row.find(key);
    if (value != nullptr && !(value->is_string() && value->as_string() == "sdpa")) {
      text += fmt::format(", {} {}", key, value->short_form());
    }
  }
  return text;
}

const CostModel* RowPredictor::cost_of(const JsonValue& row, DType type) {
  std::string gpu = row_text(row, "gpu", "");
  if (gpu.starts_with("NVIDIA ")) gpu = gpu.substr(7);
  if (gpu.empty()) return nullptr;
  const auto [entry, fresh] = costs_.try_emplace(gpu + " " + std::string(to_string(type)));
  if (fresh) {
    try {
      const MachineSpec machine = machine_for(parse_gpu_request("1x" + gpu), 1);
      entry->second = std::make_unique<MachineCostModel>(machine, 1, type);
    } catch (const InputError&) {  // another card: the least that is reserved is predicted
    }
  }
  return entry->second.get();
}

const EagerStep& RowPredictor::step_of(const JsonValue& row, bool measured, const EagerOptions& options) {
  const std::string& model = row.at("model").as_string();
  const JsonValue* changes = measured ? row.find("override") : nullptr;
  std::string key = fmt::format("{} {} {} {} {} {} {} {} {} {} {} {}", model, measured, options.tokens.batch,
                                options.tokens.seq_len, options.checkpointing, options.reentrant,
                                static_cast<int>(options.attention), to_string(options.type), options.lora_rank,
                                options.keeps_output, options.zero3, options.cpu_statistics);
  if (changes != nullptr) {
    for (const auto& [name, value] : changes->members()) key += fmt::format(" {} {}", name, value.short_form());
  }
  const auto found = steps_.find(key);
  if (found != steps_.end()) return found->second;
  ModelSpec spec = find_model(catalog_name(model));
  if (measured) spec = as_measured(spec, changes);
  return steps_.emplace(key, eager_step(spec, options)).first->second;
}

std::vector<Comparison> RowPredictor::activations(const JsonValue& row) {
  EagerOptions options = eager_options(row);
  options.cpu_statistics = true;  // recorded on the CPU
  const EagerStep& step = step_of(row, false, options);
  check_parameters(row, step, true);
  const EagerPeaks peaks = eager_peaks(step);
  std::vector<Comparison> list;
  const auto add = [&](Measured quantity, Bytes predicted, std::string_view key) {
    const JsonValue* measured = row.find(key);
    if (measured == nullptr) return;
    list.push_back({quantity,
                    RowGroup::all,
                    row.line(),
                    describe(row),
                    predicted,
                    Bytes(static_cast<double>(measured->as_int(0, kManyInRow << 10))),
                    {},
                    {}});
  };
  add(Measured::saved, peaks.saved, "saved");
  add(Measured::fwd_peak, peaks.forward, "fwd_peak");
  add(Measured::bwd_peak, peaks.backward, "bwd_peak");
  return list;
}

RowPredictor::Answer RowPredictor::deepspeed(const JsonValue& row, std::string_view text) {
  const DeepSpeedJob job = deepspeed_job(row, text);
  EagerOptions options = eager_options(row);
  options.zero3 = job.config.stage == 3;
  const EagerStep& step = step_of(row, true, options);
  check_parameters(row, step, false);
  EngineEnvironment environment;
  environment.allocator = allocator_of(row, environment);
  environment.cost = cost_of(row, options.type);
  const auto predict = [&](const EngineEnvironment& e) {
    return predict_deepspeed(step, options.tokens, job, e, measured_steps(row));
  };
  const EnginePrediction prediction = predict(environment);
  Answer answer;
  answer.row = describe(row);
  answer.verdicts.push_back(verdict_of(row, answer.row, prediction, environment, margin_, predict));
  if (prediction.memory.steps.empty() || row.at("peaks").items().empty()) return answer;
  const bool stage_3 = job.config.stage == 3;
  Comparisons list(row, answer.row, stage_3 ? RowGroup::stage_3 : RowGroup::stages_0_to_2);
  compare_steady(list, row, prediction, stage_3);
  list.add(Measured::init_peak, prediction.memory.init_peak, row.find("init_peak_gib"));
  if (job.config.optimizer_on_host() || job.config.parameters_on_host()) {
    list.add(Measured::host, prediction.host, row.at("peaks").items().back().find("rss"));
  }
  answer.comparisons = list.take();
  return answer;
}

RowPredictor::Answer RowPredictor::fsdp2(const JsonValue& row) {
  const Fsdp2Options engine = fsdp2_options(row);
  EagerOptions options = eager_options(row);
  options.keeps_output = true;  // the measuring loop holds the output until backward has ended
  const EagerStep& step = step_of(row, true, options);
  check_parameters(row, step, true);
  EngineEnvironment environment;
  environment.allocator = allocator_of(row, environment);
  const auto predict = [&](const EngineEnvironment& e) {
    return predict_fsdp2(step, options.tokens, static_cast<int>(row_integer(row, "gas", 1)), engine, e,
                         measured_steps(row));
  };
  const EnginePrediction prediction = predict(environment);
  Answer answer;
  answer.row = describe(row);
  answer.verdicts.push_back(verdict_of(row, answer.row, prediction, environment, margin_, predict));
  if (prediction.memory.steps.empty() || row.at("peaks").items().empty()) return answer;
  Comparisons list(row, answer.row, RowGroup::all);
  compare_steady(list, row, prediction, false);
  if (engine.offload) list.add(Measured::host, prediction.host, row.find("host_maxrss_gib"));
  answer.comparisons = list.take();
  return answer;
}

RowPredictor::Answer RowPredictor::predict(const JsonValue& row, std::string_view text) {
  if (row.find("saved") != nullptr && row.find("fwd_peak") != nullptr) {
    return {describe(row), activations(row), {}};
  }
  if (is_user_case(row)) return {describe(row), {}, {user_case_verdict(row, text, margin_)}};
  if (row.find("peaks") == nullptr) {
    throw InputError(
        "no columns of tests/data/groundtruth (peaks) or tests/data/activations (saved, fwd_peak, bwd_peak)");
  }
  return row.find("stage") != nullptr ? deepspeed(row, text) : fsdp2(row);
}

}  // namespace zeroplan
