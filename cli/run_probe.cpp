// zeroplan probe: measures this machine; the file is a machine.

#include <fmt/format.h>

#include <filesystem>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "models/error.h"
#include "runtime/probe.h"

namespace zeroplan {
namespace {

std::string summary(const MachineSpec& machine, const std::string& path) {
  const HostKernels& host = *machine.host_kernels;
  std::string text = fmt::format("{}: {}, {} of memory\n", machine.name, machine.cpu, format_gib(machine.dram));
  const auto rate = [&](const char* type, const std::optional<FlopsPerSecond>& peak) {
    if (peak) text += fmt::format("  {} products    {:.0f} GFLOP/s\n", type, peak->base() / 1e9);
  };
  rate("bf16", machine.gpu.peak_bf16);
  rate("fp16", machine.gpu.peak_fp16);
  rate("fp32", machine.gpu.peak_fp32);
  for (const HostMemoryRate& m : host.memory) {
    text += fmt::format("  memory, {} thread{}  {}, read and written\n", m.threads, m.threads == 1 ? " " : "s",
                        format_rate(m.rate));
  }
  if (machine.nvme.drives > 0) {
    text += fmt::format("  disk             {} read, {} write\n", format_rate(machine.nvme.read),
                        format_rate(machine.nvme.write));
  }
  return text + fmt::format("Written to {}: zeroplan plan --machine {} --gpus N counts ranks on it\n", path, path);
}

}  // namespace

Outcome run_probe(const Arguments& arguments) {
  CommandLine line("probe",
                   "Measures this machine's cores, memory, disk and collectives, in under a minute. The file is a "
                   "machine for plan, simulate and run.",
                   "Example:\n  zeroplan probe --out machine.json\n"
                   "  zeroplan plan --model config.json --machine machine.json --gpus 2 --global-batch 8 --out plan");
  std::string out, disk;
  bool overwrite = false;
  line.value("--out", "MACHINE.json", "The file to write [the machine goes to stdout]", out);
  line.value("--disk", "DIR|none", "Directory of the disk to measure, 64 MiB are written and removed [.]", disk);
  line.toggle("--force", "Overwrites the file", overwrite);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (!disk.empty() && disk != "none" && !std::filesystem::is_directory(disk)) {
    throw InputError(fmt::format("--disk: expected a directory that is there, or none, got \"{}\"", disk));
  }
  ProbeOptions options;
  options.disk_directory = disk.empty() ? "." : disk == "none" ? "" : disk;
  if (out.empty()) {
    const ProbeResult result = probe_host(options);
    return {write_machine(result.machine), result.notes, kDone};
  }
  const std::filesystem::path path(out);
  const std::string folder = path.has_parent_path() ? path.parent_path().string() : ".";
  const std::string name = path.filename().string();
  if (name.empty()) throw InputError(fmt::format("--out: expected a file's name, got \"{}\"", out));
  OutputFolder target(folder, overwrite);
  target.refuse_existing({name});
  const ProbeResult result = probe_host(options);
  target.write({{name, write_machine(result.machine), false}});
  return {summary(result.machine, out), result.notes, kDone};
}

}  // namespace zeroplan
