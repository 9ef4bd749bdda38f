#pragma once
// The two readers behind read_topology().

#include <string>
#include <string_view>

#include "models/topology_text.h"

namespace zeroplan {

/// Most devices of a matrix: the largest nodes have 16 GPUs, and some dozens of virtual NICs.
inline constexpr std::size_t kMostTopologyDevices = 512;

NodeTopology read_topology_matrix(std::string_view text, const std::string& file);
NodeTopology read_topology_xml(std::string_view text, const std::string& file);

/// Throws InputError "file:line: message".
[[noreturn]] void fail_at(const std::string& file, int line, std::string_view message);
/// The first characters of what was found, printable, in quotes.
std::string found_text(std::string_view text);
/// "0", "0-1", "0,2-17" as ascending numbers below 65536; nothing when the text is no such list.
std::optional<std::vector<int>> parse_number_list(std::string_view text);

}  // namespace zeroplan
