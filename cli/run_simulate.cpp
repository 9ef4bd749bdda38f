// zeroplan simulate PLAN.json: one plan on the machine that the file holds.

#include <fmt/format.h>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/terminal.h"
#include "models/error.h"
#include "models/lower.h"
#include "planner/report.h"
#include "planner/report_json.h"

namespace zeroplan {
namespace {

/// Flags of the event simulator.
void refuse_later_flags(const Arguments& arguments) {
  for (const std::string& argument : arguments) {
    const std::string flag = argument.substr(0, argument.find('='));
    if (flag == "--ranks" || flag == "--trace") throw InputError(flag + ": the event simulator is not built yet");
  }
}

}  // namespace

Outcome run_simulate(const Arguments& arguments) {
  CommandLine line("simulate", "One plan on its machine: memory by owner, time by phase and stream.",
                   "Example:\n  zeroplan simulate plan70b/plan.json --estimate");
  std::string path;
  bool estimate = false;
  bool json = false;
  line.positional("PLAN.json", "What plan --out wrote; required", path);
  line.toggle("--estimate", "Longest path, every op as if alone; required until the event simulator is built",
              estimate);
  line.toggle("--json", "JSON with stable keys on stdout", json);
  refuse_later_flags(arguments);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (path.empty()) throw InputError("zeroplan simulate: expected PLAN.json, got nothing; see --help");
  const PlanFile file = read_plan(read_text_file(path), path);
  if (!estimate) {
    throw InputError("zeroplan simulate: the event simulator is not built yet; --estimate gives the longest path");
  }

  Predictor predictor(file.model, file.machine);
  const Prediction prediction = predictor.predict(file.plan, Detail::laid_out);
  const MachineCostModel cost(file.machine, file.plan.shard_ranks, file.plan.precision.weights);
  const StepTable table = step_table(lower(file.model, file.plan, Folding::layers), cost, file.model);
  if (json) return {step_json(file, prediction, table, predictor.assumptions(file.plan)), {}, kDone};
  return {report_step(file, prediction, table, stdout_style()), {}, kDone};
}

}  // namespace zeroplan
