#pragma once
// One run at a time in a checkpoint directory: two would rename each other's half-written files.

#include <filesystem>

namespace zeroplan {

/// Holds a lock on a directory (flock) until destroyed; the kernel lets go of it when the process dies, however it
/// does. Nothing is written into the directory.
class DirectoryLock {
 public:
  /// Throws InputError when another run holds the lock or the directory is not there, DeviceError when the system
  /// refuses. A file system that has no locks gives none.
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int descriptor_;
};

}  // namespace zeroplan
