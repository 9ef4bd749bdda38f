// zeroplan validate FILE...: predictions beside measured rows.

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "models/error.h"
#include "planner/validate.h"

namespace zeroplan {

Outcome run_validate(const Arguments& arguments) {
  CommandLine line("validate",
                   "Predictions beside measured rows: errors per source and quantity, and the rows that could not be "
                   "predicted.",
                   "Example:\n  zeroplan validate tests/data/groundtruth/fsdp2_h200.jsonl");
  std::vector<std::string> files;
  bool json = false;
  line.positionals("FILE", "JSON lines with the columns of data/groundtruth or data/activations; required", files);
  line.toggle("--json", "JSON with stable keys on stdout", json);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (files.empty()) throw InputError("validate: expected at least one FILE");
  Validation validation;
  for (const std::string& file : files) validate_rows(read_text_file(file), file, validation);
  return {json ? validation_json(validation) : validation_text(validation), {}, kDone};
}

}  // namespace zeroplan
