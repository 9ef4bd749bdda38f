#pragma once
// Measured and fitted rates of collectives (models/catalog/fits/collectives.json).

#include <string>
#include <string_view>
#include <vector>

#include "models/units.h"
#include "sim/pipeline_law.h"
#include "sim/ring_law.h"

namespace zeroplan {

/// Measured all-reduce bus bandwidth over message size on one machine.
struct CollectiveRamp {
  struct Point {
    Bytes size;                // the full tensor
    BytesPerSecond bandwidth;  // bus bandwidth (nccl.md section 4)
  };
  std::string arch;
  int ranks = 0;
  int nodes = 1;
  std::string network;        // several nodes: the NetworkKind's name
  bool queued = false;        // calls back to back; else the host waited for each
  BytesPerSecond asymptote;   // large messages; what the shape is relative to
  std::vector<Point> points;  // rising sizes, at least two
  std::string source;

  /// Bandwidth over `asymptote` at a size: linear in the logarithms between points, constant time below the first and
  /// constant bandwidth above the last.
  double relative(Bytes size) const;
};

/// What a ring of eight GPUs of one node reaches in an all-reduce of many GiB, where their NVLink rate is `link`.
struct CollectiveLaw {
  std::string arch;
  BytesPerSecond bandwidth;
  BytesPerSecond link;  // one GPU, one direction, spec
  std::string source;
};

/// In-switch (NVLS) all-reduce over the ring's at a number of ranks of one NVSwitch node.
struct NvlsGain {
  std::string arch;
  int ranks = 0;
  double gain = 1;
  std::string source;
};

/// All-reduces in the switch (NVLS) of one node: PipelineLaw with a pipe of NCCL's size.
struct InSwitchLaw {
  double fill = 0;
  Bytes chunk;      // a channel sends one for every rank before the first is back
  Seconds arrival;  // the last rank is that much later if the host waits for each call
  std::string source;
};

struct CollectiveTables {
  std::vector<CollectiveRamp> ramps;
  std::vector<CollectiveLaw> laws;
  std::vector<NvlsGain> nvls;  // rising ranks within an architecture
  RingLaw ring;
  PipelineLaw network;    // between nodes, where no ramp was measured
  InSwitchLaw in_switch;  // in the NVLink switch, likewise
};

/// Throws InputError with file and line.
CollectiveTables read_collective_tables(std::string_view json);
/// The embedded tables, read once.
const CollectiveTables& builtin_collective_tables();

}  // namespace zeroplan
