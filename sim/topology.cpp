#include "sim/topology.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/breadth_first_search.hpp>
#include <boost/graph/dijkstra_shortest_paths.hpp>
#include <boost/graph/filtered_graph.hpp>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "models/error.h"
#include "sim/node_graph.h"

namespace zeroplan {
namespace {

using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, NodeVertex, NodeEdge>;
using Vertex = boost::graph_traits<Graph>::vertex_descriptor;
using Edge = boost::graph_traits<Graph>::edge_descriptor;
using Path = std::vector<ResourceId>;

/// Edges that a transfer from `from` to `to` may take: memories, disks and GPUs are ends, never on the way.
struct Passable {
  const Graph* graph = nullptr;
  Vertex from = 0;
  Vertex to = 0;
  bool nvlink_only = false;
  double least_width = 0;

  bool operator()(const Edge& edge) const {
    const Vertex begin = boost::source(edge, *graph);
    const Vertex end = boost::target(edge, *graph);
    if (begin != from && (*graph)[begin].is_end) return false;
    if (end != to && (*graph)[end].is_end) return false;
    const NodeEdge& link = (*graph)[edge];
    return link.width >= least_width && (!nvlink_only || link.nvlink);
  }
};
using Filtered = boost::filtered_graph<Graph, Passable>;

/// The bottleneck of the widest path; 0 when there is none.
double widest(const Filtered& graph, Vertex from, Vertex to) {
  std::vector<double> widths(boost::num_vertices(graph));
  std::vector<Vertex> parents(widths.size());
  const double unlimited = std::numeric_limits<double>::infinity();
  boost::dijkstra_shortest_paths(graph, from,
                                 boost::weight_map(boost::get(&NodeEdge::width, graph))
                                     .distance_map(widths.data())
                                     .predecessor_map(parents.data())
                                     .distance_compare(std::greater<double>())
                                     .distance_combine([](double a, double b) { return std::min(a, b); })
                                     .distance_inf(0.0)
                                     .distance_zero(unlimited));
  return widths[to];
}

/// Fewest edges; out-edges are visited in the order they were added, so ties fall to the lowest ids.
std::vector<Edge> shortest(const Filtered& graph, Vertex from, Vertex to) {
  struct Recorder : boost::default_bfs_visitor {
    explicit Recorder(std::vector<std::optional<Edge>>& kept) : into(&kept) {}
    void tree_edge(const Edge& edge, const Filtered& visited) const { (*into)[boost::target(edge, visited)] = edge; }
    std::vector<std::optional<Edge>>* into;
  };
  std::vector<std::optional<Edge>> into(boost::num_vertices(graph));
  boost::breadth_first_search(graph, from, boost::visitor(Recorder(into)));
  std::vector<Edge> path;
  for (Vertex at = to; at != from; at = boost::source(*into[at], graph)) path.push_back(*into[at]);
  std::ranges::reverse(path);
  return path;
}

/// Widest, then fewest hops, then lowest ids; nothing when there is no path.
std::optional<std::vector<Edge>> find_path(const Graph& graph, Passable passable) {
  const double width = widest(Filtered(graph, passable), passable.from, passable.to);
  if (!(width > 0)) return std::nullopt;
  passable.least_width = width;
  return shortest(Filtered(graph, passable), passable.from, passable.to);
}

struct RouteKey {
  std::uint64_t from;
  std::uint64_t to;
  friend bool operator==(const RouteKey&, const RouteKey&) = default;
};
struct RouteHash {
  std::size_t operator()(const RouteKey& key) const {
    return std::hash<std::uint64_t>{}(key.from * 0x9e3779b97f4a7c15u ^ (key.to + (key.from >> 29)));
  }
};

std::uint64_t packed(Endpoint end) {
  return (static_cast<std::uint64_t>(end.node) << 24) | (static_cast<std::uint64_t>(end.index) << 4) |
         static_cast<std::uint64_t>(end.kind);
}

}  // namespace

std::string_view to_string(ResourceKind kind) {
  switch (kind) {
    case ResourceKind::sm:
      return "sm";
    case ResourceKind::hbm:
      return "hbm";
    case ResourceKind::nvlink:
      return "nvlink";
    case ResourceKind::pcie:
      return "pcie";
    case ResourceKind::pcie_duplex:
      return "pcie duplex";
    case ResourceKind::c2c:
      return "c2c";
    case ResourceKind::c2c_duplex:
      return "c2c duplex";
    case ResourceKind::socket_link:
      return "socket link";
    case ResourceKind::dram:
      return "dram";
    case ResourceKind::cpu:
      return "cpu";
    case ResourceKind::nvme_read:
      return "nvme read";
    case ResourceKind::nvme_write:
      return "nvme write";
    case ResourceKind::nic:
      return "nic";
  }
  return "";
}

struct Topology::Impl {
  NodeGraph node;  // resources of node 0; node n's have ids higher by n x their number
  Graph graph;
  std::vector<Resource> resources;
  std::string name;
  int nodes = 1;
  int gpus_per_node = 1;
  bool peer_access = false;
  bool gpudirect = false;
  mutable std::mutex mutex;
  mutable std::unordered_map<RouteKey, Path, RouteHash> routes;

  ResourceId in_node(int number, ResourceId id) const {
    return {id.index + static_cast<std::uint32_t>(number) * static_cast<std::uint32_t>(node.resources.size())};
  }

  int vertex(Endpoint end) const {
    const std::vector<int>* known = nullptr;
    switch (end.kind) {
      case EndpointKind::gpu:
        known = &node.gpus;
        break;
      case EndpointKind::dram:
        known = &node.drams;
        break;
      case EndpointKind::nvme:
        known = &node.nvmes;
        break;
      case EndpointKind::nic:
        known = &node.nics;
        break;
    }
    const bool exists = end.index >= 0 && end.index < static_cast<int>(known->size());
    if (exists && end.node >= 0 && end.node < nodes) return (*known)[static_cast<std::size_t>(end.index)];
    static constexpr std::string_view kNames[] = {"GPU", "host memory", "NVMe", "NIC"};
    throw InputError(fmt::format("machine {}: node {} has no {} {}", name, end.node,
                                 kNames[static_cast<std::size_t>(end.kind)], end.index));
  }

  /// Appends the resources of a path within one node; false when there is none.
  bool add_leg(Path& path, Endpoint from, Endpoint to, bool nvlink_only) const {
    const auto begin = static_cast<Vertex>(vertex(from));
    const auto end = static_cast<Vertex>(vertex(to));
    const auto edges = find_path(graph, {&graph, begin, end, nvlink_only, 0});
    if (!edges) return false;
    const auto add = [&](std::optional<ResourceId> id) {
      if (id) path.push_back(in_node(from.node, *id));
    };
    add(graph[begin].memory);
    for (const Edge& edge : *edges) {
      add(graph[edge].link);
      add(graph[edge].duplex);
    }
    add(graph[end].memory);
    return true;
  }

  void need_leg(Path& path, Endpoint from, Endpoint to) const {
    if (add_leg(path, from, to, false)) return;
    throw InputError(
        fmt::format("machine {}: no path between {} and {}", name, graph[vertex(from)].name, graph[vertex(to)].name));
  }

  Endpoint host_of(Endpoint gpu) const {
    return {EndpointKind::dram, gpu.node, node.socket_of_gpu[static_cast<std::size_t>(gpu.index)]};
  }
  Endpoint nic_of(Endpoint gpu) const {
    if (node.nics.empty()) throw InputError(fmt::format("machine {}: no network is known", name));
    return {EndpointKind::nic, gpu.node, node.nic_of_gpu[static_cast<std::size_t>(gpu.index)]};
  }

  Path between_gpus(Endpoint from, Endpoint to) const {
    Path path;
    if (add_leg(path, from, to, true)) return path;
    const bool same_complex = node.complex_of_gpu[static_cast<std::size_t>(from.index)] ==
                              node.complex_of_gpu[static_cast<std::size_t>(to.index)];
    if (peer_access && same_complex) {
      need_leg(path, from, to);
    } else {
      need_leg(path, from, host_of(from));
      need_leg(path, host_of(from), to);
    }
    return path;
  }

  /// From an end to the NIC that serves it, or back; GPUs bounce through host memory without GPUDirect.
  Endpoint add_to_nic(Path& path, Endpoint end, bool outward) const {
    Endpoint nic{EndpointKind::nic, end.node, 0};
    if (end.kind == EndpointKind::nic) return end;
    if (node.nics.empty()) throw InputError(fmt::format("machine {}: no network is known", name));
    if (end.kind == EndpointKind::gpu) nic = nic_of(end);
    if (end.kind == EndpointKind::dram) nic.index = node.nic_of_socket[static_cast<std::size_t>(end.index)];
    const bool bounce = end.kind == EndpointKind::gpu && !gpudirect;
    std::vector<Endpoint> stops{end};
    if (bounce) stops.push_back(host_of(end));
    stops.push_back(nic);
    if (!outward) std::ranges::reverse(stops);
    for (std::size_t i = 1; i < stops.size(); ++i) need_leg(path, stops[i - 1], stops[i]);
    return nic;
  }

  Path between_nodes(Endpoint from, Endpoint to) const {
    Path path;
    const Endpoint out = add_to_nic(path, from, true);
    Path tail;
    const Endpoint in = add_to_nic(tail, to, false);
    path.push_back(in_node(out.node, node.nic_out[static_cast<std::size_t>(out.index)]));
    path.push_back(in_node(in.node, node.nic_in[static_cast<std::size_t>(in.index)]));
    path.insert(path.end(), tail.begin(), tail.end());
    return path;
  }

  Path find_route(Endpoint from, Endpoint to) const {
    vertex(from), vertex(to);  // both exist
    if (from == to) return {};
    if (from.node != to.node) return between_nodes(from, to);
    if (from.kind == EndpointKind::gpu && to.kind == EndpointKind::gpu) return between_gpus(from, to);
    Path path;
    need_leg(path, from, to);
    return path;
  }

  void check_reachable() const {
    for (int gpu = 0; gpu < gpus_per_node; ++gpu) {
      Path path;
      const Endpoint end{EndpointKind::gpu, 0, gpu};
      for (int socket = 0; socket < static_cast<int>(node.drams.size()); ++socket) {
        const auto from = static_cast<Vertex>(vertex(end));
        const auto to = static_cast<Vertex>(node.drams[static_cast<std::size_t>(socket)]);
        if (node.socket_of_gpu[static_cast<std::size_t>(gpu)] != socket && gpu > 0) continue;
        if (widest(Filtered(graph, {&graph, from, to, false, 0}), from, to) > 0) continue;
        throw InputError(
            fmt::format("machine {}: rank {} cannot reach the memory of socket {}: {} is missing", name, gpu, socket,
                        node.socket_of_gpu[static_cast<std::size_t>(gpu)] == socket ? "gpu.pcie" : "socket_link"));
      }
    }
    if (nodes > 1 && node.nics.empty()) {
      throw InputError(
          fmt::format("machine {}: rank {} cannot reach rank 0: {} nodes need a network", name, gpus_per_node, nodes));
    }
  }
};

Topology Topology::build(const MachineSpec& machine) {
  auto impl = std::make_shared<Impl>();
  impl->node = build_node_graph(machine);
  impl->name = machine.name;
  impl->nodes = machine.nodes;
  impl->gpus_per_node = machine.gpus_per_node;
  // Unknown counts as no: NCCL's fallback, host memory, works everywhere.
  impl->peer_access = machine.gpu.p2p_over_pcie.value_or(false);
  impl->gpudirect = machine.network.gpudirect;
  for (const NodeVertex& vertex : impl->node.vertices) boost::add_vertex(vertex, impl->graph);
  for (const NodeEdge& edge : impl->node.edges) {
    boost::add_edge(static_cast<Vertex>(edge.from), static_cast<Vertex>(edge.to), edge, impl->graph);
  }
  impl->check_reachable();
  impl->resources.reserve(impl->node.resources.size() * static_cast<std::size_t>(machine.nodes));
  for (int number = 0; number < machine.nodes; ++number) {
    const std::string prefix = fmt::format("node {} ", number);
    for (const Resource& resource : impl->node.resources) {
      impl->resources.push_back({prefix + resource.name, resource.kind, resource.capacity});
    }
  }
  return Topology(std::move(impl));
}

std::span<const Resource> Topology::resources() const { return impl_->resources; }

std::span<const ResourceId> Topology::route(Endpoint from, Endpoint to) const {
  const RouteKey key{packed(from), packed(to)};
  const std::scoped_lock lock(impl_->mutex);
  const auto known = impl_->routes.find(key);
  if (known != impl_->routes.end()) return known->second;
  return impl_->routes.emplace(key, impl_->find_route(from, to)).first->second;
}

BytesPerSecond Topology::width(std::span<const ResourceId> route) const {
  double least = std::numeric_limits<double>::infinity();
  for (const ResourceId id : route) {
    const auto uses = static_cast<double>(std::ranges::count(route, id));
    least = std::min(least, resource(id).capacity / uses);
  }
  return BytesPerSecond(least);
}

int Topology::num_ranks() const { return impl_->nodes * impl_->gpus_per_node; }
int Topology::gpus_per_node() const { return impl_->gpus_per_node; }
int Topology::sockets() const { return static_cast<int>(impl_->node.drams.size()); }
int Topology::nic_groups() const { return static_cast<int>(impl_->node.nics.size()); }

Endpoint Topology::gpu(int rank) const {
  if (rank < 0 || rank >= num_ranks()) throw std::out_of_range("Topology: no such rank");
  return {EndpointKind::gpu, rank / impl_->gpus_per_node, rank % impl_->gpus_per_node};
}
Endpoint Topology::host_of(int rank) const { return impl_->host_of(gpu(rank)); }
Endpoint Topology::nic_of(int rank) const { return impl_->nic_of(gpu(rank)); }

ResourceId Topology::sm(int rank) const {
  const Endpoint end = gpu(rank);
  return impl_->in_node(end.node, impl_->node.sms.at(static_cast<std::size_t>(end.index)));
}
ResourceId Topology::hbm(int rank) const {
  const Endpoint end = gpu(rank);
  return impl_->in_node(end.node, *impl_->graph[static_cast<Vertex>(impl_->vertex(end))].memory);
}
ResourceId Topology::dram(int node, int socket) const {
  const Endpoint end{EndpointKind::dram, node, socket};
  return impl_->in_node(node, *impl_->graph[static_cast<Vertex>(impl_->vertex(end))].memory);
}
ResourceId Topology::cpu(int node, int socket) const {
  impl_->vertex({EndpointKind::dram, node, socket});
  return impl_->in_node(node, impl_->node.cpus.at(static_cast<std::size_t>(socket)));
}
ResourceId Topology::dram_of(int rank) const { return dram(host_of(rank).node, host_of(rank).index); }
ResourceId Topology::cpu_of(int rank) const { return cpu(host_of(rank).node, host_of(rank).index); }
ResourceId Topology::nvme_read(int node) const {
  impl_->vertex(nvme(node));
  return impl_->in_node(node, impl_->node.nvme_read);
}
ResourceId Topology::nvme_write(int node) const {
  impl_->vertex(nvme(node));
  return impl_->in_node(node, impl_->node.nvme_write);
}

}  // namespace zeroplan
