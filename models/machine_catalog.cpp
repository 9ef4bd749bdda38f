#include "models/machine_catalog.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <stdexcept>

#include "models/catalog.h"
#include "models/machine_json.h"

namespace zeroplan {
namespace {

constexpr int kMostPerNode = 1024;
constexpr std::int64_t kMostSms = 1 << 20;

// What the entries of gpus/ and nodes/ may say (docs/machines.md).
constexpr std::string_view kGpuKeys[] = {"name",
                                         "aliases",
                                         "default_for",
                                         "vendor",
                                         "arch",
                                         "segment",
                                         "form_factor",
                                         "compute_capability",
                                         "label",
                                         "memory",
                                         "driver_memory",
                                         "physical_memory",
                                         "memory_bandwidth",
                                         "peak_bf16",
                                         "peak_fp16",
                                         "peak_fp32",
                                         "measured_matmul",
                                         "num_sms",
                                         "nvlink",
                                         "nvlink_generation",
                                         "nvlink_links",
                                         "wiring",
                                         "pcie_generation",
                                         "pcie",
                                         "p2p_over_pcie",
                                         "c2c",
                                         "gpus_per_c2c",
                                         "sources",
                                         "recalled"};
constexpr std::string_view kNodeKeys[] = {"name",
                                          "aliases",
                                          "provider",
                                          "kind",
                                          "gpu",
                                          "gpus_per_node",
                                          "interconnect",
                                          "nvlink",
                                          "gpus_per_pcie_switch",
                                          "gpus_per_root_complex",
                                          "pcie_generation",
                                          "pcie_lanes",
                                          "sockets",
                                          "physical_cores",
                                          "vcpus",
                                          "cpu",
                                          "dram",
                                          "dram_bandwidth",
                                          "nvme",
                                          "network",
                                          "price",
                                          "sources",
                                          "recalled"};

std::vector<std::string> texts(const JsonValue& array) {
  std::vector<std::string> result;
  for (const JsonValue& item : array.items()) result.push_back(item.as_string());
  return result;
}

std::vector<std::string> texts_at(const JsonValue& object, std::string_view key) {
  const JsonValue* array = object.find(key);
  return array == nullptr ? std::vector<std::string>{} : texts(*array);
}

std::string text_at(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value == nullptr ? std::string{} : value->as_string();
}

std::optional<int> int_at(const JsonValue& object, std::string_view key, int high = 1 << 20) {
  const JsonValue* value = object.find(key);
  if (value == nullptr) return std::nullopt;
  return static_cast<int>(value->as_int(0, high));
}

std::optional<Bytes> bytes_at(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value == nullptr ? std::nullopt : std::optional(value->as_bytes());
}

std::optional<BytesPerSecond> rate_at(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value == nullptr ? std::nullopt : std::optional(value->as_rate());
}

std::optional<FlopsPerSecond> flop_rate_at(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value == nullptr ? std::nullopt : std::optional(value->as_flop_rate());
}

std::span<const JsonValue> row(const JsonValue& value, std::size_t columns) {
  if (value.items().size() != columns) value.fail(fmt::format("{} columns", columns));
  return value.items();
}

Wiring read_wiring(const JsonValue& value) {
  const std::string& text = value.as_string();
  if (text == "none") return Wiring::none;
  if (text == "pairs") return Wiring::pairs;
  if (text == "mesh") return Wiring::mesh;
  if (text == "nvswitch above 4") return Wiring::nvswitch_above_4;
  if (text == "nvswitch above 8") return Wiring::nvswitch_above_8;
  if (text == "nvswitch") return Wiring::nvswitch;
  value.fail("none, pairs, mesh, nvswitch, nvswitch above 4 or nvswitch above 8");
}

/// Capacity: the low end of what PyTorch reports; else a stated fraction of the driver's total; else of the label.
void read_gpu_memory(const JsonValue& entry, CatalogGpu& gpu) {
  if (const JsonValue* stated = entry.find("memory")) {
    gpu.spec.memory = stated->as_bytes();
    return;
  }
  const JsonDocument defaults = read_catalog("node_defaults.json");
  const JsonValue& fraction = defaults.root().at("allocatable_fraction");
  const double value = fraction.at("value").as_real(0, 1);
  const JsonValue* driver = entry.find("driver_memory");
  const JsonValue& total = driver != nullptr ? *driver : entry.at("physical_memory");
  gpu.spec.memory = Bytes(std::floor(value * total.as_bytes().base()));
  gpu.memory = Assumption{"GPU memory", format_gib(gpu.spec.memory),
                          fmt::format("{} of {} ({}): {}", value, total.as_string(),
                                      driver != nullptr ? "nvidia-smi total" : "label; no nvidia-smi total known",
                                      fraction.at("source").as_string())};
}

void read_gpu_links(const JsonValue& entry, GpuSpec& gpu) {
  gpu.nvlink = rate_at(entry, "nvlink").value_or(BytesPerSecond{});
  gpu.nvlink_generation = int_at(entry, "nvlink_generation").value_or(0);
  gpu.nvlink_links = int_at(entry, "nvlink_links").value_or(0);
  gpu.pcie_generation = static_cast<int>(entry.at("pcie_generation").as_int(1, 99));
  gpu.pcie = entry.at("pcie").as_rate();
  if (const JsonValue* p2p = entry.find("p2p_over_pcie")) gpu.p2p_over_pcie = p2p->as_bool();
  gpu.c2c = rate_at(entry, "c2c").value_or(BytesPerSecond{});
  gpu.gpus_per_c2c = int_at(entry, "gpus_per_c2c").value_or(1);
}

CatalogGpu read_gpu(const JsonValue& entry) {
  entry.require_only(kGpuKeys);
  CatalogGpu gpu;
  gpu.spec.name = entry.at("name").as_string();
  gpu.spec.vendor = entry.at("vendor").as_string();
  gpu.spec.arch = entry.at("arch").as_string();
  gpu.spec.compute_capability = text_at(entry, "compute_capability");
  gpu.segment = entry.at("segment").as_string();
  gpu.label = static_cast<int>(entry.at("label").as_int(1, 1 << 20));
  gpu.wiring = read_wiring(entry.at("wiring"));
  gpu.spec.memory_bandwidth = entry.at("memory_bandwidth").as_rate();
  gpu.spec.peak_bf16 = flop_rate_at(entry, "peak_bf16");
  gpu.spec.peak_fp16 = flop_rate_at(entry, "peak_fp16");
  gpu.spec.peak_fp32 = flop_rate_at(entry, "peak_fp32");
  gpu.spec.measured_matmul = flop_rate_at(entry, "measured_matmul");
  if (const JsonValue* sms = entry.find("num_sms")) gpu.spec.num_sms = sms->as_int(1, kMostSms);
  read_gpu_links(entry, gpu.spec);
  gpu.spec.sources = texts(entry.at("sources"));
  gpu.spec.recalled = texts_at(entry, "recalled");
  read_gpu_memory(entry, gpu);
  return gpu;
}

void read_nvme(const JsonValue* entry, PartialNode& node) {
  if (entry == nullptr) return;
  entry->require_only({"drives", "capacity", "read", "write"});
  node.nvme_stated = true;
  node.drives = int_at(*entry, "drives", kMostPerNode);
  node.nvme_capacity = bytes_at(*entry, "capacity");
  node.nvme_read = rate_at(*entry, "read");
  node.nvme_write = rate_at(*entry, "write");
}

NetworkSpec read_network(const JsonValue& entry) {
  entry.require_only({"nics", "bandwidth", "kind", "gpudirect"});
  NetworkSpec network;
  network.nics = static_cast<int>(entry.at("nics").as_int(1, kMostPerNode));
  network.bandwidth = entry.at("bandwidth").as_rate();
  network.kind = text_at(entry, "kind");
  if (const JsonValue* direct = entry.find("gpudirect")) network.gpudirect = direct->as_bool();
  return network;
}

PriceSpec read_price(const JsonValue& entry) {
  entry.require_only({"usd_per_hour", "region", "date", "source"});
  return {entry.at("usd_per_hour").as_real(0, 1e9), text_at(entry, "region"), text_at(entry, "date"),
          entry.at("source").as_string()};
}

PartialNode read_partial(const JsonValue& entry) {
  PartialNode node;
  node.gpus_per_pcie_switch = int_at(entry, "gpus_per_pcie_switch", kMostPerNode);
  node.gpus_per_root_complex = int_at(entry, "gpus_per_root_complex", kMostPerNode);
  node.pcie_generation = int_at(entry, "pcie_generation", 99);
  node.pcie_lanes = int_at(entry, "pcie_lanes", 16);
  node.sockets = int_at(entry, "sockets", kMostPerNode);
  node.physical_cores = int_at(entry, "physical_cores");
  node.vcpus = int_at(entry, "vcpus");
  node.dram = bytes_at(entry, "dram");
  node.dram_bandwidth = rate_at(entry, "dram_bandwidth");
  read_nvme(entry.find("nvme"), node);
  return node;
}

MachineSpec read_node(const JsonValue& entry) {
  entry.require_only(kNodeKeys);
  const CatalogGpu gpu = load_gpu(entry.at("gpu").as_string());
  MachineSpec machine;
  machine.name = entry.at("name").as_string();
  machine.provider = entry.at("provider").as_string();
  machine.kind = entry.at("kind").as_string();
  machine.gpu = gpu.spec;
  machine.gpus_per_node = static_cast<int>(entry.at("gpus_per_node").as_int(1, kMostPerNode));
  machine.interconnect = read_interconnect(entry.at("interconnect"));
  machine.nvlink = rate_at(entry, "nvlink").value_or(BytesPerSecond{});
  machine.cpu = text_at(entry, "cpu");
  if (const JsonValue* network = entry.find("network")) machine.network = read_network(*network);
  if (const JsonValue* price = entry.find("price")) machine.price = read_price(*price);
  machine.sources = texts(entry.at("sources"));
  machine.recalled = texts_at(entry, "recalled");
  complete_node(machine, gpu, read_partial(entry));
  return machine;
}

bool looks_like_path(const std::string& text) {
  return text.find('/') != std::string::npos || text.ends_with(".json") || std::filesystem::exists(text);
}

}  // namespace

std::string normalized(std::string_view name) {
  std::string result;
  for (const char c : name) {
    if (c == '-' || c == '_' || c == '.' || c == ' ') continue;
    result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

JsonDocument read_catalog(std::string_view path) {
  const CatalogFile* file = find_catalog_file(path);
  if (file == nullptr) throw std::logic_error(fmt::format("no catalog file {}", path));
  return JsonDocument::parse(file->text, fmt::format("catalog/{}", path));
}

std::vector<GpuEntry> gpu_index() {
  const JsonDocument document = read_catalog("gpu_index.json");
  std::vector<GpuEntry> entries;
  for (const JsonValue& line : document.root().at("rows").items()) {
    const auto cells = row(line, 4);
    entries.push_back(
        {cells[0].as_string(), static_cast<int>(cells[1].as_int(1, 1 << 20)), texts(cells[2]), texts(cells[3])});
  }
  return entries;
}

std::vector<NodeEntry> node_index() {
  const JsonDocument document = read_catalog("node_index.json");
  std::vector<NodeEntry> entries;
  for (const JsonValue& line : document.root().at("rows").items()) {
    const auto cells = row(line, 8);
    entries.push_back({cells[0].as_string(), cells[1].as_string(), cells[2].as_string(), cells[3].as_string(),
                       static_cast<int>(cells[4].as_int(1, kMostPerNode)), cells[5].as_string(),
                       cells[6].as_real(0, 1e9), texts(cells[7])});
  }
  return entries;
}

CatalogGpu load_gpu(const std::string& name) {
  const std::string path = fmt::format("gpus/{}.json", name);
  if (find_catalog_file(path) == nullptr) {
    throw InputError(fmt::format("unknown GPU \"{}\": {}", name, did_you_mean(name, gpu_names())));
  }
  return read_gpu(read_catalog(path).root());
}

MachineSpec load_node(const std::string& name) {
  return read_node(read_catalog(fmt::format("nodes/{}.json", name)).root());
}

GpuSpec find_gpu(const std::string& name) {
  CatalogGpu gpu = load_gpu(name);
  // A GPU alone carries no assumptions: how its capacity was worked out stands among its sources.
  if (gpu.memory) gpu.spec.sources.push_back(fmt::format("memory: {}", gpu.memory->source));
  return gpu.spec;
}

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  for (GpuEntry& entry : gpu_index()) names.push_back(std::move(entry.name));
  return names;
}

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (NodeEntry& entry : node_index()) names.push_back(std::move(entry.name));
  return names;
}

MachineSpec find_machine(const std::string& name_or_path, std::string_view where, std::string_view expected) {
  const std::string wanted = normalized(name_or_path);
  std::vector<std::string> names;
  for (const NodeEntry& entry : node_index()) {
    if (normalized(entry.name) == wanted) return load_node(entry.name);
    names.push_back(entry.name);
    for (const std::string& alias : entry.aliases) {
      if (normalized(alias) == wanted) return load_node(entry.name);
      names.push_back(alias);
    }
  }
  if (!wanted.empty() && looks_like_path(name_or_path)) return read_machine(JsonDocument::read(name_or_path).root());
  throw InputError(
      fmt::format("{}: expected {}, got \"{}\": {}", where, expected, name_or_path, did_you_mean(name_or_path, names)));
}

}  // namespace zeroplan
