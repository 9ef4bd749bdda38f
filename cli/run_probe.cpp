// zeroplan probe: measures this machine; the file is a machine.

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "models/error.h"
#include "runtime/probe.h"
#include "runtime/probe_report.h"

namespace zeroplan {

Outcome run_probe(const Arguments& arguments) {
  CommandLine line("probe",
                   "Measures this machine's cores, memory, disk and collectives, in under a minute. The file is a "
                   "machine for plan, simulate and run.",
                   "Example:\n  zeroplan probe --out machine.json\n"
                   "  zeroplan plan --model config.json --machine machine.json --gpus 2 --global-batch 8 --out plan");
  std::string out, disk;
  bool overwrite = false, json = false;
  line.value("--out", "MACHINE.json", "The file to write [the machine goes to stdout]", out);
  line.value("--disk", "DIR|none", "Directory of the disk to measure, 64 MiB are written and removed [.]", disk);
  line.toggle("--json", "What was measured as JSON with stable keys on stdout, machine.json among them", json);
  line.toggle("--force", "Overwrites the file", overwrite);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (!disk.empty() && disk != "none" && !std::filesystem::is_directory(disk)) {
    throw InputError(fmt::format("--disk: expected a directory that is there, or none, got \"{}\"", disk));
  }
  ProbeOptions options;
  options.disk_directory = disk.empty() ? "." : disk == "none" ? "" : disk;
  if (out.empty()) {
    const ProbeResult result = probe_host(options);
    return {json ? probe_json(result, "") : write_machine(result.machine), result.notes, kDone};
  }
  OutputFile target(out, overwrite, "--out");
  const ProbeResult result = probe_host(options);
  target.write(write_machine(result.machine));
  Outcome outcome{json ? probe_json(result, out) : report_probe(result.machine, out), result.notes, kDone};
  for (std::string& note : target.notes()) outcome.notes.push_back(std::move(note));
  return outcome;
}

}  // namespace zeroplan
