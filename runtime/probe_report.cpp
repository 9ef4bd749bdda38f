#include "runtime/probe_report.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

/// What is not known is left out.
Json measured_json(const MachineSpec& machine) {
  Json json{{"name", machine.name}, {"cpu", machine.cpu}, {"memory_bytes", std::llround(machine.dram.base())}};
  const auto rate = [&](const char* type, const std::optional<FlopsPerSecond>& peak) {
    if (peak) json["flops_per_second"][type] = peak->base();
  };
  rate("bf16", machine.gpu.peak_bf16);
  rate("fp16", machine.gpu.peak_fp16);
  rate("fp32", machine.gpu.peak_fp32);
  json["memory_rates"] = Json::array();
  for (const HostMemoryRate& m : machine.host_kernels->memory) {
    json["memory_rates"].push_back({{"threads", m.threads}, {"bytes_per_second", m.rate.base()}});
  }
  if (machine.nvme.drives > 0) {
    json["disk"] = {{"read_bytes_per_second", machine.nvme.read.base()},
                    {"write_bytes_per_second", machine.nvme.write.base()}};
  }
  return json;
}

}  // namespace

std::string report_probe(const MachineSpec& machine, const std::string& path) {
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

std::string probe_json(const ProbeResult& result, const std::string& written_to) {
  Json json = measured_json(result.machine);
  json["machine"] = Json::parse(write_machine(result.machine));
  json["notes"] = result.notes;
  if (!written_to.empty()) json["written_to"] = written_to;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace zeroplan
