// zeroplan plan: the search, its report, its files.

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/terminal.h"
#include "cli/workload.h"
#include "models/error.h"
#include "planner/exports.h"
#include "planner/plan_trace.h"
#include "planner/report.h"
#include "planner/report_json.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kMostPlans = 1000;
constexpr std::string_view kExample =
    "Example:\n  zeroplan plan --model 70B --gpus 4xA100-80G --host-memory 1TiB --out plan70b";

struct PlanFlags {
  WorkloadFlags workload;
  MachineFlags machine;
  std::string top, out;
  bool json = false, force = false;

  void add_to(CommandLine& line) {
    workload.add_to(line);
    line.value("--top", "K", "How many different plans are shown [3]", top);
    machine.add_to(line);
    line.group("Output");
    line.value("--out", "DIR",
               "Write plan.json, deepspeed.json, accelerate_fsdp.yaml, launch.sh and trace.json (as simulate --trace "
               "does) there; no report.html",
               out);
    line.toggle("--force", "Overwrite files of an earlier --out", force);
    line.toggle("--json", "JSON with stable keys on stdout", json);
  }

  Request request() const {
    Request result = workload.request();
    if (!top.empty()) result.top_k = static_cast<int>(parse_integer(top, "--top", 1, kMostPlans));
    result.machine = machine.resolve();
    return result;
  }
};

/// A word as a shell reads it back.
std::string shell_quoted(const std::string& word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=./:,@%+";
  if (word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string command_of(const Arguments& arguments) {
  std::string command = "zeroplan plan";
  for (const std::string& argument : arguments) command += " " + shell_quoted(argument);
  return command;
}

/// The command line with `change`, "--host-memory 256GiB", in place of that flag's own value.
std::string command_with(const Arguments& arguments, const std::string& change) {
  const std::string flag = change.substr(0, change.find(' '));
  Arguments others;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == flag) {
      ++i;  // its value
    } else if (!arguments[i].starts_with(flag + "=")) {
      others.push_back(arguments[i]);
    }
  }
  return command_of(others) + " " + change;
}

/// Empty when no change is a flag with its value.
std::string fix_command(const Arguments& arguments, const Answer& answer) {
  if (!answer.shortfall) return "";
  for (const Shortfall::Change& change : answer.shortfall->changes) {
    if (change.flag.starts_with("--")) return command_with(arguments, change.flag);
  }
  return "";
}

/// trace.json of the plan.json among the files, read back: what `simulate` would see. Where there is no trace a note
/// says why.
void add_trace(std::vector<ExportFile>& files, std::vector<std::string>& notes) {
  const auto plan = std::ranges::find(files, "plan.json", &ExportFile::name);
  const PlanFile file = read_plan(plan->text, plan->name);
  try {
    PlanTrace trace = trace_of_plan(file, SimulatedRanks::folded);
    if (const std::string note = trace_note(trace, file.plan); !note.empty()) notes.push_back("trace.json " + note);
    files.push_back({"trace.json", std::move(trace.text), false});
  } catch (const InputError& error) {
    notes.push_back(fmt::format("trace.json is not written: {}", error.what()));
  }
}

/// Returns the names of the files.
std::vector<std::string> write_files(OutputFolder& folder, const std::vector<ExportFile>& files) {
  std::vector<std::string> names;
  folder.write(files);
  for (const ExportFile& file : files) names.push_back(file.name);
  return names;
}

}  // namespace

Outcome run_plan(const Arguments& arguments) {
  CommandLine line(
      "plan", "Find the training configuration that fits and is fastest. The default command: zeroplan --model ...",
      kExample);
  PlanFlags flags;
  flags.add_to(line);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  const Request request = flags.request();
  std::optional<OutputFolder> folder;
  if (!flags.out.empty()) folder.emplace(flags.out, flags.force);
  if (folder)
    folder->refuse_existing({"plan.json", "deepspeed.json", "accelerate_fsdp.yaml", "launch.sh", "trace.json"});

  const Answer answer = search(request);
  const Candidate* best = answer.feasible ? best_of(answer) : nullptr;
  Outcome outcome;
  outcome.exit_code = best != nullptr ? kDone : kNothingFits;
  for (const std::string& warning : answer.warnings) outcome.notes.push_back("warning: " + warning);
  PlanReport extra;
  extra.num_tokens = flags.workload.num_tokens();
  extra.command = command_of(arguments);
  extra.fix_command = fix_command(arguments, answer);
  std::optional<ExportSet> exports;
  if (folder && best != nullptr) {
    exports = export_fitted(*best, answer);
    add_trace(exports->files, exports->notes);
    extra.written = write_files(*folder, exports->files);
    extra.written_to = shell_quoted(flags.out);
    for (const std::string& note : exports->notes) outcome.notes.push_back("note: " + note);
  } else if (folder) {
    outcome.notes.push_back(fmt::format("--out: nothing fits, nothing was written to {}", flags.out));
  }
  if (flags.json) {
    outcome.out = plan_json(answer, extra.num_tokens);
  } else {
    if (best != nullptr) {
      extra.advice = advise(answer, *best);
      extra.rates = required_rates(answer, *best);
      if (best->plan.engine == Engine::zeroplan) {
        extra.under_deepspeed = exports ? exports->under_deepspeed : under_deepspeed(*best, answer);
      }
    }
    outcome.out = report_plan(answer, extra, stdout_style());
  }
  return outcome;
}

}  // namespace zeroplan
