#include "models/deepspeed_config.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>

namespace zeroplan {
namespace {

std::string lowered(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return result;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

std::optional<double> number_in(std::string_view text) {
  text = trimmed(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

class Reader {
 public:
  Reader(const ConfigText& file, std::optional<std::int64_t> hidden) : file_(file), hidden_(hidden) {}

  DeepSpeedConfig run() {
    read_batch();
    read_precision();
    read_types();
    read_zero();
    read_offload("zero_optimization.offload_optimizer", 4, config_.offload_optimizer);
    read_offload("zero_optimization.offload_param", 5, config_.offload_param);
    read_old_names();
    read_optimizer();
    config_.aio_block_bytes = integer("aio.block_size").value_or(config_.aio_block_bytes);
    config_.aio_threads = std::max<std::int64_t>(1, integer("aio.intra_op_parallelism").value_or(1));
    return std::move(config_);
  }

 private:
  const ConfigNode* value(std::string_view path) const {
    const ConfigMember* member = file_.find(path);
    return member == nullptr ? nullptr : &member->value;
  }

  /// "auto" of a key that the Trainer or Accelerate fills.
  bool automatic(const std::string& path) {
    const ConfigNode* node = value(path);
    if (node == nullptr || !node->is_auto()) return false;
    config_.automatic.push_back(path);
    return true;
  }

  std::optional<std::int64_t> integer(std::string_view path) const {
    const ConfigNode* node = value(path);
    return node == nullptr ? std::nullopt : coerced_integer(*node);
  }
  bool flag(std::string_view path, bool otherwise) const {
    const ConfigNode* node = value(path);
    return node == nullptr ? otherwise : coerced_bool(*node).value_or(otherwise);
  }
  std::optional<std::string> text(std::string_view path) const {
    const ConfigNode* node = value(path);
    if (node == nullptr || node->kind != ConfigNode::Kind::text) return std::nullopt;
    return node->text;
  }
  std::optional<DType> type(std::string_view path) const {
    const auto name = text(path);
    return name ? dtype_named(*name) : std::nullopt;
  }

  /// A size of zero_optimization: both names of stage 3's, "auto" by the Trainer's rule.
  void size(const std::string& name, std::int64_t& target, double automatic_value = 0) {
    for (const std::string& path : {"zero_optimization.stage3_" + name, "zero_optimization." + name}) {
      const ConfigNode* node = value(path);
      if (node == nullptr) continue;
      if (automatic_value > 0 && automatic(path)) {
        target = static_cast<std::int64_t>(automatic_value);
        return;
      }
      const auto read = coerced_integer(*node);
      if (read && *read >= 0) target = *read;
      return;
    }
  }
  bool either(const std::string& name) const {
    return flag("zero_optimization.stage3_" + name, false) || flag("zero_optimization." + name, false);
  }

  void read_batch() {
    const auto batch = [&](const std::string& path) -> std::optional<std::int64_t> {
      if (automatic(path)) return std::nullopt;
      const ConfigNode* node = value(path);  // not pydantic: a text is no number here
      return node == nullptr ? std::nullopt : node->integer();
    };
    config_.train_batch = batch("train_batch_size");
    config_.micro_batch = batch("train_micro_batch_size_per_gpu");
    config_.accumulation = batch("gradient_accumulation_steps");
    constexpr std::int64_t kMost = 1 << 20;
    const std::int64_t ulysses = integer("sequence_parallel_size").value_or(1);
    config_.sequence_parallel = static_cast<int>(std::clamp<std::int64_t>(ulysses, 1, kMost));
    if (!automatic("gradient_clipping")) {
      const ConfigNode* node = value("gradient_clipping");
      if (node != nullptr && node->is_number()) config_.gradient_clipping = node->number;
    }
  }

  void read_precision() {
    const ConfigNode* bf16 = value("bf16");
    const std::string bf = bf16 == nullptr || bf16->kind == ConfigNode::Kind::null ? "bfloat16" : "bf16";
    const bool half = flag("fp16.enabled", false), brain = flag(bf + ".enabled", false);
    const bool open_half = automatic("fp16.enabled"), open_brain = automatic(bf + ".enabled");
    config_.precision = brain ? DType::bf16 : half ? DType::fp16 : DType::fp32;
    config_.precision_automatic = !half && !brain && (open_half || open_brain);
    // The Trainer turns on what its arguments say; bf16 is what they say today.
    if (config_.precision_automatic) config_.precision = open_brain ? DType::bf16 : DType::fp16;
    config_.master_16bit = brain ? flag(bf + ".bf16_master_weights_and_grads", false)
                                 : half && flag("fp16.fp16_master_weights_and_grads", false);
    config_.states_16bit = brain && flag(bf + ".bf16_optimizer_states", false);
    config_.check_grad_overflow = flag(bf + ".check_grad_overflow", true);
    config_.autocast = flag("torch_autocast.enabled", false);
  }

  void read_types() {
    config_.grad_accum = type("data_types.grad_accum_dtype");
    if (const auto name = text("communication_data_type")) config_.communication = dtype_named(lowered(*name));
  }

  void read_zero() {
    const ConfigNode* zero = value("zero_optimization");
    if (zero != nullptr && zero->kind == ConfigNode::Kind::boolean) config_.stage = zero->flag ? 1 : 0;
    automatic("zero_optimization.stage");
    const std::int64_t stage = integer("zero_optimization.stage").value_or(config_.stage);
    config_.stage = stage >= 0 && stage <= 3 ? static_cast<int>(stage) : 0;
    const auto in_zero = [&](std::string_view key, bool otherwise) {
      return flag("zero_optimization." + std::string(key), otherwise);
    };
    config_.contiguous_gradients = in_zero("contiguous_gradients", true);
    config_.reduce_scatter = in_zero("reduce_scatter", true);
    config_.overlap_comm = in_zero("overlap_comm", config_.stage == 3);
    config_.round_robin = in_zero("round_robin_gradients", false);
    const double hidden = hidden_ ? static_cast<double>(*hidden_) : 0;
    // Without a hidden size the defaults stay; the path still counts as automatic.
    size("reduce_bucket_size", config_.reduce_bucket, hidden > 0 ? hidden * hidden : 5e8);
    size("sub_group_size", config_.sub_group);
    size("prefetch_bucket_size", config_.prefetch_bucket, hidden > 0 ? std::floor(0.9 * hidden * hidden) : 5e7);
    size("param_persistence_threshold", config_.param_persistence, hidden > 0 ? 10 * hidden : 1e5);
    size("model_persistence_threshold", config_.model_persistence);
    size("max_live_parameters", config_.max_live);
    size("max_reuse_distance", config_.max_reuse);
    config_.gather_on_save =
        either("gather_16bit_weights_on_model_save") || either("gather_fp16_weights_on_model_save");
    config_.allgather_sequential = either("allgather_sequential");
    config_.fetch_by_all_reduce = either("use_all_reduce_for_fetch_params");
    config_.hpz_ranks = std::max<std::int64_t>(1, integer("zero_optimization.zero_hpz_partition_size").value_or(1));
    config_.mics_ranks = integer("zero_optimization.mics_shard_size").value_or(-1);
    config_.mics_hierarchical = in_zero("mics_hierarchical_params_gather", false);
    config_.quantized_weights = in_zero("zero_quantized_weights", false);
    config_.quantized_gradients = in_zero("zero_quantized_gradients", false);
    config_.quantized_nontrainable = in_zero("zero_quantized_nontrainable_weights", false);
    const ConfigNode* zenflow = value("zero_optimization.zenflow");
    config_.zenflow = zenflow != nullptr && zenflow->is_object();
  }

  void read_offload(const std::string& path, std::int64_t buffers, DeepspeedOffload& offload) {
    const ConfigNode* section = value(path);
    offload.buffer_count = buffers;
    if (section == nullptr || !section->is_object()) return;
    offload.given = true;
    automatic(path + ".device");
    const std::string device = text(path + ".device").value_or("none");
    offload.device = device == "cpu"    ? OffloadDevice::cpu
                     : device == "nvme" ? OffloadDevice::nvme
                                        : OffloadDevice::none;
    offload.nvme_path = text(path + ".nvme_path");
    const auto count = [&](const char* key, std::int64_t otherwise) {
      return std::max<std::int64_t>(0, integer(path + "." + key).value_or(otherwise));
    };
    offload.buffer_count = count("buffer_count", buffers);
    offload.buffer_size = count("buffer_size", offload.buffer_size);
    offload.max_in_cpu = count("max_in_cpu", offload.max_in_cpu);
    offload.pin_memory = flag(path + ".pin_memory", true);
    offload.pipeline_read = flag(path + ".pipeline_read", false);
    offload.pipeline_write = flag(path + ".pipeline_write", false);
    offload.fast_init = flag(path + ".fast_init", false);
    offload.super_offload = flag(path + ".super_offload", false);
    const ConfigNode* ratio = value(path + ".ratio");
    const auto share = ratio == nullptr ? std::nullopt : coerced_real(*ratio);
    if (share && *share >= 0 && *share <= 1) offload.ratio = *share;
  }

  void read_old_names() {
    if (!config_.offload_optimizer.given && flag("zero_optimization.cpu_offload", false)) {
      config_.offload_optimizer.device = OffloadDevice::cpu;
    }
    if (!config_.offload_param.given && flag("zero_optimization.cpu_offload_param", false)) {
      config_.offload_param.device = OffloadDevice::cpu;
    }
  }

  void read_optimizer() {
    config_.optimizer = text("optimizer.type");
    config_.torch_adam = config_.flat_adam() && flag("optimizer.params.torch_adam", false);
    config_.torch_foreach = flag("optimizer.params.foreach", true) && !flag("optimizer.params.fused", false);
    for (const char* key : {"lr", "betas", "eps", "weight_decay"}) automatic("optimizer.params." + std::string(key));
    for (const char* key : {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"}) {
      automatic("scheduler.params." + std::string(key));
    }
  }

  const ConfigText& file_;
  std::optional<std::int64_t> hidden_;
  DeepSpeedConfig config_;
};

}  // namespace

bool DeepSpeedConfig::flat_adam() const {
  if (!optimizer) return true;
  const std::string name = lowered(*optimizer);
  return name == "adam" || name == "adamw";
}

DeepSpeedConfig read_deepspeed_config(const ConfigText& file, std::optional<std::int64_t> hidden) {
  return Reader(file, hidden).run();
}

std::optional<bool> coerced_bool(const ConfigNode& node) {
  if (node.kind == ConfigNode::Kind::boolean) return node.flag;
  if (node.is_number()) {
    if (node.number == 0) return false;
    return node.number == 1 ? std::optional(true) : std::nullopt;
  }
  if (node.kind != ConfigNode::Kind::text) return std::nullopt;
  const std::string text = lowered(node.text);
  for (const std::string_view word : {"1", "true", "t", "yes", "y", "on"}) {
    if (text == word) return true;
  }
  for (const std::string_view word : {"0", "false", "f", "no", "n", "off"}) {
    if (text == word) return false;
  }
  return std::nullopt;
}

std::optional<std::int64_t> coerced_integer(const ConfigNode& node) {
  if (node.kind == ConfigNode::Kind::boolean) return node.flag ? 1 : 0;
  if (node.is_number()) return node.integer();
  if (node.kind != ConfigNode::Kind::text) return std::nullopt;
  std::string_view text = trimmed(node.text);
  if (text.starts_with('+')) text.remove_prefix(1);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size()) return std::nullopt;
  if (error == std::errc::result_out_of_range) return text.starts_with('-') ? INT64_MIN : INT64_MAX;
  if (error != std::errc()) return std::nullopt;
  return value;
}

std::optional<double> coerced_real(const ConfigNode& node) {
  if (node.is_number()) return node.number;
  if (node.kind == ConfigNode::Kind::boolean) return node.flag ? 1 : 0;
  return node.kind == ConfigNode::Kind::text ? number_in(node.text) : std::nullopt;
}

std::optional<DType> dtype_named(std::string_view text) {
  if (text.starts_with("torch.")) text.remove_prefix(6);
  if (text == "fp32" || text == "float32" || text == "float") return DType::fp32;
  if (text == "fp16" || text == "float16" || text == "half") return DType::fp16;
  if (text == "bf16" || text == "bfloat16") return DType::bf16;
  return std::nullopt;
}

}  // namespace zeroplan
