// Names of the wirings of a node.

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "models/error.h"
#include "models/machine_json.h"

namespace zeroplan {
namespace {

constexpr Interconnect kInterconnects[] = {Interconnect::nvswitch,     Interconnect::nvlink_mesh,
                                           Interconnect::nvlink_pairs, Interconnect::pcie_switch,
                                           Interconnect::root_complex, Interconnect::single};

}  // namespace

std::string_view to_string(Interconnect value) {
  switch (value) {
    case Interconnect::nvswitch:
      return "nvswitch";
    case Interconnect::nvlink_mesh:
      return "nvlink_mesh";
    case Interconnect::nvlink_pairs:
      return "nvlink_pairs";
    case Interconnect::pcie_switch:
      return "pcie_switch";
    case Interconnect::root_complex:
      return "root_complex";
    case Interconnect::single:
      return "single";
  }
  return "";
}

Interconnect read_interconnect(const JsonValue& value) {
  const std::string& text = value.as_string();
  std::vector<std::string> names;
  for (const Interconnect candidate : kInterconnects) {
    if (text == to_string(candidate)) return candidate;
    names.emplace_back(to_string(candidate));
  }
  value.fail(fmt::format("one of {} ({})", fmt::join(names, ", "), did_you_mean(text, names)));
}

}  // namespace zeroplan
