// NCCL's topology XML: <system> holds <cpu>, those hold trees of <pci>, and those <gpu> and <nic>. pugixml parses;
// positions, names, numbers and structure are checked here.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <pugixml.hpp>

#include "models/error.h"
#include "models/topology_parts.h"
#include "models/topology_xml_element.h"
#include "models/topology_xml_link.h"

namespace zeroplan {
namespace {

constexpr int kDeepest = 64;
constexpr int kMostLinks = 1024;
constexpr int kMostNumaNode = 65535;
constexpr double kMostMegabits = 1e8;  // 100 Tb/s
constexpr double kBytesPerMegabit = 1e6 / 8;
constexpr int kVersion1 = 1, kVersion2 = 2;  // RCCL writes 2 in the same form

// PCI class codes: what a device is, without the programming interface.
constexpr std::string_view kNvswitchClass = "0x0680";
constexpr std::array<std::string_view, 3> kGpuClasses{"0x0302", "0x0300", "0x0380"};
constexpr std::array<std::string_view, 2> kNicClasses{"0x0200", "0x0207"};

/// "0000:47:00.0" and "0000:47:00.0" in capitals mean the same device.
std::string lower(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

template <class Classes>
bool is_class(const std::string& code, const Classes& classes) {
  return std::ranges::any_of(classes, [&](std::string_view one) { return code.starts_with(one); });
}

class XmlReader {
 public:
  XmlReader(std::string_view text, const std::string& file) : text_(text), lines_(text), file_(file) {
    topology_.file = file;
    topology_.format = TopologyFormat::nccl;
  }

  NodeTopology read() {
    pugi::xml_document document;
    const auto parsed = document.load_buffer(text_.data(), text_.size(), pugi::parse_default, pugi::encoding_utf8);
    if (!parsed) {
      const int line =
          lines_.of(std::min<std::ptrdiff_t>(parsed.offset, static_cast<std::ptrdiff_t>(text_.size()) - 1));
      fail_at(file_, line, fmt::format("expected well-formed XML: {}", parsed.description()));
    }
    read_document(document);
    if (topology_.gpus.empty()) fail_at(file_, system_line_, "<system>: expected at least one GPU, found none");
    sort_gpus();
    name_gpus();
    connect();
    note_unread();
    return std::move(topology_);
  }

 private:
  /// A device's way to its CPU: bridges from the lowest upwards.
  struct Place {
    int numa = -1;    // of the <cpu>; -1: not stated
    int cpu = 0;      // which <cpu>
    int bridge = -1;  // the lowest bridge
    std::string bus;  // of the PCI function; empty for a NIC straight below a CPU
    PcieLink pcie;
    std::string affinity;
  };
  struct Links {
    std::map<std::string, int> to_gpus;  // by bus id
    int to_switches = 0;
  };

  static bool is_gpu(pugi::xml_node node) { return std::string_view(node.name()) == "gpu"; }

  void read_document(const pugi::xml_document& document) {
    pugi::xml_node root;
    for (const pugi::xml_node node : document.children()) {
      const int line = lines_.of(node.offset_debug());
      if (node.type() != pugi::node_element || !root.empty()) {
        fail_at(file_, line,
                fmt::format("expected the end of the file after </system>, found {}",
                            found_text(root.empty() ? node.value() : node.name())));
      }
      if (std::string_view(node.name()) != "system") {
        fail_at(file_, line, fmt::format("expected <system>, found <{}>", node.name()));
      }
      root = node;
    }
    if (root.empty()) fail_at(file_, 1, "expected <system>, found no element");
    const XmlElement system(root, lines_, file_);
    system_line_ = system.line();
    system.check_attributes();
    note_attributes(system, {"version", "name"});
    system.integer("version", kVersion1, kVersion2);
    has_gpu_elements_ = !document.find_node([](pugi::xml_node node) { return is_gpu(node); }).empty();
    for (const XmlElement& cpu : system.children({"cpu"})) read_cpu(cpu);
  }

  void read_cpu(const XmlElement& cpu) {
    note_attributes(cpu, {"numaid", "affinity", "arch", "vendor", "familyid", "modelid", "host_hash"});
    Place place;
    place.cpu = num_cpus_++;
    const std::string host = cpu.has("host_hash") ? cpu.text("host_hash") : "";
    if (place.cpu > 0 && host != host_) {
      cpu.fail(
          fmt::format("host_hash: expected the CPUs of one node ({}), found {}", found_text(host_), found_text(host)));
    }
    host_ = host;
    place.numa = cpu.integer("numaid", -1, kMostNumaNode);
    if (cpu.has("affinity")) place.affinity = cpu.text("affinity");
    if (std::ranges::find(numa_nodes_, place.numa) != numa_nodes_.end()) {
      cpu.fail(fmt::format("expected each NUMA node once, found numaid {} again", place.numa));
    }
    numa_nodes_.push_back(place.numa);
    for (const XmlElement& child : cpu.children({"pci", "nic"})) {
      child.name() == "pci" ? read_pci(child, place, 1) : read_nic(child, place);
    }
  }

  void read_pci(const XmlElement& pci, Place place, int depth) {
    if (depth > kDeepest) pci.fail(fmt::format("expected at most {} bridges in a row, found more", kDeepest));
    note_attributes(pci, {"busid", "class", "vendor", "device", "subsystem_vendor", "subsystem_device", "link_speed",
                          "link_width", "gpu_link_speed", "gpu_link_width"});
    place.bus = lower(pci.text("busid"));
    if (!buses_.emplace(place.bus, pci.line()).second) {
      pci.fail(
          fmt::format("expected each bus id once, found {} again (first in line {})", place.bus, buses_[place.bus]));
    }
    place.pcie = read_pcie_link(pci);
    const std::string code = pci.has("class") ? lower(pci.text("class")) : "";
    const std::vector<XmlElement> children = pci.children({"pci", "gpu", "nic", "pcilink"});
    const auto below = [&](std::string_view name) {
      return std::ranges::any_of(children, [&](const XmlElement& child) { return child.name() == name; });
    };
    Place inside = place;
    if (below("pci")) {
      inside.bridge = static_cast<int>(topology_.bridges.size());
      topology_.bridges.push_back({place.bus, place.bridge, place.pcie});
    }
    for (const XmlElement& child : children) {
      if (child.name() == "pci") read_pci(child, inside, depth + 1);
      if (child.name() == "gpu") read_gpu(child, place);
      if (child.name() == "nic") read_nic(child, place);
    }
    if (children.empty()) add_bare(pci, place, code);
  }

  /// Files given to NCCL_TOPO_FILE (clouds ship them) may list PCI devices alone: their class says what they are.
  void add_bare(const XmlElement& pci, const Place& place, const std::string& code) {
    if (has_gpu_elements_) return;
    if (is_class(code, kGpuClasses)) {
      add_gpu(pci, place, static_cast<int>(topology_.gpus.size()), 0);
    } else if (is_class(code, kNicClasses)) {
      TopologyDevice nic;
      nic.name = fmt::format("NIC{}", topology_.nics.size());
      add_nic(pci, place, std::move(nic));
    }
  }

  void read_gpu(const XmlElement& gpu, const Place& place) {
    note_attributes(gpu, {"dev", "sm", "rank", "gdr", "mem", "gcn", "arch"});
    const int sm = gpu.has("sm") ? gpu.integer("sm", 0, 1000) : 0;
    add_gpu(gpu, place, gpu.integer("dev", 0, static_cast<int>(kMostTopologyDevices) - 1), sm);
    for (const XmlElement& link : gpu.children({"nvlink", "c2c"})) {
      if (link.name() == "c2c") {
        note_attributes(link, {"bw", "count"});
        topology_.superchip = true;
      } else {
        read_nvlink(link, links_.back());
      }
      link.children({});
    }
  }

  void add_gpu(const XmlElement& element, const Place& place, int index, int sm) {
    const auto same = [&](const TopologyDevice& other) { return other.device == place.bus; };
    if (std::ranges::any_of(topology_.gpus, same)) element.fail("expected one <gpu> in a <pci>, found another");
    if (std::ranges::find(gpu_indices_, index) != gpu_indices_.end()) {
      element.fail(fmt::format("dev: expected each GPU once, found {} again", index));
    }
    check_room(element);
    TopologyDevice gpu = device_at(place);
    gpu.sm = sm;
    topology_.gpus.push_back(std::move(gpu));
    gpu_indices_.push_back(index);
    gpu_lines_.push_back(element.line());
    gpu_places_.push_back(place);
    links_.emplace_back();
  }

  TopologyDevice device_at(const Place& place) const {
    TopologyDevice device;
    device.device = place.bus;
    device.cpus = place.affinity;
    if (place.numa >= 0) device.numa = {place.numa};
    device.pcie = place.pcie;
    device.bridge = place.bridge;
    return device;
  }

  void read_nvlink(const XmlElement& link, Links& links) {
    note_attributes(link, {"target", "count", "tclass"});
    const std::string target = lower(link.text("target"));
    const int count = link.integer("count", 1, kMostLinks);
    const std::string code = lower(link.text("tclass"));
    if (is_class(code, kGpuClasses)) {
      if (!links.to_gpus.emplace(target, count).second) {
        link.fail(fmt::format("expected each target once, found {} again", target));
      }
    } else if (code.starts_with("0x068001")) {
      topology_.superchip = true;  // links to the CPU: Power9, Grace before <c2c>
    } else if (code.starts_with(kNvswitchClass)) {
      links.to_switches += count;
      topology_.nvswitch = true;
    } else {
      link.fail(fmt::format("tclass: expected a GPU (0x0302..), an NVSwitch (0x068000) or a CPU (0x068001), found {}",
                            found_text(code)));
    }
  }

  void read_nic(const XmlElement& nic, const Place& place) {
    note_attributes(nic, {});
    for (const XmlElement& net : nic.children({"net"})) {
      note_attributes(net, {"name", "dev", "latency", "speed", "port", "guid", "maxconn", "gdr", "coll"});
      net.children({});
      TopologyDevice device;
      device.name = net.text("name");
      if (device.name.empty()) net.fail("name: expected the name of a device, found nothing");
      device.speed = BytesPerSecond(net.real("speed", 1, kMostMegabits) * kBytesPerMegabit);
      if (net.has("dev")) net.integer("dev", 0, kMostNumaNode);
      if (net.has("port")) net.integer("port", 0, kMostNumaNode);
      if (net.has("gdr")) device.gpudirect = net.integer("gdr", 0, 1) == 1;
      add_nic(net, place, std::move(device));
    }
  }

  void add_nic(const XmlElement& element, const Place& place, TopologyDevice nic) {
    const auto same = [&](const TopologyDevice& other) { return other.name == nic.name; };
    if (std::ranges::any_of(topology_.nics, same)) {
      element.fail(fmt::format("expected each network device once, found {} again", found_text(nic.name)));
    }
    check_room(element);
    const TopologyDevice where = device_at(place);
    nic.device = where.device;
    nic.cpus = where.cpus;
    nic.numa = where.numa;
    nic.pcie = where.pcie;
    nic.bridge = where.bridge;
    topology_.nics.push_back(std::move(nic));
    nic_places_.push_back(place);
  }

  void check_room(const XmlElement& element) const {
    if (topology_.num_devices() < kMostTopologyDevices) return;
    element.fail(fmt::format("expected at most {} devices, found more", kMostTopologyDevices));
  }

  /// By device number: the order of ranks.
  void sort_gpus() {
    std::vector<std::size_t> order(gpu_indices_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::sort(order, {}, [&](std::size_t i) { return gpu_indices_[i]; });
    const auto sorted = [&](auto& values) {
      auto copy = values;
      for (std::size_t i = 0; i < order.size(); ++i) copy[i] = values[order[i]];
      values = std::move(copy);
    };
    sorted(topology_.gpus), sorted(gpu_places_), sorted(links_), sorted(gpu_lines_), sorted(gpu_indices_);
  }

  void name_gpus() {
    for (std::size_t i = 0; i < gpu_indices_.size(); ++i)
      topology_.gpus[i].name = fmt::format("GPU{}", gpu_indices_[i]);
  }

  /// How two places meet: at a bridge, at their CPU, or across CPUs.
  Connection meet(const Place& a, const Place& b) const {
    if (a.cpu != b.cpu) return Connection::sys;
    if (!a.bus.empty() && a.bus == b.bus) return Connection::pix;
    int steps_a = 0;
    for (int up = a.bridge; up >= 0; up = topology_.bridges[static_cast<std::size_t>(up)].parent, ++steps_a) {
      int steps_b = 0;
      for (int other = b.bridge; other >= 0; other = topology_.bridges[static_cast<std::size_t>(other)].parent) {
        if (other == up) return steps_a + steps_b == 0 ? Connection::pix : Connection::pxb;
        ++steps_b;
      }
    }
    return Connection::phb;
  }

  int nvlinks_between(std::size_t i, std::size_t j) const {
    const auto direct = links_[i].to_gpus.find(topology_.gpus[j].device);
    if (direct != links_[i].to_gpus.end()) return direct->second;
    return std::min(links_[i].to_switches, links_[j].to_switches);
  }

  void connect() {
    std::vector<Place> places = gpu_places_;
    places.insert(places.end(), nic_places_.begin(), nic_places_.end());
    const std::size_t count = topology_.gpus.size();
    topology_.links.resize(places.size() * places.size());
    topology_.pcie.resize(count * count);
    for (std::size_t i = 0; i < places.size(); ++i) {
      for (std::size_t j = 0; j < places.size(); ++j) {
        TopologyLink& link = topology_.links[i * places.size() + j];
        if (i != j) link.kind = meet(places[i], places[j]);
        if (i >= count || j >= count) continue;
        topology_.pcie[i * count + j] = link.kind;
        if (i == j) continue;
        const int nvlinks = nvlinks_between(i, j);
        if (nvlinks != nvlinks_between(j, i)) {
          fail_at(file_, gpu_lines_[std::max(i, j)],
                  fmt::format("<gpu>: expected as many NVLinks from {} to {} as back, found {} and {}",
                              topology_.gpus[i].name, topology_.gpus[j].name, nvlinks, nvlinks_between(j, i)));
        }
        if (nvlinks > 0) link = {Connection::nvlink, nvlinks};
      }
    }
    count_links();
  }

  void count_links() {
    for (std::size_t i = 0; i < links_.size(); ++i) {
      int& total = topology_.gpus[i].nvlinks;
      total = links_[i].to_switches;
      for (const auto& [target, count] : links_[i].to_gpus) {
        const bool here = std::ranges::find(topology_.gpus, target, &TopologyDevice::device) != topology_.gpus.end();
        if (here) total += count;
        if (!here) outside_.emplace_back(fmt::format("{} to {}", topology_.gpus[i].name, target));
      }
    }
  }

  void note_attributes(const XmlElement& element, std::initializer_list<std::string_view> known) {
    for (const std::string& name : element.other_attributes(known)) {
      unread_.emplace(fmt::format("{} of <{}>", name, element.name()), element.line());
    }
  }

  void note_unread() {
    for (const auto& [what, line] : unread_) {
      topology_.notes.push_back({"attribute not read", what, fmt::format("{}:{}", file_, line)});
    }
    for (const std::string& link : outside_) {
      topology_.notes.push_back({"NVLinks not counted", link, "the GPU at their other end is not in the file"});
    }
  }

  std::string_view text_;
  XmlLines lines_;
  const std::string& file_;
  int system_line_ = 1;
  bool has_gpu_elements_ = false;
  int num_cpus_ = 0;
  std::string host_;
  std::vector<int> numa_nodes_;
  std::map<std::string, int> buses_;
  std::vector<int> gpu_indices_, gpu_lines_;
  std::vector<Place> gpu_places_, nic_places_;
  std::vector<Links> links_;
  std::map<std::string, int> unread_;
  std::vector<std::string> outside_;
  NodeTopology topology_;
};

}  // namespace

NodeTopology read_topology_xml(std::string_view text, const std::string& file) { return XmlReader(text, file).read(); }

}  // namespace zeroplan
