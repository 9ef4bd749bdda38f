#include "cli/topology_command.h"

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "models/topology_form.h"
#include "models/topology_text.h"
#include "models/units.h"
#include "sim/topology_routes.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

/// All that is said about one file.
struct Answer {
  NodeTopology topology;
  std::optional<CatalogGpu> gpu;
  NodeForm form;
  MachineSpec machine;
  std::vector<GpuRoute> routes;
  std::vector<HostCopy> copies;

  const CatalogGpu* named_gpu() const { return gpu ? &*gpu : nullptr; }
  const std::string& gpu_name(int index) const { return topology.gpus[static_cast<std::size_t>(index)].name; }
};

Answer answer_for(std::string_view text, const std::string& file, const std::string& gpu) {
  Answer answer;
  answer.topology = read_topology(text, file);
  if (!gpu.empty()) answer.gpu = gpu_of_topology(gpu, answer.topology);
  answer.form = node_form(answer.topology, answer.named_gpu());
  answer.machine = machine_from(answer.topology, answer.form, answer.named_gpu());
  answer.routes = gpu_routes(answer.topology, answer.form, answer.machine);
  answer.copies = host_copies(answer.topology, answer.form, answer.machine);
  return answer;
}

std::string counted(int count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string names_of(const Answer& answer, const std::vector<int>& gpus) {
  std::vector<std::string> names;
  for (const int gpu : gpus) names.push_back(answer.gpu_name(gpu));
  return fmt::format("{}", fmt::join(names, " "));
}

std::string pcie_text(const PcieLink& link) {
  if (link.generation == 0) return "";
  return link.lanes == 0 ? fmt::format("Gen{}", link.generation)
                         : fmt::format("Gen{} x{}", link.generation, link.lanes);
}

// --- text ---------------------------------------------------------------------------------------

void print_matrix(const Answer& answer, std::ostream& out) {
  const NodeTopology& topology = answer.topology;
  std::size_t width = 4;
  for (std::size_t i = 0; i < topology.num_devices(); ++i) width = std::max(width, topology.device(i).name.size());
  fmt::print(out, "{:<{}}", "", width);
  for (std::size_t i = 0; i < topology.num_devices(); ++i) fmt::print(out, "  {:>{}}", topology.device(i).name, width);
  fmt::print(out, "  {:>5}  {}\n", "NUMA", "device");
  for (std::size_t i = 0; i < topology.num_devices(); ++i) {
    const TopologyDevice& device = topology.device(i);
    fmt::print(out, "{:<{}}", device.name, width);
    for (std::size_t j = 0; j < topology.num_devices(); ++j) {
      fmt::print(out, "  {:>{}}", to_string(topology.link(i, j)), width);
    }
    const std::string numa = device.numa.empty() ? "-" : fmt::format("{}", fmt::join(device.numa, ","));
    std::string about = device.device;
    if (const std::string link = pcie_text(device.pcie); !link.empty()) about += ", " + link;
    if (device.nvlinks > 0) about += ", " + counted(device.nvlinks, "NVLink");
    if (device.speed.base() > 0) about += ", " + format_rate(device.speed);
    fmt::print(out, "  {:>5}  {}\n", numa, about.empty() ? "-" : about);
  }
}

/// NICs that meet one of these GPUs below a switch.
std::string near_nics(const Answer& answer, const std::vector<int>& gpus) {
  std::string result;
  const NodeTopology& topology = answer.topology;
  for (std::size_t nic = 0; nic < topology.nics.size(); ++nic) {
    const bool near = std::ranges::any_of(gpus, [&](int gpu) {
      return topology.link(static_cast<std::size_t>(gpu), topology.gpus.size() + nic).kind <= Connection::pxb;
    });
    if (near) result += " " + topology.nics[nic].name;
  }
  return result;
}

void print_graph(const Answer& answer, std::ostream& out) {
  const NodeForm& form = answer.form;
  fmt::print(out, "\nGraph\n");
  const auto inside = [](const std::vector<int>& group, const std::vector<int>& of) {
    return std::ranges::find(of, group.front()) != of.end();
  };
  for (std::size_t i = 0; i < form.sockets.size(); ++i) {
    const auto& numa = form.numa_nodes[i];
    fmt::print(out, "  socket {}{}\n", i, numa.empty() ? "" : fmt::format(" (NUMA {})", fmt::join(numa, ",")));
    if (!form.trees_known) {
      fmt::print(out, "    {} (NVLink hides how they meet on PCIe)\n", names_of(answer, form.sockets[i]));
      continue;
    }
    for (std::size_t j = 0; j < form.complexes.size(); ++j) {
      if (!inside(form.complexes[j], form.sockets[i])) continue;
      fmt::print(out, "    root complex {}\n", j);
      for (std::size_t k = 0; k < form.trees.size(); ++k) {
        const auto& tree = form.trees[k];
        if (!inside(tree, form.complexes[j])) continue;
        const std::string nics = near_nics(answer, tree);
        const bool is_switch = tree.size() > 1 || !nics.empty();
        fmt::print(out, "      {}{}{}\n", is_switch ? fmt::format("PCIe switch {}: ", k) : "", names_of(answer, tree),
                   nics);
      }
    }
  }
}

void print_routes(const Answer& answer, std::ostream& out) {
  if (answer.routes.empty()) return;
  fmt::print(out, "\nRoutes between GPUs, one stream, one direction\n");
  std::vector<bool> done(answer.routes.size());
  for (std::size_t i = 0; i < answer.routes.size(); ++i) {
    if (done[i]) continue;
    const GpuRoute& first = answer.routes[i];
    std::vector<std::string> pairs;
    for (std::size_t j = i; j < answer.routes.size(); ++j) {
      const GpuRoute& route = answer.routes[j];
      if (route.way != first.way || route.rate != first.rate) continue;
      done[j] = true;
      pairs.push_back(fmt::format("{}-{}", answer.gpu_name(route.from), answer.gpu_name(route.to)));
    }
    const bool all = pairs.size() == answer.routes.size() && pairs.size() > 1;
    fmt::print(out, "  {:<36} {:>12}  {}\n", first.way, first.rate.base() > 0 ? format_rate(first.rate) : "rate: --gpu",
               all ? fmt::format("every pair ({})", pairs.size()) : fmt::format("{}", fmt::join(pairs, " ")));
  }
}

void print_copies(const Answer& answer, std::ostream& out) {
  fmt::print(out, "\nHost copies, one direction\n");
  if (answer.copies.empty()) fmt::print(out, "  over C2C: its rate is known with --gpu\n");
  for (const HostCopy& copy : answer.copies) {
    const std::string shared =
        copy.shared_with.size() > 1 ? fmt::format(", shared by {}", names_of(answer, copy.shared_with)) : "";
    fmt::print(out, "  {:<6} alone {:>10}, all GPUs at once {:>10}: {}{}\n", answer.gpu_name(copy.gpu),
               format_rate(copy.alone), format_rate(copy.together), copy.limit, shared);
  }
}

void print_nics(const Answer& answer, std::ostream& out) {
  if (answer.topology.nics.empty()) return;
  fmt::print(out, "\nNIC of each GPU\n");
  for (std::size_t gpu = 0; gpu < answer.topology.gpus.size(); ++gpu) {
    const auto index = static_cast<std::size_t>(answer.form.nic_of_gpu[gpu]);
    const TopologyDevice& nic = answer.topology.nics[index];
    const bool other_name = answer.topology.format == TopologyFormat::nvidia_smi && !nic.device.empty();
    fmt::print(out, "  {:<6} {}{}, {}\n", answer.topology.gpus[gpu].name, nic.name,
               other_name ? fmt::format(" ({})", nic.device) : "",
               to_string(answer.topology.link(gpu, answer.topology.gpus.size() + index)));
  }
}

void print_form(const Answer& answer, std::ostream& out) {
  const MachineSpec& machine = answer.machine;
  std::string links;
  if (answer.form.nvlinks > 0) links = fmt::format(", {} a GPU", counted(answer.form.nvlinks, "NVLink"));
  if (machine.nvlink.base() > 0) links += fmt::format(" ({})", format_rate(machine.nvlink));
  const NetworkSpec& network = machine.network;
  const std::string nics = network.nics > 0
                               ? fmt::format("{} ({})", counted(network.nics, "NIC"), format_rate(network.bandwidth))
                               : "no NIC";
  fmt::print(out, "\nMachine: {} x {}, {}{}, {} a PCIe switch, {} a root complex, {}, {}\n", machine.gpus_per_node,
             machine.gpu.name, to_string(machine.interconnect), links, counted(machine.gpus_per_pcie_switch, "GPU"),
             machine.gpus_per_root_complex, counted(machine.sockets, "socket"), nics);
}

void print_assumptions(const Answer& answer, std::ostream& out) {
  std::vector<Assumption> all = answer.machine.assumptions;
  all.insert(all.end(), answer.topology.notes.begin(), answer.topology.notes.end());
  if (all.empty()) return;
  fmt::print(out, "Assumptions\n");
  for (const Assumption& one : all) fmt::print(out, "  {}: {} ({})\n", one.what, one.value, one.source);
}

void print_text(const Answer& answer, std::ostream& out) {
  const NodeTopology& topology = answer.topology;
  fmt::print(out, "{}: {}, {}, {}\n\n", topology.file, counted(static_cast<int>(topology.gpus.size()), "GPU"),
             counted(static_cast<int>(topology.nics.size()), "NIC"),
             topology.format == TopologyFormat::nccl ? "NCCL topology" : "nvidia-smi topo -m");
  print_matrix(answer, out);
  print_graph(answer, out);
  print_routes(answer, out);
  print_copies(answer, out);
  print_nics(answer, out);
  print_form(answer, out);
  print_assumptions(answer, out);
}

// --- JSON ---------------------------------------------------------------------------------------

Json device_json(const TopologyDevice& device) {
  Json json{{"name", device.name}};
  if (!device.device.empty()) json["device"] = device.device;
  if (!device.cpus.empty()) json["cpus"] = device.cpus;
  if (!device.numa.empty()) json["numa"] = device.numa;
  if (device.memory_node) json["memory_node"] = *device.memory_node;
  if (device.pcie.generation > 0) json["pcie_generation"] = device.pcie.generation;
  if (device.pcie.lanes > 0) json["pcie_lanes"] = device.pcie.lanes;
  if (device.nvlinks > 0) json["nvlinks"] = device.nvlinks;
  if (device.speed.base() > 0) json["bytes_per_second"] = device.speed.base();
  if (device.gpudirect) json["gpudirect"] = *device.gpudirect;
  return json;
}

Json groups_json(const Answer& answer, const std::vector<std::vector<int>>& groups) {
  Json json = Json::array();
  for (const auto& group : groups) {
    Json names = Json::array();
    for (const int gpu : group) names.push_back(answer.gpu_name(gpu));
    json.push_back(std::move(names));
  }
  return json;
}

Json matrix_json(const NodeTopology& topology) {
  Json rows = Json::array();
  for (std::size_t i = 0; i < topology.num_devices(); ++i) {
    Json row = Json::array();
    for (std::size_t j = 0; j < topology.num_devices(); ++j) row.push_back(to_string(topology.link(i, j)));
    rows.push_back(std::move(row));
  }
  return rows;
}

Json graph_json(const Answer& answer) {
  const NodeForm& form = answer.form;
  Json graph{{"sockets", groups_json(answer, form.sockets)}};
  if (form.trees_known) {
    graph["root_complexes"] = groups_json(answer, form.complexes);
    graph["pcie_switches"] = groups_json(answer, form.trees);
  }
  return graph;
}

Json routes_json(const Answer& answer) {
  Json routes = Json::array();
  for (const GpuRoute& route : answer.routes) {
    Json entry{{"from", answer.gpu_name(route.from)}, {"to", answer.gpu_name(route.to)}, {"way", route.way}};
    if (route.rate.base() > 0) entry["bytes_per_second"] = route.rate.base();
    routes.push_back(std::move(entry));
  }
  return routes;
}

Json copies_json(const Answer& answer) {
  Json copies = Json::array();
  for (const HostCopy& copy : answer.copies) {
    copies.push_back({{"gpu", answer.gpu_name(copy.gpu)},
                      {"alone_bytes_per_second", copy.alone.base()},
                      {"together_bytes_per_second", copy.together.base()},
                      {"limit", copy.limit},
                      {"shared_with", groups_json(answer, {copy.shared_with})[0]}});
  }
  return copies;
}

Json form_json(const Answer& answer) {
  const MachineSpec& machine = answer.machine;
  Json form{{"gpus_per_node", machine.gpus_per_node}, {"interconnect", to_string(machine.interconnect)}};
  if (answer.form.nvlinks > 0) form["nvlinks"] = answer.form.nvlinks;
  form["gpus_per_pcie_switch"] = machine.gpus_per_pcie_switch;
  form["gpus_per_root_complex"] = machine.gpus_per_root_complex;
  form["sockets"] = machine.sockets;
  form["nics"] = machine.network.nics;
  return form;
}

void print_json(const Answer& answer, std::ostream& out) {
  const NodeTopology& topology = answer.topology;
  Json json{{"format", topology.format == TopologyFormat::nccl ? "nccl" : "nvidia-smi"}};
  json["gpus"] = Json::array();
  for (std::size_t i = 0; i < topology.gpus.size(); ++i) {
    json["gpus"].push_back(device_json(topology.gpus[i]));
    const int nic = answer.form.nic_of_gpu[i];
    if (nic >= 0) json["gpus"].back()["nic"] = topology.nics[static_cast<std::size_t>(nic)].name;
  }
  json["nics"] = Json::array();
  for (const TopologyDevice& nic : topology.nics) json["nics"].push_back(device_json(nic));
  json["matrix"] = matrix_json(topology);
  json["graph"] = graph_json(answer);
  json["routes"] = routes_json(answer);
  json["host_copies"] = copies_json(answer);
  json["form"] = form_json(answer);
  if (answer.gpu) json["machine"] = Json::parse(write_machine(answer.machine));
  json["assumptions"] = Json::array();
  for (const auto& list : {answer.machine.assumptions, topology.notes}) {
    for (const Assumption& one : list) {
      json["assumptions"].push_back({{"what", one.what}, {"value", one.value}, {"source", one.source}});
    }
  }
  fmt::print(out, "{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

void print_topology(std::string_view text, const std::string& file, const std::string& gpu, std::ostream& out,
                    bool json) {
  const Answer answer = answer_for(text, file, gpu);
  json ? print_json(answer, out) : print_text(answer, out);
}

}  // namespace zeroplan
