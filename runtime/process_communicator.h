#pragma once
// Ranks that are processes, on one host or several. They meet at a store that rank 0 serves over TCP; then every pair
// of a group has a connection for each channel: a Unix socket with memory that both map where they share a host, else
// TCP. Sums have the bits of thread_communicator.h. Traffic is neither encrypted nor signed: for trusted networks.

#include <chrono>
#include <memory>
#include <string>

#include "runtime/communicator.h"
#include "runtime/rank_environment.h"

namespace zeroplan {

struct ProcessWorldOptions {
  int rank = 0;
  int size = 1;
  std::string store_address = "127.0.0.1";  // rank 0's host; a loopback address keeps the job off the network
  int store_port = kDefaultMasterPort + 1;  // torchrun's agent may keep MASTER_PORT itself
  std::string job_key = "zeroplan";         // what must be equal on all ranks, such as a digest of the plan

  std::chrono::milliseconds wait_limit = kDefaultWaitLimit;            // of a call for its peers
  std::chrono::milliseconds connect_limit = std::chrono::seconds(60);  // until all ranks have met
  std::chrono::milliseconds silence_limit = std::chrono::seconds(6);   // of a rank that lives, even in long kernels

  enum class Transport { automatic, tcp };
  Transport transport = Transport::automatic;
  /// Ranks of one host share memory. Empty: the running kernel, the host's name and the network namespace tell hosts
  /// apart.
  std::string host;
};

/// What the launcher said, and the defaults.
ProcessWorldOptions process_world_options(const RankEnvironment& environment);

/// Returns when all ranks have met. Throws DeviceError that says who is missing, or why the job cannot form: another
/// world size, a rank twice, another job's key or protocol version; a process that speaks something else is turned away
/// and mentioned when a rank stays missing.
///
/// A rank that dies, is cut off, or is silent for `silence_limit` (stopped, host down) ends the job within that time.
/// A World destroyed with its communicators is a rank that left: calls that need it fail, others go on. Rank 0's waits
/// for the others to leave, at most `wait_limit`: it has the store.
std::unique_ptr<World> make_process_world(const ProcessWorldOptions& options);

}  // namespace zeroplan
