#pragma once
// Shared by the files of check's prediction.

#include <memory>

#include "planner/check_prediction.h"

namespace zeroplan {

/// Predicts configurations of one model on one machine.
class CheckPredictor {
 public:
  /// The references outlive it.
  CheckPredictor(const ModelSpec& model, const MachineSpec& machine, const CheckWorkload& flags);

  RunPrediction predict(const DeepSpeedConfig& config, const EngineWorkload& workload);
  /// Nothing when it cannot be told; `why` says so.
  std::optional<EngineTime> time(const DeepSpeedConfig& config, const EngineWorkload& workload, std::string& why) const;
  std::optional<EngineFit> memory(const DeepSpeedConfig& config, const EngineWorkload& workload, std::string& why);

 private:
  const MachineSpec& machine_;
  ModelSpec trained_;  // with adapters
  EngineFitter fitter_;
};

/// What of the file no rule of the prediction knows (tensor parallelism, compression, ...), with the key; empty: all is
/// known.
std::string unmodelled_sections(const ConfigText& file);

/// The configuration `file`, its run and what changes of its keys give. See check_prediction.h.
struct NearestSubject {
  const ConfigText& file;
  const CheckInput& input;  // model and machine
  RunPrediction run;
};
std::optional<NearestConfig> nearest_config(const NearestSubject& subject, CheckPredictor& predictor);

/// The run at every stage; empty when the file's stage cannot be set.
std::vector<StageRow> stage_rows(const NearestSubject& subject, CheckPredictor& predictor);
/// What each setting gives back when it is turned alone, most of the tight memory first.
std::vector<Gain> gains(const NearestSubject& subject, CheckPredictor& predictor);
/// Whether GPU or host are nearly full: above 90 % of what the card has, where PyTorch's allocator starts to give
/// memory back, or of the host.
bool is_tight(const EngineFit& fit);

/// Elements of the largest parameter as transformers keeps it: a layer's gate and up experts are one tensor.
std::int64_t largest_gather(const EagerStep& step);
/// Elements that one module holds itself, the most of all: what DeepSpeed's estimator calls the largest layer.
std::int64_t largest_module(const EagerStep& step);

/// Of the step as PyTorch runs it, when that is known.
struct StepFacts {
  LossBlocks loss;
  std::int64_t largest = 0;  // elements of the largest parameter
};
/// What the figures mean, and what they do not say: of p.run, p.stages, p.gains.
std::vector<std::string> check_remarks(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config,
                                       const StepFacts& facts);

/// A configuration that is changed key by key.
class ConfigDraft {
 public:
  explicit ConfigDraft(const ConfigText& file);
  ~ConfigDraft();
  ConfigDraft(const ConfigDraft&);
  ConfigDraft& operator=(const ConfigDraft&);

  /// "zero_optimization.stage", "3": the value is JSON. Sections are made when they are not there. False when one is no
  /// object.
  bool set(const std::string& path, const std::string& value);
  bool set(const std::string& path, std::int64_t value) { return set(path, std::to_string(value)); }
  bool has(const std::string& path) const;
  ConfigText text() const;
  const std::vector<KeyChange>& changes() const { return changes_; }

 private:
  struct Tree;  // the file as JSON
  std::shared_ptr<const ConfigText> file_;
  std::unique_ptr<Tree> tree_;
  std::vector<KeyChange> changes_;
};

/// What a person would turn, in the order in which it is tried.
enum class Knob : std::uint8_t {
  bucket,
  gathers,
  overlap,
  micro_batch,
  checkpointing,
  stage,
  optimizer,
  parameters,
  pinned,
  contiguous  // gradients: not tried by the search, fragmentation is not what its figures show
};
struct Setting {
  Knob knob;
  std::int64_t value;  // sequences, elements, a stage, an OffloadDevice, or on and off
};

/// A configuration with settings applied.
struct Variant {
  ConfigDraft draft;
  EngineWorkload workload;
  DeepSpeedConfig config;
  std::vector<KeyChange> script;
  std::optional<EngineTime> time;
  RunPrediction run;  // once memory is predicted

  std::vector<KeyChange> changes() const;
};
/// `start` (whose draft is of `file`) with the settings, the stage first: whether the others mean anything depends on
/// it. Nothing when one of them is what the configuration has already, or has no meaning in it.
std::optional<Variant> with_settings(const Variant& start, std::vector<Setting> settings, const ConfigText& file,
                                     std::int64_t hidden);

/// A reduce bucket that is tried in place of a larger one (elements): a tenth of DeepSpeed's default, whose messages
/// still reach the network's rate (lint rule bucket-small).
inline constexpr std::int64_t kSmallBucket = 50'000'000;

}  // namespace zeroplan
