#include "models/json_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

namespace zeroplan {
namespace {

using Json = nlohmann::json;

/// Where the parser reads. It sees one character at a time; the line is counted when somebody asks.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : position(text.data()), counted_(text.data()) {}

  /// The line of the last character read. A number ends when the next character is read, so a newline counts for
  /// the line that it ends.
  int line() {
    if (position > counted_) {
      line_ += static_cast<int>(std::count(counted_, position - 1, '\n'));
      counted_ = position - 1;
    }
    return line_;
  }

  const char* position;

 private:
  const char* counted_;  // newlines before this one are in line_
  int line_ = 1;
};

/// The input iterator that nlohmann/json reads through: it leaves its position in the cursor.
class CursorIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CursorIterator(Cursor* cursor, const char* position) : cursor_(cursor), position_(position) {}
  reference operator*() const { return *position_; }
  CursorIterator& operator++() {
    cursor_->position = ++position_;
    return *this;
  }
  CursorIterator operator++(int) {
    CursorIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CursorIterator& a, const CursorIterator& b) { return a.position_ == b.position_; }

 private:
  Cursor* cursor_;
  const char* position_;
};

/// Printable and at most `longest` bytes: broken input ends up in messages.
std::string printable(std::string_view text, std::size_t longest) {
  std::string result;
  for (const char c : text.substr(0, longest)) result += c < 0x20 || c > 0x7e ? '?' : c;
  return text.size() > longest ? result + "..." : result;
}

/// A string as JSON on one line, cut at a character after `longest` bytes.
std::string quoted(std::string_view text, std::size_t longest) {
  const bool cut = text.size() > longest;
  if (cut) {
    const auto is_continuation = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
    while (longest > 0 && is_continuation(text[longest])) --longest;
  }
  const std::string body(text.substr(0, cut ? longest : text.size()));
  return Json(body + (cut ? "..." : "")).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

/// Receives the events of the SAX parser and builds the tree.
class JsonTreeBuilder {
 public:
  JsonTreeBuilder(const std::string& name, Cursor& cursor) : name_(name), cursor_(cursor) {}

  bool null() { return add(JsonValue(JsonValue::Kind::null, cursor_.line())); }
  bool boolean(bool value) { return add_scalar(JsonValue::Kind::boolean, value); }
  bool number_integer(std::int64_t value) { return add_scalar(JsonValue::Kind::integer, value); }
  bool number_unsigned(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      refuse_integer(std::to_string(value));
    return add_scalar(JsonValue::Kind::integer, static_cast<std::int64_t>(value));
  }
  bool number_float(double value, const std::string& text) {
    // An integer that no 64-bit type holds arrives here too.
    if (text.find_first_of(".eE") == std::string::npos) refuse_integer(text);
    return add_scalar(JsonValue::Kind::real, value);
  }
  bool string(std::string& value) { return add_scalar(JsonValue::Kind::string, std::move(value)); }
  bool binary(Json::binary_t&) { throw std::logic_error("JSON text holds no binary values"); }

  bool start_object(std::size_t) { return open(JsonValue::Kind::object); }
  bool start_array(std::size_t) { return open(JsonValue::Kind::array); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& key) {
    Frame& frame = frames_.back();
    if (is_repeated(frame, key)) fail(fmt::format("the key {} is given twice", quoted(key, kLongestQuote)));
    frame.key = std::move(key);
    return true;
  }

  bool parse_error(std::size_t, const std::string& token, const Json::exception& error) {
    constexpr int kNumberOverflow = 406;  // nlohmann/json: out_of_range.406
    if (error.id == kNumberOverflow)
      fail(fmt::format("the number {} is out of range", printable(token, kLongestQuote)));
    // "[json.exception.parse_error.101] parse error at line 2, column 3: <what we want>"
    std::string_view text = error.what();
    const std::size_t column = text.find("column ");
    const std::size_t colon = column == std::string_view::npos ? column : text.find(": ", column);
    if (colon != std::string_view::npos) text.remove_prefix(colon + 2);
    constexpr std::size_t kLongestReason = 240;
    fail("not valid JSON: " + printable(text, kLongestReason));
  }

  /// The finished tree: values know their parents and their file.
  std::unique_ptr<JsonValue> take(const std::string* file) {
    auto root = std::make_unique<JsonValue>(std::move(*root_));
    connect(*root, nullptr, file);
    return root;
  }

 private:
  static constexpr std::size_t kLongestQuote = 40;
  struct Frame {
    JsonValue value;
    std::string key;                            // of the member being read
    std::unordered_set<std::string> seen = {};  // keys of an object with many members
  };

  [[noreturn]] void fail(std::string_view message) {
    throw InputError(fmt::format("{}:{}: {}", name_, cursor_.line(), message));
  }
  [[noreturn]] void refuse_integer(const std::string& text) {
    fail(fmt::format("the integer {} does not fit in 64 bits", printable(text, kLongestQuote)));
  }

  template <class T>
  bool add_scalar(JsonValue::Kind kind, T&& data) {
    JsonValue value(kind, cursor_.line());
    value.data_ = std::forward<T>(data);
    return add(std::move(value));
  }

  bool add(JsonValue value) {
    if (frames_.empty()) {
      root_ = std::move(value);
      return true;
    }
    Frame& frame = frames_.back();
    if (frame.value.is_array()) {
      std::get<JsonValue::Items>(frame.value.data_).push_back(std::move(value));
    } else {
      std::get<JsonValue::Members>(frame.value.data_).emplace_back(std::move(frame.key), std::move(value));
    }
    return true;
  }

  bool open(JsonValue::Kind kind) {
    if (frames_.size() == kMaxJsonDepth) fail(fmt::format("more than {} levels of nesting", kMaxJsonDepth));
    JsonValue value(kind, cursor_.line());
    if (kind == JsonValue::Kind::array) {
      value.data_ = JsonValue::Items();
    } else {
      value.data_ = JsonValue::Members();
    }
    frames_.push_back({std::move(value), {}});
    return true;
  }

  bool close() {
    JsonValue value = std::move(frames_.back().value);
    frames_.pop_back();
    return add(std::move(value));
  }

  // A scan is quickest for the usual handful of keys; a set keeps an object of a million keys linear.
  static bool is_repeated(Frame& frame, const std::string& key) {
    constexpr std::size_t kFewMembers = 64;
    const auto& members = std::get<JsonValue::Members>(frame.value.data_);
    if (members.size() < kFewMembers) {
      return std::ranges::any_of(members, [&](const auto& member) { return member.first == key; });
    }
    if (frame.seen.empty()) {
      for (const auto& member : members) frame.seen.insert(member.first);
    }
    return !frame.seen.insert(key).second;
  }

  static void connect(JsonValue& value, const JsonValue* parent, const std::string* file) {
    value.parent_ = parent;
    value.file_ = file;
    if (auto* items = std::get_if<JsonValue::Items>(&value.data_)) {
      for (JsonValue& item : *items) connect(item, &value, file);
    } else if (auto* members = std::get_if<JsonValue::Members>(&value.data_)) {
      for (auto& member : *members) connect(member.second, &value, file);
    }
  }

  const std::string& name_;
  Cursor& cursor_;
  std::vector<Frame> frames_;
  std::optional<JsonValue> root_;
};

// --- JsonValue ----------------------------------------------------------------------------------

std::string JsonValue::pointer() const {
  if (parent_ == nullptr) return "";
  if (const Items* items = std::get_if<Items>(&parent_->data_)) {
    return fmt::format("{}/{}", parent_->pointer(), this - items->data());
  }
  const Members& members = std::get<Members>(parent_->data_);
  const auto self = std::ranges::find_if(members, [this](const auto& member) { return &member.second == this; });
  std::string key;
  for (const char c : self->first) {  // RFC 6901
    if (c == '~') {
      key += "~0";
    } else if (c == '/') {
      key += "~1";
    } else {
      key += c;
    }
  }
  return fmt::format("{}/{}", parent_->pointer(), key);
}

std::string JsonValue::place() const {
  const std::string path = pointer();
  return fmt::format("{}:{}{}{}", *file_, line_, path.empty() ? "" : ": ", path);
}

void JsonValue::fail(std::string_view expected) const {
  fail_with(fmt::format("expected {}, got {}", expected, short_form()));
}

void JsonValue::fail_with(std::string_view message) const { throw InputError(fmt::format("{}: {}", place(), message)); }

namespace {

// Appends `value` until the text is long enough to be cut.
void append_short(std::string& text, const JsonValue& value, std::size_t longest) {
  if (text.size() > longest) return;
  const auto append_all = [&](const auto& range, char open, char close, const auto& append_one) {
    text += open;
    bool first = true;
    for (const auto& element : range) {
      if (text.size() > longest) return;
      if (!first) text += ", ";
      first = false;
      append_one(element);
    }
    text += close;
  };
  switch (value.kind()) {
    case JsonValue::Kind::null:
      text += "null";
      break;
    case JsonValue::Kind::boolean:
      text += value.as_bool() ? "true" : "false";
      break;
    case JsonValue::Kind::integer:
      text += fmt::format(
          "{}", value.as_int(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()));
      break;
    case JsonValue::Kind::real:
      text += fmt::format("{}", value.as_real(-std::numeric_limits<double>::max(), std::numeric_limits<double>::max()));
      break;
    case JsonValue::Kind::string:
      text += quoted(value.as_string(), longest);
      break;
    case JsonValue::Kind::array:
      append_all(value.items(), '[', ']', [&](const JsonValue& item) { append_short(text, item, longest); });
      break;
    case JsonValue::Kind::object:
      append_all(value.members(), '{', '}', [&](const auto& member) {
        text += quoted(member.first, longest) + ": ";
        append_short(text, member.second, longest);
      });
      break;
  }
}

std::string range_text(std::string_view what, double low, double high, std::string_view low_text,
                       std::string_view high_text, double lowest, double highest) {
  if (low <= lowest && high >= highest) return std::string(what);
  if (high >= highest) return fmt::format("{} of at least {}", what, low_text);
  if (low <= lowest) return fmt::format("{} of at most {}", what, high_text);
  return fmt::format("{} from {} to {}", what, low_text, high_text);
}

}  // namespace

std::string JsonValue::short_form() const {
  constexpr std::size_t kLongest = 40;
  if (is_string()) return quoted(as_string(), kLongest);
  std::string text;
  append_short(text, *this, kLongest);
  if (text.size() <= kLongest) return text;
  std::size_t end = kLongest;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // not inside a character
  return text.substr(0, end) + "...";
}

const JsonValue* JsonValue::find(std::string_view key) const {
  for (const auto& member : members()) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

const JsonValue& JsonValue::at(std::string_view key) const {
  const JsonValue* value = find(key);
  if (value == nullptr) fail_with(fmt::format("the key {} is missing", quoted(key, 80)));
  return *value;
}

std::span<const std::pair<std::string, JsonValue>> JsonValue::members() const {
  const Members* members = std::get_if<Members>(&data_);
  if (members == nullptr) fail("an object");
  return *members;
}

void JsonValue::require_only(std::span<const std::string_view> known) const {
  for (const auto& [key, value] : members()) {
    if (std::ranges::find(known, key) != known.end()) continue;
    const std::vector<std::string> names(known.begin(), known.end());
    const std::string hint = did_you_mean(key, names);
    const std::string path = pointer();
    throw InputError(fmt::format("{}:{}:{}{} unknown key {}{}{}", file(), value.line(), path.empty() ? "" : " " + path,
                                 path.empty() ? "" : ":", quoted(key, 80), hint.empty() ? "" : ", ", hint));
  }
}

void JsonValue::require_only(std::initializer_list<std::string_view> known) const {
  require_only(std::span(known.begin(), known.size()));
}

std::span<const JsonValue> JsonValue::items() const {
  const Items* items = std::get_if<Items>(&data_);
  if (items == nullptr) fail("an array");
  return *items;
}

bool JsonValue::as_bool() const {
  const bool* value = std::get_if<bool>(&data_);
  if (value == nullptr) fail("true or false");
  return *value;
}

std::int64_t JsonValue::as_int(std::int64_t low, std::int64_t high) const {
  std::optional<std::int64_t> value;
  if (const auto* integer = std::get_if<std::int64_t>(&data_)) value = *integer;
  if (const auto* real = std::get_if<double>(&data_)) {
    constexpr double kTwo63 = 9223372036854775808.0;  // the first double beyond int64
    if (std::trunc(*real) == *real && *real >= -kTwo63 && *real < kTwo63) value = static_cast<std::int64_t>(*real);
  }
  if (value && *value >= low && *value <= high) return *value;
  using Limits = std::numeric_limits<std::int64_t>;
  fail(range_text("an integer", static_cast<double>(low), static_cast<double>(high), fmt::format("{}", low),
                  fmt::format("{}", high), static_cast<double>(Limits::min()), static_cast<double>(Limits::max())));
}

double JsonValue::as_real(double low, double high) const {
  std::optional<double> value;
  if (const auto* integer = std::get_if<std::int64_t>(&data_)) value = static_cast<double>(*integer);
  if (const auto* real = std::get_if<double>(&data_)) value = *real;
  if (value && *value >= low && *value <= high) return *value;
  constexpr double kLargest = std::numeric_limits<double>::max();
  fail(range_text("a number", low, high, fmt::format("{}", low), fmt::format("{}", high), -kLargest, kLargest));
}

const std::string& JsonValue::as_string() const {
  const std::string* value = std::get_if<std::string>(&data_);
  if (value == nullptr) fail("a string");
  return *value;
}

Bytes JsonValue::as_bytes() const {
  if (!is_string()) fail("a size with its unit, such as \"80GB\" or \"80GiB\"");
  return parse_bytes(as_string(), place());
}

BytesPerSecond JsonValue::as_rate() const {
  if (!is_string()) fail("a rate with its unit, such as \"3.35 TB/s\"");
  return parse_rate(as_string(), place());
}

FlopsPerSecond JsonValue::as_flop_rate() const {
  if (!is_string()) fail("a rate with its unit, such as \"312 TFLOPS\"");
  return parse_flop_rate(as_string(), place());
}

Seconds JsonValue::as_seconds() const {
  if (!is_string()) fail("a time with its unit, such as \"3.4us\"");
  return parse_seconds(as_string(), place());
}

// --- JsonDocument -------------------------------------------------------------------------------

JsonDocument JsonDocument::parse(std::string_view text, std::string name, JsonSyntax syntax) {
  JsonDocument document;
  document.name_ = std::make_unique<std::string>(std::move(name));
  const std::string& file = *document.name_;
  if (text.size() > kMaxJsonBytes) {
    throw InputError(fmt::format("{}:1: larger than {} MiB, the limit for JSON files", file, kMaxJsonBytes >> 20));
  }
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    throw InputError(fmt::format("{}:1: the file is empty, expected JSON", file));
  }
  Cursor cursor(text);
  JsonTreeBuilder builder(file, cursor);
  const CursorIterator begin(&cursor, text.data());
  const CursorIterator end(&cursor, text.data() + text.size());
  constexpr bool kWholeText = true;
  Json::sax_parse(begin, end, &builder, Json::input_format_t::json, kWholeText, syntax == JsonSyntax::comments);
  document.root_ = builder.take(document.name_.get());
  return document;
}

JsonDocument JsonDocument::read(const std::filesystem::path& path, JsonSyntax syntax) {
  const std::string name = path.string();
  std::error_code code;
  if (std::filesystem::is_directory(path, code)) {
    throw InputError(fmt::format("{}: expected a JSON file, got a directory", name));
  }
  errno = 0;
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw InputError(fmt::format("{}: cannot be opened: {}", name, std::strerror(errno)));

  // In pieces, because pipes and /dev files do not know their size.
  std::string text;
  constexpr std::size_t kPiece = 64u << 10;
  while (stream && text.size() <= kMaxJsonBytes) {
    const std::size_t used = text.size();
    text.resize(used + kPiece);
    stream.read(text.data() + used, static_cast<std::streamsize>(kPiece));
    text.resize(used + static_cast<std::size_t>(stream.gcount()));
  }
  if (stream.bad()) throw InputError(fmt::format("{}: cannot be read: {}", name, std::strerror(errno)));
  return parse(text, name, syntax);
}

}  // namespace zeroplan
