// Settings of a DeepSpeed configuration that memory and time depend on.

#include <algorithm>
#include <array>

#include "planner/check_parts.h"

namespace zeroplan {
namespace {

/// Sizes that are tried in place of larger ones (elements): a tenth of DeepSpeed's defaults.
constexpr std::int64_t kSmallPrefetch = 5'000'000, kSmallLive = 100'000'000, kSmallPersistence = 10'000;
/// Of the drives' file system; a person knows the real one.
constexpr const char* kNvmePath = "\"/local_nvme\"";
const std::string kZero = "zero_optimization.";

std::string text_of(bool value) { return value ? "true" : "false"; }

/// The name that the file has for a stage-3 key that goes by two.
std::string stage3_key(const std::string& name, const ConfigText& file) {
  const std::string brief = kZero + name;
  return file.find(brief) != nullptr ? brief : kZero + "stage3_" + name;
}

bool set_gathers(Variant& v, const ConfigText& file) {
  const DeepSpeedConfig& c = v.config;
  bool changed = false;
  const auto lower = [&](const std::string& name, std::int64_t now, std::int64_t most) {
    if (now <= most) return;
    changed = v.draft.set(stage3_key(name, file), most) || changed;
  };
  lower("prefetch_bucket_size", c.prefetch_bucket, kSmallPrefetch);
  lower("max_live_parameters", c.max_live, kSmallLive);
  lower("max_reuse_distance", c.max_reuse, kSmallLive);
  lower("param_persistence_threshold", c.param_persistence, kSmallPersistence);
  return changed;
}

bool set_micro_batch(Variant& v, std::int64_t batch) {
  const std::int64_t all = v.workload.tokens.batch * v.workload.accumulation;
  if (batch == v.workload.tokens.batch || all % batch != 0) return false;
  v.workload.tokens.batch = batch;
  v.workload.accumulation = all / batch;
  return v.draft.set("train_micro_batch_size_per_gpu", batch) &&
         v.draft.set("gradient_accumulation_steps", all / batch);
}

bool set_checkpointing(Variant& v, bool on) {
  if (v.workload.checkpointing == on) return false;
  v.workload.checkpointing = on;
  v.script.push_back({"gradient_checkpointing", on ? "false" : "true", on ? "true" : "false", true});
  return true;
}

bool set_offload(Variant& v, const std::string& section, OffloadDevice to) {
  const bool optimizer = section == "offload_optimizer";
  const bool used = optimizer ? v.config.optimizer_on_host() : v.config.parameters_on_host();
  const OffloadDevice now =
      !used ? OffloadDevice::none : (optimizer ? v.config.offload_optimizer : v.config.offload_param).device;
  if (now == to) return false;
  if (to != OffloadDevice::none && v.config.stage < (optimizer && to == OffloadDevice::cpu ? 1 : 3)) return false;
  const std::string path = kZero + section;
  constexpr std::array<const char*, 3> kNames{"\"none\"", "\"cpu\"", "\"nvme\""};
  if (!v.draft.set(path + ".device", kNames[static_cast<std::size_t>(to)])) return false;
  if (to == OffloadDevice::nvme && !v.draft.has(path + ".nvme_path") && !v.draft.set(path + ".nvme_path", kNvmePath)) {
    return false;
  }
  return to == OffloadDevice::none || v.draft.has(path + ".pin_memory") || v.draft.set(path + ".pin_memory", "true");
}

bool set_pinned(Variant& v, bool pinned) {
  bool changed = false;
  if (v.config.optimizer_on_host() && v.config.offload_optimizer.pin_memory != pinned) {
    changed = v.draft.set(kZero + "offload_optimizer.pin_memory", text_of(pinned));
  }
  if (v.config.parameters_on_host() && v.config.offload_param.pin_memory != pinned) {
    changed = v.draft.set(kZero + "offload_param.pin_memory", text_of(pinned)) || changed;
  }
  return changed;
}

/// False when the setting is what the configuration has, or has no meaning in it.
bool apply(Variant& v, const Setting& s, const ConfigText& file) {
  switch (s.knob) {
    case Knob::bucket:
      return v.config.stage >= 1 && v.config.reduce_bucket > s.value &&
             v.draft.set(kZero + "reduce_bucket_size", s.value);
    case Knob::gathers:
      return v.config.stage == 3 && set_gathers(v, file);
    case Knob::overlap:
      return v.config.stage >= 1 && v.config.overlap_comm && v.draft.set(kZero + "overlap_comm", "false");
    case Knob::micro_batch:
      return set_micro_batch(v, s.value);
    case Knob::checkpointing:
      return set_checkpointing(v, s.value != 0);
    case Knob::stage:
      return v.config.stage != s.value && v.draft.set(kZero + "stage", s.value);
    case Knob::optimizer:
      return set_offload(v, "offload_optimizer", static_cast<OffloadDevice>(s.value));
    case Knob::parameters:
      return set_offload(v, "offload_param", static_cast<OffloadDevice>(s.value));
    case Knob::pinned:
      return set_pinned(v, s.value != 0);
    case Knob::contiguous:
      return (v.config.stage == 1 || v.config.stage == 2) && v.config.contiguous_gradients != (s.value != 0) &&
             !v.config.optimizer_on_host() && v.draft.set(kZero + "contiguous_gradients", text_of(s.value != 0));
  }
  return false;
}

}  // namespace

std::vector<KeyChange> Variant::changes() const {
  std::vector<KeyChange> all = draft.changes();
  all.insert(all.end(), script.begin(), script.end());
  return all;
}

std::optional<Variant> with_settings(const Variant& start, std::vector<Setting> settings, const ConfigText& file,
                                     std::int64_t hidden) {
  std::stable_partition(settings.begin(), settings.end(), [](const Setting& s) { return s.knob == Knob::stage; });
  Variant v = start;
  for (const Setting& s : settings) {
    if (!apply(v, s, file)) return std::nullopt;
    v.config = read_deepspeed_config(v.draft.text(), hidden);
  }
  return v;
}

}  // namespace zeroplan
