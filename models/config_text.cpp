#include "models/config_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <unordered_set>

#include "models/error.h"
#include "models/json_reader.h"
#include "models/json_text.h"

namespace zeroplan {

std::optional<std::int64_t> ConfigNode::integer() const {
  constexpr double kBeyond = 9223372036854775808.0;  // 2^63, exact
  if (kind == Kind::integer && number >= kBeyond) return INT64_MAX;
  if (kind == Kind::integer && number < -kBeyond) return INT64_MIN;
  if (!is_number() || !std::isfinite(number) || std::floor(number) != number) return std::nullopt;
  if (number >= kBeyond || number < -kBeyond) return std::nullopt;
  return static_cast<std::int64_t>(number);
}

const ConfigMember* ConfigNode::find(std::string_view key) const {
  const auto found = std::ranges::find(members, key, &ConfigMember::key);
  return found == members.end() ? nullptr : &*found;
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xC2 ? 0
                               : lead < 0xE0 ? 2
                               : lead < 0xF0 ? 3
                               : lead < 0xF5 ? 4
                                             : 0;
    if (length == 0 || text.size() - i < length) return false;
    for (std::size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(text[i + k]) & 0xC0) != 0x80) return false;
    }
    const auto second = length > 1 ? static_cast<unsigned char>(text[i + 1]) : 0;
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F)) return false;
    if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) return false;
    i += length;
  }
  return true;
}

/// Recursive descent; every step consumes a byte or throws.
class ConfigParser {
 public:
  explicit ConfigParser(ConfigText& file) : file_(file), text_(file.text_) {}

  void run() {
    if (text_.size() > kMaxJsonBytes) fail(fmt::format("larger than {} MiB", kMaxJsonBytes >> 20));
    if (text_.find('\0') != std::string_view::npos || !is_utf8(text_)) fail("not valid JSON: expected UTF-8 text");
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;
    skip();
    if (at_ == text_.size()) fail("the file is empty, expected JSON");
    file_.root_ = value();
    skip();
    if (at_ != text_.size()) fail(fmt::format("expected the end of the file, got {}", here()));
  }

 private:
  [[noreturn]] void fail(std::string_view message) const {
    throw InputError(fmt::format("{}:{}: {}", file_.name_, line_, message));
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool starts(std::string_view part) const { return text_.substr(at_).starts_with(part); }
  std::string here() const {
    return at_ == text_.size() ? "the end of the file" : json_quoted(text_.substr(at_, 1), 8);
  }
  void advance() { line_ += text_[at_++] == '\n' ? 1 : 0; }

  /// Blanks and comments.
  void skip() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
        advance();
      } else if (c == '#' || starts("//")) {
        file_.comments_.push_back({at_, line_});
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (starts("/*")) {
        file_.comments_.push_back({at_, line_});
        const std::size_t end = text_.find("*/", at_ + 2);
        if (end == std::string_view::npos) fail("the comment is not closed");
        while (at_ < end + 2) advance();
      } else {
        return;
      }
    }
  }

  ConfigNode value() {
    ConfigNode node;
    node.line = line_;
    node.begin = at_;
    const char c = peek();
    if (c == '{') {
      read_object(node);
    } else if (c == '[') {
      read_array(node);
    } else if (c == '"') {
      node.kind = ConfigNode::Kind::text;
      node.text = text();
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      read_number(node);
    } else {
      read_word(node);
    }
    node.end = at_;
    return node;
  }

  void read_word(ConfigNode& node) {
    using Kind = ConfigNode::Kind;
    constexpr std::array<std::string_view, 3> kWords = {"null", "true", "false"};
    for (const std::string_view word : kWords) {
      if (!starts(word)) continue;
      at_ += word.size();
      const char next = peek();
      if (std::isalnum(static_cast<unsigned char>(next)) != 0 || next == '_') break;
      node.kind = word == "null" ? Kind::null : Kind::boolean;
      node.flag = word == "true";
      return;
    }
    at_ = node.begin;
    for (const std::string_view word : {"True", "False", "None", "NaN", "Infinity", "nan", "inf"}) {
      if (starts(word)) fail(fmt::format("{} is no JSON: expected true, false, null or a number", word));
    }
    fail(fmt::format("expected a value, got {} (Hjson without quotes is not read here)", here()));
  }

  void read_number(ConfigNode& node) {
    const auto digits = [&] {
      const std::size_t first = at_;
      while (peek() >= '0' && peek() <= '9') ++at_;
      if (at_ == first) fail(fmt::format("not valid JSON: expected a digit, got {}", here()));
    };
    node.kind = ConfigNode::Kind::integer;
    if (peek() == '-') ++at_;
    const bool zero = peek() == '0';
    const std::size_t first = at_;
    digits();
    if (zero && at_ - first > 1) fail("not valid JSON: a number with a leading 0");
    if (peek() == '.') {
      node.kind = ConfigNode::Kind::real;
      ++at_;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      node.kind = ConfigNode::Kind::real;
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    if (std::isalpha(static_cast<unsigned char>(peek())) != 0 || peek() == '_') {
      fail(fmt::format("not valid JSON: a number with {} behind it", here()));
    }
    node.number = std::strtod(std::string(text_.substr(node.begin, at_ - node.begin)).c_str(), nullptr);
  }

  unsigned hex4() {
    unsigned code = 0;
    const std::string_view digits = text_.substr(std::min(at_, text_.size()), 4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (error != std::errc() || digits.size() != 4 || end != digits.data() + 4) {
      fail("not valid JSON: expected four hexadecimal digits behind \\u");
    }
    at_ += 4;
    return code;
  }

  void append_code(std::string& out) {
    unsigned code = hex4();
    if (code >= 0xD800 && code < 0xDC00 && starts("\\u")) {
      at_ += 2;
      const unsigned low = hex4();
      if (low < 0xDC00 || low > 0xDFFF) fail("not valid JSON: half of a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xD800 && code <= 0xDFFF) {
      fail("not valid JSON: half of a surrogate pair");
    }
    const auto put = [&](unsigned byte) { out += static_cast<char>(byte); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xC0 | code >> 6), put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      put(0xE0 | code >> 12), put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
    } else {
      put(0xF0 | code >> 18), put(0x80 | (code >> 12 & 0x3F)), put(0x80 | (code >> 6 & 0x3F)),
          put(0x80 | (code & 0x3F));
    }
  }

  std::string text() {
    std::string out;
    ++at_;  // the quote
    while (true) {
      if (at_ == text_.size() || peek() == '\n') fail("not valid JSON: a text without its closing quote");
      const char c = text_[at_++];
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) fail("not valid JSON: a control character in a text");
      if (c != '\\') {
        out += c;
        continue;
      }
      constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
      const char escape = peek();
      ++at_;
      if (escape == 'u') {
        append_code(out);
      } else if (const std::size_t k = kNames.find(escape); k != std::string_view::npos && at_ <= text_.size()) {
        out += kMeanings[k];
      } else {
        fail("not valid JSON: an unknown escape in a text");
      }
    }
  }

  void enter() {
    if (++depth_ > kMaxJsonDepth) fail(fmt::format("more than {} levels of nesting", kMaxJsonDepth));
    ++at_;
  }

  /// Behind a member or item: false at the closing bracket, which is consumed.
  bool more(char close) {
    skip();
    if (peek() == close) return ++at_, false;
    if (peek() != ',') fail(fmt::format("expected , or {}, got {}", close, here()));
    const ConfigText::Position comma{at_, line_};
    ++at_;
    skip();
    if (peek() != close) return true;
    file_.trailing_commas_.push_back(comma);
    return ++at_, false;
  }

  void read_object(ConfigNode& node) {
    node.kind = ConfigNode::Kind::object;
    enter();
    std::unordered_set<std::string> seen;
    skip();
    bool open = peek() != '}';
    if (!open) ++at_;
    while (open) {
      ConfigMember member;
      member.line = line_;
      member.begin = at_;
      if (peek() != '"') fail(fmt::format("expected a key in quotes, got {}", here()));
      member.key = text();
      member.key_end = at_;
      member.repeated = !seen.insert(member.key).second;
      skip();
      if (peek() != ':') fail(fmt::format("expected : behind the key {}, got {}", json_quoted(member.key, 40), here()));
      ++at_;
      skip();
      member.value = value();
      node.members.push_back(std::move(member));
      open = more('}');
    }
    --depth_;
  }

  void read_array(ConfigNode& node) {
    node.kind = ConfigNode::Kind::array;
    enter();
    skip();
    bool open = peek() != ']';
    if (!open) ++at_;
    while (open) {
      node.items.push_back(value());
      open = more(']');
    }
    --depth_;
  }

  ConfigText& file_;
  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1, depth_ = 0;
};

ConfigText ConfigText::parse(std::string text, std::string name) {
  ConfigText file;
  file.text_ = std::move(text);
  file.name_ = std::move(name);
  ConfigParser(file).run();
  return file;
}

const ConfigMember* ConfigText::find(std::string_view path) const {
  const ConfigNode* node = &root_;
  while (true) {
    const std::size_t dot = path.find('.');
    const ConfigMember* member = node->find(path.substr(0, dot));
    if (member == nullptr || dot == std::string_view::npos) return member;
    node = &member->value;
    path.remove_prefix(dot + 1);
  }
}

std::string ConfigText::excerpt(const ConfigNode& node, std::size_t longest) const {
  std::string line;
  bool blank = false;
  for (const char c : std::string_view(text_).substr(node.begin, node.end - node.begin)) {
    if (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
      blank = true;
      continue;
    }
    if (blank && !line.empty()) line += ' ';
    blank = false;
    line += c;
    if (line.size() > longest) break;
  }
  if (line.size() <= longest) return line;
  line.resize(longest);
  while (!line.empty() && !is_utf8(line)) line.pop_back();
  return line + "...";
}

}  // namespace zeroplan
