#pragma once
// One run at a time in a checkpoint directory: two would rename each other's half-written files.

#include <filesystem>

#include "runtime/file_descriptor.h"

namespace zeroplan {

/// Holds a lock on a directory (flock) until destroyed; the kernel lets go of it when the process dies, however it
/// does. Nothing is written into the directory.
class DirectoryLock {
 public:
  /// Throws InputError when another run holds the lock or the directory is not there, DeviceError when the system
  /// refuses. A file system that has no locks gives none.
  explicit DirectoryLock(const std::filesystem::path& directory);

 private:
  FileDescriptor directory_;
};

}  // namespace zeroplan
