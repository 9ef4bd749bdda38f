#include "cli/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "models/error.h"

namespace zeroplan {
namespace {

constexpr std::array<Command, 11> kCommands = {{
    {"plan", "Find the training configuration that fits and is fastest (the default command)", run_plan},
    {"simulate", "One plan.json: memory, time by phase and stream", run_simulate},
    {"run", "Trains with one plan.json on this machine and measures every op", run_run},
    {"compare", "A prediction beside the measurement of the same plan, op by op", run_compare},
    {"check", "A DeepSpeed configuration: what is wrong, dead or contradictory in it, and the corrected file",
     run_check},
    {"probe", "Measures this machine; the file is a machine for the other commands", run_probe},
    {"validate", "Predictions beside measured rows: tables of errors", run_validate},
    {"whatif", "The same training on several machines: speed, price, and which to take within a budget and a deadline",
     run_whatif},
    {"models", "The catalog of models, or one model: tensors, FLOPs, sources", run_models},
    {"machines", "The catalog of machines and GPUs, or one of them", run_machines},
    {"topology", "The wiring in `nvidia-smi topo -m` or NCCL's XML: graph, routes, shared links", run_topology},
}};

/// Named by the specification, for a later version.
constexpr std::array<std::string_view, 1> kLaterCommands = {"report"};

std::string program_help() {
  std::string text =
      "zeroplan: a ZeRO training configuration that fits, with its memory and step time\n\n"
      "Usage: zeroplan [COMMAND] [flags]\n\nCommands:\n";
  for (const Command& command : kCommands) text += fmt::format("  {:<10} {}\n", command.name, command.summary);
  text +=
      "\n  zeroplan COMMAND --help    flags, defaults and an example\n"
      "  zeroplan --version\n\n"
      "Example:\n  zeroplan --model 70B --gpus 4xA100-80G\n\n"
      "Exit codes: 0 done, 1 nothing fits or keeps its limits or check found an error, 2 bad input, 3 a device failed, "
      "70 a bug of zeroplan\n";
  return text;
}

[[noreturn]] void refuse_unknown(const std::string& name) {
  if (std::ranges::find(kLaterCommands, name) != kLaterCommands.end()) {
    throw InputError(fmt::format("zeroplan {}: not built yet", name));
  }
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.emplace_back(command.name);
  throw InputError(fmt::format("expected a command, got \"{}\"; {}", name, did_you_mean(name, names)));
}

}  // namespace

std::span<const Command> commands() { return kCommands; }

Outcome run_command_line(const Arguments& arguments) {
  if (arguments.empty()) return {program_help(), {}, kDone};
  const std::string& first = arguments.front();
  if (first == "--help" || first == "-h") return {program_help(), {}, kDone};
  if (first == "--version") return {fmt::format("zeroplan {}\n", ZEROPLAN_VERSION), {}, kDone};
  if (first.starts_with("--")) return run_plan(arguments);
  for (const Command& command : kCommands) {
    if (command.name == first) return command.run({arguments.begin() + 1, arguments.end()});
  }
  refuse_unknown(first);
}

}  // namespace zeroplan
