#pragma once
// Messages between ranks and the store: a header with magic number and protocol version, a type, and a body of numbers
// and texts. Little-endian, as all machines that we build for.

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::uint32_t kWireMagic = 0x4e4c505a;  // "ZPLN"
inline constexpr std::uint16_t kWireVersion = 2;

/// A failure is a reason of the sender's own; a symptom may be what another rank's failure looks like from the sender.
enum class FrameType : std::uint16_t { hello, welcome, exchange, texts, failure, beat, goodbye, symptom };

struct Frame {
  FrameType type = FrameType::beat;
  std::string body;
};

std::string encode_frame(FrameType type, std::string_view body = {});

/// Takes what came from a socket and gives whole frames.
class FrameReader {
 public:
  enum class Fault { none, foreign, version, too_long };

  explicit FrameReader(std::size_t longest_body) : longest_body_(longest_body) {}
  void append(std::string_view bytes) { bytes_.append(bytes); }
  /// The next frame. None until it is complete, and none for ever after a fault.
  std::optional<Frame> next();
  Fault fault() const { return fault_; }
  std::uint16_t version() const { return version_; }  // of the other side, after Fault::version
  void allow(std::size_t longest_body) { longest_body_ = longest_body; }

 private:
  std::string bytes_;
  std::size_t longest_body_;
  Fault fault_ = Fault::none;
  std::uint16_t version_ = kWireVersion;
};

class BodyWriter {
 public:
  BodyWriter& number(std::int64_t value);
  BodyWriter& text(std::string_view value);
  const std::string& body() const { return body_; }

 private:
  std::string body_;
};

/// Reads what BodyWriter wrote, in order. A body that ends too early gives zeros, empty texts, and complete() == false.
class BodyReader {
 public:
  explicit BodyReader(std::string_view body) : rest_(body) {}
  std::int64_t number();
  std::string text();
  /// Nothing was missing and nothing is left.
  bool complete() const { return !missing_ && rest_.empty(); }

 private:
  std::string_view take(std::uint64_t bytes);

  std::string_view rest_;
  bool missing_ = false;
};

}  // namespace zeroplan
