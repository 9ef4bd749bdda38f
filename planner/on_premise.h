#pragma once
// What an hour of a node costs that somebody owns.

#include "models/machine_spec.h"

namespace zeroplan {

struct OnPremise {
  double capital_usd = 0;  // of a node, with its part of network and racks
  double years = 0;        // that it is written off over
  double kilowatts = 0;    // a node draws while it trains; hours in which it idles are not charged
  double usd_per_kwh = 0;  // electricity, cooling included
  double utilisation = 1;  // part of those years in which it works, above 0 to 1
  std::string source;      // of the figures; may be empty
};

/// Capital of an hour of work, and its electricity: capital / (years x 8766 h x utilisation) + kilowatts x usd_per_kwh.
struct OwnedHour {
  double capital_usd = 0, electricity_usd = 0;
  double usd() const { return capital_usd + electricity_usd; }
};
OwnedHour owned_hour(const OnPremise& terms);

/// The price of a node and hour, its source spelling out the sum.
PriceSpec price_of(const OnPremise& terms);

}  // namespace zeroplan
