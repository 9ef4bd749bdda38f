#pragma once
// Connections between the members of a group of processes: who connects to whom, and which pairs share memory.

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/process_job.h"
#include "runtime/shared_region.h"

namespace zeroplan {

/// Where other ranks reach this one.
class PeerListener {
 public:
  /// Takes a TCP port on every address, or only on the loopback address when that is given.
  void listen(const std::string& loopback) { tcp_ = listen_tcp(0, loopback); }
  /// A Unix socket beside it, once the job's token is known.
  void listen_locally(const ProcessJob& job);

  int tcp() const { return tcp_.value(); }
  int local() const { return local_.value(); }

 private:
  FileDescriptor tcp_, local_;
};

/// One peer of a group.
struct PeerLink {
  int rank = 0;  // in the world
  FileDescriptor socket;
  bool shared = false;  // a Unix socket: data lies in the regions
  SharedRegion region;  // the peer's
};

/// A link to each of `members` but this rank, in their order; `creation` counts the calls on all ranks. Collective over
/// the members. Throws DeviceError.
std::vector<PeerLink> connect_peers(ProcessJob& job, const PeerListener& listener, std::span<const int> members,
                                    std::int64_t creation, Deadline deadline);

/// Exchanges regions over the shared links: this rank's goes to all of them, theirs into their links. Returns this
/// rank's, empty without a shared link.
SharedRegion exchange_regions(ProcessJob& job, std::span<PeerLink> links, std::int64_t bytes, Deadline deadline);

/// Ends the job because the link to `rank` ended while `doing`: with the store's reason where it knows one.
[[noreturn]] void report_lost(ProcessJob& job, int rank, const std::string& doing, int error);

}  // namespace zeroplan
