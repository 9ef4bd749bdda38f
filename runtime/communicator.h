#pragma once
// Collectives between the ranks of one job, behind one interface: ranks that are threads of this process
// (thread_communicator.h) and ranks that are processes (process_communicator.h).
//
// A Communicator is one group on one channel. Every member makes the same calls in the same order; a member calls from
// one thread at a time. Calls return when this rank's data is there and its buffers may be used again. Sums are formed
// in rank order, in fp32 (fp64 for none), and rounded to the tensor's type once: the bits do not depend on timing,
// transport or which collective formed them.
//
// A rank that dies, leaves, aborts or makes another call than its peers ends every call of every other rank with a
// DeviceError that names the rank and the reason, within seconds.

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/units.h"

namespace zeroplan {

/// `count` elements, dense.
struct TensorView {
  void* data = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::fp32;
};

/// How long a call waits for its peers before the job fails, unless a world is made with another limit.
inline constexpr std::chrono::milliseconds kDefaultWaitLimit = std::chrono::seconds(60);

class Communicator {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // inside the group
  virtual int size() const = 0;

  // Each returns the moment at which the last member had arrived: before it the call waited, after it it moved data.

  /// full[r * shard.count ...] = shard of rank r. `shard` may be this rank's part of `full`. full.count = size x
  /// shard.count.
  virtual Clock::time_point all_gather(TensorView shard, TensorView full) = 0;
  /// shard = this rank's part of the sum of all `full`. `shard` may be that part of `full`; the rest of `full` is left
  /// in an unspecified state then.
  virtual Clock::time_point reduce_scatter(TensorView full, TensorView shard) = 0;
  /// In place: the sum of all ranks' tensors.
  virtual Clock::time_point all_reduce(TensorView tensor) = 0;

  /// Bytes of this rank that crossed to or came from others, for measured.json.
  virtual std::int64_t bytes_sent() const = 0;
  virtual std::int64_t bytes_received() const = 0;
};

/// The job as one rank sees it: makes communicators, and exchanges small messages outside the schedule (losses, errors,
/// checkpoint manifests). Called from one thread at a time, abort() from any. Communicators may outlive it.
class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Collective over all ranks of the world, each naming its own group: `members` in ascending order, this rank among
  /// them. Calls with equal `channel` on different ranks belong together. Groups of one need no communicator: the
  /// result of such a call moves nothing.
  virtual std::unique_ptr<Communicator> communicator(std::span<const int> members, int channel) = 0;
  /// Every rank's text, in rank order. Also a barrier.
  virtual std::vector<std::string> exchange(const std::string& text) = 0;
  /// Ends every pending and later call of all ranks with a DeviceError that carries `reason` and this rank's number.
  /// Never throws.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace zeroplan
