#include "sim/engine_time_fit.h"

#include <fmt/format.h>

#include <stdexcept>

#include "models/catalog.h"
#include "models/json_reader.h"

namespace zeroplan {
namespace {

constexpr std::string_view kFile = "fits/engine_time.json";
constexpr double kMaxValue = 1000;  // no number of the file is larger, whatever its unit

struct FitName {
  TimeFit key;
  std::string_view name, unit;
};
constexpr FitName kNames[] = {
    {TimeFit::memory_rate_eager, "memory_rate_eager", "1"},
    {TimeFit::memory_rate_hugging_face, "memory_rate_hugging_face", "1"},
    {TimeFit::unfused_attention_rate, "unfused_attention_rate", "1"},
    {TimeFit::memory_rate_scores, "memory_rate_scores", "1"},
    {TimeFit::contention, "contention", "1"},
    {TimeFit::fp8_rate, "fp8_rate", "1"},
    {TimeFit::host_op, "host_op", "us"},
    {TimeFit::host_op_deepspeed, "host_op_deepspeed", "us"},
    {TimeFit::host_op_backward, "host_op_backward", "1"},
    {TimeFit::host_hook_deepspeed, "host_hook_deepspeed", "us"},
    {TimeFit::host_stage3, "host_stage3", "1"},
    {TimeFit::host_fsdp1, "host_fsdp1", "ms"},
    {TimeFit::host_fsdp2, "host_fsdp2", "ms"},
    {TimeFit::host_fsdp2_hugging_face, "host_fsdp2_hugging_face", "ms"},
    {TimeFit::host_compiled, "host_compiled", "1"},
    {TimeFit::host_graph, "host_graph", "1"},
    {TimeFit::host_composer, "host_composer", "1"},
    {TimeFit::host_megatron, "host_megatron", "1"},
    {TimeFit::optimizer_decoupled, "optimizer_decoupled", "B"},
    {TimeFit::optimizer_fused, "optimizer_fused", "B"},
    {TimeFit::optimizer_deepspeed, "optimizer_deepspeed", "B"},
    {TimeFit::optimizer_deepspeed_all, "optimizer_deepspeed_all", "B"},
    {TimeFit::optimizer_start, "optimizer_start", "ms"},
    {TimeFit::optimizer_start_deepspeed, "optimizer_start_deepspeed", "ms"},
    {TimeFit::optimizer_tensor_deepspeed, "optimizer_tensor_deepspeed", "ms"},
    {TimeFit::deepspeed_overhead, "deepspeed_overhead", "s"},
    {TimeFit::deepspeed_hidden, "deepspeed_hidden", "1"},
    {TimeFit::deepspeed_messages, "deepspeed_messages", "1"},
    {TimeFit::deepspeed_network_volta, "deepspeed_network_volta", "1"},
    {TimeFit::deepspeed_network_ampere, "deepspeed_network_ampere", "1"},
    {TimeFit::deepspeed_network_hopper, "deepspeed_network_hopper", "1"},
    {TimeFit::deepspeed_adam_volta, "deepspeed_adam_volta", "G parameters/s"},
    {TimeFit::deepspeed_adam_ampere, "deepspeed_adam_ampere", "G parameters/s"},
    {TimeFit::deepspeed_adam_hopper, "deepspeed_adam_hopper", "G parameters/s"},
    {TimeFit::cpu_adam_deepspeed, "cpu_adam_deepspeed", "1"},
    {TimeFit::cpu_adam_deepspeed_stage3, "cpu_adam_deepspeed_stage3", "1"},
    {TimeFit::cpu_adam_torch, "cpu_adam_torch", "1"},
    {TimeFit::pcie_rate, "pcie_rate", "1"},
};
static_assert(std::size(kNames) == kNumTimeFits);

const FitName& name_of(TimeFit key) {
  const FitName& found = kNames[static_cast<std::size_t>(key)];
  if (found.key != key) throw std::logic_error("engine_time_fit: names out of order");
  return found;
}

template <class Row>
Row read_efficiency(const JsonValue& item, std::string_view first, std::string_view second) {
  item.require_only({first, second, "value", "fitted", "source"});
  return {item.at(first).as_string(), item.at(second).as_string(), item.at("value").as_real(1e-3, 1.5),
          item.at("fitted").as_bool(), item.at("source").as_string()};
}

std::string in_quotes(std::string_view text) { return fmt::format("\"{}\"", text); }

template <class Row>
std::string efficiency_rows(const std::vector<Row>& rows, std::string_view first, std::string_view second,
                            std::string Row::*a, std::string Row::*b) {
  std::string out;
  for (const Row& row : rows) {
    out += fmt::format("{}\n    {{\"{}\": {}, \"{}\": {}, \"value\": {:.4f}, \"fitted\": {},\n     \"source\": {}}}",
                       out.empty() ? "" : ",", first, in_quotes(row.*a), second, in_quotes(row.*b), row.value,
                       row.fitted, in_quotes(row.source));
  }
  return out;
}

}  // namespace

std::string_view to_string(TimeFit key) { return name_of(key).name; }
std::string_view unit_of(TimeFit key) { return name_of(key).unit; }

EngineTimeFit read_engine_time_fit(std::string_view json) {
  const JsonDocument document = JsonDocument::parse(json, std::string(kFile));
  const JsonValue& root = document.root();
  root.require_only({"schema", "parameters", "matmul", "attention"});
  root.at("schema").as_int(1, 1);
  EngineTimeFit fit;
  const auto items = root.at("parameters").items();
  for (std::size_t i = 0; i < kNumTimeFits; ++i) {
    const FitName& expected = kNames[i];
    if (i >= items.size()) root.at("parameters").fail_with(fmt::format("missing: {}", expected.name));
    const JsonValue& item = items[i];
    item.require_only({"name", "value", "unit", "fitted", "source"});
    if (item.at("name").as_string() != expected.name) item.at("name").fail(in_quotes(expected.name));
    if (item.at("unit").as_string() != expected.unit) item.at("unit").fail(in_quotes(expected.unit));
    fit.values[i] = {item.at("value").as_real(0, kMaxValue), item.at("fitted").as_bool(),
                     item.at("source").as_string()};
  }
  if (items.size() > kNumTimeFits) items[kNumTimeFits].fail_with("one parameter too many");
  for (const JsonValue& item : root.at("matmul").items())
    fit.matmul.push_back(read_efficiency<MatmulEfficiency>(item, "gpu", "era"));
  for (const JsonValue& item : root.at("attention").items())
    fit.attention.push_back(read_efficiency<AttentionEfficiency>(item, "arch", "kernel"));
  return fit;
}

std::string write_engine_time_fit(const EngineTimeFit& fit) {
  std::string parameters;
  for (std::size_t i = 0; i < kNumTimeFits; ++i) {
    const TimeFitValue& value = fit.values[i];
    parameters += fmt::format(
        "{}\n    {{\"name\": \"{}\", \"value\": {:.4f}, \"unit\": \"{}\", \"fitted\": {},\n     \"source\": \"{}\"}}",
        i == 0 ? "" : ",", kNames[i].name, value.value, kNames[i].unit, value.fitted, value.source);
  }
  return fmt::format(
      "{{\n  \"schema\": 1,\n  \"parameters\": [{}\n  ],\n  \"matmul\": [{}\n  ],\n  \"attention\": [{}\n  ]\n}}\n",
      parameters, efficiency_rows(fit.matmul, "gpu", "era", &MatmulEfficiency::gpu, &MatmulEfficiency::era),
      efficiency_rows(fit.attention, "arch", "kernel", &AttentionEfficiency::arch, &AttentionEfficiency::kernel));
}

const EngineTimeFit& builtin_engine_time_fit() {
  static const EngineTimeFit fit = [] {
    const CatalogFile* file = find_catalog_file(kFile);
    if (file == nullptr) throw std::logic_error("no embedded catalog file fits/engine_time.json");
    return read_engine_time_fit(file->text);
  }();
  return fit;
}

}  // namespace zeroplan
