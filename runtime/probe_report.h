#pragma once
// What `zeroplan probe` says of what it measured.

#include <string>

#include "runtime/probe.h"

namespace zeroplan {

/// For people: cores, memory, disk, and where the machine was written to. The machine is a probed one.
std::string report_probe(const MachineSpec& machine, const std::string& path);

/// `probe --json`: the same figures as plain numbers under stable keys, the whole machine.json and the notes.
/// `written_to` is left out when empty. Ends with a line break.
std::string probe_json(const ProbeResult& result, const std::string& written_to);

}  // namespace zeroplan
