// zeroplan validate FILE...: predictions beside measured rows.

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/values.h"
#include "models/error.h"
#include "models/text_file.h"
#include "planner/validate.h"
#include "planner/validate_earlier.h"

namespace zeroplan {

Outcome run_validate(const Arguments& arguments) {
  CommandLine line(
      "validate",
      "Predictions beside measured rows: errors per source and quantity, runs that are called to fit and did "
      "not and the reverse, and the rows that could not be predicted. Ends with 1 when an earlier run was better.",
      "Example:\n  zeroplan validate tests/data/groundtruth/fsdp2_h200.jsonl");
  std::vector<std::string> files;
  std::string margin, against;
  bool json = false;
  line.positionals(
      "FILE",
      "JSON lines with the columns of tests/data/groundtruth or tests/data/activations, or CSV with those of "
      "tests/data/published; required",
      files);
  line.value("--margin", "PERCENT", "Part of a card that stays free where a run is called to fit [3%]", margin);
  line.value("--against", "FILE",
             "Output of an earlier validate --json: what is worse now is listed, and the exit code is 1", against);
  line.toggle("--json", "JSON with stable keys on stdout", json);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (files.empty()) throw InputError("validate: expected at least one FILE");
  const double free = margin.empty() ? kVerdictMargin : parse_margin(margin, "--margin");
  Validation validation;
  for (const std::string& file : files) validate_rows(read_text_file(file), file, validation, free);
  if (against.empty()) return {json ? validation_json(validation) : validation_text(validation), {}, kDone};
  const EarlierComparison earlier = compare_with_earlier(validation, read_text_file(against), against);
  return {json ? validation_json(validation, &earlier) : validation_text(validation) + earlier_text(earlier, against),
          {},
          earlier.regressions.empty() ? kDone : kRegression};
}

}  // namespace zeroplan
