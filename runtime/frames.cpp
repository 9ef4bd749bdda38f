#include "runtime/frames.h"

#include <cstring>

namespace zeroplan {
namespace {

struct FrameHeader {
  std::uint32_t magic = kWireMagic;
  std::uint16_t version = kWireVersion;
  FrameType type = FrameType::beat;
  std::uint64_t length = 0;
};
static_assert(sizeof(FrameHeader) == 16);

}  // namespace

std::string encode_frame(FrameType type, std::string_view body) {
  const FrameHeader header{kWireMagic, kWireVersion, type, body.size()};
  std::string bytes(sizeof(header), '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes.append(body);
}

std::optional<Frame> FrameReader::next() {
  FrameHeader header;
  // Who says "GET /" and waits is known by its first bytes.
  const std::size_t seen = std::min(bytes_.size(), sizeof(header.magic));
  if (std::memcmp(bytes_.data(), &header.magic, seen) != 0) fault_ = Fault::foreign;
  if (fault_ != Fault::none || bytes_.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, bytes_.data(), sizeof(header));
  version_ = header.version;
  if (header.version != kWireVersion) fault_ = Fault::version;
  if (fault_ == Fault::none && header.length > longest_body_) fault_ = Fault::too_long;
  if (fault_ != Fault::none || bytes_.size() - sizeof(header) < header.length) return std::nullopt;
  Frame frame{header.type, bytes_.substr(sizeof(header), header.length)};
  bytes_.erase(0, sizeof(header) + header.length);
  return frame;
}

BodyWriter& BodyWriter::number(std::int64_t value) {
  char bytes[sizeof(value)];
  std::memcpy(bytes, &value, sizeof(value));
  body_.append(bytes, sizeof(value));
  return *this;
}

BodyWriter& BodyWriter::text(std::string_view value) {
  number(static_cast<std::int64_t>(value.size()));
  body_.append(value);
  return *this;
}

std::string_view BodyReader::take(std::uint64_t bytes) {
  if (bytes > rest_.size()) {
    missing_ = true;
    rest_ = {};
    return {};
  }
  const std::string_view taken = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return taken;
}

std::int64_t BodyReader::number() {
  std::int64_t value = 0;
  const std::string_view bytes = take(sizeof(value));
  if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

std::string BodyReader::text() { return std::string(take(static_cast<std::uint64_t>(number()))); }

}  // namespace zeroplan
