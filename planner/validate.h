#pragma once
// `zeroplan validate`: predictions beside measured rows (data/groundtruth, data/activations), as tables of errors per
// source and quantity. Rows that cannot be predicted are listed with the reason, never dropped.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/units.h"
#include "planner/validate_step_time.h"

namespace zeroplan {

enum class Measured : std::uint8_t {
  allocated_after,  // torch.cuda.memory_allocated after the step
  allocated_fwd,    // its peak in forward, backward and step
  allocated_bwd,
  allocated_step,
  reserved,     // by the caching allocator
  device_used,  // by cudaMemGetInfo
  host,         // resident set of rows that offload (without, it is the process itself)
  init_peak,    // peak allocated in initialize
  saved,        // activations alive after forward, peaks of forward and backward above parameters
  fwd_peak,
  bwd_peak,
  published_reserved,  // what a row of data/published prints as its peak, by the counter that it names
  published_allocated,
  published_used,  // nvidia-smi
};
inline constexpr int kNumMeasured = 14;
std::string_view to_string(Measured quantity);

/// Rows of one source that are averaged together. Stage 3's reserved memory depends on timing, so it has a table of its
/// own beside the one of all rows.
enum class RowGroup : std::uint8_t { all, stages_0_to_2, stage_3 };
std::string_view to_string(RowGroup group);

struct Comparison {
  Measured quantity = Measured::allocated_after;
  RowGroup group = RowGroup::all;  // the group besides `all` that the row belongs to; all: none
  int line = 0;                    // of the source
  std::string row;                 // short description
  Bytes predicted, measured;
  Bytes low, high;  // the predicted interval; both 0: none is given
  /// The measured value lies in the interval, or within half a percent of it.
  bool inside() const { return measured >= low * 0.995 && measured <= high * 1.005; }
  /// predicted / measured - 1.
  double error() const { return predicted / measured - 1.0; }
};

struct Unpredicted {
  std::string source;
  int line = 0;
  std::string row, reason;
};

/// Did the run fit on the card it was measured on?
struct Verdict {
  std::string source;
  int line = 0;
  std::string id;  // of data/published
  std::string row;
  bool measured_fits = true, predicted_fits = true;
  Bytes need, capacity;  // device memory with the host in step with the GPU; of the card, margin taken off
  std::string why;       // the allocator's message when it is predicted not to fit
  bool wrong() const { return measured_fits != predicted_fits; }
};

/// Verdicts of one source.
struct VerdictTable {
  std::string source;
  int fitted = 0, called_too_large = 0;       // runs that fitted; of them: called "does not fit"
  int out_of_memory = 0, called_fitting = 0;  // runs that did not; of them: called "fits"
};

struct ErrorTable {
  std::string source;
  Measured quantity = Measured::allocated_after;
  RowGroup group = RowGroup::all;
  int rows = 0;
  double mean_error = 0;     // of |error|: MAPE / 100
  double largest_error = 0;  // of |error|
  double bias = 0;           // mean of error
  int intervals = 0;         // rows with an interval, and how many measured values lie in it
  int inside = 0;
  Comparison worst;
};

struct Validation {
  std::vector<ErrorTable> tables;  // in the order of sources and quantities
  std::vector<StepTimeTable> step_times;
  std::vector<Unpredicted> unpredicted;
  std::vector<Verdict> verdicts;
  std::vector<Unpredicted> no_verdict;  // rows of data/published on whose memory nothing is said, and why
  int rows = 0;                         // read
  int verdict_errors() const;
  /// In the order of sources.
  std::vector<VerdictTable> verdict_tables() const;
};

/// Share of a card that has to stay free for "fits" (issue 6).
inline constexpr double kVerdictMargin = 0.03;

/// One file's text: JSON lines, or CSV with the columns of data/published (step times, whether the run fits, printed
/// peaks). `name` stands in tables and messages; verdicts leave `margin` of the card free. Appends to `validation`.
/// Throws InputError for what is no JSON object a line.
void validate_rows(std::string_view text, const std::string& name, Validation& validation,
                   double margin = kVerdictMargin);

/// Tables for people.
std::string validation_text(const Validation& validation);
struct EarlierComparison;  // planner/validate_earlier.h
/// {"schema": 1, "rows", "tables": [...], "unpredicted": [...], "verdicts": {...}}; errors in percent. With a
/// comparison also "regressions" and "not_compared".
std::string validation_json(const Validation& validation, const EarlierComparison* earlier = nullptr);

}  // namespace zeroplan
