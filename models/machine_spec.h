#pragma once
// A machine: nodes of equal GPUs, what connects them, host memory, disks, network, price. The catalog, machine.json,
// `probe` and plan.json all use this one form. Rates are one direction, theoretical unless the name says measured;
// the fractions that make them achievable live in the cost model and are printed as assumptions.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/host_kernels.h"
#include "models/units.h"

namespace zeroplan {

struct GpuSpec {
  std::string name;                         // "A100-SXM4-80GB"
  std::string vendor;                       // "NVIDIA"
  std::string arch;                         // "Ampere"
  std::string compute_capability;           // "8.0"; empty if unknown
  Bytes memory;                             // what a process can allocate before context and libraries
  BytesPerSecond memory_bandwidth;          // spec sheet
  std::optional<FlopsPerSecond> peak_bf16;  // dense
  std::optional<FlopsPerSecond> peak_fp16;
  std::optional<FlopsPerSecond> peak_fp32;        // tensor-core tf32 not counted
  std::optional<FlopsPerSecond> measured_matmul;  // best sustained 16-bit matmul measured on this GPU
  std::optional<std::int64_t> num_sms;
  BytesPerSecond nvlink;      // all links of one GPU, one direction; 0: none
  int nvlink_generation = 0;  // 0: none or not NVIDIA
  int nvlink_links = 0;
  int pcie_generation = 4;
  BytesPerSecond pcie;  // x16, one direction
  std::optional<bool> p2p_over_pcie;
  BytesPerSecond c2c;    // NVLink-C2C of a superchip's CPU, one direction; 0: copies take PCIe
  int gpus_per_c2c = 1;  // GPUs that share it
  std::vector<std::string> sources;
  std::vector<std::string> recalled;  // fields known from memory only: printed as "recalled"
  friend bool operator==(const GpuSpec&, const GpuSpec&) = default;
};

/// How the GPUs of one node reach each other (data/hardware README).
enum class Interconnect : std::uint8_t { nvswitch, nvlink_mesh, nvlink_pairs, pcie_switch, root_complex, single };
std::string_view to_string(Interconnect value);

struct NvmeSpec {
  int drives = 0;       // 0: no NVMe
  Bytes capacity;       // all drives of a node
  BytesPerSecond read;  // all drives of a node together
  BytesPerSecond write;
  friend bool operator==(const NvmeSpec&, const NvmeSpec&) = default;
};

struct NetworkSpec {
  int nics = 0;              // 0: unknown or none
  BytesPerSecond bandwidth;  // all NICs of a node together, one direction
  std::string kind;          // "EFA v2", "InfiniBand NDR"
  bool gpudirect = false;    // NICs read and write GPU memory; else copies pass through DRAM
  friend bool operator==(const NetworkSpec&, const NetworkSpec&) = default;
};

struct PriceSpec {
  double usd_per_hour = 0;  // on demand, whole node
  std::string region, date, source;
  friend bool operator==(const PriceSpec&, const PriceSpec&) = default;
};

struct MachineSpec {
  std::string name;      // "p4de.24xlarge"
  std::string provider;  // "AWS"; "generic"; "user"
  std::string kind;      // "cloud", "on-prem", "on-prem template", "generic", "probed"
  GpuSpec gpu;
  int gpus_per_node = 1;  // ranks per node
  int nodes = 1;
  Interconnect interconnect = Interconnect::single;
  BytesPerSecond nvlink;  // per GPU, one direction, as this node wires it; 0: none
  int gpus_per_pcie_switch = 1;
  int gpus_per_root_complex = 1;
  int sockets = 1;
  BytesPerSecond socket_link;  // GPU traffic between two sockets, one direction; 0 with one socket
  int physical_cores = 0;      // per node; 0: unknown
  std::string cpu;
  Bytes dram;                     // per node, installed
  BytesPerSecond dram_bandwidth;  // per node, achievable read-modify-write
  NvmeSpec nvme;
  NetworkSpec network;
  std::optional<PriceSpec> price;
  /// Compute happens on the host's cores ("probed" machines without a GPU): no PCIe copies are needed then.
  bool host_device = false;
  /// What a probe measured of the cores of such a machine: kernels, threads, collectives, disk.
  std::optional<HostKernels> host_kernels;
  std::vector<std::string> sources;
  std::vector<std::string> recalled;
  std::vector<Assumption> assumptions;  // null fields filled from node_defaults.json

  int ranks() const { return gpus_per_node * nodes; }
  friend bool operator==(const MachineSpec&, const MachineSpec&) = default;
  /// DRAM minus the larger of 8 GiB and 5 % (spec, defaults). Where the host is the device, what the devices leave of
  /// it, minus a reserve that small machines have too: the smaller of 8 GiB and an eighth, or 5 % if that is more.
  Bytes usable_dram() const;
};

/// A machine whose host is the device, as `ranks` devices: each has an equal part of what all have together (memory,
/// rates); they share cores and DRAM. Throws std::logic_error on a machine with GPUs.
void set_host_ranks(MachineSpec& machine, int ranks);

/// machine.json (schema 1), the form of catalog entries too: strict, units as text.
MachineSpec read_machine(std::string_view text, const std::string& file_name);
/// Writes what read_machine reads; round-trips exactly.
std::string write_machine(const MachineSpec& machine);

/// The text of `--gpus`: "4xA100-80G", "8xH100", "2x3090-24G", any case, "a100_80gb".
struct GpuRequest {
  int count = 0;         // per node
  std::string gpu;       // canonical catalog name
  std::string typed{};   // where the name leaves the memory open, as it was typed;
  std::string others{};  // and what else it may be: "A100-SXM4-40GB (40 GB)"
};
/// Throws InputError on a count below 1, an unknown or ambiguous name (nearest ones listed) or a label that is not the
/// GPU's memory. `where` is how the message names what was typed.
GpuRequest parse_gpu_request(std::string_view text, std::string_view where = "--gpus");

/// How several nodes are written where a machine is typed: "--nodes 2" beside it, or "2x" before it.
enum class NodesForm : std::uint8_t { flag, prefix };
/// How a message names a machine that somebody typed, and tells what to type instead.
struct TypedMachine {
  std::string where = "--gpus";  // "--hardware 16xH100"
  NodesForm nodes = NodesForm::flag;
};

/// The machine that `--gpus`/`--machine` means (spec section 3, Defaults): the cheapest on-demand priced catalog node
/// with exactly that GPU and count and a known DRAM size; else an on-premise entry; else a generic node. A count above
/// the largest node of that GPU is refused with the spelling of `typed` for several nodes. Every default taken is in
/// `assumptions`.
MachineSpec machine_for(const GpuRequest& request, int nodes, const TypedMachine& typed = {});
/// Of one machine.
inline constexpr int kMostNodes = 65536;
/// Sets the number of nodes. Several nodes without a known network get the default one, as an assumption.
/// Throws InputError when `nodes` is not in [1, kMostNodes].
void set_nodes(MachineSpec& machine, int nodes);
/// A catalog node by name or alias, or a machine.json path. A message about another text says where it stood and what
/// was expected there.
MachineSpec find_machine(const std::string& name_or_path, std::string_view where = "--machine",
                         std::string_view expected = "a catalog name or a machine.json");

/// `--host-memory`: replaces the installed memory of a node and the assumption about it.
void set_host_memory(MachineSpec& machine, Bytes dram);
/// `--nvme`: replaces the drives of a node and the assumptions about them; a rate that the text leaves out is a new
/// one. "none" takes the drives away. Throws InputError as parse_nvme().
void set_nvme(MachineSpec& machine, std::string_view text, std::string_view where = "--nvme");
/// `--nvme 4x2TB[@6.5GB/s]`: drives x capacity [@ read rate a drive]; the write rate is half of a given read rate.
NvmeSpec parse_nvme(std::string_view text, std::string_view where = "--nvme");

/// Names of the catalog's nodes and GPUs, sorted.
std::vector<std::string> machine_names();
std::vector<std::string> gpu_names();
/// One GPU of the catalog by canonical name. Throws InputError with the nearest names.
GpuSpec find_gpu(const std::string& name);

}  // namespace zeroplan
