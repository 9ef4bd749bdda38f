// What people type for machines: --gpus, --nvme, and the machine that a bare --gpus means.

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <tuple>

#include "models/machine_catalog.h"

namespace zeroplan {
namespace {

constexpr std::string_view kExpected = "NxGPU such as 4xA100-80G";
constexpr int kUsualMostPerNode = 8;  // nodes of 8 are sold for any GPU; more only where the catalog has one
constexpr std::int64_t kMostTyped = 1'000'000;
constexpr std::size_t kMostDrives = 1024;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

/// A printable piece of what was typed.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text.substr(0, 60)) result += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return result + '"';
}

/// "80", "80g", "80gb", "80gib" -> 80; anything else, or a leading zero, is no memory suffix.
std::optional<int> memory_suffix(std::string_view text) {
  std::size_t digits = 0;
  while (digits < text.size() && is_digit(text[digits])) ++digits;
  if (digits == 0 || digits > 4 || text[0] == '0') return std::nullopt;
  const std::string_view unit = text.substr(digits);
  if (!unit.empty() && unit != "g" && unit != "gb" && unit != "gib") return std::nullopt;
  int value = 0;
  for (const char c : text.substr(0, digits)) value = 10 * value + (c - '0');
  return value;
}

/// The canonical name without its memory part: A100-SXM4-40GB and A100-SXM4-80GB are one family, "a100sxm4".
std::string family(const GpuEntry& gpu) {
  const std::size_t dash = gpu.name.rfind('-');
  if (dash != std::string::npos && memory_suffix(normalized(gpu.name.substr(dash + 1))) == gpu.label) {
    return normalized(gpu.name.substr(0, dash));
  }
  return normalized(gpu.name);
}

bool answers_to(const GpuEntry& gpu, const std::string& name) {
  const auto same = [&](const std::string& text) { return normalized(text) == name; };
  return same(gpu.name) || std::ranges::any_of(gpu.aliases, same) || std::ranges::any_of(gpu.default_for, same);
}

using Matches = std::vector<const GpuEntry*>;

std::string list_names(const Matches& gpus) {
  std::string result;
  for (const GpuEntry* gpu : gpus) {
    result += fmt::format("{}{} ({} GB)", result.empty() ? "" : ", ", gpu->name, gpu->label);
  }
  return result;
}

/// Names given to a whole family, or the family of a GPU that answers to the name.
Matches family_members(const std::vector<GpuEntry>& index, const std::string& base) {
  std::vector<std::string> families;
  for (const GpuEntry& gpu : index) {
    if (family(gpu) == base || answers_to(gpu, base)) families.push_back(family(gpu));
  }
  Matches result;
  for (const GpuEntry& gpu : index) {
    if (std::ranges::find(families, family(gpu)) != families.end()) result.push_back(&gpu);
  }
  return result;
}

[[noreturn]] void refuse_unknown(const std::vector<GpuEntry>& index, std::string_view typed, std::string_view where) {
  std::vector<std::string> names;
  for (const GpuEntry& gpu : index) {
    names.push_back(gpu.name);
    names.insert(names.end(), gpu.aliases.begin(), gpu.aliases.end());
  }
  throw InputError(fmt::format("{}: unknown GPU {}: {}", where, quoted(typed), did_you_mean(typed, names)));
}

/// The member of a family with that label. Throws when none or several have it.
const GpuEntry& with_label(const std::vector<GpuEntry>& index, const Matches& members, int label,
                           std::string_view typed, const std::string& base, std::string_view where) {
  Matches fitting;
  for (const GpuEntry* gpu : members) {
    if (gpu->label == label) fitting.push_back(gpu);
  }
  if (fitting.size() == 1) return *fitting.front();
  if (fitting.size() > 1) {
    throw InputError(fmt::format("{}: {} is ambiguous: {}", where, quoted(typed), list_names(fitting)));
  }
  Matches others = members;  // other form factors of the same chip, to choose from
  for (const GpuEntry& gpu : index) {
    if (normalized(gpu.name).starts_with(base) && std::ranges::find(others, &gpu) == others.end()) {
      others.push_back(&gpu);
    }
  }
  throw InputError(
      fmt::format("{}: {}: no such GPU has {} GB, there is {}", where, quoted(typed), label, list_names(others)));
}

const GpuEntry& resolve_gpu(const std::vector<GpuEntry>& index, std::string_view typed, std::string_view where) {
  const std::string name = normalized(typed);
  for (const GpuEntry& gpu : index) {
    if (answers_to(gpu, name)) return gpu;
  }
  const Matches whole = family_members(index, name);
  const auto is_default = [](const GpuEntry* gpu) { return !gpu->default_for.empty(); };
  if (const auto found = std::ranges::find_if(whole, is_default); found != whole.end()) return **found;
  if (whole.size() == 1) return *whole.front();
  if (!whole.empty()) {
    throw InputError(fmt::format("{}: {} is ambiguous: {}", where, quoted(typed), list_names(whole)));
  }
  for (std::size_t end = name.size(); end-- > 1;) {  // the longest name that leaves a memory suffix
    const std::optional<int> label = memory_suffix(std::string_view(name).substr(end));
    if (!label) continue;
    const std::string base = name.substr(0, end);
    const Matches members = family_members(index, base);
    if (!members.empty()) return with_label(index, members, *label, typed, base, where);
  }
  refuse_unknown(index, typed, where);
}

/// GPUs of the same form that differ in memory, when the typed name does not say which: A100 is 80 GB, and 40 GB exist.
Matches of_other_memory(const std::vector<GpuEntry>& index, const GpuEntry& taken, std::string_view typed) {
  const std::string name = normalized(typed);
  for (std::size_t end = name.size(); end-- > 1;) {
    if (memory_suffix(std::string_view(name).substr(end)) == taken.label) return {};
  }
  Matches others;
  for (const GpuEntry& gpu : index) {
    if (family(gpu) == family(taken) && gpu.label != taken.label) others.push_back(&gpu);
  }
  return others;
}

/// Largest node that is sold, and the counts that the catalog has for this GPU.
struct NodeSizes {
  int largest = kUsualMostPerNode;
  std::vector<int> counts;
};

NodeSizes node_sizes(const std::vector<NodeEntry>& nodes, const std::string& gpu) {
  NodeSizes sizes;
  for (const NodeEntry& node : nodes) {
    if (node.gpu != gpu) continue;
    sizes.counts.push_back(node.gpus_per_node);
    sizes.largest = std::max(sizes.largest, node.gpus_per_node);
  }
  return sizes;
}

/// `count` GPUs spread over equal nodes: a size that the catalog has if one divides it, else the largest that does.
int node_size_for(int count, const NodeSizes& sizes) {
  int best = 1;
  bool best_listed = false;
  for (int size = 1; size <= sizes.largest; ++size) {
    if (count % size != 0) continue;
    const bool listed = size > 1 && std::ranges::find(sizes.counts, size) != sizes.counts.end();
    if (listed >= best_listed) best = size, best_listed = listed;
  }
  return best;
}

void refuse_large(const GpuRequest& request, int nodes, const NodeSizes& sizes, const TypedMachine& typed) {
  if (request.count <= sizes.largest) return;
  const int size = node_size_for(request.count, sizes);
  const std::int64_t needed = static_cast<std::int64_t>(nodes) * (request.count / size);
  const std::string node = fmt::format("{}x{}", size, request.gpu);
  throw InputError(fmt::format("{}: {}x{} is more than one node holds (at most {}): use {}", typed.where, request.count,
                               request.gpu, sizes.largest,
                               typed.nodes == NodesForm::prefix ? fmt::format("{}x{}", needed, node)
                                                                : fmt::format("--gpus {} --nodes {}", node, needed)));
}

const NodeEntry* cheapest_cloud(const std::vector<NodeEntry>& nodes, const GpuRequest& request) {
  const NodeEntry* best = nullptr;
  const auto rank = [](const NodeEntry& node) {  // at equal prices the one with more host memory
    return std::tuple(node.usd_per_hour, -parse_bytes(node.dram, "dram").base());
  };
  for (const NodeEntry& node : nodes) {
    if (node.gpu != request.gpu || node.gpus_per_node != request.count || node.kind != "cloud") continue;
    if (node.usd_per_hour <= 0 || node.dram.empty()) continue;
    if (best == nullptr || rank(node) < rank(*best)) best = &node;
  }
  return best;
}

/// Products before templates, stated host memory before none, then by name.
const NodeEntry* on_premise(const std::vector<NodeEntry>& nodes, const GpuRequest& request) {
  const NodeEntry* best = nullptr;
  const auto rank = [](const NodeEntry& node) { return std::tuple(node.dram.empty(), node.kind); };
  for (const NodeEntry& node : nodes) {
    if (node.gpu != request.gpu || node.gpus_per_node != request.count || node.kind == "cloud") continue;
    if (best == nullptr || rank(node) < rank(*best)) best = &node;
  }
  return best;
}

Interconnect generic_interconnect(Wiring wiring, int count) {
  if (count == 1) return Interconnect::single;
  switch (wiring) {
    case Wiring::none:
      return Interconnect::root_complex;
    case Wiring::pairs:
      return Interconnect::nvlink_pairs;
    case Wiring::mesh:
      return Interconnect::nvlink_mesh;
    case Wiring::nvswitch_above_4:
      return count <= 4 ? Interconnect::nvlink_mesh : Interconnect::nvswitch;
    case Wiring::nvswitch_above_8:
      return count <= 8 ? Interconnect::nvlink_mesh : Interconnect::nvswitch;
    case Wiring::nvswitch:
      return Interconnect::nvswitch;
  }
  return Interconnect::root_complex;
}

/// Links of a point-to-point fabric that is not NVIDIA's go one to each peer: fewer peers, fewer links.
BytesPerSecond generic_nvlink(const CatalogGpu& gpu, Interconnect interconnect, int count) {
  if (interconnect == Interconnect::single || interconnect == Interconnect::root_complex) return {};
  const int links = gpu.spec.nvlink_links;
  if (gpu.wiring == Wiring::mesh && gpu.spec.vendor != "NVIDIA" && links > 0 && count - 1 < links) {
    return gpu.spec.nvlink * (count - 1) / links;
  }
  return gpu.spec.nvlink;
}

MachineSpec generic_node(const GpuRequest& request) {
  const CatalogGpu gpu = load_gpu(request.gpu);
  MachineSpec machine;
  machine.name = fmt::format("generic-{}x{}", request.count, request.gpu);
  machine.provider = "generic";
  machine.kind = "generic";
  machine.gpu = gpu.spec;
  machine.gpus_per_node = request.count;
  machine.interconnect = generic_interconnect(gpu.wiring, request.count);
  machine.nvlink = generic_nvlink(gpu, machine.interconnect, request.count);
  machine.sources = {"node_defaults.json"};
  if (request.count > 1) {
    machine.assumptions.push_back({"GPU interconnect", std::string(to_string(machine.interconnect)),
                                   "default: how boxes of this GPU are usually wired; optional bridges not counted"});
  }
  complete_node(machine, gpu, PartialNode{});
  return machine;
}

std::string price_text(const PriceSpec& price) {
  std::string text = fmt::format("{:.4g} USD per hour", price.usd_per_hour);
  if (!price.region.empty()) text += ", " + price.region;
  if (!price.date.empty()) text += ", " + price.date;
  return text;
}

}  // namespace

GpuRequest parse_gpu_request(std::string_view text, std::string_view where) {
  const std::string_view whole = trimmed(text);
  std::size_t digits = whole.starts_with('-') || whole.starts_with('+') ? 1 : 0;
  while (digits < whole.size() && (is_digit(whole[digits]) || whole[digits] == '.')) ++digits;
  const std::string_view rest = trimmed(whole.substr(digits));
  if (digits == 0 || rest.size() < 2 || (rest[0] != 'x' && rest[0] != 'X')) {
    throw InputError(fmt::format("{}: expected {}, got {}", where, kExpected, quoted(text)));
  }
  const std::int64_t count =
      parse_integer(whole.substr(0, digits), fmt::format("{}: the count in {}", where, quoted(text)), 1, kMostTyped);
  const std::string_view name = trimmed(rest.substr(1));
  const std::vector<GpuEntry> index = gpu_index();
  if (normalized(name).empty()) refuse_unknown(index, name, where);
  const GpuEntry& taken = resolve_gpu(index, name, where);
  GpuRequest request{static_cast<int>(count), taken.name};
  if (const Matches others = of_other_memory(index, taken, name); !others.empty()) {
    request.typed = std::string(name);
    request.others = list_names(others);
  }
  return request;
}

MachineSpec machine_for(const GpuRequest& request, int nodes, const TypedMachine& typed) {
  const std::vector<NodeEntry> index = node_index();
  if (request.count < 1) {
    throw InputError(fmt::format("{}: expected {}, got {} GPUs", typed.where, kExpected, request.count));
  }
  refuse_large(request, std::max(nodes, 1), node_sizes(index, request.gpu), typed);
  MachineSpec machine;
  std::string why;
  if (const NodeEntry* cloud = cheapest_cloud(index, request)) {
    machine = load_node(cloud->name);
    why = fmt::format("default: cheapest on-demand priced catalog node with {} x {} ({})", request.count, request.gpu,
                      price_text(*machine.price));
  } else if (const NodeEntry* own = on_premise(index, request)) {
    machine = load_node(own->name);
    why = fmt::format("default: on-premise catalog entry; no priced cloud node with {} x {} states its host memory",
                      request.count, request.gpu);
  } else {
    machine = generic_node(request);
    why = fmt::format("default: no catalog node with {} x {} states its host memory; filled from node_defaults.json",
                      request.count, request.gpu);
  }
  machine.assumptions.insert(machine.assumptions.begin(),
                             {"machine", fmt::format("{} ({})", machine.name, machine.provider), why});
  if (!request.others.empty()) {
    machine.assumptions.insert(
        machine.assumptions.begin(),
        {"GPU", request.gpu, fmt::format("{} means that one; there is also {}", request.typed, request.others)});
  }
  set_nodes(machine, nodes);
  return machine;
}

NvmeSpec parse_nvme(std::string_view text, std::string_view where) {
  constexpr std::string_view kForm = "DRIVESxSIZE[@RATE] such as 4x2TB or 4x2TB@6.5GB/s, or none";
  const std::size_t times = text.find_first_of("xX");
  if (times == std::string_view::npos || times == 0) {
    throw InputError(fmt::format("{}: expected {}, got {}", where, kForm, quoted(text)));
  }
  const std::size_t at = text.find('@', times);
  const std::string_view size = text.substr(times + 1, at == std::string_view::npos ? at : at - times - 1);
  NvmeSpec nvme;
  nvme.drives =
      static_cast<int>(parse_integer(text.substr(0, times), fmt::format("{}: drives", where), 1, kMostDrives));
  nvme.capacity = parse_bytes(size, fmt::format("{}: size of a drive", where)) * nvme.drives;
  if (at == std::string_view::npos) {
    const JsonDocument defaults = read_catalog("node_defaults.json");
    nvme.read = defaults.root().at("nvme_drive").at("read").as_rate() * nvme.drives;
    nvme.write = defaults.root().at("nvme_drive").at("write").as_rate() * nvme.drives;
  } else {
    nvme.read = parse_rate(text.substr(at + 1), fmt::format("{}: read rate of a drive", where)) * nvme.drives;
    nvme.write = nvme.read / 2;
  }
  if (nvme.capacity.base() <= 0 || nvme.read.base() <= 0) {
    throw InputError(fmt::format("{}: expected {}, got {} (zero)", where, kForm, quoted(text)));
  }
  return nvme;
}

void set_host_memory(MachineSpec& machine, Bytes dram) {
  machine.dram = dram;
  std::erase(machine.recalled, "dram");
  std::erase_if(machine.assumptions, [](const Assumption& assumption) { return assumption.what == "host memory"; });
}

void set_nvme(MachineSpec& machine, std::string_view text, std::string_view where) {
  const bool none = text == "none";
  machine.nvme = none ? NvmeSpec{} : parse_nvme(text, where);
  std::erase(machine.recalled, "nvme");
  std::erase_if(machine.assumptions, [](const Assumption& assumption) { return assumption.what.starts_with("NVMe"); });
  if (none) return;
  if (text.find('@') != std::string_view::npos) {
    machine.assumptions.push_back({"NVMe write rate", format_rate(machine.nvme.write), "default: half the read rate"});
    return;
  }
  const JsonDocument defaults = read_catalog("node_defaults.json");
  const std::string source = fmt::format("default: {}", defaults.root().at("nvme_drive").at("source").as_string());
  machine.assumptions.push_back({"NVMe read rate", format_rate(machine.nvme.read), source});
  machine.assumptions.push_back({"NVMe write rate", format_rate(machine.nvme.write), source});
}

}  // namespace zeroplan
