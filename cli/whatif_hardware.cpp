#include "cli/whatif_hardware.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/values.h"
#include "models/error.h"

namespace zeroplan {
namespace {

/// The length of "12x" or "12X" at the front, 0 without.
std::size_t counted_prefix(std::string_view text) {
  const std::size_t digits = text.find_first_not_of("0123456789");
  const bool counted = digits != std::string_view::npos && digits > 0 && (text[digits] == 'x' || text[digits] == 'X');
  return counted ? digits + 1 : 0;
}

bool is_node(std::string_view text) {
  const std::vector<std::string> names = machine_names();
  return is_path(text) || std::ranges::find(names, text) != names.end();
}

}  // namespace

bool is_path(std::string_view text) { return text.find('/') != std::string_view::npos || text.ends_with(".json"); }

Alternative alternative_of(std::string_view item, std::string_view flag) {
  constexpr std::string_view kForms = "NxGPU, a catalog node or a machine.json, with NODESx before it or not";
  if (item.empty()) {
    throw InputError(fmt::format("{}expected {}, got nothing", flag.empty() ? "" : fmt::format("{}: ", flag), kForms));
  }
  Alternative alternative;
  alternative.name = item;
  const TypedMachine typed{flag.empty() ? std::string(item) : fmt::format("{} {}", flag, item), NodesForm::prefix};
  const std::size_t prefix = counted_prefix(item);
  const std::string_view rest = item.substr(prefix);
  const bool node_behind = prefix > 0 && is_node(rest);
  alternative.nodes_given = prefix > 0 && (node_behind || counted_prefix(rest) > 0);
  alternative.unit = alternative.nodes_given ? rest : item;
  int nodes = 1;
  if (alternative.nodes_given) {
    nodes = static_cast<int>(
        parse_integer(item.substr(0, prefix - 1), fmt::format("{}: nodes", typed.where), 1, kMostNodes));
  }
  if (prefix == 0 || node_behind) {
    alternative.machine = find_machine(alternative.unit, typed.where, kForms);
  } else {
    alternative.machine = machine_for(parse_gpu_request(alternative.unit, typed.where), nodes, typed);
  }
  if (alternative.nodes_given) {
    if (alternative.machine.host_device && nodes > 1) {
      throw InputError(fmt::format("{}: a probed machine is one node", typed.where));
    }
    if (alternative.machine.nodes != nodes) set_nodes(alternative.machine, nodes);
  } else if (is_path(alternative.unit)) {
    alternative.nodes_given = true;  // what the file says is there
  }
  return alternative;
}

std::vector<Alternative> alternatives_of_flag(const std::string& hardware) {
  std::vector<Alternative> alternatives;
  std::string_view rest = hardware;
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    if (item.empty()) throw InputError(fmt::format("--hardware: expected A,B,C, got \"{}\"", hardware));
    const std::size_t at = item.rfind('@');
    Alternative alternative = alternative_of(item.substr(0, at), "--hardware");
    if (at != std::string_view::npos) {
      const double usd = parse_usd(item.substr(at + 1), fmt::format("--hardware {}", item));
      alternative.machine.price = PriceSpec{usd, "", "", "given with --hardware"};
      alternative.name = item;
      alternative.unit += item.substr(at);
    }
    for (const Alternative& known : alternatives) {
      if (known.name == item) throw InputError(fmt::format("--hardware: \"{}\" is given twice", item));
    }
    alternatives.push_back(std::move(alternative));
    if (alternatives.size() > kMostAlternatives) {
      throw InputError(fmt::format("--hardware: expected at most {} machines", kMostAlternatives));
    }
    if (comma == std::string_view::npos) return alternatives;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace zeroplan
