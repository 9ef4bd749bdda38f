#include "planner/whatif_verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace zeroplan {
namespace {

const std::string& unit_of(const Alternative& a) { return a.unit.empty() ? a.name : a.unit; }

/// The rows that keep the limits, the preferred first; those without a price last when the cheapest is wanted.
std::vector<WhatifPoint> keeping(const WhatifAnswer& answer) {
  std::vector<WhatifPoint> found;
  for (std::size_t i = 0; i < answer.rows.size(); ++i) {
    const auto run = answer.rows[i].run(answer.limits);
    if (run && run->meets(answer.limits)) found.push_back({i, true, *run});
  }
  const bool priced = std::ranges::any_of(found, [](const WhatifPoint& p) { return p.run.usd.has_value(); });
  // Node hours of different machines say nothing about money.
  const Prefer prefer = priced ? answer.limits.prefer : Prefer::fastest;
  std::ranges::stable_sort(found,
                           [&](const WhatifPoint& a, const WhatifPoint& b) { return preferred(a.run, b.run, prefer); });
  return found;
}

/// "17.7 days and 8,660 USD to spare".
std::string to_spare(const WhatifRun& run, const WhatifLimits& limits) {
  std::vector<std::string> parts;
  if (limits.deadline) parts.push_back(days_text(*limits.deadline - run.time));
  if (limits.budget_usd) parts.push_back(usd_text(*limits.budget_usd - *run.usd));
  return fmt::format("{} to spare", fmt::join(parts, " and "));
}

std::string why_recommended(const WhatifAnswer& answer, const std::vector<WhatifPoint>& kept) {
  const WhatifPoint& first = kept.front();
  const bool cheapest = answer.limits.prefer == Prefer::cheapest && first.run.usd;
  const auto unpriced = static_cast<std::size_t>(
      std::ranges::count_if(kept, [](const WhatifPoint& p) { return !p.run.usd.has_value(); }));
  const std::size_t compared = cheapest ? kept.size() - unpriced : kept.size();
  std::string text = fmt::format("{}: {}", place_text(answer.rows[first.row], first.run.nodes), run_text(first.run));
  const std::string best =
      compared == 1 ? "the only machine that keeps"
                    : fmt::format("the {} of {} machines that keep", cheapest ? "cheapest" : "fastest", compared);
  text += fmt::format("; {} {}, {}", best, limits_text(answer.limits), to_spare(first.run, answer.limits));
  if (cheapest && unpriced > 0) text += fmt::format("; {} more without a price", unpriced);
  if (answer.limits.prefer == Prefer::cheapest && !cheapest)
    text += "; none of them has a price, so the fastest is taken";
  if (kept.size() > 1) {
    const WhatifPoint& next = kept[1];
    text += fmt::format("; next {}: {}", place_text(answer.rows[next.row], next.run.nodes), run_text(next.run));
  }
  return text;
}

/// Every run that was planned and can be held against the limits: without a price none is within a budget.
std::vector<WhatifPoint> comparable(const WhatifAnswer& answer, const std::vector<WhatifPoint>& more) {
  std::vector<WhatifPoint> points;
  for (std::size_t i = 0; i < answer.rows.size(); ++i) {
    for (const NodeTrial& trial : answer.rows[i].trials) {
      if (trial.run) points.push_back({i, true, *trial.run});
    }
  }
  points.insert(points.end(), more.begin(), more.end());
  if (answer.limits.budget_usd) std::erase_if(points, [](const WhatifPoint& p) { return !p.run.usd; });
  // What no limit may be is no change either.
  std::erase_if(points, [](const WhatifPoint& p) {
    return p.run.time > kLongestDeadline * 0.999 || p.run.usd.value_or(0) > kLargestBudget - 1;
  });
  return points;
}

class Changes {
 public:
  Changes(const WhatifAnswer& answer, const std::vector<WhatifPoint>& points)
      : answer_(answer), limits_(answer.limits), points_(points) {}

  std::vector<WhatifChange> all() {
    const auto more_nodes =
        least([&](const WhatifPoint& p) { return !p.asked && p.run.meets(limits_); },
              [&](const WhatifPoint& a, const WhatifPoint& b) { return preferred(a.run, b.run, limits_.prefer); });
    const auto smaller = [&](const WhatifPoint& a, const WhatifPoint& b) {
      return a.run.excess(limits_) < b.run.excess(limits_);
    };
    std::vector<WhatifPoint> single;
    if (const auto p = least([&](const WhatifPoint& q) { return q.asked && q.run.over(limits_) == 0; }, smaller)) {
      single.push_back(*p);
    }
    if (const auto p =
            least([&](const WhatifPoint& q) { return q.asked && q.run.late(limits_) == Seconds(); }, smaller)) {
      single.push_back(*p);
    }
    // Both limits a little rather than one by a lot.
    const auto both = least(
        [&](const WhatifPoint& p) { return p.run.late(limits_) > Seconds() && p.run.over(limits_) > 0; }, smaller);
    if (both && std::ranges::none_of(single, [&](const WhatifPoint& p) { return !smaller(*both, p); })) {
      single.push_back(*both);
    }
    std::ranges::stable_sort(single, smaller);
    if (more_nodes) single.insert(single.begin(), *more_nodes);
    if (single.empty()) {
      if (const auto p = least([](const WhatifPoint&) { return true; }, smaller)) single.push_back(*p);
    }
    std::vector<WhatifChange> changes;
    for (const WhatifPoint& p : single) changes.push_back(change_to(p));
    return changes;
  }

 private:
  template <class Keep, class Less>
  std::optional<WhatifPoint> least(Keep keep, Less less) const {
    std::optional<WhatifPoint> best;
    for (const WhatifPoint& p : points_) {
      if (keep(p) && (!best || less(p, *best))) best = p;
    }
    return best;
  }

  WhatifChange change_to(const WhatifPoint& p) const {
    const WhatifRow& row = answer_.rows[p.row];
    std::vector<std::string> whats, flags;
    if (!p.asked) {
      whats.push_back(fmt::format("{} nodes of {} instead of {}", p.run.nodes, unit_of(row.alternative),
                                  row.alternative.machine.nodes));
      flags.push_back(row.alternative.from_file
                          ? fmt::format("\"nodes\": {} in \"{}\"", p.run.nodes, row.alternative.name)
                          : fmt::format("--hardware {}x{}", p.run.nodes, unit_of(row.alternative)));
    }
    if (const Seconds late = p.run.late(limits_); late > Seconds()) {
      // Rounded up to a tenth of a day: the flag must do.
      const double days = std::ceil(10 * p.run.time.base() / kSecondsPerDay) / 10;
      whats.push_back(fmt::format("a deadline {} longer, {} days", days_text(late), days));
      flags.push_back(fmt::format("--deadline {}days", days));
    }
    if (const double over = p.run.over(limits_); over > 0) {
      const double usd = std::ceil(*p.run.usd);
      whats.push_back(fmt::format("a budget {} larger, {}", usd_text(over), usd_text(usd)));
      flags.push_back(fmt::format("--budget {:.0f}USD", usd));
    }
    return {fmt::format("{}: {}, {}", fmt::join(whats, " and "), place_text(row, p.run.nodes), run_text(p.run)),
            fmt::format("{}", fmt::join(flags, " ")), row.alternative.name, p.run};
  }

  const WhatifAnswer& answer_;
  const WhatifLimits& limits_;
  const std::vector<WhatifPoint>& points_;
};

std::optional<std::size_t> nearest_row(const WhatifAnswer& answer) {
  std::optional<std::size_t> nearest;
  double least = 0;
  for (std::size_t i = 0; i < answer.rows.size(); ++i) {
    const auto run = answer.rows[i].run(answer.limits);
    if (!run || (answer.limits.budget_usd && !run->usd)) continue;
    if (nearest && run->excess(answer.limits) >= least) continue;
    nearest = i;
    least = run->excess(answer.limits);
  }
  return nearest;
}

std::string missed(const WhatifAnswer& answer, const WhatifRow& row) {
  const auto run = row.run(answer.limits);
  std::vector<std::string> misses;
  if (const Seconds late = run->late(answer.limits); late > Seconds()) misses.push_back(days_text(late) + " late");
  if (const double over = run->over(answer.limits); over > 0) misses.push_back(usd_text(over) + " over the budget");
  std::string text = fmt::format("no machine keeps {}; nearest is {}: {}, {}", limits_text(answer.limits),
                                 place_text(row, run->nodes), run_text(*run), fmt::join(misses, " and "));
  const bool most = !row.alternative.nodes_given && run->nodes == row.trials.back().nodes;
  if (most && run->late(answer.limits) > Seconds()) {
    text += fmt::format("; a step of {} sequences has no part for more nodes (--global-batch)",
                        *answer.workload.global_batch);
  }
  return text;
}

}  // namespace

bool preferred(const WhatifRun& a, const WhatifRun& b, Prefer prefer) {
  if (prefer == Prefer::cheapest) {
    if (a.usd.has_value() != b.usd.has_value()) return a.usd.has_value();
    const double cost_a = a.usd.value_or(a.node_hours), cost_b = b.usd.value_or(b.node_hours);
    if (cost_a != cost_b) return cost_a < cost_b;
    return a.time < b.time;
  }
  if (a.time != b.time) return a.time < b.time;
  return a.usd.value_or(a.node_hours) < b.usd.value_or(b.node_hours);
}

WhatifVerdict verdict_of(const WhatifAnswer& answer, const std::vector<WhatifPoint>& more) {
  WhatifVerdict verdict;
  const std::vector<WhatifPoint> kept = keeping(answer);
  if (!kept.empty()) {
    verdict.recommended = kept.front().row;
    verdict.why = why_recommended(answer, kept);
    return verdict;
  }
  verdict.nearest = nearest_row(answer);
  const std::vector<WhatifPoint> points = comparable(answer, more);
  verdict.changes = Changes(answer, points).all();
  verdict.why = verdict.nearest ? missed(answer, answer.rows[*verdict.nearest])
                                : fmt::format("no machine keeps {}: nothing {}fits", limits_text(answer.limits),
                                              answer.limits.budget_usd ? "with a price " : "");
  return verdict;
}

std::string days_text(Seconds time) {
  const double days = time.base() / kSecondsPerDay;
  if (days < 2) return fmt::format("{:.1f} hours", time.base() / kSecondsPerHour);
  return fmt::format("{:g} days", std::round(10 * days) / 10);
}

std::string usd_text(double usd) {
  constexpr double kCentsMatter = 100;
  return usd < kCentsMatter ? fmt::format("{:.2f} USD", usd) : whole_text(usd) + " USD";
}

std::string whole_text(double value) {
  constexpr double kCounted = 1e15;
  return value < kCounted ? format_count(std::llround(value)) : fmt::format("{:.4g}", value);
}

std::string run_text(const WhatifRun& run) {
  return run.usd ? fmt::format("{} in {}", usd_text(*run.usd), days_text(run.time))
                 : fmt::format("{} (no price)", days_text(run.time));
}

std::string place_text(const WhatifRow& row, int nodes) {
  return nodes == 1 ? unit_of(row.alternative) : fmt::format("{} on {} nodes", unit_of(row.alternative), nodes);
}

std::string limits_text(const WhatifLimits& limits) {
  std::vector<std::string> parts;
  if (limits.deadline) parts.push_back(fmt::format("the deadline of {}", days_text(*limits.deadline)));
  if (limits.budget_usd) parts.push_back(fmt::format("the budget of {}", usd_text(*limits.budget_usd)));
  return fmt::format("{}", fmt::join(parts, " and "));
}

}  // namespace zeroplan
