#pragma once
// What `zeroplan machines` prints. Argument parsing is elsewhere.

#include <ostream>
#include <string>

#include "models/machine_spec.h"

namespace zeroplan {

/// The catalog: one line a node (GPUs, host memory, price) and one a GPU; or {"machines": [...], "gpus": [...]}.
void print_machines(std::ostream& out, bool json);

/// One machine: every value with its unit, "recalled" beside what nobody re-read, price, assumptions, sources. As JSON:
/// the form of machine.json.
void print_machine(const MachineSpec& machine, std::ostream& out, bool json);

/// One GPU; as JSON the form of machine.json's "gpu".
void print_gpu(const GpuSpec& gpu, std::ostream& out, bool json);

/// What `machines NAME|FILE` shows: a catalog node, a machine.json, or a GPU by any of its names. Throws InputError
/// with the nearest names of both.
void print_machine_or_gpu(const std::string& name, std::ostream& out, bool json);

}  // namespace zeroplan
