#pragma once
// What is known of the networks between nodes, by their names in the catalog.

#include <string_view>

#include "models/units.h"

namespace zeroplan {

struct NetworkKind {
  std::string_view name;  // found anywhere in NetworkSpec::kind
  double fraction = 0;    // bus bandwidth of large messages over the sum of a node's NICs
  Seconds step;           // a step over the network takes that much longer than in NCCL's table
  /// An all-reduce on two nodes sends a tree's bytes out of them, half of a ring's.
  bool tree = false;
  std::string_view source;
};

/// The entry whose name is found in `kind`; TCP sockets where none is.
const NetworkKind& network_kind(std::string_view kind);

}  // namespace zeroplan
