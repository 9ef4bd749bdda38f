// fit_pipelines COLLECTIVES.csv HELD_OUT.csv: refits the pipeline laws of models/catalog/fits/collectives.json (between
// nodes: fill and pipe; in the switch: fill and arrival), prints them, what they say of each machine that is left out
// of the fit, and of the machines of the second file, of which nothing is fitted. Measured tables are not used. Soft L1
// at 10 % of the logarithm of time, compass search on the logarithms of the two numbers; deterministic.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/collective_rows.h"

namespace {

using namespace zeroplan;
using namespace zeroplan::tests;

using Rows = std::vector<Measured>;
using Numbers = std::array<double, 2>;  // logarithms

/// Least of f near `at`: steps along both axes, halved when neither helps.
Numbers minimised(const std::function<double(const Numbers&)>& f, Numbers at) {
  double best = f(at);
  for (double step = 0.5; step > 1e-3;) {
    bool moved = false;
    for (std::size_t k = 0; k < at.size(); ++k) {
      for (const double sign : {1.0, -1.0}) {
        Numbers next = at;
        next[k] += sign * step;
        const double value = f(next);
        if (value >= best) continue;
        best = value, at = next, moved = true;
      }
    }
    if (!moved) step /= 2;
  }
  return at;
}

double cost(const Rows& rows, const CollectiveTables& tables) {
  constexpr double kSoft = 0.1;
  double sum = 0;
  for (const Measured& row : rows) {
    const double error = std::log(predicted(row, tables) / row.gigabytes_per_second) / kSoft;
    sum += std::sqrt(1 + error * error) - 1;
  }
  return sum;
}

struct Law {
  const char* name;
  std::vector<std::string> machines;
  Numbers start;
  void (*set)(CollectiveTables& tables, double first, double second);
};

const Law kLaws[] = {
    {"between nodes: fill a pass, pipe in MB",
     {"p4de-2", "p5-2", "p6-b200-4"},
     {std::log(0.8), std::log(30.0)},
     [](CollectiveTables& t, double fill, double pipe) { t.network.fill = fill, t.network.pipe = Bytes(pipe * 1e6); }},
    {"in the switch: fill, arrival in us",
     {"h200-8", "b200-8"},
     {std::log(0.9), std::log(15.0)},
     [](CollectiveTables& t, double fill, double arrival) {
       t.in_switch.fill = fill, t.in_switch.arrival = Seconds(arrival * 1e-6);
     }},
};

CollectiveTables fitted(const Law& law, const Rows& rows) {
  const auto tables_of = [&](const Numbers& n) {
    CollectiveTables tables = without_ramps();
    law.set(tables, std::exp(n[0]), std::exp(n[1]));
    return tables;
  };
  const Numbers best = minimised([&](const Numbers& n) { return cost(rows, tables_of(n)); }, law.start);
  fmt::print("  {:.3f}, {:.2f}\n", std::exp(best[0]), std::exp(best[1]));
  return tables_of(best);
}

void print_errors(const std::string& name, const Rows& rows, const CollectiveTables& tables) {
  for (const bool large : {false, true}) {
    double sum = 0, bias = 0, worst = 0;
    int n = 0, outside = 0;
    for (const Measured& row : rows) {
      if (row.large() != large) continue;
      const double ratio = predicted(row, tables) / row.gigabytes_per_second;
      sum += std::abs(ratio - 1);
      bias += std::log(ratio);
      worst = std::max(worst, std::abs(ratio - 1));
      outside += std::abs(ratio - 1) > (large ? 0.10 : 0.25);
      ++n;
    }
    if (n > 0)
      fmt::print("    {:<44} {} n {:>2}  MAPE {:>5.1f} %  bias {:>+6.1f} %  worst {:>5.1f} %  outside {}\n", name,
                 large ? ">= 256 MiB" : "1-256 MiB ", n, 100 * sum / n, 100 * (std::exp(bias / n) - 1), 100 * worst,
                 outside);
  }
}

/// All-reduces of whole machines from 1 MiB on; sizes that were not stated are not fitted.
Rows rows_of(const Rows& all, const Law& law, const std::string& only, const std::string& without) {
  Rows rows;
  for (const Measured& row : all) {
    const bool ours = std::ranges::find(law.machines, row.machine) != law.machines.end();
    const CollectiveModel model(measured_machine(row.machine));
    if (!ours || row.collective != "all_reduce" || row.group != model.all() || row.size < Bytes(1024.0 * 1024))
      continue;
    if (row.source.find("not stated") != std::string::npos || row.machine == without) continue;
    if (only.empty() || row.machine == only) rows.push_back(row);
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "usage: fit_pipelines COLLECTIVES.csv HELD_OUT.csv\n");
    return 2;
  }
  const Rows all = measured_rows(argv[1]);
  CollectiveTables both = without_ramps();
  for (const Law& law : kLaws) {
    fmt::print("{}\n", law.name);
    const CollectiveTables tables = fitted(law, rows_of(all, law, "", ""));
    if (&law == &kLaws[0]) both.network = tables.network;
    if (&law == &kLaws[1]) both.in_switch = tables.in_switch;
    for (const std::string& machine : law.machines) print_errors(machine, rows_of(all, law, machine, ""), tables);
    for (const std::string& machine : law.machines) {
      fmt::print("  {} left out:", machine);
      print_errors(machine, rows_of(all, law, machine, ""), fitted(law, rows_of(all, law, "", machine)));
    }
  }
  fmt::print("nothing fitted, no measured table\n");
  std::map<std::string, Rows> groups;
  for (const Measured& row : measured_rows(argv[2]))
    groups[row.machine + ", " + row.collective + ", " + row.source.substr(0, 14)].push_back(row);
  for (const auto& [name, rows] : groups) print_errors(name, rows, both);
  return 0;
}
