#pragma once
// One measured row and what is predicted for it.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/eager_step.h"
#include "models/json_reader.h"
#include "models/model_spec.h"
#include "planner/validate.h"
#include "sim/cost_model.h"

namespace zeroplan {

/// The model of a measured row: of the catalog, with what the measuring scripts change in it.
ModelSpec model_as_measured(const std::string& name);

/// Predicts rows; keeps eager steps, which many rows share.
class RowPredictor {
 public:
  /// `margin`: share of the card that a verdict leaves free.
  explicit RowPredictor(double margin) : margin_(margin) {}
  struct Answer {
    std::string row;
    std::vector<Comparison> comparisons;
    std::vector<Verdict> verdicts;  // none or one
  };
  /// Throws InputError with the reason when the row cannot be predicted.
  Answer predict(const JsonValue& row, std::string_view text);
  /// Short description: "llama-2-7b, 8 ranks, stage 3, 1 x 2048, checkpointed".
  static std::string describe(const JsonValue& row);

 private:
  /// Kernel times on the row's GPU; null when the catalog does not know it. Collectives of the fake process groups that
  /// rows were measured with take no time.
  const CostModel* cost_of(const JsonValue& row, DType type);
  const EagerStep& step_of(const JsonValue& row, bool as_measured, const EagerOptions& options);
  std::vector<Comparison> activations(const JsonValue& row);
  Answer deepspeed(const JsonValue& row, std::string_view text);
  Answer fsdp2(const JsonValue& row);

  double margin_;
  std::map<std::string, EagerStep> steps_;
  std::map<std::string, std::unique_ptr<MachineCostModel>> costs_;
};

}  // namespace zeroplan
