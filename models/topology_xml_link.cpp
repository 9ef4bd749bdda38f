#include "models/topology_xml_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <string_view>

namespace zeroplan {
namespace {

// Lane rates in GT/s of the PCIe generations from 1.
constexpr std::array<double, 6> kLaneRates{2.5, 5, 8, 16, 32, 64};
// Widths that the kernel prints when it does not know (virtual functions).
constexpr std::array<int, 3> kUnknownWidths{0, 63, 255};
constexpr std::array<int, 7> kWidths{1, 2, 4, 8, 12, 16, 32};

/// "16.0 GT/s PCIe", "16 GT/s"; "Unknown" and nothing: not stated.
int generation(const XmlElement& pci, const std::string& text) {
  if (text.empty() || text.starts_with("Unknown")) return 0;
  double rate = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rate);
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (!unit.empty() && (unit.back() == ' ' || unit.back() == '\n')) unit.remove_suffix(1);
  const auto known = std::ranges::find(kLaneRates, rate);
  if (error == std::errc{} && known != kLaneRates.end() && (unit == " GT/s" || unit == " GT/s PCIe")) {
    return 1 + static_cast<int>(known - kLaneRates.begin());
  }
  pci.fail(fmt::format("link_speed: expected 2.5, 5, 8, 16, 32 or 64 GT/s, found {}", found_text(text)));
}

}  // namespace

PcieLink read_pcie_link(const XmlElement& pci) {
  PcieLink link;
  if (pci.has("link_speed")) link.generation = generation(pci, pci.text("link_speed"));
  if (pci.has("link_width") && !pci.text("link_width").empty()) {
    link.lanes = pci.integer("link_width", 0, 255);
    if (std::ranges::find(kUnknownWidths, link.lanes) != kUnknownWidths.end()) {
      link.lanes = 0;
    } else if (std::ranges::find(kWidths, link.lanes) == kWidths.end()) {
      pci.fail(fmt::format("link_width: expected 1, 2, 4, 8, 12, 16 or 32 lanes, found {}", link.lanes));
    }
  }
  return link;
}

}  // namespace zeroplan
