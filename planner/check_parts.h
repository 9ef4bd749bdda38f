#pragma once
// Shared by the files of check's prediction.

#include <nlohmann/json_fwd.hpp>

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

/// A configuration that is changed key by key.
class ConfigDraft {
 public:
  /// Not usable when sections that are changed are no objects.
  explicit ConfigDraft(const ConfigText& file);
  ~ConfigDraft();
  ConfigDraft(const ConfigDraft&);
  ConfigDraft& operator=(const ConfigDraft&);

  /// "zero_optimization.stage"; sections are made when they are not there. False when one is no object.
  bool set(const std::string& path, const nlohmann::ordered_json& value);
  bool has(const std::string& path) const;
  ConfigText text() const;
  const std::vector<KeyChange>& changes() const { return changes_; }

 private:
  std::shared_ptr<const ConfigText> file_;
  std::unique_ptr<nlohmann::ordered_json> json_;
  std::vector<KeyChange> changes_;
};

}  // namespace zeroplan
