#include "cli/whatif_values.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <span>
#include <string>

#include "models/error.h"
#include "planner/whatif.h"

namespace zeroplan {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

constexpr Unit kDollars[] = {{"USD", 1}, {"kUSD", 1e3}, {"MUSD", 1e6}};

struct Amount {
  std::string_view expected;  // in words, with an example
  std::span<const Unit> units;
  double least, most;  // in the first unit
  bool zero_allowed = false;
};

[[noreturn]] void refuse(std::string_view where, std::string_view expected, std::string_view text) {
  constexpr std::size_t kLongest = 60;
  throw InputError(fmt::format("{}: expected {}, got \"{}\"{}", where, expected, text.substr(0, kLongest),
                               text.size() > kLongest ? "..." : ""));
}

double parse_amount(std::string_view text, std::string_view where, const Amount& amount) {
  double value = 0;
  if (text.empty() || text[0] < '0' || text[0] > '9') refuse(where, amount.expected, text);
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc{} || !std::isfinite(value)) refuse(where, amount.expected, text);
  std::string_view name = text.substr(static_cast<std::size_t>(parsed.ptr - text.data()));
  if (name.starts_with(' ')) name.remove_prefix(1);
  for (const Unit& unit : amount.units) {
    if (unit.name != name) continue;
    const double result = value * unit.factor;
    const bool enough = result > amount.least || (amount.zero_allowed && value == 0);
    if (!enough || result > amount.most) refuse(where, amount.expected, text);
    return result;
  }
  refuse(where, amount.expected, text);
}

}  // namespace

double parse_budget(std::string_view text, std::string_view where) {
  return parse_amount(text, where,
                      {"US dollars such as 50000USD, 50kUSD or 1.5MUSD, above 0", kDollars, 0, kLargestBudget});
}

Seconds parse_deadline(std::string_view text, std::string_view where) {
  static constexpr Unit kUnits[] = {{"days", 1},        {"day", 1},      {"d", 1},     {"hours", 1.0 / 24},
                                    {"hour", 1.0 / 24}, {"h", 1.0 / 24}, {"weeks", 7}, {"week", 7}};
  return Seconds(kSecondsPerDay * parse_amount(text, where,
                                               {"a time such as 30days, 36h or 2weeks, above 0 and at most 36525days",
                                                kUnits, 0, kLongestDeadline.base() / kSecondsPerDay}));
}

double parse_hourly_price(std::string_view text, std::string_view where) {
  static constexpr Unit kUnits[] = {{"USD/hour", 1}, {"USD/h", 1}};
  return parse_amount(text, where,
                      {"US dollars of a node and hour such as \"31.5 USD/hour\", above 0", kUnits, 0, 1e6});
}

double parse_capital(std::string_view text, std::string_view where) {
  return parse_amount(text, where,
                      {"what a node cost, such as \"350000 USD\" or \"350 kUSD\"", kDollars, 0, 1e9, true});
}

double parse_years(std::string_view text, std::string_view where) {
  static constexpr Unit kUnits[] = {{"years", 1}, {"year", 1}};
  return parse_amount(text, where, {"a time such as \"4 years\", above 0 and at most 50 years", kUnits, 0, 50});
}

double parse_power(std::string_view text, std::string_view where) {
  static constexpr Unit kUnits[] = {{"kW", 1}, {"W", 1e-3}};
  return parse_amount(
      text, where, {"what a node draws, such as \"10.2 kW\" or \"10200 W\", at most 1000 kW", kUnits, 0, 1000, true});
}

double parse_electricity(std::string_view text, std::string_view where) {
  static constexpr Unit kUnits[] = {{"USD/kWh", 1}};
  return parse_amount(text, where, {"a price such as \"0.12 USD/kWh\", at most 100 USD/kWh", kUnits, 0, 100, true});
}

double parse_utilisation(std::string_view text, std::string_view where) {
  static constexpr Unit kUnits[] = {{"%", 0.01}};
  return parse_amount(text, where, {"a part such as \"80 %\", above 0 to 100 %", kUnits, 0, 1});
}

}  // namespace zeroplan
