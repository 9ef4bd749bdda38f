#include "runtime/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "models/error.h"
#include "models/json_reader.h"
#include "models/json_text.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;
/// Data starts at a multiple of this; the header is padded with blanks up to it.
constexpr std::int64_t kAlignment = 8;

struct NamedType {
  std::string_view name;
  DType type;
};
constexpr std::array<NamedType, 6> kTypes = {{{"BF16", DType::bf16},
                                              {"F16", DType::fp16},
                                              {"F32", DType::fp32},
                                              {"U8", DType::u8},
                                              {"I32", DType::i32},
                                              {"I64", DType::i64}}};

std::string_view name_of(DType type) {
  for (const NamedType& named : kTypes) {
    if (named.type == type) return named.name;
  }
  throw std::logic_error("safetensors: a type without a name");
}

DType type_of(const JsonValue& value) {
  for (const NamedType& named : kTypes) {
    if (value.as_string() == named.name) return named.type;
  }
  value.fail("a dtype that we read (BF16, F16, F32, U8, I32 or I64)");
}

/// Bytes that a shape says; nothing when they are too many to be a file.
std::optional<std::int64_t> bytes_of_shape(std::span<const std::int64_t> shape, DType type) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    if (size != 0 && elements > kMaxElements / size) return std::nullopt;
    elements *= size;
  }
  return elements * size_of(type);
}

SafetensorsEntry read_entry(const std::string& name, const JsonValue& value) {
  value.require_only({"dtype", "shape", "data_offsets"});
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = type_of(value.at("dtype"));
  for (const JsonValue& size : value.at("shape").items()) entry.shape.push_back(size.as_int(0, kMaxElements));
  const JsonValue& offsets = value.at("data_offsets");
  if (offsets.items().size() != 2) offsets.fail("two offsets");
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 2;
  entry.begin = offsets.items()[0].as_int(0, kLargest);
  entry.end = offsets.items()[1].as_int(entry.begin, kLargest);
  const auto bytes = bytes_of_shape(entry.shape, entry.dtype);
  if (bytes != entry.end - entry.begin) {
    offsets.fail_with(fmt::format("tensor {}: {} bytes, but shape [{}] of {} has {}", name, entry.end - entry.begin,
                                  fmt::join(entry.shape, ", "), name_of(entry.dtype),
                                  bytes ? fmt::format("{}", *bytes) : std::string("too many")));
  }
  return entry;
}

std::string header_text(std::span<const SafetensorsEntry> entries) {
  std::string text = R"({"__metadata__":{"format":"pt"})";
  for (const SafetensorsEntry& entry : entries) {
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                        json_quoted(entry.name, std::string_view::npos), name_of(entry.dtype),
                        fmt::join(entry.shape, ","), entry.begin, entry.end);
  }
  text += '}';
  const auto size = static_cast<std::int64_t>(text.size());
  text.append(static_cast<std::size_t>((kAlignment - size % kAlignment) % kAlignment), ' ');
  return text;
}

}  // namespace

// --- writing -----------------------------------------------------------------------------------------

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries)
    : entries_(std::move(entries)), file_(path) {
  std::int64_t next = 0;
  for (SafetensorsEntry& entry : entries_) {
    const auto bytes = bytes_of_shape(entry.shape, entry.dtype);
    if (!bytes) throw std::logic_error("safetensors: a tensor without a size");
    entry.begin = std::exchange(next, next + *bytes);
    entry.end = next;
  }
  const std::string header = header_text(entries_);
  const auto length = static_cast<std::uint64_t>(header.size());
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(bytes_of_text(header));
}

void SafetensorsWriter::add(std::span<const std::byte> bytes) {
  if (next_ == entries_.size() || std::ssize(bytes) != entries_[next_].end - entries_[next_].begin) {
    throw std::logic_error("safetensors: a tensor of another size than announced");
  }
  ++next_;
  file_.write(bytes);
}

void SafetensorsWriter::finish() {
  if (next_ != entries_.size()) throw std::logic_error("safetensors: tensors are missing");
  file_.commit();
}

// --- reading -----------------------------------------------------------------------------------------

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) { parse(); }

void SafetensorsFile::parse() {
  const std::string name = file_.path().string();
  const auto refuse = [&](const std::string& message) { throw InputError(fmt::format("{}: {}", name, message)); };
  if (file_.size() < kLengthBytes) refuse(fmt::format("expected a safetensors file, found {} bytes", file_.size()));
  std::uint64_t length = 0;
  file_.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > static_cast<std::uint64_t>(file_.size() - kLengthBytes) || length > kMaxJsonBytes) {
    refuse(fmt::format("expected a safetensors file: its first 8 bytes give a header of {} bytes, after them are {}{}",
                       length, file_.size() - kLengthBytes, length > kMaxJsonBytes ? " (we read at most 16 MiB)" : ""));
  }
  std::string header(static_cast<std::size_t>(length), '\0');
  file_.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  if (!header.starts_with('{')) refuse("expected a safetensors file: its header is no JSON object");
  data_ = kLengthBytes + static_cast<std::int64_t>(length);
  const JsonDocument document = JsonDocument::parse(header, name);
  for (const auto& [key, value] : document.root().members()) {
    if (key == "__metadata__") {
      for (const auto& [field, text] : value.members()) metadata_.emplace(field, text.as_string());
    } else {
      entries_.push_back(read_entry(key, value));
    }
  }
  std::sort(entries_.begin(), entries_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t next = 0;
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.begin != next) {
      refuse(fmt::format("tensor {} begins at {} and {} bytes are taken before it", entry.name, entry.begin, next));
    }
    next = entry.end;
  }
  if (next != file_.size() - data_) {
    refuse(fmt::format("{}: its tensors have {} bytes, the file has {} after the header",
                       next > file_.size() - data_ ? "truncated" : "bytes left over", next, file_.size() - data_));
  }
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const SafetensorsEntry& entry) { return entry.name == name; });
  return found != entries_.end() ? &*found : nullptr;
}

void SafetensorsFile::read(const SafetensorsEntry& entry, std::int64_t begin, std::span<std::byte> into) const {
  if (begin < 0 || begin + std::ssize(into) > entry.end - entry.begin) {
    throw std::logic_error("safetensors: a read outside the tensor");
  }
  file_.read(data_ + entry.begin + begin, into);
}

}  // namespace zeroplan
