#include "planner/on_premise.h"

#include <fmt/format.h>

#include <cmath>

namespace zeroplan {
namespace {

constexpr double kHoursPerYear = 365.25 * 24;

}  // namespace

OwnedHour owned_hour(const OnPremise& terms) {
  return {terms.capital_usd / (terms.years * kHoursPerYear * terms.utilisation), terms.kilowatts * terms.usd_per_kwh};
}

PriceSpec price_of(const OnPremise& terms) {
  const OwnedHour hour = owned_hour(terms);
  PriceSpec price;
  price.usd_per_hour = hour.usd();
  price.source = fmt::format(
      "on premise: {:.2f} USD of {} USD over {:g} years at {:g} % use, and {:.2f} USD of {:g} kW at {:g} USD/kWh",
      hour.capital_usd, format_count(std::llround(terms.capital_usd)), terms.years, 100 * terms.utilisation,
      hour.electricity_usd, terms.kilowatts, terms.usd_per_kwh);
  if (!terms.source.empty()) price.source += "; " + terms.source;
  return price;
}

}  // namespace zeroplan
