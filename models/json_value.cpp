// What a JsonValue answers; json_reader.cpp builds the values.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "models/json_reader.h"
#include "models/json_text.h"

namespace zeroplan {

std::string json_quoted(std::string_view text, std::size_t longest) {
  const bool cut = text.size() > longest;
  if (cut) {
    const auto is_continuation = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
    while (longest > 0 && is_continuation(text[longest])) --longest;
  }
  const std::string body(text.substr(0, cut ? longest : text.size()));
  return nlohmann::json(body + (cut ? "..." : "")).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

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
      text += json_quoted(value.as_string(), longest);
      break;
    case JsonValue::Kind::array:
      append_all(value.items(), '[', ']', [&](const JsonValue& item) { append_short(text, item, longest); });
      break;
    case JsonValue::Kind::object:
      append_all(value.members(), '{', '}', [&](const auto& member) {
        text += json_quoted(member.first, longest) + ": ";
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
  if (is_string()) return json_quoted(as_string(), kLongest);
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
  if (value == nullptr) fail_with(fmt::format("the key {} is missing", json_quoted(key, 80)));
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
                                 path.empty() ? "" : ":", json_quoted(key, 80), hint.empty() ? "" : ", ", hint));
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

}  // namespace zeroplan
