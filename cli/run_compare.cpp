// zeroplan compare PLAN.json MEASURED.json: prediction beside measurement.

#include <fmt/format.h>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "models/error.h"
#include "models/text_file.h"
#include "planner/compare_plan.h"

namespace zeroplan {

Outcome run_compare(const Arguments& arguments) {
  CommandLine line("compare", "A prediction beside the measurement of the same plan, op by op.",
                   "Example:\n  zeroplan run plan/plan.json --data synthetic --steps 20 --measure measured.json\n"
                   "  zeroplan compare plan/plan.json measured.json");
  std::string plan_path, measured_path;
  bool json = false;
  line.positional("PLAN.json", "What plan --out wrote; required", plan_path);
  line.positional("MEASURED.json", "What run --measure wrote of that plan; required", measured_path);
  line.toggle("--json", "JSON with stable keys on stdout", json);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (plan_path.empty() || measured_path.empty()) {
    throw InputError("zeroplan compare: expected PLAN.json MEASURED.json; see --help");
  }
  const PlanFile file = read_plan(read_text_file(plan_path), plan_path);
  if (file.plan.engine != Engine::zeroplan) {
    throw InputError(fmt::format("{}: plan/engine: expected zeroplan, whose runs are measured, got {}", plan_path,
                                 to_string(file.plan.engine)));
  }
  const Measured measured = read_measured(read_text_file(measured_path), measured_path);
  const PlanComparison result = compare_plan(file, measured, measured_path);
  if (json) return {comparison_json(file, measured, result), {}, kDone};
  return {report_comparison(file, measured, result, stdout_style()), {}, kDone};
}

}  // namespace zeroplan
