#pragma once
// machine.json (schema 1) inside a larger document: plan.json embeds the whole machine.

#include <string>

#include "models/json_reader.h"
#include "models/machine_spec.h"

namespace zeroplan {

/// The machine of a parsed object. Throws InputError with file, line and pointer on unknown, missing or wrong keys.
MachineSpec read_machine(const JsonValue& value);
/// One GPU as machine.json carries it under "gpu".
std::string write_gpu(const GpuSpec& gpu);
/// The class named by a text value; the nearest name is in the error.
Interconnect read_interconnect(const JsonValue& value);

}  // namespace zeroplan
