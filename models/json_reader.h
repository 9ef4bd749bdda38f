#pragma once
// JSON with positions: every value knows its file, line and pointer, so that each error can point.
// nlohmann/json 3.11 (Debian 12) has no positions, so its SAX parser feeds a small tree of our own.

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "models/error.h"
#include "models/units.h"

namespace zeroplan {

/// Limits of the spec (section 5).
inline constexpr std::size_t kMaxJsonBytes = 16u << 20;
inline constexpr int kMaxJsonDepth = 64;

enum class JsonSyntax {
  strict,    // our own files
  comments,  // Hugging Face files: // and /* */ comments are skipped
};

/// One value of a parsed document. Values are owned by their document (JsonDocument), which must outlive them.
/// Every accessor throws InputError "file:line: /pointer: expected X, got Y".
class JsonValue {
 public:
  enum class Kind : std::uint8_t { null, boolean, integer, real, string, array, object };

  // Values point at their parents: they move only while a document is built.
  JsonValue(JsonValue&&) noexcept = default;
  JsonValue& operator=(JsonValue&&) noexcept = default;

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::null; }
  bool is_object() const { return kind_ == Kind::object; }
  bool is_array() const { return kind_ == Kind::array; }
  bool is_string() const { return kind_ == Kind::string; }
  bool is_number() const { return kind_ == Kind::integer || kind_ == Kind::real; }
  int line() const { return line_; }
  std::string pointer() const;                        // "/gpu/memory_bandwidth", "" at the root
  const std::string& file() const { return *file_; }  // as the user named it

  // Objects. Keys keep their order in the file; a key given twice is an error at parse time.
  const JsonValue* find(std::string_view key) const;  // nullptr when absent
  const JsonValue& at(std::string_view key) const;    // error when absent: names the key
  std::span<const std::pair<std::string, JsonValue>> members() const;
  /// Error on the first key that is not in `known`: its line, and the nearest known key.
  void require_only(std::span<const std::string_view> known) const;
  void require_only(std::initializer_list<std::string_view> known) const;

  // Arrays.
  std::span<const JsonValue> items() const;

  // Scalars. Ranges are inclusive. An integral real such as 4096.0 is an integer; NaN and infinity never parse.
  bool as_bool() const;
  std::int64_t as_int(std::int64_t low, std::int64_t high) const;
  double as_real(double low, double high) const;
  const std::string& as_string() const;
  Bytes as_bytes() const;  // text with unit, see parse_bytes
  BytesPerSecond as_rate() const;
  FlopsPerSecond as_flop_rate() const;
  Seconds as_seconds() const;

  /// InputError at this value: "file:line: /pointer: expected <expected>, got <short form of this value>".
  [[noreturn]] void fail(std::string_view expected) const;
  /// As fail(), with free text: "file:line: /pointer: <message>".
  [[noreturn]] void fail_with(std::string_view message) const;
  /// The value as JSON in one line, cut after ~40 characters.
  std::string short_form() const;

 private:
  friend class JsonTreeBuilder;
  using Items = std::vector<JsonValue>;
  using Members = std::vector<std::pair<std::string, JsonValue>>;
  JsonValue(Kind kind, int line) : line_(line), kind_(kind) {}
  std::string place() const;  // "file:line: /pointer"

  std::variant<std::monostate, bool, std::int64_t, double, std::string, Items, Members> data_;
  const JsonValue* parent_ = nullptr;  // pointer() walks up: no string per value
  const std::string* file_ = nullptr;
  int line_ = 0;
  Kind kind_ = Kind::null;
};

/// A parsed file. Movable, not copyable (values point into it).
class JsonDocument {
 public:
  /// Parses text. `name` is how errors call it. Throws InputError with line on syntax errors, more than kMaxJsonDepth
  /// levels, more than kMaxJsonBytes, an empty text, a repeated key, or anything after the value.
  static JsonDocument parse(std::string_view text, std::string name, JsonSyntax syntax = JsonSyntax::strict);
  /// Reads and parses a file or what a pipe brings. Throws InputError as read_text_file() does, and of the text.
  static JsonDocument read(const std::filesystem::path& path, JsonSyntax syntax = JsonSyntax::strict);

  const JsonValue& root() const { return *root_; }

 private:
  std::unique_ptr<std::string> name_;
  std::unique_ptr<JsonValue> root_;
};

}  // namespace zeroplan
