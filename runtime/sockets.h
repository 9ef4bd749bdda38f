#pragma once
// Sockets as the process communicator uses them: owned, never blocking, never raising SIGPIPE, interrupted calls made
// again.

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "runtime/file_descriptor.h"

namespace zeroplan {

/// "Connection refused"; "end of file" for 0.
std::string error_text(int error);

using Deadline = std::chrono::steady_clock::time_point;

/// Milliseconds until `deadline` for poll(), at least 0, rounded up.
int poll_time(Deadline deadline);
/// Waits until `socket` has one of `events` (POLLIN, POLLOUT), `stop` (or -1) is readable, or the deadline passes.
/// False for the latter two.
bool wait_for(int socket, short events, int stop, Deadline deadline);

/// An event that stays: readable from the first signal() on.
class StickyEvent {
 public:
  StickyEvent();
  int value() const { return event_.value(); }
  void signal() noexcept;
  /// Takes the signal back.
  void clear() noexcept;

 private:
  FileDescriptor event_;
};

/// What one attempt to move bytes gave.
struct IoResult {
  enum class State { moved, would_block, closed } state = State::moved;
  std::size_t bytes = 0;
  int error = 0;  // of a closed connection; 0 for end of file
};
/// At most as much as is there. `closed` for end of file and for whatever ended the connection.
IoResult receive_some(int socket, void* data, std::size_t bytes);
IoResult send_some(int socket, std::span<iovec> parts);

/// A TCP socket that listens on `port` (0: any free one) for IPv6 and IPv4, or only on the loopback addresses' IPv4 or
/// IPv6 one when `loopback` names it. Throws DeviceError.
FileDescriptor listen_tcp(int port, const std::string& loopback = {});
/// Same, in the abstract namespace of Unix sockets.
FileDescriptor listen_local(const std::string& name);
int port_of(int socket);
/// The numeric address of this or the other end of a TCP connection, "10.0.0.7"; IPv4 in IPv6 form as IPv4.
std::string own_host(int socket);
std::string peer_host(int socket);
bool is_loopback(const std::string& numeric_host);
/// The loopback address that a name or numeric address says, "" for any other host.
std::string loopback_of(const std::string& host);

/// The next connection, or none when nobody waits.
FileDescriptor accept_one(int listener);

/// One attempt at every address of `host`, until `deadline` or `stop` is readable: a connected socket, or none and why.
struct Connected {
  FileDescriptor socket;
  std::string error;
};
Connected connect_tcp(const std::string& host, int port, Deadline deadline, int stop);
Connected connect_local(const std::string& name);

}  // namespace zeroplan
