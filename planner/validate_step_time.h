#pragma once
// Measured steps of DeepSpeed and FSDP runs beside predicted ones: rows of data/published (CSV, its README has the
// columns) and `phase_s` of data/groundtruth. Part of `zeroplan validate`.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/json_reader.h"
#include "models/model_spec.h"
#include "sim/engine_time.h"

namespace zeroplan {

/// One measured step and the run it belongs to.
struct MeasuredStep {
  int line = 0;      // of the source; a CSV's header is line 1
  std::string row;   // short description
  std::string kind;  // what is left out together in a held-out fit: the model's name
  std::vector<std::string> groups;
  std::shared_ptr<const ModelSpec> model;
  MachineSpec machine;
  EngineTimeRun run;
  /// Set by the fit's parameter of that name before a prediction; kept apart so that a refit sees it.
  std::optional<TimeFit> host_adam;
  bool engine_timers = false;  // measured by the engine's forward, backward and step timers, not by whole steps
  Seconds measured;
};

/// Predicts one measured step. Throws InputError on what is not modelled.
EngineTime predict_step(const MeasuredStep& step, const EngineTimeFit& fit = builtin_engine_time_fit());

/// A row that has no prediction, and why.
struct SkippedStep {
  int line = 0;
  std::string row, reason;
};

struct MeasuredSteps {
  std::vector<MeasuredStep> steps;
  std::vector<SkippedStep> skipped;
  int rows = 0;
};

/// Whether a text is CSV with the common columns of data/published.
bool is_published_table(std::string_view text);
/// All rows; a column that is missing is a cell that is not stated, and a table without models, frameworks or GPUs has
/// no steps. Throws InputError when a record is cut.
MeasuredSteps read_published_steps(std::string_view text, const std::string& name);

/// Steps of data/groundtruth: medians of `phase_s` after the first step; the process group is a fake, so nothing is
/// communicated. Keeps models, which many rows share.
class GroundtruthSteps {
 public:
  /// Nothing for rows without phases. Throws InputError with the reason when the row cannot be predicted.
  std::optional<MeasuredStep> read(const JsonValue& row, const std::string& label);

 private:
  std::shared_ptr<const ModelSpec> model_of(const std::string& name, std::int64_t lora);
  std::map<std::string, std::shared_ptr<const ModelSpec>> models_;
};

/// Errors of one group of a source: its rows, or all of them.
struct StepTimeTable {
  std::string source, group;
  int rows = 0;
  double mean_error = 0;  // of |predicted / measured - 1|: MAPE / 100
  double p90_error = 0;
  double largest_error = 0;
  double bias = 0;
  /// Mean error of one constant model-FLOP utilisation for each GPU, the best one for these very rows.
  double constant_mfu_error = 0;
  int worst_line = 0;
  std::string worst_row;
  Seconds worst_predicted, worst_measured;
};

/// Tables of a source: "all" first, then its groups in order of appearance. Rows whose prediction throws go to
/// `skipped`.
std::vector<StepTimeTable> step_time_tables(const std::string& source, std::span<const MeasuredStep> steps,
                                            std::vector<SkippedStep>& skipped,
                                            const EngineTimeFit& fit = builtin_engine_time_fit());
/// For people.
std::string step_time_text(std::span<const StepTimeTable> tables);

}  // namespace zeroplan
