#pragma once
// Files that exist whole or not at all, and reads that are complete or an error. What the disk refuses (full,
// read-only, EIO) is a DeviceError with path and the system's reason; a file shorter than asked for is an InputError.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "runtime/file_descriptor.h"

namespace zeroplan {

std::span<const std::byte> bytes_of_text(std::string_view text);

/// Written from front to back under "PATH.tmp"; commit() makes it PATH. Without commit() the destructor removes it.
class AtomicFile {
 public:
  /// Replaces a left over "PATH.tmp". The folder must exist.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  std::int64_t size() const { return size_; }
  /// Data to the disk, new name, folder to the disk: after it the file survives a power cut.
  void commit();

 private:
  [[noreturn]] void fail(std::string_view what) const;

  std::filesystem::path path_, temporary_;
  FileDescriptor file_;
  std::int64_t size_ = 0;
};

/// AtomicFile in one call.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);
/// mkdir -p, each new folder's parent synced. InputError when a file stands in the way.
void make_directories(const std::filesystem::path& path);
void sync_directory(const std::filesystem::path& path);

/// A regular file open for reading. Reading is thread-safe.
class InputFile {
 public:
  /// InputError when it is missing, unreadable or not a regular file.
  explicit InputFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t size() const { return size_; }  // when opened
  int descriptor() const { return file_.value(); }
  /// Fills `into` from `offset`. InputError "PATH: truncated: ..." when the file ends before.
  void read(std::int64_t offset, std::span<std::byte> into) const;

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
  std::int64_t size_ = 0;
};

}  // namespace zeroplan
