#pragma once
// What a DeepSpeed configuration does on a machine, for `check`: memory by phase, host memory, step time, and the
// nearest configuration that fits or is faster. What no rule covers is named and left out, never guessed.

#include <optional>
#include <string>
#include <vector>

#include "models/assumption.h"
#include "planner/check_storage.h"
#include "planner/deepspeed_estimator.h"
#include "planner/deepspeed_releases.h"
#include "planner/engine_fit.h"
#include "planner/lint.h"
#include "planner/loss_memory.h"
#include "sim/engine_time.h"

namespace zeroplan {

/// What is trained, as far as flags say it: a DeepSpeed configuration does not.
struct CheckWorkload {
  std::optional<std::int64_t> seq_len;       // default: the smaller of 4096 and the model's maximum
  std::optional<std::int64_t> micro_batch;   // where the file has none
  std::optional<std::int64_t> global_batch;  // where the file has none
  std::optional<bool> checkpointing;         // of every layer; default: none
  std::int64_t lora_rank = 0;                // 0: all is trained
  std::string allocator_conf;                // PYTORCH_CUDA_ALLOC_CONF of the run; empty: PyTorch's defaults
  double margin = 0.05;                      // of GPU and host, stays free
  ReleaseMonth release;                      // of DeepSpeed; year 0: 0.19
};

/// A part of the answer that is left out.
struct NotPredicted {
  std::string part;  // "memory", "time"
  std::string why;
  friend bool operator==(const NotPredicted&, const NotPredicted&) = default;
};

/// One configuration under DeepSpeed.
struct RunPrediction {
  EngineWorkload workload;
  std::optional<EngineFit> memory;
  std::optional<EngineTime> time;
  std::vector<NotPredicted> missing;

  std::int64_t global_batch() const { return workload.tokens.batch * workload.accumulation * workload.ranks; }
  /// False without a memory prediction too: nothing says that it does not fit.
  bool does_not_fit() const { return memory && !memory->fits(); }
  /// Without the allocator having to give memory back.
  bool fits_well() const { return memory && memory->fits_in_step(); }
};

/// One key with another value.
struct KeyChange {
  std::string key;         // "zero_optimization.stage"
  std::string from;        // as the file has it; empty: it is not there
  std::string to;          // JSON
  bool in_script = false;  // gradient checkpointing is an argument of the training script
};

enum class NearestAim : std::uint8_t { fits, faster };
std::string_view to_string(NearestAim aim);

struct NearestConfig {
  NearestAim aim = NearestAim::fits;
  std::vector<KeyChange> changes;       // empty: none was found
  std::optional<RunPrediction> result;  // with these changes
  int tried = 0;                        // configurations whose memory was predicted
};

/// The same file at one ZeRO stage.
struct StageRow {
  int stage = 0;
  RunPrediction run;
};

/// One setting turned alone.
struct Gain {
  std::vector<KeyChange> changes;
  Bytes allocated, reserved, host;  // less than the file takes; below zero: more
};

/// What DeepSpeed's estimator prints for stage 2 or 3.
struct EstimatorLine {
  std::string name;  // "estimate_zero3_model_states_mem_needs"
  EstimatorBytes bytes;
};

struct CheckPrediction {
  bool corrected = false;  // of the file as --fix corrects it, because DeepSpeed would refuse or ignore parts of it
  int ranks_per_node = 1;
  RunPrediction run;
  std::vector<Assumption> assumptions;
  std::vector<StageRow> stages;  // 0 to 3, the file's own too; those whose memory is predicted
  std::vector<Gain> gains;       // most first; only when the GPU or the host is tight
  std::optional<StorageNeeds> storage;
  std::optional<EstimatorLine> estimator;  // none below stage 2, and for adapters
  std::vector<ReleaseDifference> releases;
  std::vector<std::string> remarks;  // sentences
  /// Nothing when memory is not predicted, or it fits and nothing is 5 % faster.
  std::optional<NearestConfig> nearest;
};

/// Predicts `input.file` (with its model and machine: both are needed) after the lint found `answer`. Throws InputError
/// on flags that contradict the file or the model.
CheckPrediction predict_check(const CheckInput& input, const CheckAnswer& answer, const CheckWorkload& workload);

}  // namespace zeroplan
