#pragma once
// A file of fixed size for the lifetime of an object, its blocks allocated at the start.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/file_descriptor.h"

namespace zeroplan {

struct ScratchFileOptions {
  std::string directory;
  std::string stem;  // the name begins with it
  std::int64_t size = 0;
  bool keep = false;         // keeps the name: the file stays when the object goes
  bool direct = true;        // O_DIRECT where the file system can
  int largest_block = 4096;  // a disk with larger blocks is used through the page cache
};

/// Locked (flock) against a second process. Without `keep` the name goes as soon as the file is open, so that the disk
/// is given back however the process ends.
class ScratchFile {
 public:
  /// Throws InputError for a directory that is missing, read-only or none; DeviceError when the file cannot be made,
  /// and with path, bytes asked and bytes free when it cannot have its size.
  explicit ScratchFile(const ScratchFileOptions& options);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  int descriptor() const { return file_.value(); }
  const std::string& path() const { return path_; }
  bool direct() const { return direct_; }
  /// Of memory that direct I/O reads and writes; 1 without direct I/O.
  int memory_alignment() const { return memory_alignment_; }
  const std::vector<std::string>& notes() const { return notes_; }
  /// Throws DeviceError if the file has been cut. A write makes it long again, and what lay between reads as zeros; but
  /// nobody writes the byte behind the last one asked for, so that a cut shows whatever is written after it.
  void check_whole() const;

 private:
  void create(const ScratchFileOptions& options);
  void allocate();
  void use_direct(int largest_block);

  std::string path_;
  std::int64_t size_ = 0;  // with the byte at the end
  FileDescriptor file_;
  bool named_ = false;  // still has its name, and should lose it
  bool direct_ = false;
  int memory_alignment_ = 1;
  std::vector<std::string> notes_;
};

}  // namespace zeroplan
