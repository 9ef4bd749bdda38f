#include "models/json_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "models/json_text.h"
#include "models/text_file.h"

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
    if (is_repeated(frame, key)) fail(fmt::format("the key {} is given twice", json_quoted(key, kLongestQuote)));
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
  // The parser takes a NUL for the end of the text and would pass over what follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(nul), '\n');
    throw InputError(fmt::format("{}:{}: not valid JSON: a NUL byte; expected UTF-8 text", file, line));
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
  return parse(read_text_file(name), name, syntax);
}

}  // namespace zeroplan
