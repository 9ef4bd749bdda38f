#include "sim/ring_law.h"

#include <algorithm>
#include <cmath>

#include "sim/nccl_constants.h"

namespace zeroplan {
namespace {

/// What a rank receives over what its channels copy.
double wire_per_copy(bool all_reduce, double ranks) {
  return all_reduce ? 2 * (ranks - 1) / (2 * ranks - 1) : (ranks - 1) / ranks;
}

double ring_rate(const RingLaw& law, const NvlinkRing& ring) {
  const BytesPerSecond measured = ring.link * (law.channels * law.channel);
  const BytesPerSecond copies = ring.link * (ring.channels * law.channel);
  const MeasuredRing known{ring.asymptote, ring.asymptote_ranks, measured};
  return copy_limited_rate(known, copies, law.corner, ring.ranks, ring.all_reduce).base();
}

}  // namespace

BytesPerSecond copy_limited_rate(const MeasuredRing& known, BytesPerSecond copies, double corner, int ranks,
                                 bool all_reduce) {
  if (known.ranks == ranks) return known.all_reduce;
  const auto limit = [&](BytesPerSecond rate, double wire) { return std::pow(rate.base() * wire, -corner); };
  const double link = std::max(0.0, limit(known.all_reduce, 1) - limit(known.copies, wire_per_copy(true, known.ranks)));
  return BytesPerSecond(std::pow(link + limit(copies, wire_per_copy(all_reduce, ranks)), -1 / corner));
}

RingTime ring_time(const RingLaw& law, const NvlinkRing& ring, std::size_t protocol, Bytes wire) {
  const double steps = (ring.all_reduce ? 2 : 1) * (ring.ranks - 1);
  const double nccl = nccl::kRingBase[protocol] + steps * nccl::kRingNvlink[protocol];
  RingTime time;
  time.latency = Seconds(nccl * 1e-6);
  if (!(wire > Bytes())) return time;
  if (protocol == nccl::kLL) {
    const double channels =
        ring.channels * law.ll_channel * ring.link.base() * wire_per_copy(ring.all_reduce, ring.ranks);
    time.transfer = Seconds(wire.base() / std::min(channels, nccl::kLLFraction * ring_rate(law, ring)));
    return time;
  }
  const double seconds = wire.base() / ring_rate(law, ring);
  const double ramp = 1 + law.ramp_loss * std::pow(seconds / 1e-3, -law.ramp_exponent);
  time.transfer = Seconds(seconds * ramp / (protocol == nccl::kLL128 ? nccl::kLL128Fraction : 1.0));
  return time;
}

}  // namespace zeroplan
