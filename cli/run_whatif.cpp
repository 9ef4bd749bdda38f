// zeroplan whatif: the same training on several machines.

#include <fmt/format.h>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "cli/workload.h"
#include "models/error.h"
#include "planner/report.h"
#include "planner/report_json.h"
#include "planner/whatif.h"

namespace zeroplan {
namespace {

constexpr std::size_t kMostAlternatives = 64;

std::vector<Alternative> alternatives_of(const std::string& hardware) {
  if (hardware.empty()) {
    throw InputError("--hardware: expected machines such as 8xA100-80G,8xH100, got nothing; see --help");
  }
  std::vector<Alternative> alternatives;
  std::string_view rest = hardware;
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    if (item.empty()) throw InputError(fmt::format("--hardware: expected A,B,C, got \"{}\"", hardware));
    for (const Alternative& known : alternatives) {
      if (known.name == item) throw InputError(fmt::format("--hardware: \"{}\" is given twice", item));
    }
    alternatives.push_back({std::string(item), machine_of_item(item)});
    if (alternatives.size() > kMostAlternatives) {
      throw InputError(fmt::format("--hardware: expected at most {} machines", kMostAlternatives));
    }
    if (comma == std::string_view::npos) return alternatives;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace

Outcome run_whatif(const Arguments& arguments) {
  CommandLine line("whatif", "The same training on several machines: what fits, how fast, what it costs.",
                   "Example:\n  zeroplan whatif --model 13B --hardware 8xA100-80G,8xH100,2x8xH100,4xA100-80G@13USD "
                   "--tokens 300B");
  WorkloadFlags workload;
  std::string hardware;
  bool json = false;
  workload.add_to(line);
  line.group("Machines");
  line.value("--hardware", "A,B,C",
             "NxGPU, NODESxNxGPU, a catalog node or a machine.json; @12.5USD: price of a node and hour; required",
             hardware);
  line.group("Output");
  line.toggle("--json", "JSON with stable keys on stdout", json);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  const Request request = workload.request();
  const WhatifAnswer answer = plan_alternatives(request, alternatives_of(hardware));

  Outcome outcome;
  outcome.exit_code = answer.any_fits() ? kDone : kNothingFits;
  for (const WhatifRow& row : answer.rows) {
    if (!row.answer) continue;
    for (const std::string& warning : row.answer->warnings) {
      outcome.notes.push_back(fmt::format("warning: {}: {}", row.alternative.name, warning));
    }
  }
  const auto num_tokens = workload.num_tokens();
  outcome.out = json ? whatif_json(answer, num_tokens) : report_whatif(answer, num_tokens, stdout_style());
  return outcome;
}

}  // namespace zeroplan
