#pragma once
// Time of NCCL's ring over NVLink inside one node: six numbers fitted to measurements (docs/cost-model.md section 4;
// tests/tools/fit_collectives.cpp), the rest is NCCL's own.

#include <cstddef>
#include <string>

#include "models/units.h"

namespace zeroplan {

/// t = NCCL's base + steps x NCCL's hop + transfer, and skew x (ranks - 2) if the host waits for each call
/// transfer = wire / rate x (1 + ramp_loss x (wire / rate / 1 ms)^-ramp_exponent)
/// rate = (link's limit^-corner + (channels x channel x link x wire per copy)^-corner)^(-1 / corner)
///
/// Wire per copy: a channel is one thread block that copies each chunk from here to there. For n - 1 chunks that a rank
/// of a gather or scatter receives it makes n copies, for 2(n - 1) of an all-reduce 2n - 1. With two ranks half of its
/// work is its own part, which is why a pair gathers at 305 GB/s where eight reach 361.
struct RingLaw {
  int channels = 24;
  double channel = 0;     // rate of one channel's copies, of one GPU's NVLink rate
  double ll_channel = 0;  // the same with protocol LL
  double corner = 1;      // how sharply channels and link limit together
  double ramp_loss = 0, ramp_exponent = 0;
  Seconds skew;  // for every rank beyond two, unless calls are queued: they do not arrive together
  std::string source;
};

/// A ring of one node.
struct NvlinkRing {
  int ranks = 2;
  bool all_reduce = false;   // else a gather, a scatter or a broadcast
  BytesPerSecond link;       // one GPU, one direction, spec
  BytesPerSecond asymptote;  // bus bandwidth of a large all-reduce among `asymptote_ranks`
  int asymptote_ranks = 8;   // of the ranks' own number: channels are no limit
  int channels = 24;
};

/// A large all-reduce that was measured among `ranks`, whose channels copy `copies` together.
struct MeasuredRing {
  BytesPerSecond all_reduce;
  int ranks = 8;
  BytesPerSecond copies;
};
/// Bus bandwidth among another number of ranks, or of a gather or scatter, with channels that copy `copies`: what the
/// links alone would carry is worked out from the measured one. Equal numbers of ranks: as measured.
BytesPerSecond copy_limited_rate(const MeasuredRing& known, BytesPerSecond copies, double corner, int ranks,
                                 bool all_reduce);

struct RingTime {
  Seconds latency, transfer;
  Seconds total() const { return latency + transfer; }
};
/// `protocol` is nccl::kLL, kLL128 or kSimple; `wire` what each rank sends: message x 2(n-1)/n or (n-1)/n.
RingTime ring_time(const RingLaw& law, const NvlinkRing& ring, std::size_t protocol, Bytes wire);

}  // namespace zeroplan
