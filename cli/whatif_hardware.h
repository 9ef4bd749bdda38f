#pragma once
// The machines of `--hardware` and of whatif's file.

#include <string>
#include <string_view>
#include <vector>

#include "planner/whatif.h"

namespace zeroplan {

inline constexpr std::size_t kMostAlternatives = 64;

/// NxGPU, a catalog node or a machine.json, with "NODESx" before it when the number of nodes is given. A machine.json
/// has its own number of nodes, unless one stands before it. Messages begin with the flag, if there is one, and the
/// item. Throws InputError.
Alternative alternative_of(std::string_view item, std::string_view flag);
/// "8xH100,2xp4de.24xlarge,my.json@12.5USD": the same, each with "@31.5USD" behind it when the user knows the price of
/// a node and hour. Different names, at most kMostAlternatives.
std::vector<Alternative> alternatives_of_flag(const std::string& hardware);

/// Whether the text names a file or folder rather than an entry of a catalog.
bool is_path(std::string_view text);

}  // namespace zeroplan
