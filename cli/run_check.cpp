// zeroplan check DS_CONFIG.json: the lint of a DeepSpeed configuration.

#include <filesystem>
#include <optional>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/terminal.h"
#include "cli/workload.h"
#include "models/error.h"
#include "planner/lint_report.h"

namespace zeroplan {
namespace {

struct CheckFlags {
  std::string path, model, out;
  MachineFlags machine;
  bool fix = false, json = false, force = false;

  void add_to(CommandLine& line) {
    line.positional("DS_CONFIG.json", "The configuration that DeepSpeed gets; required", path);
    line.value("--model", "MODEL", "Catalog name, size (70B), config.json or its directory: adds the rules of sizes",
               model);
    machine.add_to(line);
    line.group("Output");
    line.toggle("--fix", "Prints the corrected file instead of the findings; what no finding touches keeps its form",
                fix);
    line.value("--out", "FILE", "With --fix: writes the corrected file there", out);
    line.toggle("--force", "Overwrites the file of --out", force);
    line.toggle("--json", "JSON with stable keys on stdout", json);
  }

  bool machine_given() const { return !machine.gpus.empty() || !machine.machine.empty(); }
};

void write_fixed(const CheckFlags& flags, const std::string& text) {
  const std::filesystem::path path(flags.out);
  const std::string name = path.filename().string();
  if (name.empty()) throw InputError("--out: expected a file, got \"" + flags.out + "\"");
  OutputFolder folder(path.has_parent_path() ? path.parent_path().string() : ".", flags.force);
  folder.refuse_existing({name});
  folder.write({{name, text, false}});
}

/// The corrected file on stdout or in --out; what is left to do on stderr.
Outcome fixed(const CheckFlags& flags, const CheckInput& input) {
  const FixedText corrected = fix_deepspeed(input);
  const ConfigText file = ConfigText::parse(corrected.text, flags.path);
  const CheckAnswer left = check_deepspeed({file, input.model, input.machine});
  Outcome outcome;
  outcome.exit_code = left.has_errors() ? kNothingFits : kDone;
  outcome.notes.push_back(std::to_string(corrected.corrections.size()) + " corrected");
  for (const std::string& correction : corrected.corrections)
    outcome.notes.push_back("corrected: " + printable_line(correction));
  for (const Finding& finding : left.findings) {
    if (finding.rule->severity == Severity::note) continue;
    outcome.notes.push_back(finding_line(file, finding));
  }
  if (flags.out.empty()) {
    outcome.out = corrected.text;
  } else {
    write_fixed(flags, corrected.text);
  }
  return outcome;
}

}  // namespace

Outcome run_check(const Arguments& arguments) {
  CommandLine line(
      "check",
      "What DeepSpeed 0.19 does with each wrong, dead or contradictory key of a configuration, and the corrected text.",
      "Example:\n  zeroplan check ds_config.json --model 70B --gpus 8xA100-80G\n"
      "  zeroplan check ds_config.json --fix > fixed.json");
  CheckFlags flags;
  flags.add_to(line);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (flags.path.empty()) throw InputError("zeroplan check: expected DS_CONFIG.json, got nothing; see --help");
  if (!flags.out.empty() && !flags.fix) throw InputError("--out: has no meaning without --fix");
  if (flags.force && flags.out.empty()) throw InputError("--force: has no meaning without --out");
  if (flags.json && flags.fix) throw InputError("--json: has no meaning with --fix, which prints the file");
  const ConfigText file = ConfigText::parse(read_text_file(flags.path), flags.path);
  std::optional<ModelSpec> model;
  if (!flags.model.empty()) model = find_model(flags.model);
  std::optional<MachineSpec> machine;
  const MachineFlags& m = flags.machine;
  if (flags.machine_given()) {
    machine = m.resolve();
  } else if (!m.nodes.empty() || !m.host_memory.empty() || !m.nvme.empty()) {
    throw InputError("--gpus: expected NxGPU such as 4xA100-80G beside --nodes, --host-memory and --nvme, got nothing");
  }
  const CheckInput input{file, model ? &*model : nullptr, machine ? &*machine : nullptr};
  if (flags.fix) return fixed(flags, input);
  const CheckAnswer answer = check_deepspeed(input);
  const int exit_code = answer.has_errors() ? kNothingFits : kDone;
  if (flags.json) return {check_json(input, answer), {}, exit_code};
  return {report_check(input, answer, stdout_style()), {}, exit_code};
}

}  // namespace zeroplan
