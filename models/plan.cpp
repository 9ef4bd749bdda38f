#include "models/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "models/json_reader.h"
#include "models/machine_json.h"
#include "models/schedule.h"

namespace zeroplan {

namespace {

template <class E>
struct Name {
  E value;
  std::string_view name;
};
constexpr std::array kEngines{Name{Engine::zeroplan, "zeroplan"}, Name{Engine::deepspeed, "deepspeed"},
                              Name{Engine::fsdp2, "fsdp2"}};
constexpr std::array kRecomputes{Name{Recompute::none, "none"}, Name{Recompute::selective, "selective"},
                                 Name{Recompute::full, "full"}};
constexpr std::array kTiers{Name{Tier::hbm, "gpu"}, Name{Tier::host, "host"}, Name{Tier::nvme, "nvme"}};
constexpr std::array kUpdates{Name{UpdateOn::host, "host"}, Name{UpdateOn::device, "gpu"}};
constexpr std::array kReduces{Name{ReduceEach::step, "step"}, Name{ReduceEach::micro_step, "micro_step"}};
constexpr std::array kScalings{Name{LossScaling::none, "none"}, Name{LossScaling::dynamic, "dynamic"}};
constexpr std::array kAdamForms{Name{AdamForm::fused, "fused"}, Name{AdamForm::foreach, "foreach"},
                                Name{AdamForm::loop, "loop"}};
constexpr std::array kDTypes{Name{DType::bf16, "bf16"}, Name{DType::fp16, "fp16"}, Name{DType::fp32, "fp32"}};

template <class Table, class E>
std::string_view name_of(const Table& table, E value) {
  for (const auto& row : table) {
    if (row.value == value) return row.name;
  }
  return "?";
}

template <class Table>
auto value_of(const Table& table, const JsonValue& json) {
  const std::string& text = json.as_string();
  for (const auto& row : table) {
    if (row.name == text) return row.value;
  }
  std::string expected = "one of";
  for (const auto& row : table) expected += fmt::format("{}\"{}\"", &row == &table[0] ? " " : ", ", row.name);
  json.fail(expected);
}

}  // namespace

std::string_view to_string(Engine value) { return name_of(kEngines, value); }
std::string_view to_string(Recompute value) { return name_of(kRecomputes, value); }
std::string_view to_string(Tier value) { return name_of(kTiers, value); }
std::string_view to_string(UpdateOn value) { return name_of(kUpdates, value); }
std::string_view to_string(ReduceEach value) { return name_of(kReduces, value); }
std::string_view to_string(LossScaling value) { return name_of(kScalings, value); }
std::string_view to_string(AdamForm value) { return name_of(kAdamForms, value); }

Placement Placement::all(Tier tier, int blocks) {
  Placement p;
  (tier == Tier::hbm ? p.hbm : tier == Tier::host ? p.host : p.nvme) = blocks;
  return p;
}

int Precision::optimizer_bytes_per_parameter() const {
  return (!master ? 0 : split_master ? 2 : 4) + 2 * size_of(states);
}
int Precision::state_bytes_per_parameter() const { return size_of(weights) + optimizer_bytes_per_parameter(); }

// --- checks -----------------------------------------------------------------------------------------

namespace {

class PlanChecker {
 public:
  PlanChecker(const Plan& plan, const ModelSpec& model, std::string_view where)
      : p_(plan),
        blocks_(static_cast<int>(model.sequence.size())),
        layers_(static_cast<int>(model.num_layers)),
        hidden_(model.hidden),
        where_(where) {}

  void run() const {
    ranges();
    sharding();
    placement();
    precision();
    software();
    if (p_.engine != Engine::zeroplan) other_engine();
  }

 private:
  void require(bool ok, std::string_view field, std::string_view expected) const {
    if (!ok) throw InputError(fmt::format("{}: {}: {}", where_, field, expected));
  }
  template <class Value>
  void require(bool ok, std::string_view field, std::string_view expected, Value found) const {
    if (!ok) throw InputError(fmt::format("{}: {}: {}, got {}", where_, field, expected, found));
  }

  void ranges() const {
    require(p_.ranks >= 1 && p_.ranks <= 1 << 20, "ranks", "expected 1 to 1048576", p_.ranks);
    require(p_.seq_len >= 1 && p_.seq_len <= 1 << 26, "seq_len", "expected 1 to 67108864", p_.seq_len);
    require(p_.micro_batch >= 1 && p_.micro_batch <= 1 << 20, "micro_batch", "expected 1 to 1048576", p_.micro_batch);
    require(p_.micro_batch * p_.seq_len <= std::int64_t{1} << 31, "micro_batch",
            "expected at most 2^31 tokens a micro-step", p_.micro_batch);
    require(p_.accumulation >= 1 && p_.accumulation <= 1 << 24, "accumulation", "expected 1 to 16777216",
            p_.accumulation);
    require(p_.zero_stage >= 0 && p_.zero_stage <= 3, "zero_stage", "expected 0, 1, 2 or 3", p_.zero_stage);
    require(p_.prefetch_layers >= 0 && p_.prefetch_layers <= 3, "prefetch_layers", "expected 0 to 3",
            p_.prefetch_layers);
    require(p_.loss_chunk_tokens >= 1, "loss_chunk_tokens", "expected at least 1", p_.loss_chunk_tokens);
    require(p_.recompute_layers >= 0 && p_.recompute_layers <= layers_, "recompute_layers",
            fmt::format("expected 0 to the model's {} layers", layers_), p_.recompute_layers);
    require(p_.lora_rank == 0 || p_.engine != Engine::zeroplan, "trainable",
            "expected \"all\": adapters are trained under deepspeed and fsdp2 only");
    require(p_.lora_rank >= 0 && p_.lora_rank <= hidden_, "trainable",
            fmt::format("expected a rank of at most the model's hidden size, {}", hidden_), p_.lora_rank);
    require((p_.recompute == Recompute::none) == (p_.recompute_layers == 0), "recompute_layers",
            "expected 0 exactly when recompute is \"none\"", p_.recompute_layers);
    require(p_.clip_norm >= 0 && std::isfinite(p_.clip_norm), "clip_norm",
            "expected 0 (no clipping) or a positive norm", p_.clip_norm);
  }

  void sharding() const {
    require(p_.shard_ranks >= 1 && p_.ranks % p_.shard_ranks == 0, "shard_ranks",
            fmt::format("expected a divisor of ranks, {}", p_.ranks), p_.shard_ranks);
    require(p_.zero_stage > 0 || p_.shard_ranks == 1, "shard_ranks",
            "expected 1 at stage 0 (every rank holds all states)", p_.shard_ranks);
    require(p_.zero_stage < 2 || p_.reduce_each == ReduceEach::micro_step, "reduce_each",
            "expected \"micro_step\" at stages 2 and 3 (only shards of the gradients are kept)");
  }

  void placement() const {
    require(
        p_.optimizer.total() == blocks_ && p_.optimizer.hbm >= 0 && p_.optimizer.host >= 0 && p_.optimizer.nvme >= 0,
        "optimizer", fmt::format("expected counts that sum to the model's {} blocks", blocks_));
    require(p_.parameters.total() == blocks_ && p_.parameters.hbm >= 0 && p_.parameters.host >= 0 &&
                p_.parameters.nvme >= 0,
            "parameters", fmt::format("expected counts that sum to the model's {} blocks", blocks_));
    require(p_.zero_stage > 0 || p_.optimizer.hbm == blocks_, "optimizer", "offload needs stage 1 or higher");
    require(p_.zero_stage == 3 || p_.parameters.hbm == blocks_, "parameters", "offload needs stage 3");
    require(p_.parameters.hbm == blocks_ || p_.update == UpdateOn::host, "update",
            "expected \"host\" when weights are offloaded (the GPU would have to write them back)");
    require(p_.parameters.hbm >= p_.optimizer.hbm || p_.parameters.hbm == blocks_, "parameters",
            "weights off the GPU need their optimizer states off the GPU too");
    require(p_.gradients != Tier::nvme, "gradients", "expected \"gpu\" or \"host\"");
    if (p_.gradients == Tier::host) {
      require(p_.optimizer.hbm < blocks_, "gradients", "gradients on the host need optimizer states off the GPU");
      require(p_.zero_stage >= 2 || p_.ranks == 1 || p_.reduce_each == ReduceEach::micro_step, "gradients",
              "on the host below stage 2 needs reduce_each \"micro_step\"");
    }
  }

  void precision() const {
    const Precision& x = p_.precision;
    const bool narrow = x.weights != DType::fp32;
    require(narrow || !x.master, "precision/master", "expected false with fp32 weights (they are the master)");
    require(!narrow || x.master, "precision/master", "expected true with 16-bit weights");
    require(!x.split_master || (x.master && x.weights == DType::bf16), "precision/split_master",
            "needs bf16 weights with a master");
    require(x.states == DType::fp32 || x.states == DType::bf16, "precision/states", "expected fp32 or bf16");
    require(x.gradients == x.weights, "precision/gradients", "expected the type of the weights");
    require(x.accumulation == x.gradients || x.accumulation == DType::fp32, "precision/accumulation",
            "expected fp32 or the type of the gradients");
    require(p_.loss_scaling == LossScaling::none || x.weights == DType::fp16, "loss_scaling", "is for fp16 only");
    require(x.weights != DType::fp16 || p_.loss_scaling == LossScaling::dynamic, "loss_scaling",
            "expected \"dynamic\" with fp16 weights");
  }

  /// What of PyTorch's own choices belongs to one engine.
  void software() const {
    require(p_.adam == AdamForm::fused || p_.engine == Engine::fsdp2, "adam",
            "expected \"fused\": the form of torch's AdamW is a choice under fsdp2 only");
    require(p_.allocator_conf.empty() || p_.engine != Engine::zeroplan, "allocator_conf",
            "expected none: the zeroplan engine lays memory out by itself");
    // It is written into launch.sh; PyTorch's own reader takes no other characters.
    constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:,.>[]";
    require(p_.allocator_conf.find_first_not_of(kPlain) == std::string::npos && p_.allocator_conf.size() <= 1000,
            "allocator_conf", "expected a value of PYTORCH_CUDA_ALLOC_CONF such as expandable_segments:True");
  }

  /// What DeepSpeed and FSDP2 cannot follow: they checkpoint whole layers, all or none, and keep states of a kind in
  /// one tier, gradients on the GPU.
  void other_engine() const {
    const bool deepspeed = p_.engine == Engine::deepspeed;
    require(p_.recompute != Recompute::selective, "recompute", "expected \"none\" or \"full\" under this engine");
    require(p_.recompute_layers == 0 || p_.recompute_layers == layers_, "recompute_layers",
            fmt::format("expected 0 or {} under this engine", layers_), p_.recompute_layers);
    const auto whole = [&](const Placement& x) { return std::max({x.hbm, x.host, x.nvme}) == blocks_; };
    require(whole(p_.optimizer), "optimizer", "expected all blocks in one tier under this engine");
    require(whole(p_.parameters), "parameters", "expected all blocks in one tier under this engine");
    require(p_.gradients == Tier::hbm, "gradients", "expected \"gpu\" under this engine");
    require(p_.optimizer.hbm == blocks_ || p_.update == UpdateOn::host, "update",
            "expected \"host\" with optimizer states off the GPU");
    require(p_.precision.states == DType::fp32 && !p_.precision.split_master, "precision",
            "expected fp32 states and masters under this engine");
    if (deepspeed) {
      hpz_group();
      require(p_.zero_stage == 3 || p_.optimizer.nvme == 0, "optimizer", "expected stage 3 with states on NVMe");
      return;
    }
    require(p_.zero_stage >= 2, "zero_stage", "expected 2 or 3 under fsdp2", p_.zero_stage);
    require(p_.optimizer.nvme == 0 && p_.optimizer.host == p_.parameters.host, "optimizer",
            "expected to lie where the parameters lie, GPU or host, under fsdp2");
    require(p_.optimizer.hbm == blocks_ || p_.adam == AdamForm::loop, "adam",
            "expected \"loop\" with states on the host: other forms there are not known", to_string(p_.adam));
  }

  /// At stage 3 a group smaller than all ranks is hpZ's: it keeps a second copy of the weights, on the GPU.
  void hpz_group() const {
    if (p_.zero_stage == 0 || p_.shard_ranks == p_.ranks) return;
    require(p_.zero_stage == 3, "shard_ranks", fmt::format("expected all {} ranks under deepspeed", p_.ranks),
            p_.shard_ranks);
    require(p_.shard_ranks > 1, "shard_ranks", "expected a group of several ranks for hpZ", p_.shard_ranks);
    require(p_.parameters.hbm == blocks_, "shard_ranks",
            fmt::format("expected all {} ranks with weights off the GPU: hpZ keeps its copy there", p_.ranks),
            p_.shard_ranks);
  }

  const Plan& p_;
  int blocks_, layers_;
  std::int64_t hidden_;
  std::string_view where_;
};

}  // namespace

void check_plan(const Plan& plan, const ModelSpec& model, std::string_view where) {
  PlanChecker(plan, model, where).run();
}

std::string describe(const Plan& plan) {
  std::string text = fmt::format("ZeRO-{}", plan.zero_stage);
  if (plan.zero_stage > 0 && plan.shard_ranks != plan.ranks)
    text += fmt::format("{} in groups of {}", plan.engine == Engine::deepspeed ? " with hpZ" : "", plan.shard_ranks);
  const auto place = [&](std::string_view what, const Placement& p) {
    if (p.hbm == p.total()) return;
    std::string where;
    const auto part = [&](int count, std::string_view tier) {
      if (count == 0) return;
      if (!where.empty()) where += " + ";
      where += count == p.total() ? std::string(tier) : fmt::format("{} {}/{}", tier, count, p.total());
    };
    part(p.hbm, "GPU"), part(p.host, "host"), part(p.nvme, "NVMe");
    text += fmt::format(", {} on {}", what, where);
  };
  if (plan.lora_rank > 0) text += fmt::format(", LoRA of rank {}", plan.lora_rank);
  place("weights", plan.parameters);
  place("optimizer", plan.optimizer);
  if (plan.optimizer.hbm < plan.optimizer.total() && plan.update == UpdateOn::device) text += " (updated by the GPU)";
  if (plan.gradients == Tier::host) text += ", gradients on host";
  if (plan.recompute != Recompute::none) {
    text += fmt::format(", {} recompute", to_string(plan.recompute));
    text += fmt::format(" of {} layers", plan.recompute_layers);
  }
  text += fmt::format(", micro-batch {} x {}", plan.micro_batch, plan.accumulation);
  const bool on_gpu = plan.optimizer.hbm == plan.optimizer.total();
  if (on_gpu && plan.adam != AdamForm::fused) text += fmt::format(", {} AdamW", to_string(plan.adam));
  return text;
}

// --- plan.json ---------------------------------------------------------------------------------------

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kLora = "lora:r=";

Json placement_json(const Placement& p) { return Json{{"gpu", p.hbm}, {"host", p.host}, {"nvme", p.nvme}}; }

Json plan_json(const Plan& p) {
  Json j;
  j["engine"] = to_string(p.engine);
  j["ranks"] = p.ranks;
  j["shard_ranks"] = p.shard_ranks;
  j["zero_stage"] = p.zero_stage;
  if (p.lora_rank > 0) j["trainable"] = fmt::format("{}{}", kLora, p.lora_rank);
  j["seq_len"] = p.seq_len;
  j["micro_batch"] = p.micro_batch;
  j["accumulation"] = p.accumulation;
  j["precision"] = {{"weights", name_of(kDTypes, p.precision.weights)},
                    {"master", p.precision.master},
                    {"split_master", p.precision.split_master},
                    {"states", name_of(kDTypes, p.precision.states)},
                    {"gradients", name_of(kDTypes, p.precision.gradients)},
                    {"accumulation", name_of(kDTypes, p.precision.accumulation)}};
  j["optimizer"] = placement_json(p.optimizer);
  j["parameters"] = placement_json(p.parameters);
  j["gradients"] = to_string(p.gradients);
  j["update"] = to_string(p.update);
  j["recompute"] = to_string(p.recompute);
  j["recompute_layers"] = p.recompute_layers;
  j["prefetch_layers"] = p.prefetch_layers;
  j["reduce_each"] = to_string(p.reduce_each);
  j["loss_chunk_tokens"] = p.loss_chunk_tokens;
  j["clip_norm"] = p.clip_norm;
  j["loss_scaling"] = to_string(p.loss_scaling);
  if (p.engine == Engine::fsdp2) j["adam"] = to_string(p.adam);
  if (!p.allocator_conf.empty()) j["allocator_conf"] = p.allocator_conf;
  return j;
}

/// "all", "lora:r=16".
std::int64_t read_trainable(const JsonValue& j) {
  const std::string& text = j.as_string();
  if (text == "all") return 0;
  std::int64_t rank = 0;
  const char* begin = text.data() + std::min(text.size(), kLora.size());
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), rank);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!text.starts_with(kLora) || !whole || rank < 1) j.fail("\"all\" or \"lora:r=16\"");
  return rank;
}

Placement read_placement(const JsonValue& j) {
  j.require_only({"gpu", "host", "nvme"});
  const auto count = [&](std::string_view key) { return static_cast<int>(j.at(key).as_int(0, 1 << 20)); };
  return {count("gpu"), count("host"), count("nvme")};
}

Precision read_precision(const JsonValue& j) {
  j.require_only({"weights", "master", "split_master", "states", "gradients", "accumulation"});
  Precision p;
  p.weights = value_of(kDTypes, j.at("weights"));
  p.master = j.at("master").as_bool();
  p.split_master = j.at("split_master").as_bool();
  p.states = value_of(kDTypes, j.at("states"));
  p.gradients = value_of(kDTypes, j.at("gradients"));
  p.accumulation = value_of(kDTypes, j.at("accumulation"));
  return p;
}

/// Files of before this key are of what was planned then: fused, and the loop on the host.
AdamForm read_adam(const JsonValue& j, const Plan& p) {
  const JsonValue* adam = j.find("adam");
  if (adam == nullptr) {
    const bool on_host = p.engine == Engine::fsdp2 && p.optimizer.hbm < p.optimizer.total();
    return on_host ? AdamForm::loop : AdamForm::fused;
  }
  if (p.engine != Engine::fsdp2) adam->fail("no such key but with \"engine\": \"fsdp2\"");
  return value_of(kAdamForms, *adam);
}

Plan read_plan_keys(const JsonValue& j) {
  j.require_only({"engine",
                  "ranks",
                  "shard_ranks",
                  "zero_stage",
                  "trainable",
                  "seq_len",
                  "micro_batch",
                  "accumulation",
                  "precision",
                  "optimizer",
                  "parameters",
                  "gradients",
                  "update",
                  "recompute",
                  "recompute_layers",
                  "prefetch_layers",
                  "reduce_each",
                  "loss_chunk_tokens",
                  "clip_norm",
                  "loss_scaling",
                  "state_bytes_per_parameter",
                  "adam",
                  "allocator_conf"});
  Plan p;
  p.engine = value_of(kEngines, j.at("engine"));
  p.ranks = static_cast<int>(j.at("ranks").as_int(1, 1 << 20));
  p.shard_ranks = static_cast<int>(j.at("shard_ranks").as_int(1, 1 << 20));
  p.zero_stage = static_cast<int>(j.at("zero_stage").as_int(0, 3));
  if (const JsonValue* trainable = j.find("trainable")) p.lora_rank = read_trainable(*trainable);
  p.seq_len = j.at("seq_len").as_int(1, 1 << 26);
  p.micro_batch = j.at("micro_batch").as_int(1, 1 << 20);
  p.accumulation = j.at("accumulation").as_int(1, 1 << 24);
  p.precision = read_precision(j.at("precision"));
  p.optimizer = read_placement(j.at("optimizer"));
  p.parameters = read_placement(j.at("parameters"));
  p.gradients = value_of(kTiers, j.at("gradients"));
  p.update = value_of(kUpdates, j.at("update"));
  p.recompute = value_of(kRecomputes, j.at("recompute"));
  p.recompute_layers = static_cast<int>(j.at("recompute_layers").as_int(0, 1 << 20));
  p.prefetch_layers = static_cast<int>(j.at("prefetch_layers").as_int(0, 3));
  p.reduce_each = value_of(kReduces, j.at("reduce_each"));
  p.loss_chunk_tokens = j.at("loss_chunk_tokens").as_int(1, std::int64_t{1} << 40);
  p.clip_norm = j.at("clip_norm").as_real(0, 1e30);
  p.loss_scaling = value_of(kScalings, j.at("loss_scaling"));
  p.adam = read_adam(j, p);
  if (const JsonValue* conf = j.find("allocator_conf")) p.allocator_conf = conf->as_string();
  if (const JsonValue* stated = j.find("state_bytes_per_parameter")) {
    const int bytes = p.precision.state_bytes_per_parameter();
    if (stated->as_int(0, 64) != bytes) stated->fail(fmt::format("{}, which follows from \"precision\"", bytes));
  }
  return p;
}

/// The subtree as JSON text again, for the readers of models and machines.
Json to_json(const JsonValue& v) {
  switch (v.kind()) {
    case JsonValue::Kind::null:
      return nullptr;
    case JsonValue::Kind::boolean:
      return v.as_bool();
    case JsonValue::Kind::integer:
      return v.as_int(INT64_MIN, INT64_MAX);
    case JsonValue::Kind::real:
      return v.as_real(-1e308, 1e308);
    case JsonValue::Kind::string:
      return v.as_string();
    case JsonValue::Kind::array: {
      Json j = Json::array();
      for (const JsonValue& item : v.items()) j.push_back(to_json(item));
      return j;
    }
    case JsonValue::Kind::object: {
      Json j = Json::object();
      for (const auto& [key, item] : v.members()) j[key] = to_json(item);
      return j;
    }
  }
  return nullptr;
}

}  // namespace

std::string plan_keys_json(const Plan& plan, int indent) {
  Json j = plan_json(plan);
  j["state_bytes_per_parameter"] = plan.precision.state_bytes_per_parameter();
  return j.dump(indent);
}

std::string write_plan(const PlanFile& file) {
  Json j;
  j["schema"] = 1;
  j["plan"] = plan_json(file.plan);
  j["plan"]["state_bytes_per_parameter"] = file.plan.precision.state_bytes_per_parameter();
  j["model"] = {{"name", file.model.name}, {"config", Json::parse(file.model.config)}};
  j["machine"] = Json::parse(write_machine(file.machine));
  // Names come from paths: bytes that are no UTF-8 are replaced, not refused.
  return j.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

PlanFile read_plan(std::string_view text, const std::string& file_name) {
  const JsonDocument document = JsonDocument::parse(text, file_name);
  const JsonValue& root = document.root();
  root.require_only({"schema", "plan", "model", "machine"});
  if (root.at("schema").as_int(0, 1 << 20) != 1) root.at("schema").fail("1");
  PlanFile file;
  const JsonValue& model = root.at("model");
  model.require_only({"name", "config"});
  file.model = read_model(to_json(model.at("config")).dump(), file_name + ": /model/config");
  file.model.name = model.at("name").as_string();
  file.machine = read_machine(root.at("machine"));
  file.plan = read_plan_keys(root.at("plan"));
  check_plan(file.plan, file.model, file_name + ":" + std::to_string(root.at("plan").line()) + ": /plan");
  if (file.plan.ranks != file.machine.ranks()) {
    root.at("plan").at("ranks").fail(fmt::format("the machine's {} ranks", file.machine.ranks()));
  }
  const int group = file.plan.shard_ranks, node = file.machine.gpus_per_node;
  if (node % group != 0 && group % node != 0) {
    root.at("plan").at("shard_ranks").fail(fmt::format("an even part of a node's {} GPUs, or whole nodes", node));
  }
  return file;
}

}  // namespace zeroplan
