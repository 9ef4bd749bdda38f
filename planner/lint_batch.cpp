// Batch sizes, and "auto" that somebody fills.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

constexpr std::string_view kTrain = "train_batch_size", kMicro = "train_micro_batch_size_per_gpu",
                           kAccumulation = "gradient_accumulation_steps";

/// train = micro x accumulation x ranks, with what is known of it. Values below 1 are reported by their type.
class BatchCheck {
 public:
  explicit BatchCheck(Linter& lint) : lint_(lint), ranks_(lint.data_parallel()) {
    train_ = positive(lint.config.train_batch);
    micro_ = positive(lint.config.micro_batch);
    accumulation_ = positive(lint.config.accumulation);
  }

  void run() {
    if (lint_.is_true("elasticity.enabled")) return elasticity();
    if (!lint_.has(kTrain) && !lint_.has(kMicro)) return missing();
    if (huge()) return;
    if (unreadable(kTrain, train_) || unreadable(kMicro, micro_) || unreadable(kAccumulation, accumulation_)) return;
    if (train_ && micro_ && accumulation_) return all_three();
    if (train_ && micro_) return two(*micro_, kMicro);
    if (train_ && accumulation_ && !lint_.has(kMicro)) return two(*accumulation_, kAccumulation);
    if (train_ && !lint_.has(kMicro) && !lint_.has(kAccumulation)) return only_train();
    if (micro_ && !lint_.has(kTrain) && ranks_) from_micro();
  }

 private:
  static constexpr std::int64_t kMost = std::int64_t{1} << 30;  // beyond it the products do not fit either

  static std::optional<std::int64_t> positive(std::optional<std::int64_t> value) {
    return value && *value > 0 && *value <= kMost ? value : std::nullopt;
  }

  /// Sizes that nothing can hold or end. DeepSpeed takes them: its own sums hold for them, in Python's integers.
  bool huge() {
    bool found = false;
    for (const std::string_view key : {kTrain, kMicro, kAccumulation}) {
      const ConfigNode* node = lint_.value(key);
      if (node == nullptr || !node->is_number() || node->number <= static_cast<double>(kMost)) continue;
      if (!std::isfinite(node->number) && node->kind == ConfigNode::Kind::real) continue;  // number-unreadable says it
      found = true;
      const std::string shown = lint_.shown(key);
      const std::string what = key == kMicro   ? shown + " samples at once: no GPU holds that many."
                               : key == kTrain ? shown + " samples make one step, which never ends."
                                               : shown + " micro-steps make one step, which never ends.";
      lint_.report("batch-huge", std::string(key),
                   what + " DeepSpeed takes the number, Python's have no bound: it does not stop at start.",
                   fmt::format("\"{}\": a smaller number", key));
    }
    return found;
  }

  /// Given, neither a number nor left to the Trainer.
  bool unreadable(std::string_view path, const std::optional<std::int64_t>& value) const {
    return lint_.has(path) && !value;
  }

  void missing() {
    lint_.report(
        "batch-missing", "",
        lint_.has(kAccumulation)
            ? "gradient_accumulation_steps alone does not say the batch: DeepSpeed stops with an AssertionError."
            : "neither train_batch_size nor train_micro_batch_size_per_gpu: DeepSpeed stops with an AssertionError.",
        fmt::format("\"{}\": 1", kMicro));
  }

  void elasticity() {
    if (lint_.is_true("elasticity.ignore_non_elastic_batch_info")) return;
    for (const std::string_view key : {kTrain, kMicro, kAccumulation}) {
      if (!lint_.has(key)) continue;
      Finding& finding = lint_.report("batch-elasticity", std::string(key),
                                      fmt::format("elasticity owns the batch sizes: {} beside it is an "
                                                  "ElasticityConfigError at start.",
                                                  key),
                                      "remove it, or set elasticity.ignore_non_elastic_batch_info");
      lint_.remove(finding, key);
    }
  }

  void all_three() {
    const std::int64_t product = *micro_ * *accumulation_;
    if (ranks_) {
      if (*train_ == product * *ranks_) return;
      identity(fmt::format("{} x {} x {} = {}", *micro_, *accumulation_, *ranks_, product * *ranks_),
               product * *ranks_);
    } else if (*train_ % product != 0) {
      lint_.report(
          "batch-no-ranks", std::string(kTrain),
          fmt::format("{} = {} x {} x ranks has no solution: {} / {} is no integer, and DeepSpeed stops with an "
                      "AssertionError on any number of ranks.",
                      *train_, *micro_, *accumulation_, *train_, product),
          fmt::format("\"{}\": a multiple of {}", kTrain, product));
    } else {
      holds_on(*train_ / product, fmt::format("{} x {}", *micro_, *accumulation_));
    }
  }

  void holds_on(std::int64_t ranks, const std::string& product) {
    lint_.report(
        "batch-ranks", std::string(kTrain),
        fmt::format("{} = {} x ranks holds on {} only: DeepSpeed stops with an AssertionError on any other number{}.",
                    *train_, product, plural(ranks, "rank"),
                    ranks == 1 ? "" : ", 1 included (a script started without torchrun or deepspeed)"));
  }

  std::string ranks_text() const {
    if (*ranks_ == lint_.machine->ranks()) return plural(*ranks_, "rank");
    return fmt::format("{} data-parallel of {} ranks (sequence_parallel_size, autotp_size)", *ranks_,
                       lint_.machine->ranks());
  }

  /// On how many ranks the numbers do hold: processes that a launcher did not join each count one rank.
  std::string holds_elsewhere() const {
    if (!micro_ || !accumulation_) return "";
    const std::int64_t product = *micro_ * *accumulation_;
    if (*train_ % product != 0) return "";
    const std::int64_t implied = *train_ / product;
    const std::string holds = fmt::format(" It holds on {}", plural(implied, "rank"));
    if (*ranks_ != 1) return holds + ".";
    return holds + fmt::format(
                       ": when {} processes run and each of them sees one rank, they were started without "
                       "torchrun or deepspeed, or by mpirun without RANK and WORLD_SIZE.",
                       implied);
  }

  void identity(const std::string& arithmetic, std::int64_t right) {
    Finding& finding = lint_.report(
        "batch-identity", std::string(kTrain),
        fmt::format(
            "train_batch_size is {}, but micro-batch x accumulation x ranks is {} on {}: DeepSpeed stops with an "
            "AssertionError that prints these numbers.{}",
            *train_, arithmetic, ranks_text(), holds_elsewhere()),
        fmt::format("\"{}\": {}", kTrain, right));
    lint_.replace(finding, *lint_.value(kTrain), std::to_string(right));
  }

  /// The third is train / (ranks x what is given), and must come out even.
  void two(std::int64_t given, std::string_view key) {
    if (!ranks_) {
      if (*train_ % given == 0) return;
      lint_.report(
          "batch-no-ranks", std::string(kTrain),
          fmt::format("{} is no multiple of {} {}: DeepSpeed stops with an AssertionError on any number of ranks.",
                      *train_, key, given),
          fmt::format("\"{}\": a multiple of {}", kTrain, given));
      return;
    }
    const std::int64_t unit = given * *ranks_;
    const std::int64_t other = *train_ / unit;
    if (other > 0 && other * unit == *train_) return;
    const std::int64_t right = std::max<std::int64_t>(1, other) * unit;
    const bool fixed_micro = key == kMicro;
    identity(fixed_micro ? fmt::format("{} x {} x {} = {}", given, other, *ranks_, other * unit)
                         : fmt::format("{} x {} x {} = {}", other, given, *ranks_, other * unit),
             right);
  }

  void only_train() {
    if (!ranks_) return;
    const std::int64_t micro = *train_ / *ranks_;
    if (micro * *ranks_ != *train_ || micro == 0) {
      identity(fmt::format("{} x 1 x {} = {}", micro, *ranks_, micro * *ranks_),
               std::max<std::int64_t>(1, micro) * *ranks_);
      return;
    }
    lint_.report(
        "batch-inferred", std::string(kTrain),
        fmt::format("the micro-batch follows from it: {} / {} = {} a GPU at once, without accumulation.", *train_,
                    plural(*ranks_, "rank"), plural(micro, "sample")),
        micro == 1
            ? ""
            : fmt::format("\"{}\": a smaller one, with gradient_accumulation_steps, if that does not fit", kMicro));
  }

  void from_micro() {
    const std::int64_t accumulation = accumulation_.value_or(1);
    if (lint_.has(kAccumulation) && !accumulation_) return;
    lint_.report("batch-inferred", std::string(kMicro),
                 fmt::format("train_batch_size follows: {} x {} x {} = {}.", *micro_, accumulation,
                             plural(*ranks_, "rank"), *micro_ * accumulation * *ranks_));
  }

  Linter& lint_;
  std::optional<std::int64_t> ranks_, train_, micro_, accumulation_;
};

/// One note for all: configurations for the Trainer hold a dozen of them.
void lint_automatic(Linter& lint) {
  std::vector<std::string> filled;
  for (const std::string& path : lint.config.automatic) {
    const DeepspeedKey* key = lint.keys.find(path);
    if (key != nullptr && key->auto_filled == AutoFilled::trainer && path == key->path) filled.push_back(path);
  }
  if (filled.empty()) return;
  std::string first = filled.front();
  for (const std::string& path : filled) {
    if (lint.line_of(path) < lint.line_of(first)) first = path;
  }
  lint.report(
      "auto-needs-trainer", first,
      fmt::format("\"auto\" in {}: the Hugging Face Trainer or Accelerate fills {}. Given to "
                  "deepspeed.initialize() as it is, the batch keys are a TypeError, gradient_clipping fails in the "
                  "first step, optimizer and scheduler get the text, and guarded sections take their defaults.",
                  fmt::join(filled, ", "), filled.size() == 1 ? "it" : "them"));
}

/// The sizes that stand for "auto", to look at and to paste (transformers' trainer_config_finalize).
void lint_auto_values(Linter& lint) {
  constexpr std::string_view kBucket = "zero_optimization.reduce_bucket_size";
  const auto automatic = [&](std::string_view path) {
    return std::ranges::find(lint.config.automatic, path) != lint.config.automatic.end();
  };
  if (automatic(kBucket) && lint.config.stage < 3) {
    lint.report(
        "auto-bucket-below-3", std::string(kBucket),
        fmt::format("\"auto\" at stage {}: transformers of early 2022 and before filled it at stage 3 only, and "
                    "DeepSpeed stopped with a ValidationError at the text.",
                    lint.config.stage));
  }
  if (lint.model == nullptr) return;
  const DeepSpeedConfig& c = lint.config;
  const std::pair<std::string_view, std::int64_t> sizes[] = {
      {kBucket, c.reduce_bucket},
      {"zero_optimization.stage3_prefetch_bucket_size", c.prefetch_bucket},
      {"zero_optimization.stage3_param_persistence_threshold", c.param_persistence}};
  std::vector<std::string> told, pasted;
  std::string first;
  for (const auto& [path, size] : sizes) {
    if (!automatic(path) || (c.stage < 3 && path != kBucket)) continue;
    if (first.empty()) first = path;
    told.push_back(
        fmt::format("{} {} ({:.1f} MB)", leaf_of(path), format_count(size), bytes_of(size, c.precision).base() / 1e6));
    pasted.push_back(fmt::format("\"{}\": {}", leaf_of(path), size));
  }
  if (told.empty()) return;
  lint.report("auto-values", first,
              fmt::format("\"auto\" is, with hidden size {}: {}. A model whose config has neither hidden_size nor "
                          "hidden_sizes (nor a text_config with them) gets a ValueError instead: paste the numbers.",
                          format_count(lint.model->hidden), fmt::join(told, ", ")),
              fmt::format("{}", fmt::join(pasted, ", ")));
}

/// What accumulation does at a stage, and what loops that accumulate on their own lose.
void lint_accumulation(Linter& lint) {
  const DeepSpeedConfig& c = lint.config;
  if (!c.accumulation || !lint.has(kAccumulation)) return;
  const std::string key(kAccumulation);
  if (*c.accumulation == 1 && (c.stage == 1 || c.stage == 2)) {
    lint.report("accumulation-by-hand", key,
                fmt::format("1: every backward counts as the last before a step. A loop that calls backward several "
                            "times for one step loses all gradients but the last at stage {}.",
                            c.stage),
                "the number of micro-steps, or engine.set_gradient_accumulation_boundary() in the loop");
  } else if (*c.accumulation > 1 && c.stage >= 2) {
    lint.report("reduces-each-micro-step", key,
                fmt::format("stage {} reduces gradients in each of the {} micro-steps{}; stage 1 once a step.", c.stage,
                            *c.accumulation, c.stage == 3 ? ", and gathers weights in each" : ""),
                "\"stage\": 1 where it fits and links are slow");
  }
}

}  // namespace

void lint_batch(Linter& lint) {
  BatchCheck(lint).run();
  lint_automatic(lint);
  lint_auto_values(lint);
  lint_accumulation(lint);
}

}  // namespace zeroplan
