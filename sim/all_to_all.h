#pragma once
// All-to-all inside a node: every rank of a group sends each other one its part, pair by pair, on the graph.

#include "models/machine_spec.h"
#include "models/units.h"

namespace zeroplan {

using SecondsPerByte = decltype(Seconds() / Bytes());

/// How much longer than a ring of as many bytes (a reduce-scatter) an all-to-all keeps the fullest link of a node busy,
/// for each byte that a rank holds, in groups of `inside` consecutive GPUs that all do it at once: at least 0. Loads
/// are counted on the links of Topology at their capacities. Under a switch both fill a GPU's own link alike (0); over
/// two sockets half of all pairs cross between them, of a ring two neighbours. NCCL sends pairs side by side over all
/// of its channels; on 8 A100 PCIe over two sockets an all-to-all takes 1.34 times its ring (links.json, SimuMax:
/// 0.2754 and 0.3688 of the base rate). Throws InputError as Topology::build().
SecondsPerByte all_to_all_beyond_ring(const MachineSpec& machine, int inside);

}  // namespace zeroplan
