#include "models/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "models/error.h"

namespace zeroplan {
namespace {

/// One spelling of a unit: `factor` x 10^`exponent` base units. Powers of ten stay apart so that a decimal text is
/// rounded once: "80.1GB" is exactly 80100000000.
struct Unit {
  std::string_view name;
  int exponent;
  double factor;
};

constexpr double kBit = 1.0 / 8;  // bytes

// In each table the first `kNumWritten...` entries are those that to_text() writes.
constexpr Unit kSizeUnits[] = {{"TiB", 0, kTiB}, {"TB", 12, 1},    {"GiB", 0, kGiB}, {"GB", 9, 1}, {"MiB", 0, kMiB},
                               {"MB", 6, 1},     {"KiB", 0, kKiB}, {"KB", 3, 1},     {"B", 0, 1}};
constexpr std::size_t kNumWrittenSizes = 9;

constexpr Unit kRateUnits[] = {
    {"TB/s", 12, 1},     {"GB/s", 9, 1},      {"MB/s", 6, 1},      {"KB/s", 3, 1},     {"B/s", 0, 1},
    {"TiB/s", 0, kTiB},  {"GiB/s", 0, kGiB},  {"MiB/s", 0, kMiB},  {"KiB/s", 0, kKiB}, {"Tb/s", 12, kBit},
    {"Gb/s", 9, kBit},   {"Mb/s", 6, kBit},   {"Kb/s", 3, kBit},   {"b/s", 0, kBit},   {"Tbps", 12, kBit},
    {"Gbps", 9, kBit},   {"Mbps", 6, kBit},   {"Kbps", 3, kBit},   {"bps", 0, kBit},   {"Tbit/s", 12, kBit},
    {"Gbit/s", 9, kBit}, {"Mbit/s", 6, kBit}, {"Kbit/s", 3, kBit}, {"bit/s", 0, kBit}, {"TBps", 12, 1},
    {"GBps", 9, 1},      {"MBps", 6, 1},      {"KBps", 3, 1},      {"Bps", 0, 1}};
constexpr std::size_t kNumWrittenRates = 5;

constexpr Unit kFlopRateUnits[] = {{"EFLOPS", 18, 1},  {"PFLOPS", 15, 1}, {"TFLOPS", 12, 1},  {"GFLOPS", 9, 1},
                                   {"MFLOPS", 6, 1},   {"FLOPS", 0, 1},   {"EFLOP/s", 18, 1}, {"PFLOP/s", 15, 1},
                                   {"TFLOP/s", 12, 1}, {"GFLOP/s", 9, 1}, {"MFLOP/s", 6, 1},  {"FLOP/s", 0, 1}};
constexpr std::size_t kNumWrittenFlopRates = 6;

constexpr Unit kTimeUnits[] = {{"s", 0, 1},   {"ms", -3, 1},      {"us", -6, 1},
                               {"ns", -9, 1}, {"\u00b5s", -6, 1}, {"\u03bcs", -6, 1}};  // micro sign and Greek mu
constexpr std::size_t kNumWrittenTimes = 4;

/// What is measured, for messages.
struct Dimension {
  std::string_view expected;
  std::span<const Unit> units;
  std::size_t num_written;
};
constexpr Dimension kSize{R"(a size such as "80GB" or "80GiB")", kSizeUnits, kNumWrittenSizes};
constexpr Dimension kRate{R"(a rate such as "6.5GB/s" or "400Gb/s")", kRateUnits, kNumWrittenRates};
constexpr Dimension kFlopRate{R"(a rate such as "312 TFLOPS")", kFlopRateUnits, kNumWrittenFlopRates};
constexpr Dimension kTime{R"(a time such as "3.4us" or "2 ms")", kTimeUnits, kNumWrittenTimes};

/// The text in quotes on one line, cut: users paste anything.
std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 60;
  std::string result = "\"";
  for (const char c : text.substr(0, kLongest)) result += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return result + (text.size() > kLongest ? "...\"" : "\"");
}

[[noreturn]] void refuse(std::string_view what, std::string_view expected, std::string_view text,
                         std::string_view reason) {
  throw InputError(fmt::format("{}: expected {}, got {} ({})", what, expected, quoted(text), reason));
}

const Unit* find_unit(std::string_view name, std::span<const Unit> units) {
  for (const Unit& unit : units) {
    if (unit.name == name) return &unit;
  }
  // kB is the SI spelling, and g and t mean nothing else; m would be milli, and b is a bit.
  std::string capital(name);
  if (capital.empty() || std::string_view("kgt").find(capital[0]) == std::string_view::npos) return nullptr;
  capital[0] = static_cast<char>(capital[0] - 'a' + 'A');
  for (const Unit& unit : units) {
    if (unit.name == capital) return &unit;
  }
  return nullptr;
}

std::string unit_hint(std::string_view name, std::span<const Unit> units) {
  if (name.empty()) return "the unit is missing";
  std::vector<std::string> names;
  for (const Unit& unit : units) names.emplace_back(unit.name);
  return fmt::format("unknown unit {}, {}", quoted(name), did_you_mean(name, names));
}

/// The number at the front of a text: decimal digits, kept apart from their exponent.
struct Number {
  std::string_view digits;
  int exponent;
  std::string_view rest;
};

std::optional<Number> split_number(std::string_view text) {
  const auto is_digit = [&](std::size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  std::size_t end = 0;
  bool any = false;
  while (is_digit(end)) ++end, any = true;
  if (end < text.size() && text[end] == '.') {
    ++end;
    while (is_digit(end)) ++end, any = true;
  }
  if (!any) return std::nullopt;
  Number number{text.substr(0, end), 0, text.substr(end)};
  if (end < text.size() && (text[end] == 'e' || text[end] == 'E')) {
    std::size_t first = end + 1;
    if (first < text.size() && text[first] == '+') ++first;
    const bool negative = first < text.size() && text[first] == '-';
    if (is_digit(first + (negative ? 1 : 0))) {
      const auto parsed = std::from_chars(text.data() + first, text.data() + text.size(), number.exponent);
      if (parsed.ec != std::errc{}) number.exponent = negative ? -100'000 : 100'000;  // beyond any double
      number.rest = text.substr(static_cast<std::size_t>(parsed.ptr - text.data()));
    }
  }
  return number;
}

double parse_quantity(std::string_view text, std::string_view what, const Dimension& dimension) {
  if (text.starts_with('-')) refuse(what, dimension.expected, text, "negative");
  const std::optional<Number> number = split_number(text);
  if (!number) refuse(what, dimension.expected, text, "not a number");
  std::string_view name = number->rest;
  if (name.starts_with(' ')) name.remove_prefix(1);
  const Unit* unit = find_unit(name, dimension.units);
  if (unit == nullptr) refuse(what, dimension.expected, text, unit_hint(name, dimension.units));

  const int exponent = std::clamp(number->exponent, -100'000, 100'000) + unit->exponent;
  const std::string scaled = fmt::format("{}e{}", number->digits, exponent);
  double value = 0;
  const auto parsed = std::from_chars(scaled.data(), scaled.data() + scaled.size(), value);
  const double base = value * unit->factor;
  if (parsed.ec != std::errc{} || !std::isfinite(base)) refuse(what, dimension.expected, text, "out of range");
  return base;
}

/// The shortest "<number> <unit>" that parses back to `base`; equal lengths prefer a whole number.
std::string shortest_text(double base, const Dimension& dimension) {
  constexpr int kFewDigits = 6;
  std::string best;
  std::string_view best_unit;
  for (const Unit& unit : dimension.units.first(dimension.num_written)) {
    const double count = base / unit.factor / std::pow(10.0, unit.exponent);
    if (!(count >= 1 && count < 1e6)) continue;
    std::string digits = fmt::format("{:.{}g}", count, kFewDigits);
    if (digits.find('e') != std::string::npos) continue;  // 999999.7 rounds up to 1e+06
    const bool shorter =
        best.empty() || digits.size() < best.size() ||
        (digits.size() == best.size() && best.find('.') != std::string::npos && digits.find('.') == std::string::npos);
    if (shorter && parse_quantity(fmt::format("{}{}", digits, unit.name), "", dimension) == base) {
      best = std::move(digits);
      best_unit = unit.name;
    }
  }
  if (!best.empty()) return fmt::format("{} {}", best, best_unit);
  for (const Unit& unit : dimension.units) {
    if (unit.exponent == 0 && unit.factor == 1) return fmt::format("{} {}", base, unit.name);
  }
  return fmt::format("{}", base);
}

/// Three significant digits without an exponent; all digits of the whole part.
std::string three_digits(double value) {
  if (value == 0 || !std::isfinite(value)) return fmt::format("{}", value == 0 ? 0.0 : value);
  // The exponent after rounding: 9.999 has four digits before it is cut and reads 10.0.
  const std::string scientific = fmt::format("{:.2e}", value);
  const int exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  return fmt::format("{:.{}f}", value, std::max(0, 2 - exponent));
}

}  // namespace

std::string_view to_string(DType type) {
  switch (type) {
    case DType::bf16:
      return "bf16";
    case DType::fp16:
      return "fp16";
    case DType::fp32:
      return "fp32";
    case DType::u8:
      return "u8";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
  }
  throw std::logic_error("to_string: no such DType");
}

Bytes parse_bytes(std::string_view text, std::string_view what) { return Bytes(parse_quantity(text, what, kSize)); }

BytesPerSecond parse_rate(std::string_view text, std::string_view what) {
  return BytesPerSecond(parse_quantity(text, what, kRate));
}

FlopsPerSecond parse_flop_rate(std::string_view text, std::string_view what) {
  return FlopsPerSecond(parse_quantity(text, what, kFlopRate));
}

Seconds parse_seconds(std::string_view text, std::string_view what) {
  return Seconds(parse_quantity(text, what, kTime));
}

std::int64_t parse_integer(std::string_view text, std::string_view what, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = parsed.ec == std::errc{} && parsed.ptr == text.data() + text.size();
  if (whole && value >= low && value <= high) return value;
  const std::string expected = high == std::numeric_limits<std::int64_t>::max()
                                   ? fmt::format("a whole number of at least {}", low)
                                   : fmt::format("a whole number from {} to {}", low, high);
  throw InputError(fmt::format("{}: expected {}, got {}", what, expected, quoted(text)));
}

std::string format_gib(Bytes value) {
  const std::string text = fmt::format("{:.1f} GiB", value.base() / kGiB);
  return text == "-0.0 GiB" ? "0.0 GiB" : text;
}

std::string format_seconds(Seconds value) {
  const double seconds = value.base();
  // Half a unit of the third digit below 1: 0.9996 s reads "1.00 s", not "1000 ms".
  constexpr double kRoundsToOne = 0.9995;
  const double size = std::abs(seconds);
  if (size == 0) return "0 s";
  if (size >= kRoundsToOne || !std::isfinite(size)) return three_digits(seconds) + " s";
  if (size * 1e3 >= kRoundsToOne) return three_digits(seconds * 1e3) + " ms";
  return three_digits(seconds * 1e6) + " us";
}

std::string format_rate(BytesPerSecond value) { return three_digits(value.base() / kGB) + " GB/s"; }

std::string to_text(Bytes value) { return shortest_text(value.base(), kSize); }

std::string to_text(BytesPerSecond value) { return shortest_text(value.base(), kRate); }

std::string to_text(FlopsPerSecond value) { return shortest_text(value.base(), kFlopRate); }

std::string to_text(Seconds value) { return shortest_text(value.base(), kTime); }

std::string format_count(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  const std::size_t first = digits.front() == '-' ? 1 : 0;
  for (std::size_t i = digits.size(); i > first + 3;) {
    i -= 3;
    digits.insert(i, ",");
  }
  return digits;
}

}  // namespace zeroplan
