#pragma once
// Memory that two processes of a host map. It has no name: its descriptor goes over a Unix socket, so nothing is left
// behind whoever is killed when, and the size of /dev/shm is no limit.

#include <cstddef>
#include <cstdint>

#include "runtime/sockets.h"

namespace zeroplan {

class SharedRegion {
 public:
  SharedRegion() = default;
  /// New memory of this process, zeros, all of it reserved. Throws DeviceError.
  static SharedRegion create(std::int64_t bytes);
  /// Another process's, read only. Throws DeviceError when it has another size or its owner could shrink it.
  static SharedRegion attach(const FileDescriptor& descriptor, std::int64_t bytes);

  ~SharedRegion();
  SharedRegion(SharedRegion&& other) noexcept;
  SharedRegion& operator=(SharedRegion&& other) noexcept;

  std::byte* data() const { return data_; }
  int descriptor() const { return descriptor_.value(); }

 private:
  SharedRegion(FileDescriptor descriptor, std::byte* data, std::int64_t bytes)
      : descriptor_(std::move(descriptor)), data_(data), bytes_(bytes) {}

  FileDescriptor descriptor_;  // of one's own region
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// Sends a descriptor over a fresh Unix socket; the other end gets its own.
void send_descriptor(int socket, int descriptor);
/// Waits for one; none when `stop` is readable, the deadline passes or the other end is gone.
FileDescriptor receive_descriptor(int socket, int stop, Deadline deadline);

}  // namespace zeroplan
