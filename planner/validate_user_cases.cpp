#include "planner/validate_user_cases.h"

#include <fmt/format.h>

#include "models/config_text.h"
#include "models/error.h"
#include "models/machine_catalog.h"
#include "planner/engine_fit.h"
#include "planner/row_values.h"

namespace zeroplan {
namespace {

/// The row's own text of a member.
std::string member_text(const ConfigText& row, std::string_view key) {
  const ConfigMember* member = row.find(key);
  if (member == nullptr || !member->value.is_object()) throw InputError(fmt::format("{}: expected an object", key));
  return row.text().substr(member->value.begin, member->value.end - member->value.begin);
}

MachineSpec machine_of(const JsonValue& row) {
  MachineSpec machine = machine_for(parse_gpu_request(row.at("gpus").as_string()), 1);
  if (const JsonValue* host = row.find("host_memory"))
    set_host_memory(machine, parse_bytes(host->as_string(), "host_memory"));
  return machine;
}

ModelSpec model_of(const JsonValue& row, const ConfigText& text) {
  const std::string& name = row.at("model").as_string();
  return row.find("model_config") == nullptr ? find_model(name) : read_model(member_text(text, "model_config"), name);
}

EngineWorkload workload_of(const JsonValue& row, const DeepSpeedConfig& config, const MachineSpec& machine) {
  EngineWorkload w;
  w.tokens = {config.micro_batch.value_or(1), row.at("seq_len").as_int(1, kManyInRow)};
  w.accumulation = config.accumulation.value_or(1);
  check_micro_steps(w.tokens.batch, w.tokens.seq_len, w.accumulation);
  w.ranks = machine.ranks();
  const std::string& recompute = row.at("recompute").as_string();
  if (recompute != "none" && recompute != "full")
    throw InputError(fmt::format("recompute: expected none or full, found \"{}\"", recompute));
  w.checkpointing = recompute == "full";
  w.type = config.precision;
  w.lora_rank = row_integer(row, "lora_rank", 0);
  const std::string attention = row_text(row, "attention", "");
  if (attention == "eager") w.attention = EagerAttention::eager;
  if (!attention.empty() && attention != "eager")
    throw InputError(fmt::format("attention: expected eager, found \"{}\"", attention));
  return w;
}

std::string why_not(const EngineFit& fit) {
  if (fit.gpu == GpuVerdict::does_not_fit) return fit.failed_at + ": " + fit.failure;
  return fit.host_fits() ? "" : fmt::format("host: {} of {}", format_gib(fit.host), format_gib(fit.host_capacity));
}

}  // namespace

bool is_user_case(const JsonValue& row) { return row.find("observed") != nullptr && row.find("deepspeed") != nullptr; }

Verdict user_case_verdict(const JsonValue& row, std::string_view text, double margin) {
  if (const JsonValue* reason = row.find("not_compared")) throw InputError(reason->as_string());
  const ConfigText source = ConfigText::parse(std::string(text), "row");
  const MachineSpec machine = machine_of(row);
  const ModelSpec model = model_of(row, source);
  const DeepSpeedConfig config =
      read_deepspeed_config(ConfigText::parse(member_text(source, "deepspeed"), "deepspeed"), model.hidden);
  EngineFitter fitter(model, machine, margin);
  const EngineFit fit = fitter.deepspeed(config, workload_of(row, config, machine));
  Verdict verdict;
  verdict.line = row.line();
  verdict.id = row.at("id").as_string();
  verdict.row = fmt::format("{}: {}, {}", verdict.id, row.at("model").as_string(), row.at("gpus").as_string());
  verdict.measured_fits = row.at("observed").at("fits").as_bool();
  verdict.predicted_fits = fit.fits();
  const bool host = fit.gpu != GpuVerdict::does_not_fit && !fit.host_fits();
  verdict.need = host ? fit.host : fit.reserved_low + fit.overhead;
  verdict.capacity = host ? fit.host_capacity : fit.capacity;
  verdict.why = why_not(fit);
  return verdict;
}

}  // namespace zeroplan
