#pragma once
// Money, days and the like as text. Each parser takes the text and what stands before the error: a flag, or a file's
// line and key. Numbers carry their unit; a blank may stand between. Throws InputError with what was expected.

#include <string_view>

#include "models/units.h"

namespace zeroplan {

/// "50000USD", "50kUSD", "1.5 MUSD": above 0, at most 10^12.
double parse_budget(std::string_view text, std::string_view where);
/// "30days", "1 day", "36h", "2 weeks": above 0, at most 100 years.
Seconds parse_deadline(std::string_view text, std::string_view where);
/// "31.5 USD/hour", "31.5 USD/h": of a node; above 0, at most 10^6.
double parse_hourly_price(std::string_view text, std::string_view where);
/// "350000 USD": 0 or more, at most 10^9.
double parse_capital(std::string_view text, std::string_view where);
/// "4 years": above 0, at most 50.
double parse_years(std::string_view text, std::string_view where);
/// "10.2 kW", "10200 W": 0 or more, at most 1000 kW. In kW.
double parse_power(std::string_view text, std::string_view where);
/// "0.12 USD/kWh": 0 or more, at most 100.
double parse_electricity(std::string_view text, std::string_view where);
/// "80 %": above 0 to 100. As a part of 1.
double parse_utilisation(std::string_view text, std::string_view where);

}  // namespace zeroplan
