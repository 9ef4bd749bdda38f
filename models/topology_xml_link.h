#pragma once
// How fast a <pci> is: its attributes link_speed and link_width.

#include "models/topology_parts.h"
#include "models/topology_xml_element.h"

namespace zeroplan {

/// Generation and lanes; 0 for what the file does not state. Throws InputError on a speed or width that PCIe has not.
PcieLink read_pcie_link(const XmlElement& pci);

}  // namespace zeroplan
