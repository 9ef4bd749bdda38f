// zeroplan whatif: the same training on several machines, within a budget and a deadline.

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/terminal.h"
#include "cli/whatif_file.h"
#include "cli/whatif_hardware.h"
#include "models/error.h"
#include "planner/report.h"
#include "planner/report_json.h"
#include "planner/whatif_csv.h"

namespace zeroplan {
namespace {

constexpr std::string_view kExample =
    "Example:\n"
    "  zeroplan whatif --model 13B --hardware 8xA100-80G,8xH100,2x8xH100,4xA100-80G@13USD --tokens 300B\n"
    "  zeroplan whatif --model 8B --hardware 8xH100,8xA100-80G --tokens 300B --budget 60kUSD --deadline 30days\n"
    "  zeroplan whatif examples/whatif.json --out answer\n\n"
    "Within a budget or a deadline a machine whose number of nodes is not given is planned with every number that can\n"
    "share the global batch: each is predicted, none scaled. The cheapest that keeps both is recommended, the fastest\n"
    "with --objective time. Exit code 1: none keeps them; the nearest miss and what would do are printed. A flag\n"
    "replaces what FILE says, with a note.";

struct Flags {
  WhatifFlags question;
  std::string file, hardware, out;
  bool json = false, overwrite = false;

  void add_to(CommandLine& line) {
    line.positional("FILE", "Workloads, machines with their prices, budget and deadline as JSON (docs/whatif.md)",
                    file);
    question.workload.add_to(line);
    line.group("Machines");
    line.value(
        "--hardware", "A,B,C",
        "NxGPU, a catalog node or a machine.json; NODESx before it fixes the nodes, @12.5USD behind it: price of "
        "a node and hour; required without FILE",
        hardware);
    line.group("Limits of the whole run (with --tokens)");
    line.value("--budget", "USD", "US dollars: 50000USD, 50kUSD, 1.5MUSD", question.budget);
    line.value("--deadline", "DAYS", "30days, 36h, 2weeks", question.deadline);
    line.group("Output");
    line.value("--out", "DIR", "Write whatif.json, whatif.csv and MACHINE/plan.json of every row there", out);
    line.toggle("--force", "Overwrite files of an earlier --out", overwrite);
    line.toggle("--json", "JSON with stable keys on stdout", json);
  }
};

/// What is asked: the workloads, each on the machines.
struct Question {
  WhatifFile file;
  std::vector<Alternative> machines;
};

Question question_of(const Flags& flags) {
  Question question;
  if (!flags.file.empty()) question.file = read_whatif_file(flags.file);
  if (!question.file.workloads.empty() && !flags.question.workload.model.empty()) {
    throw InputError(fmt::format("--model: {} states its workloads; expected one or the other", flags.file));
  }
  if (!question.file.machines.empty() && !flags.hardware.empty()) {
    throw InputError(fmt::format("--hardware: expected none beside the machines of {}", question.file.machines_place));
  }
  if (question.file.workloads.empty()) question.file.workloads.emplace_back();
  question.machines = question.file.machines;
  if (!question.machines.empty()) return question;
  if (flags.hardware.empty()) {
    throw InputError("--hardware: expected machines such as 8xA100-80G,8xH100, got nothing; see --help");
  }
  question.machines = alternatives_of_flag(flags.hardware);
  return question;
}

NamedWhatif answer_of(const Flags& flags, const Question& question, const WhatifFile::Workload& workload,
                      std::vector<std::string>& notes) {
  try {
    const WhatifFlags all = merged(flags.question, question.file, workload, notes);
    NamedWhatif named{question.file.workloads.size() > 1 ? workload.name : "", {}, {}};
    named.answer = plan_alternatives(all.workload.request(), question.machines, all.limits());
    const std::string before = named.name.empty() ? "" : named.name + ": ";
    for (const WhatifRow& row : named.answer.rows) {
      if (!row.answer) continue;
      for (const std::string& warning : row.answer->warnings) {
        notes.push_back(fmt::format("warning: {}{}: {}", before, row.alternative.name, warning));
      }
    }
    return named;
  } catch (const InputError& error) {
    throw InputError(placed(error.what(), flags.question, question.file, workload));
  }
}

/// A name as one part of a path: what is no letter, digit, dot, plus, minus or underscore becomes a minus.
std::string folder_name(std::string_view name) {
  std::string safe;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
                       c == '+' || c == '-' || c == '_';
    safe += plain ? c : '-';
  }
  return safe.find_first_not_of('.') == std::string::npos ? "-" + safe : safe;
}

/// `name`, or with a number behind it where another folder is called that already.
std::string unused(std::string name, std::vector<std::string>& taken) {
  const std::string base = name;
  for (int n = 2; std::ranges::find(taken, name) != taken.end(); ++n) name = fmt::format("{}-{}", base, n);
  taken.push_back(name);
  return name;
}

/// Where each row's plan goes, by workload and machine: "8xH100/plan.json", with several workloads below their names.
std::vector<std::vector<std::string>> plan_names(const Question& question) {
  std::vector<std::vector<std::string>> names;
  std::vector<std::string> above;
  for (const WhatifFile::Workload& workload : question.file.workloads) {
    const bool several = question.file.workloads.size() > 1;
    const std::string prefix = several ? unused(folder_name(workload.name), above) + "/" : "";
    std::vector<std::string> taken;
    std::vector<std::string>& mine = names.emplace_back();
    for (const Alternative& machine : question.machines) {
      mine.push_back(prefix + unused(folder_name(machine.name), taken) + "/plan.json");
    }
  }
  return names;
}

std::vector<ExportFile> files_of(const std::vector<NamedWhatif>& answers) {
  std::vector<ExportFile> files{{"whatif.json", whatif_json(answers), false},
                                {"whatif.csv", whatif_csv(answers), false}};
  for (const NamedWhatif& named : answers) {
    for (std::size_t i = 0; i < named.plan_files.size(); ++i) {
      if (named.plan_files[i].empty()) continue;
      const WhatifRow& row = named.answer.rows[i];
      files.push_back({named.plan_files[i],
                       write_plan({row.best()->plan, row.answer->request.model, row.answer->request.machine}), false});
    }
  }
  return files;
}

/// Rows that fit keep the name of their plan.
void name_plans(std::vector<NamedWhatif>& answers, std::vector<std::vector<std::string>> names) {
  for (std::size_t a = 0; a < answers.size(); ++a) {
    answers[a].plan_files = std::move(names[a]);
    for (std::size_t i = 0; i < answers[a].plan_files.size(); ++i) {
      if (answers[a].answer.rows[i].best() == nullptr) answers[a].plan_files[i].clear();
    }
  }
}

std::string report_of(const std::vector<NamedWhatif>& answers) {
  std::string text;
  for (const NamedWhatif& named : answers) {
    if (!text.empty()) text += "\n";
    if (!named.name.empty()) text += fmt::format("=== {} ===\n", named.name);
    text += report_whatif(named.answer, stdout_style());
  }
  return text;
}

}  // namespace

Outcome run_whatif(const Arguments& arguments) {
  CommandLine line(
      "whatif",
      "The same training on several machines: what fits, how fast, what it costs, and which to take within "
      "a budget and a deadline.",
      kExample);
  Flags flags;
  flags.add_to(line);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  const Question question = question_of(flags);
  std::optional<OutputFolder> folder;
  std::vector<std::vector<std::string>> names;
  if (!flags.out.empty()) {
    names = plan_names(question);
    folder.emplace(flags.out, flags.overwrite);
    folder->refuse_existing({"whatif.json", "whatif.csv"});
    for (const std::vector<std::string>& of_workload : names) folder->refuse_existing(of_workload);
  }
  Outcome outcome;
  std::vector<NamedWhatif> answers;
  for (const WhatifFile::Workload& workload : question.file.workloads) {
    answers.push_back(answer_of(flags, question, workload, outcome.notes));
    if (!answers.back().answer.satisfied()) outcome.exit_code = kNothingFits;
  }
  if (folder) {
    name_plans(answers, std::move(names));
    folder->write(files_of(answers));
  }
  outcome.out = flags.json ? whatif_json(answers) : report_of(answers);
  if (folder && !flags.json) {
    outcome.out +=
        fmt::format("\nWritten to {}: whatif.json, whatif.csv, plan.json of each machine that fits\n", flags.out);
  }
  return outcome;
}

}  // namespace zeroplan
