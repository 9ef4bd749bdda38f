#include "cli/machines_command.h"

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "models/error.h"
#include "models/machine_catalog.h"
#include "models/machine_json.h"
#include "models/units.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

/// Prints "  label   value", with "recalled" behind what came from memory.
class Sheet {
 public:
  Sheet(std::ostream& out, const std::vector<std::string>& recalled) : out_(out), recalled_(recalled) {}

  void line(std::string_view field, std::string_view label, const std::string& value) const {
    const bool recalled = std::ranges::find(recalled_, field) != recalled_.end();
    fmt::print(out_, "  {:<22} {}{}\n", label, value, recalled ? "  (recalled)" : "");
  }

 private:
  std::ostream& out_;
  const std::vector<std::string>& recalled_;
};

std::string tflops(const std::optional<FlopsPerSecond>& rate) {
  return rate ? fmt::format("{:.4g} TFLOPS", rate->base() / 1e12) : "not known";
}

std::string or_unknown(const std::string& text) { return text.empty() ? "not known" : text; }

void print_list(std::ostream& out, std::string_view title, const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  fmt::print(out, "{}\n", title);
  for (const std::string& line : lines) fmt::print(out, "  {}\n", line);
}

std::string nvlink_text(BytesPerSecond rate, std::string_view per) {
  return rate.base() > 0 ? fmt::format("{} {}, one direction", format_rate(rate), per) : "none";
}

void print_gpu_lines(const GpuSpec& gpu, std::ostream& out) {
  const Sheet sheet(out, gpu.recalled);
  sheet.line("", "vendor", fmt::format("{}, {}", or_unknown(gpu.vendor), or_unknown(gpu.arch)));
  sheet.line("", "compute capability", or_unknown(gpu.compute_capability));
  sheet.line("memory", "memory", format_gib(gpu.memory));
  sheet.line("memory_bandwidth", "memory bandwidth", format_rate(gpu.memory_bandwidth));
  sheet.line("peak_bf16", "peak bf16, dense", tflops(gpu.peak_bf16));
  sheet.line("peak_fp16", "peak fp16, dense", tflops(gpu.peak_fp16));
  sheet.line("peak_fp32", "peak fp32", tflops(gpu.peak_fp32));
  sheet.line("measured_matmul", "measured matmul", tflops(gpu.measured_matmul));
  sheet.line("num_sms", "SMs", gpu.num_sms ? fmt::format("{}", *gpu.num_sms) : "not known");
  sheet.line("nvlink", "links of the GPU", nvlink_text(gpu.nvlink, "for all"));
  sheet.line("pcie", "PCIe", fmt::format("Gen{}, {}, one direction", gpu.pcie_generation, format_rate(gpu.pcie)));
  sheet.line("p2p_over_pcie", "peer access over PCIe",
             gpu.p2p_over_pcie ? (*gpu.p2p_over_pcie ? "yes" : "no") : "not known");
  if (gpu.c2c.base() > 0) {
    sheet.line("c2c", "NVLink-C2C to the CPU",
               fmt::format("{}, one direction, for {} GPU(s)", format_rate(gpu.c2c), gpu.gpus_per_c2c));
  }
}

std::string nvme_text(const NvmeSpec& nvme) {
  if (nvme.drives == 0) return "none";
  return fmt::format("{} drives, {} in all, read {}, write {}", nvme.drives, format_gib(nvme.capacity),
                     format_rate(nvme.read), format_rate(nvme.write));
}

std::string network_text(const NetworkSpec& network) {
  if (network.nics == 0) return "not known";
  return fmt::format("{} NICs, {} in all, one direction ({}){}", network.nics, format_rate(network.bandwidth),
                     or_unknown(network.kind), network.gpudirect ? ", GPUDirect" : "");
}

std::string price_text(const std::optional<PriceSpec>& price) {
  if (!price) return "not known";
  std::string where = price->source;
  if (!price->date.empty()) where = fmt::format("{}; {}", price->date, where);
  if (!price->region.empty()) where = fmt::format("{}, {}", price->region, where);
  return fmt::format("{:.2f} USD an hour on demand ({})", price->usd_per_hour, where);
}

void print_node_lines(const MachineSpec& machine, std::ostream& out) {
  const Sheet sheet(out, machine.recalled);
  sheet.line("", "GPUs", fmt::format("{} x {} a node", machine.gpus_per_node, machine.gpu.name));
  if (machine.nodes > 1) sheet.line("", "nodes", fmt::format("{}", machine.nodes));
  sheet.line("interconnect", "GPU interconnect", std::string(to_string(machine.interconnect)));
  sheet.line("nvlink", "GPU links as wired", nvlink_text(machine.nvlink, "a GPU"));
  sheet.line("gpus_per_pcie_switch", "GPUs a PCIe switch", fmt::format("{}", machine.gpus_per_pcie_switch));
  sheet.line("gpus_per_root_complex", "GPUs a root complex", fmt::format("{}", machine.gpus_per_root_complex));
  sheet.line("cpu", "CPU", or_unknown(machine.cpu));
  sheet.line("sockets", "sockets", fmt::format("{}", machine.sockets));
  if (machine.sockets > 1) sheet.line("socket_link", "between sockets", format_rate(machine.socket_link));
  sheet.line("physical_cores", "cores",
             machine.physical_cores > 0 ? fmt::format("{}", machine.physical_cores) : "not known");
  sheet.line("dram", "host memory",
             fmt::format("{} ({} usable)", format_gib(machine.dram), format_gib(machine.usable_dram())));
  sheet.line("dram_bandwidth", "host memory bandwidth", format_rate(machine.dram_bandwidth) + " achievable");
  sheet.line("nvme", "NVMe", nvme_text(machine.nvme));
  sheet.line("network", "network", network_text(machine.network));
  sheet.line("price", "price of a node", price_text(machine.price));
}

Json list_as_json() {
  Json machines = Json::array();
  for (const NodeEntry& node : node_index()) {
    Json entry{{"name", node.name},
               {"provider", node.provider},
               {"kind", node.kind},
               {"gpu", node.gpu},
               {"gpus_per_node", node.gpus_per_node}};
    if (!node.dram.empty()) entry["dram_bytes"] = parse_bytes(node.dram, node.name).base();
    if (node.usd_per_hour > 0) entry["usd_per_hour"] = node.usd_per_hour;
    machines.push_back(std::move(entry));
  }
  Json gpus = Json::array();
  for (const std::string& name : gpu_names()) {
    const GpuSpec gpu = find_gpu(name);
    gpus.push_back({{"name", name},
                    {"vendor", gpu.vendor},
                    {"memory_bytes", gpu.memory.base()},
                    {"memory_bandwidth", gpu.memory_bandwidth.base()}});
  }
  return {{"machines", std::move(machines)}, {"gpus", std::move(gpus)}};
}

/// The GPU that a name or alias means, if it means one.
std::optional<GpuSpec> gpu_by_any_name(const std::string& name) {
  try {
    return find_gpu(parse_gpu_request("1x" + name).gpu);
  } catch (const InputError&) {
    return std::nullopt;
  }
}

}  // namespace

void print_machines(std::ostream& out, bool json) {
  if (json) {
    fmt::print(out, "{}\n", list_as_json().dump(2));
    return;
  }
  fmt::print(out, "{:<40} {:<38} {:>12} {:>10}  {}\n", "machine", "GPUs", "host memory", "USD/hour", "provider");
  for (const NodeEntry& node : node_index()) {
    const std::string dram = node.dram.empty() ? "-" : format_gib(parse_bytes(node.dram, node.name));
    const std::string price = node.usd_per_hour > 0 ? fmt::format("{:.2f}", node.usd_per_hour) : "-";
    fmt::print(out, "{:<40} {:<38} {:>12} {:>10}  {}\n", node.name,
               fmt::format("{} x {}", node.gpus_per_node, node.gpu), dram, price, node.provider);
  }
  fmt::print(out, "\n{:<40} {:>12} {:>14} {:>14}\n", "GPU", "memory", "bandwidth", "peak 16-bit");
  for (const std::string& name : gpu_names()) {
    const GpuSpec gpu = find_gpu(name);
    fmt::print(out, "{:<40} {:>12} {:>14} {:>14}\n", name, format_gib(gpu.memory), format_rate(gpu.memory_bandwidth),
               tflops(gpu.peak_bf16 ? gpu.peak_bf16 : gpu.peak_fp16));
  }
}

void print_machine(const MachineSpec& machine, std::ostream& out, bool json) {
  if (json) {
    out << write_machine(machine);
    return;
  }
  fmt::print(out, "{}{}{}\n", machine.name, machine.provider.empty() ? "" : ", " + machine.provider,
             machine.kind.empty() ? "" : ", " + machine.kind);
  print_node_lines(machine, out);
  fmt::print(out, "GPU {}, as this node wires it\n", machine.gpu.name);
  print_gpu_lines(machine.gpu, out);
  std::vector<std::string> assumed;
  for (const Assumption& assumption : machine.assumptions) {
    assumed.push_back(fmt::format("{}: {} ({})", assumption.what, assumption.value, assumption.source));
  }
  print_list(out, "Assumptions", assumed);
  print_list(out, "Sources of the node", machine.sources);
  print_list(out, "Sources of the GPU", machine.gpu.sources);
}

void print_gpu(const GpuSpec& gpu, std::ostream& out, bool json) {
  if (json) {
    out << write_gpu(gpu);
    return;
  }
  fmt::print(out, "{}\n", gpu.name);
  print_gpu_lines(gpu, out);
  print_list(out, "Sources", gpu.sources);
}

void print_machine_or_gpu(const std::string& name, std::ostream& out, bool json) {
  std::string why;
  try {
    return print_machine(find_machine(name), out, json);
  } catch (const InputError& error) {
    why = error.what();
  }
  if (const auto gpu = gpu_by_any_name(name)) return print_gpu(*gpu, out, json);
  if (why.find("--machine: expected") == std::string::npos) throw InputError(why);  // a file that cannot be read
  std::vector<std::string> names;
  for (const NodeEntry& node : node_index()) {
    names.push_back(node.name);
    names.insert(names.end(), node.aliases.begin(), node.aliases.end());
  }
  for (std::string& gpu : gpu_names()) names.push_back(std::move(gpu));
  throw InputError(fmt::format("machines: expected a machine, a GPU or a machine.json, got \"{}\": {}", name,
                               did_you_mean(name, names)));
}

}  // namespace zeroplan
