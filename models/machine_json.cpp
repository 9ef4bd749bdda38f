// Each struct's keys are listed once, in a describe() that three visitors walk: one collects the known keys, one
// reads, one writes. So what is read is also written.

#include "models/machine_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <type_traits>

#include "models/host_kernels_json.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchema = 1;
constexpr int kMostPerNode = 1024;  // GPUs, NICs, drives of one node
constexpr int kMostSockets = 64;    // the largest servers have 32; routes are laid between any two
constexpr int kMostCores = 1 << 20;
constexpr double kMostUsdPerHour = 1e9;
constexpr double kMostBase = 1e21;  // bytes, bytes/s, flops/s: beyond any machine, far from overflow

template <class Visitor, class Gpu>
void describe_gpu(Visitor& visit, Gpu& gpu) {
  visit.need("name", gpu.name);
  visit.text("vendor", gpu.vendor);
  visit.text("arch", gpu.arch);
  visit.text("compute_capability", gpu.compute_capability);
  visit.need("memory", gpu.memory);
  visit.need("memory_bandwidth", gpu.memory_bandwidth);
  visit.maybe("peak_bf16", gpu.peak_bf16);
  visit.maybe("peak_fp16", gpu.peak_fp16);
  visit.maybe("peak_fp32", gpu.peak_fp32);
  visit.maybe("measured_matmul", gpu.measured_matmul);
  visit.maybe("num_sms", gpu.num_sms);
  visit.amount("nvlink", gpu.nvlink);
  visit.count("nvlink_generation", gpu.nvlink_generation, 0, 99, 0);
  visit.count("nvlink_links", gpu.nvlink_links, 0, kMostPerNode, 0);
  visit.need("pcie_generation", gpu.pcie_generation, 1, 99);
  visit.amount("pcie", gpu.pcie);
  visit.maybe("p2p_over_pcie", gpu.p2p_over_pcie);
  visit.amount("c2c", gpu.c2c);
  visit.count("gpus_per_c2c", gpu.gpus_per_c2c, 1, kMostPerNode, 1);
  visit.list("sources", gpu.sources);
  visit.list("recalled", gpu.recalled);
}

template <class Visitor, class Nvme>
void describe_nvme(Visitor& visit, Nvme& nvme) {
  visit.need("drives", nvme.drives, 1, kMostPerNode);
  visit.need("capacity", nvme.capacity);
  visit.need("read", nvme.read);
  visit.need("write", nvme.write);
}

template <class Visitor, class Network>
void describe_network(Visitor& visit, Network& network) {
  visit.need("nics", network.nics, 1, kMostPerNode);
  visit.need("bandwidth", network.bandwidth);
  visit.text("kind", network.kind);
  visit.flag("gpudirect", network.gpudirect);
}

template <class Visitor, class Price>
void describe_price(Visitor& visit, Price& price) {
  visit.need("usd_per_hour", price.usd_per_hour, kMostUsdPerHour);
  visit.text("region", price.region);
  visit.text("date", price.date);
  visit.text("source", price.source);
}

template <class Visitor, class Assumed>
void describe_assumption(Visitor& visit, Assumed& assumption) {
  visit.need("what", assumption.what);
  visit.need("value", assumption.value);
  visit.need("source", assumption.source);
}

template <class Visitor, class Machine>
void describe_machine(Visitor& visit, Machine& machine) {
  visit.schema("schema", kSchema);
  visit.need("name", machine.name);
  visit.text("provider", machine.provider);
  visit.text("kind", machine.kind);
  visit.part("gpu", machine.gpu);
  visit.need("gpus_per_node", machine.gpus_per_node, 1, kMostPerNode);
  visit.count("nodes", machine.nodes, 1, kMostNodes, 1);
  visit.need("interconnect", machine.interconnect);
  visit.amount("nvlink", machine.nvlink);
  visit.count("gpus_per_pcie_switch", machine.gpus_per_pcie_switch, 1, kMostPerNode, 1);
  visit.count("gpus_per_root_complex", machine.gpus_per_root_complex, 1, kMostPerNode, 1);
  visit.count("sockets", machine.sockets, 1, kMostSockets, 1);
  visit.amount("socket_link", machine.socket_link);
  visit.count("physical_cores", machine.physical_cores, 0, kMostCores, 0);
  visit.text("cpu", machine.cpu);
  visit.need("dram", machine.dram);
  visit.need("dram_bandwidth", machine.dram_bandwidth);
  visit.part("nvme", machine.nvme);
  visit.part("network", machine.network);
  visit.part("price", machine.price);
  visit.flag("host_device", machine.host_device);
  visit.part("host_kernels", machine.host_kernels);
  visit.list("sources", machine.sources);
  visit.list("recalled", machine.recalled);
  visit.list("assumptions", machine.assumptions);
}

template <class Visitor, class Part>
void describe(Visitor& visit, Part& part) {
  using Plain = std::remove_const_t<Part>;
  if constexpr (std::is_same_v<Plain, GpuSpec>) describe_gpu(visit, part);
  if constexpr (std::is_same_v<Plain, NvmeSpec>) describe_nvme(visit, part);
  if constexpr (std::is_same_v<Plain, NetworkSpec>) describe_network(visit, part);
  if constexpr (std::is_same_v<Plain, PriceSpec>) describe_price(visit, part);
  if constexpr (std::is_same_v<Plain, Assumption>) describe_assumption(visit, part);
  if constexpr (std::is_same_v<Plain, MachineSpec>) describe_machine(visit, part);
}

/// Every method of a visitor takes the key first; this one notes it.
struct KeyCollector {
  std::vector<std::string_view> keys;
  template <class... Rest>
  void need(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void text(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void maybe(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void amount(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void count(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void flag(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void list(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void part(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
  template <class... Rest>
  void schema(std::string_view key, Rest&&...) {
    keys.push_back(key);
  }
};

template <class Part>
Part read_part(const JsonValue& value);

void read_value(const JsonValue& value, std::string& out) { out = value.as_string(); }
void read_value(const JsonValue& value, bool& out) { out = value.as_bool(); }
void read_value(const JsonValue& value, std::int64_t& out) { out = value.as_int(1, std::int64_t{1} << 40); }
void read_value(const JsonValue& value, Interconnect& out) { out = read_interconnect(value); }
void read_value(const JsonValue& value, Assumption& out) { out = read_part<Assumption>(value); }
void read_value(const JsonValue& value, Bytes& out) { out = value.as_bytes(); }
/// Slower than any link or chip: a wrong unit. Times divide by rates, so nothing near zero may pass.
constexpr BytesPerSecond kLeastRate(1e3);
constexpr FlopsPerSecond kLeastFlopRate(1e6);

void read_value(const JsonValue& value, BytesPerSecond& out) {
  out = value.as_rate();
  if (out != BytesPerSecond() && out < kLeastRate) value.fail("0 or a rate of at least 1 KB/s");
}
void read_value(const JsonValue& value, FlopsPerSecond& out) {
  out = value.as_flop_rate();
  if (out < kLeastFlopRate) value.fail("a rate of at least 1 MFLOPS");
}

template <class T>
void read_checked(const JsonValue& value, T& out) {
  read_value(value, out);
  if constexpr (requires { out.base(); }) {
    if (!(out.base() > 0)) value.fail("an amount above zero");
    if (out.base() > kMostBase) value.fail("an amount that a machine can have");
  }
}

class Reader {
 public:
  explicit Reader(const JsonValue& object) : object_(object) {}

  template <class T>
  void need(std::string_view key, T& out) {
    read_checked(object_.at(key), out);
    if constexpr (std::is_same_v<T, std::string>) {
      if (out.empty()) object_.at(key).fail("a text that is not empty");
    }
  }
  void need(std::string_view key, int& out, int low, int high) {
    out = static_cast<int>(object_.at(key).as_int(low, high));
  }
  void need(std::string_view key, double& out, double high) { out = object_.at(key).as_real(0, high); }
  void text(std::string_view key, std::string& out) { optional(key, out); }
  void flag(std::string_view key, bool& out) { optional(key, out); }
  template <class T>
  void amount(std::string_view key, T& out) {
    optional(key, out);
  }
  template <class T>
  void maybe(std::string_view key, std::optional<T>& out) {
    if (const JsonValue* value = object_.find(key)) read_checked(*value, out.emplace());
  }
  void count(std::string_view key, int& out, int low, int high, int absent) {
    const JsonValue* value = object_.find(key);
    out = value == nullptr ? absent : static_cast<int>(value->as_int(low, high));
  }
  template <class T>
  void list(std::string_view key, std::vector<T>& out) {
    const JsonValue* value = object_.find(key);
    if (value == nullptr) return;
    for (const JsonValue& item : value->items()) read_value(item, out.emplace_back());
  }
  void part(std::string_view key, GpuSpec& out) { out = read_part<GpuSpec>(object_.at(key)); }
  template <class T>
  void part(std::string_view key, T& out) {
    if (const JsonValue* value = object_.find(key)) out = read_part<T>(*value);
  }
  void part(std::string_view key, std::optional<PriceSpec>& out) {
    if (const JsonValue* value = object_.find(key)) out = read_part<PriceSpec>(*value);
  }
  void part(std::string_view key, std::optional<HostKernels>& out) {
    if (const JsonValue* value = object_.find(key)) out = read_host_kernels(*value);
  }
  void schema(std::string_view key, int expected) {
    const JsonValue& value = object_.at(key);
    if (value.kind() != JsonValue::Kind::integer || value.as_int(INT64_MIN, INT64_MAX) != expected) {
      value.fail(fmt::format("schema {}", expected));
    }
  }

 private:
  template <class T>
  void optional(std::string_view key, T& out) {
    if (const JsonValue* value = object_.find(key)) read_checked(*value, out);
  }
  const JsonValue& object_;
};

template <class Part>
Part read_part(const JsonValue& value) {
  Part part;
  if (!value.is_object()) value.fail("an object");
  KeyCollector known;
  describe(known, part);
  value.require_only(known.keys);
  Reader reader(value);
  describe(reader, part);
  return part;
}

template <class Part>
Json write_part(const Part& part);

class Writer {
 public:
  template <class T>
  void need(std::string_view key, const T& value) {
    put(key, value);
  }
  void need(std::string_view key, int value, int /*low*/, int /*high*/) { json_[std::string(key)] = value; }
  void need(std::string_view key, double value, double /*high*/) { json_[std::string(key)] = value; }
  void text(std::string_view key, const std::string& value) {
    if (!value.empty()) put(key, value);
  }
  void flag(std::string_view key, bool value) {
    if (value) put(key, value);
  }
  template <class T>
  void amount(std::string_view key, T value) {
    if (value.base() != 0) put(key, value);
  }
  template <class T>
  void maybe(std::string_view key, const std::optional<T>& value) {
    if (value) put(key, *value);
  }
  void count(std::string_view key, int value, int /*low*/, int /*high*/, int absent) {
    if (value != absent) json_[std::string(key)] = value;
  }
  template <class T>
  void list(std::string_view key, const std::vector<T>& values) {
    if (values.empty()) return;
    Json array = Json::array();
    for (const T& value : values) array.push_back(to_json(value));
    json_[std::string(key)] = std::move(array);
  }
  void part(std::string_view key, const GpuSpec& value) { json_[std::string(key)] = write_part(value); }
  void part(std::string_view key, const NvmeSpec& value) {
    if (value.drives > 0) json_[std::string(key)] = write_part(value);
  }
  void part(std::string_view key, const NetworkSpec& value) {
    if (value.nics > 0) json_[std::string(key)] = write_part(value);
  }
  void part(std::string_view key, const std::optional<PriceSpec>& value) {
    if (value) json_[std::string(key)] = write_part(*value);
  }
  void part(std::string_view key, const std::optional<HostKernels>& value) {
    if (value) json_[std::string(key)] = Json::parse(write_host_kernels(*value));
  }
  void schema(std::string_view key, int value) { json_[std::string(key)] = value; }
  Json take() { return std::move(json_); }

 private:
  template <class T>
  static Json to_json(const T& value) {
    if constexpr (requires { value.base(); }) {
      return to_text(value);
    } else if constexpr (std::is_same_v<T, Interconnect>) {
      return std::string(to_string(value));
    } else if constexpr (std::is_same_v<T, Assumption>) {
      return write_part(value);
    } else {
      return value;
    }
  }
  template <class T>
  void put(std::string_view key, const T& value) {
    json_[std::string(key)] = to_json(value);
  }
  Json json_ = Json::object();
};

template <class Part>
Json write_part(const Part& part) {
  Writer writer;
  describe(writer, part);
  return writer.take();
}

/// Names of CPUs and GPUs come from drivers: bytes that are no UTF-8 are replaced, not refused.
std::string dump(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

/// What single keys cannot tell.
void check_wiring(const JsonValue& value, const MachineSpec& machine) {
  const bool nvlinked = machine.interconnect == Interconnect::nvswitch ||
                        machine.interconnect == Interconnect::nvlink_mesh ||
                        machine.interconnect == Interconnect::nvlink_pairs;
  const std::string_view wiring = to_string(machine.interconnect);
  if (nvlinked && machine.nvlink.base() == 0) {
    value.fail_with(fmt::format("interconnect {} needs nvlink: the rate of one GPU, one direction", wiring));
  }
  if (machine.interconnect == Interconnect::single && machine.gpus_per_node > 1) {
    value.fail_with(fmt::format("interconnect single has one GPU, not gpus_per_node {}", machine.gpus_per_node));
  }
  if (machine.sockets > 1 && machine.socket_link.base() == 0) {
    value.fail_with(
        fmt::format("sockets {} need socket_link: the rate between two of them, one direction", machine.sockets));
  }
  if (machine.gpu.pcie.base() == 0 && machine.gpu.c2c.base() == 0 && !machine.host_device) {
    value.at("gpu").fail_with("pcie is missing: the rate of the GPU's link to the host, one direction");
  }
  if (!machine.host_kernels) return;
  if (!machine.host_device) value.at("host_kernels").fail_with("only for a machine with \"host_device\": true");
  if (machine.nodes > 1) value.at("host_kernels").fail_with("a probed host is one node: its network was not measured");
  if (machine.physical_cores == 0) value.fail_with("host_kernels need \"physical_cores\"");
}

}  // namespace

MachineSpec read_machine(const JsonValue& value) {
  MachineSpec machine = read_part<MachineSpec>(value);
  check_wiring(value, machine);
  return machine;
}

MachineSpec read_machine(std::string_view text, const std::string& file_name) {
  const JsonDocument document = JsonDocument::parse(text, file_name);
  return read_machine(document.root());
}

std::string write_machine(const MachineSpec& machine) { return dump(write_part(machine)); }

std::string write_gpu(const GpuSpec& gpu) { return dump(write_part(gpu)); }

}  // namespace zeroplan
