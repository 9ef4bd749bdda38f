#pragma once
// The safetensors format (https://huggingface.co/docs/safetensors, "Format"): 8 bytes of header length, a JSON header,
// the tensors' bytes without holes. Little-endian.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/units.h"
#include "runtime/atomic_file.h"

namespace zeroplan {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::bf16;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0, end = 0;  // bytes after the header
};

/// Writes one file front to back under a temporary name. Offsets are given in the order of `entries` (begin and end of
/// the argument are not read). Throws DeviceError for what the disk refuses.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries);
  /// The next tensor's bytes, whole. Throws std::logic_error when their number is not what its shape says.
  void add(std::span<const std::byte> bytes);
  /// Throws std::logic_error when a tensor is missing. The file exists from here on.
  void finish();

 private:
  std::vector<SafetensorsEntry> entries_;
  std::size_t next_ = 0;
  AtomicFile file_;
};

/// A file open for reading; strict. Throws InputError naming file and tensor: header longer than the file or 16 MiB,
/// not JSON, unknown dtype, size other than shape x dtype, overlaps, holes, bytes left over. Reading is thread-safe.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // by position in the file
  const SafetensorsEntry* find(std::string_view name) const;                 // null when absent
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Bytes [begin, begin + into.size()) of the tensor.
  void read(const SafetensorsEntry& entry, std::int64_t begin, std::span<std::byte> into) const;

 private:
  void parse();

  InputFile file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
  std::int64_t data_ = 0;  // offset of the first tensor
};

}  // namespace zeroplan
