#include "models/topology_form.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "models/error.h"

namespace zeroplan {
namespace {

constexpr int kMostLinksOfAnyGpu = 18;  // H100, B200; A100 has 12, V100 6
constexpr int kMostSockets = 2;         // x86 GPU servers

std::size_t at(int index) { return static_cast<std::size_t>(index); }
int count_of(const auto& values) { return static_cast<int>(values.size()); }

/// Indices 0..count-1 grouped by a relation: connected components, in order of their lowest member.
template <class Joined>
std::vector<std::vector<int>> components(int count, Joined joined) {
  std::vector<int> root(at(count));
  std::iota(root.begin(), root.end(), 0);
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < i; ++j) {
      if (root[at(i)] == root[at(j)] || !joined(i, j)) continue;
      const int from = std::max(root[at(i)], root[at(j)]);
      const int to = std::min(root[at(i)], root[at(j)]);
      std::ranges::replace(root, from, to);
    }
  }
  std::vector<std::vector<int>> groups;
  for (int i = 0; i < count; ++i) {
    if (root[at(i)] == i) groups.emplace_back();
    const auto same = [&](const std::vector<int>& group) { return root[at(group.front())] == root[at(i)]; };
    if (root[at(i)] == i) {
      groups.back().push_back(i);
    } else {
      std::ranges::find_if(groups, same)->push_back(i);
    }
  }
  return groups;
}

int largest(const std::vector<std::vector<int>>& groups) {
  std::size_t most = 1;
  for (const auto& group : groups) most = std::max(most, group.size());
  return static_cast<int>(most);
}
bool equal_sizes(const std::vector<std::vector<int>>& groups) {
  return std::ranges::all_of(groups, [&](const auto& group) { return group.size() == groups.front().size(); });
}

std::string sizes_text(const std::vector<std::vector<int>>& groups) {
  std::vector<std::size_t> sizes;
  for (const auto& group : groups) sizes.push_back(group.size());
  return fmt::format("{}", fmt::join(sizes, " + "));
}

class FormBuilder {
 public:
  FormBuilder(const NodeTopology& topology, const CatalogGpu* gpu)
      : topology_(topology), gpu_(gpu), count_(count_of(topology.gpus)) {}

  NodeForm build() {
    form_.trees = components(count_, [&](int i, int j) { return meet(i, j) <= Connection::pxb; });
    form_.complexes = components(count_, [&](int i, int j) { return meet(i, j) <= Connection::phb; });
    find_unknown();
    set_sockets();
    set_interconnect();
    set_nics();
    check_regular();
    return std::move(form_);
  }

 private:
  void assume(std::string what, std::string value, std::string source) {
    form_.assumptions.push_back({std::move(what), std::move(value), std::move(source)});
  }

  const TopologyLink& link(int i, int j) const { return topology_.link(at(i), at(j)); }
  /// The way over PCIe; hidden ones count as far apart.
  Connection meet(int i, int j) const { return topology_.pcie_between(at(i), at(j)).value_or(Connection::sys); }

  void find_unknown() {
    for (int i = 0; i < count_; ++i) {
      for (int j = 0; j < i; ++j) {
        if (!topology_.pcie_between(at(i), at(j))) form_.trees_known = false;
      }
    }
    if (topology_.superchip) form_.trees_known = true;  // there is no PCIe between GPU and CPU to share
  }

  /// What says on which CPU a GPU is: its NUMA nodes, else its cores.
  std::string side(int i) const {
    const TopologyDevice& gpu = topology_.gpus[at(i)];
    return gpu.numa.empty() ? gpu.cpus : fmt::format("node {}", fmt::join(gpu.numa, ","));
  }

  void set_sockets() {
    form_.sockets = components(count_, [&](int i, int j) {
      const auto met = topology_.pcie_between(at(i), at(j));
      if (met && *met < Connection::sys) return true;
      return side(i) == side(j) && (!side(i).empty() || !met);
    });
    const bool numbered = std::ranges::none_of(topology_.gpus, [](const auto& gpu) { return gpu.numa.empty(); });
    if (count_of(form_.sockets) > kMostSockets && !topology_.superchip && numbered) join_numa_nodes();
    for (const auto& socket : form_.sockets) {
      std::set<int> numbers;
      for (const int gpu : socket)
        numbers.insert(topology_.gpus[at(gpu)].numa.begin(), topology_.gpus[at(gpu)].numa.end());
      form_.numa_nodes.emplace_back(numbers.begin(), numbers.end());
    }
    if (!numbered && count_ > 1) {
      assume("CPU sockets", fmt::format("{}", form_.sockets.size()), "the file states no NUMA node for some GPUs");
    }
  }

  /// More than two NUMA nodes are parts of two CPUs (NPS2, NPS4, sub-NUMA clusters): the lower half of the numbers is
  /// the first.
  void join_numa_nodes() {
    int highest = 0;
    for (const TopologyDevice& gpu : topology_.gpus) highest = std::max(highest, gpu.numa.back());
    int numbers = 1;
    while (numbers <= highest) numbers *= 2;
    const auto upper = [&](int i) { return topology_.gpus[at(i)].numa.front() >= numbers / 2; };
    const std::size_t nodes = form_.sockets.size();
    form_.sockets = components(count_, [&](int i, int j) { return upper(i) == upper(j); });
    assume("CPU sockets", fmt::format("{}", form_.sockets.size()),
           fmt::format("{} NUMA nodes hold GPUs: taken as parts of {} CPUs, numbers below {} on the first", nodes,
                       kMostSockets, numbers / 2));
  }

  int nvlinks_of(int i) const {
    int total = 0;
    for (int j = 0; j < count_; ++j) total += link(i, j).nvlinks;
    return total;
  }

  void set_interconnect() {
    if (count_ == 1) return;
    if (set_nvlink()) return;
    const bool below_switch = std::ranges::any_of(form_.trees, [](const auto& tree) { return tree.size() > 1; });
    form_.interconnect = below_switch ? Interconnect::pcie_switch : Interconnect::root_complex;
  }

  bool set_nvlink() {
    int linked = 0, least = kMostLinksOfAnyGpu * count_, most = 0;
    for (int i = 0; i < count_; ++i) {
      for (int j = 0; j < i; ++j) {
        if (link(i, j).nvlinks == 0) continue;
        ++linked;
        least = std::min(least, link(i, j).nvlinks);
        most = std::max(most, link(i, j).nvlinks);
      }
    }
    if (linked == 0) return false;
    const bool all = linked == count_ * (count_ - 1) / 2;
    if (all && least == most && is_switched(least)) {
      set_fabric(Interconnect::nvswitch, least);
    } else if (are_pairs()) {
      set_fabric(Interconnect::nvlink_pairs, least);
    } else if (are_joined()) {
      int fewest = nvlinks_of(0);
      for (int i = 1; i < count_; ++i) fewest = std::min(fewest, nvlinks_of(i));
      set_fabric(Interconnect::nvlink_mesh, fewest);
    } else {
      assume("NVLink", "left out of the machine",
             "some GPUs have links and others none: a machine of equal GPUs cannot say that");
      return false;
    }
    return true;
  }

  void set_fabric(Interconnect kind, int nvlinks) {
    form_.interconnect = kind;
    form_.nvlinks = nvlinks;
  }

  /// Equal counts to every other GPU are links to a switch when the file says so, or when that many links to each of
  /// them is more than the GPU has. Two GPUs: when such GPUs sit on a board with a switch.
  bool is_switched(int nvlinks) const {
    if (topology_.nvswitch) return true;
    if (topology_.format == TopologyFormat::nccl) return false;
    const int available = gpu_ && gpu_->spec.nvlink_links > 0 ? gpu_->spec.nvlink_links : kMostLinksOfAnyGpu;
    if (count_ > 2) return nvlinks * (count_ - 1) > available;
    const bool board = gpu_ && (gpu_->wiring == Wiring::nvswitch || gpu_->wiring == Wiring::nvswitch_above_4 ||
                                gpu_->wiring == Wiring::nvswitch_above_8);
    return board && nvlinks == available;
  }

  bool are_pairs() const {
    for (int i = 0; i < count_; ++i) {
      int partners = 0;
      for (int j = 0; j < count_; ++j) partners += link(i, j).nvlinks > 0 ? 1 : 0;
      if (partners != 1) return false;
    }
    return true;
  }

  bool are_joined() const {
    return components(count_, [&](int i, int j) { return link(i, j).nvlinks > 0; }).size() == 1;
  }

  /// The nearest NIC, then the fastest, then the one with the fewest GPUs, then the first.
  void set_nics() {
    std::vector<int> users(topology_.nics.size());
    for (int gpu = 0; gpu < count_; ++gpu) {
      int best = -1;
      const auto rank = [&](int nic) {
        const TopologyLink& there = topology_.link(at(gpu), at(count_ + nic));
        return std::tuple(there.kind, -topology_.nics[at(nic)].speed.base(), users[at(nic)], nic);
      };
      for (int nic = 0; nic < count_of(topology_.nics); ++nic) {
        if (best < 0 || rank(nic) < rank(best)) best = nic;
      }
      if (best >= 0) ++users[at(best)];
      form_.nic_of_gpu.push_back(best);
    }
  }

  /// A machine has equal sockets, root complexes and switches, filled in the order of GPUs.
  void check_regular() {
    const auto say = [&](std::string_view what, const std::vector<std::vector<int>>& groups) {
      if (equal_sizes(groups)) return;
      assume(fmt::format("GPUs per {}", what), fmt::format("{}", largest(groups)),
             fmt::format("the file has groups of {}: the machine takes the largest for all", sizes_text(groups)));
    };
    if (form_.trees_known) say("PCIe switch", form_.trees);
    if (form_.trees_known) say("root complex", form_.complexes);
    const int sockets = count_of(form_.sockets);
    for (int socket = 0; socket < sockets; ++socket) {
      for (const int gpu : form_.sockets[at(socket)]) {
        if (gpu * sockets / count_ == socket) continue;
        assume("order of GPUs", "taken as even over the sockets, in order",
               fmt::format("the file has {} on socket {}", topology_.gpus[at(gpu)].name, socket));
        return;
      }
    }
  }

  const NodeTopology& topology_;
  const CatalogGpu* gpu_;
  int count_;
  NodeForm form_;
};

void check_links(const NodeTopology& topology, const NodeForm& form, const CatalogGpu& gpu) {
  if (form.nvlinks > gpu.spec.nvlink_links) {
    throw InputError(fmt::format("--gpu: expected a GPU with {} NVLinks as {} has them, found {} with {}", form.nvlinks,
                                 topology.file, gpu.spec.name, gpu.spec.nvlink_links));
  }
}

}  // namespace

CatalogGpu gpu_of_topology(const std::string& name, const NodeTopology& topology) {
  CatalogGpu gpu = load_gpu(parse_gpu_request("1x" + name, "--gpu").gpu);
  for (const TopologyDevice& device : topology.gpus) {
    const std::string capability = fmt::format("{}.{}", device.sm / 10, device.sm % 10);
    if (device.sm == 0 || gpu.spec.compute_capability.empty() || capability == gpu.spec.compute_capability) continue;
    throw InputError(fmt::format("--gpu: expected a GPU of compute capability {} as {} says of {}, found {} with {}",
                                 capability, topology.file, device.name, gpu.spec.name, gpu.spec.compute_capability));
  }
  return gpu;
}

NodeForm node_form(const NodeTopology& topology, const CatalogGpu* gpu) {
  NodeForm form = FormBuilder(topology, gpu).build();
  if (gpu) check_links(topology, form, *gpu);
  if (gpu && form.nvlinks == 0 && gpu->spec.nvlink_links > 0 && topology.gpus.size() > 1) {
    form.assumptions.push_back({"NVLink", "none",
                                fmt::format("{} can have {} links, the file shows none (no bridge, or "
                                            "printed by `topo -mp`)",
                                            gpu->spec.name, gpu->spec.nvlink_links)});
  }
  return form;
}

}  // namespace zeroplan
