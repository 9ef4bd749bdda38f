// Bottleneck fairness: hand-made cases, its definition checked on random ones, and progressive filling as a second
// opinion where amounts are equal.

#include "sim/sharing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

constexpr double kClose = 1e-9;  // relative; flows in a circle are settled by iteration

struct Case {
  std::vector<double> capacities;
  std::vector<std::vector<Use>> flows;
};

std::vector<double> rates(const Case& c) {
  FairSharing sharing;
  for (double capacity : c.capacities) sharing.add_resource(capacity);
  std::vector<std::uint32_t> ids;
  for (const auto& uses : c.flows) {
    ids.push_back(sharing.add_flow());
    sharing.start(ids.back(), uses);
  }
  sharing.solve();
  std::vector<double> result;
  for (std::uint32_t id : ids) result.push_back(sharing.rate(id));
  return result;
}

/// Textbook progressive filling: all rates rise together; flows of a full resource stop. For amounts that are all 1.
std::vector<double> progressive_filling(const Case& c) {
  std::vector<double> rate(c.flows.size(), 0), left = c.capacities;
  std::vector<bool> stopped(c.flows.size(), false);
  const auto users = [&](std::size_t r) {
    int count = 0;
    for (std::size_t f = 0; f < c.flows.size(); ++f) {
      for (const Use& use : c.flows[f]) count += !stopped[f] && use.resource == r ? 1 : 0;
    }
    return count;
  };
  for (std::size_t round = 0; round < c.flows.size(); ++round) {
    double step = std::numeric_limits<double>::infinity();
    std::size_t full = 0;
    for (std::size_t r = 0; r < left.size(); ++r) {
      if (users(r) == 0 || left[r] / users(r) >= step) continue;
      step = left[r] / users(r);
      full = r;
    }
    if (!std::isfinite(step)) break;
    for (std::size_t r = 0; r < left.size(); ++r) left[r] -= step * users(r);
    for (std::size_t f = 0; f < c.flows.size(); ++f) {
      if (!stopped[f]) rate[f] += step;
    }
    for (std::size_t f = 0; f < c.flows.size(); ++f) {
      for (const Use& use : c.flows[f]) stopped[f] = stopped[f] || use.resource == full;
    }
  }
  return rate;
}

/// Nothing over capacity, and every flow has a full resource that nobody uses more than it does.
void check_fair(const Case& c, const std::vector<double>& rate) {
  std::vector<double> used(c.capacities.size(), 0), largest = used;
  for (std::size_t f = 0; f < c.flows.size(); ++f) {
    for (const Use& use : c.flows[f]) {
      used[use.resource] += use.amount * rate[f];
      largest[use.resource] = std::max(largest[use.resource], use.amount * rate[f]);
    }
  }
  for (std::size_t r = 0; r < used.size(); ++r) CHECK(used[r] <= c.capacities[r] * (1 + 1e-12));
  for (std::size_t f = 0; f < c.flows.size(); ++f) {
    const bool has_bottleneck = std::ranges::any_of(c.flows[f], [&](const Use& use) {
      return used[use.resource] >= c.capacities[use.resource] * (1 - kClose) &&
             use.amount * rate[f] >= largest[use.resource] * (1 - kClose);
    });
    INFO("flow " << f << " at " << rate[f]);
    CHECK(has_bottleneck);
  }
}

Case random_case(Random& random, bool equal_amounts) {
  Case c;
  const auto resources = random.between(1, 12), flows = random.between(1, 15);
  for (int r = 0; r < resources; ++r) c.capacities.push_back(random.chance(30) ? 1.0 : 0.1 + 10 * random.unit());
  for (int f = 0; f < flows; ++f) {
    std::map<std::uint32_t, double> uses;
    const auto count = random.between(1, 4);
    for (int k = 0; k < count; ++k) {
      const auto resource = static_cast<std::uint32_t>(random.between(0, resources - 1));
      uses[resource] = equal_amounts ? 1.0 : std::pow(10.0, 2 * random.unit() - 1);
    }
    auto& flow = c.flows.emplace_back();
    for (const auto& [resource, amount] : uses) flow.push_back({resource, amount});
  }
  return c;
}

}  // namespace

TEST_CASE("Flows of one resource get even shares of it") {
  CHECK(rates({{6}, {{{0, 1}}, {{0, 1}}, {{0, 1}}}}) == std::vector<double>{2, 2, 2});
  // A copy of 2 bytes a unit of progress gets as many bytes as the others, and so half the progress.
  CHECK(rates({{6}, {{{0, 2}}, {{0, 1}}, {{0, 1}}}}) == std::vector<double>{1, 2, 2});
}

TEST_CASE("What a flow cannot use goes to the others") {
  //  flow 0: A and B; flow 1: A; flow 2: B
  //  A = 10, B = 2: flow 0 gets 1 of B, so flow 1 has 9 of A
  CHECK(rates({{10, 2}, {{{0, 1}, {1, 1}}, {{0, 1}}, {{1, 1}}}}) == std::vector<double>{1, 9, 1});
}

TEST_CASE("A kernel that needs little of what another lacks is not slowed") {
  // flops on A, bytes on B. Flow 0 is limited by B and uses a tenth of A; flow 1 gets the rest of A.
  const auto r = rates({{1, 1}, {{{0, 0.1}, {1, 1}}, {{0, 1}}}});
  CHECK(r[0] == 1);
  CHECK_THAT(r[1], WithinRel(0.9, 1e-15));
}

TEST_CASE("Flows that are each other's largest rival share by their largest demand") {
  //  A: r0 + 2 r1 <= 1, B: 2 r0 + r1 <= 1: flow 0 is limited by B, flow 1 by A
  const auto r = rates({{1, 1}, {{{0, 1}, {1, 2}}, {{0, 2}, {1, 1}}}});
  CHECK_THAT(r[0], WithinRel(1.0 / 3, 1e-14));
  CHECK_THAT(r[1], WithinRel(1.0 / 3, 1e-14));
}

TEST_CASE("Only what hangs together with a change is worked out anew") {
  FairSharing sharing;
  for (int r = 0; r < 4; ++r) sharing.add_resource(1);
  for (int f = 0; f < 4; ++f) sharing.add_flow();
  sharing.start(0, std::vector<Use>{{0, 1}});
  sharing.start(1, std::vector<Use>{{1, 1}});
  CHECK(sharing.solve().size() == 2);
  CHECK(sharing.solve().empty());
  sharing.start(2, std::vector<Use>{{0, 1}});
  const auto told = sharing.solve();
  std::vector<FairSharing::Change> changed(told.begin(), told.end());
  std::ranges::sort(changed, {}, &FairSharing::Change::flow);
  REQUIRE(changed.size() == 2);
  CHECK((changed[0].flow == 0 && changed[0].before == 1 && changed[0].now == 0.5));
  CHECK((changed[1].flow == 2 && changed[1].before == 0 && changed[1].now == 0.5));
  sharing.stop(0);
  REQUIRE(sharing.solve().size() == 1);
  CHECK(sharing.rate(2) == 1);
  CHECK(sharing.rate(0) == 0);
  CHECK(sharing.load(0) == 1);
}

TEST_CASE("A change does not reach a flow whose bottleneck has as much to give as before") {
  //  flow 0: A; flow 1: A and B; flow 2: B and C; flow 3: C.  A = 2, B = 10, C = 4
  //  A holds 0 and 1 at 1, C holds 2 and 3 at 2; B, which 1 and 2 use, is not full.
  FairSharing sharing;
  for (const double capacity : {2.0, 10.0, 4.0}) sharing.add_resource(capacity);
  for (int f = 0; f < 4; ++f) sharing.add_flow();
  sharing.start(0, std::vector<Use>{{0, 1}});
  sharing.start(1, std::vector<Use>{{0, 1}, {1, 1}});
  sharing.start(2, std::vector<Use>{{1, 1}, {2, 1}});
  sharing.start(3, std::vector<Use>{{2, 1}});
  CHECK(sharing.solve().size() == 4);
  sharing.stop(0);
  REQUIRE(sharing.solve().size() == 1);  // flow 1, through A
  CHECK(sharing.rate(1) == 2);
  CHECK(sharing.rate(2) == 2);
  // Flow 1 alone on A = 2 and B = 10; flow 2 alone could have 4 of C and B still has room.
  sharing.stop(3);
  REQUIRE(sharing.solve().size() == 1);
  CHECK(sharing.rate(2) == 4);
}

TEST_CASE("A flow that a new one overtakes gives way") {
  //  flow 0: A = 6 alone has 6 (of B = 10, which is not full); then flow 1 on B: with flow 0 fixed B would leave it 4,
  //  less than flow 0 has. Fair is 5 each.
  FairSharing sharing;
  sharing.add_resource(6);
  sharing.add_resource(10);
  for (int f = 0; f < 2; ++f) sharing.add_flow();
  sharing.start(0, std::vector<Use>{{0, 1}, {1, 1}});
  CHECK(sharing.solve().size() == 1);
  sharing.start(1, std::vector<Use>{{1, 1}});
  CHECK(sharing.solve().size() == 2);
  CHECK(sharing.rate(0) == 5);
  CHECK(sharing.rate(1) == 5);
  sharing.stop(1);
  CHECK(sharing.solve().size() == 1);
  CHECK(sharing.rate(0) == 6);
}

TEST_CASE("Impossible amounts and capacities are refused") {
  FairSharing sharing;
  CHECK_THROWS_AS(sharing.add_resource(0), std::logic_error);
  CHECK_THROWS_AS(sharing.add_resource(std::nan("")), std::logic_error);
  sharing.add_resource(1);
  sharing.add_flow();
  CHECK_THROWS_AS(sharing.start(0, std::vector<Use>{{0, 0}}), std::logic_error);
  CHECK_THROWS_AS(sharing.start(0, std::vector<Use>{{0, std::nan("")}}), std::logic_error);
}

TEST_CASE("With equal amounts the rates are those of progressive filling") {
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const Case c = random_case(random, true);
    const auto ours = rates(c), expected = progressive_filling(c);
    for (std::size_t f = 0; f < ours.size(); ++f) REQUIRE_THAT(ours[f], WithinRel(expected[f], 1e-12));
  }
}

TEST_CASE("Rates of random flows are bottleneck-fair") {
  Random random(4);
  for (int i = 0; i < 3000; ++i) {
    const Case c = random_case(random, false);
    INFO("case " << i);
    check_fair(c, rates(c));
  }
}

TEST_CASE("Flows that come and go end at the rates of a fresh start") {
  Random random(5);
  for (int i = 0; i < 200; ++i) {
    const Case c = random_case(random, i % 2 == 0);
    FairSharing sharing;
    for (double capacity : c.capacities) sharing.add_resource(capacity);
    for (std::size_t f = 0; f < c.flows.size(); ++f) sharing.add_flow();
    std::vector<bool> active(c.flows.size(), false);
    for (int change = 0; change < 60; ++change) {
      const auto f = static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(c.flows.size()) - 1));
      if (active[f]) {
        sharing.stop(static_cast<std::uint32_t>(f));
      } else {
        sharing.start(static_cast<std::uint32_t>(f), c.flows[f]);
      }
      active[f] = !active[f];
      if (random.chance(70)) sharing.solve();
    }
    sharing.solve();
    Case now{c.capacities, {}};
    for (std::size_t f = 0; f < c.flows.size(); ++f) {
      if (active[f]) now.flows.push_back(c.flows[f]);
    }
    const auto fresh = rates(now);
    std::size_t k = 0;
    for (std::size_t f = 0; f < c.flows.size(); ++f) {
      if (active[f]) REQUIRE_THAT(sharing.rate(static_cast<std::uint32_t>(f)), WithinRel(fresh[k++], kClose));
    }
    for (std::uint32_t r = 0; r < c.capacities.size(); ++r) CHECK(sharing.load(r) <= 1 + 1e-12);
  }
}

TEST_CASE("Many flows that come and go have the rates of a fresh start after every change") {
  // Only a few rates are worked out anew each time; what is left over of each resource must not drift.
  Random random(6);
  for (const bool equal_amounts : {true, false}) {
    Case c;
    for (int r = 0; r < 40; ++r) c.capacities.push_back(1 + static_cast<double>(random.between(0, 3)));
    for (int f = 0; f < 60; ++f) {
      auto& flow = c.flows.emplace_back();
      const auto first = random.between(0, 39), count = random.between(1, 4);
      for (std::int64_t k = 0; k < count; ++k) {
        const double amount = equal_amounts ? 1 : 0.1 + random.unit();
        flow.push_back({static_cast<std::uint32_t>((first + k) % 40), amount});
      }
    }
    FairSharing sharing;
    for (double capacity : c.capacities) sharing.add_resource(capacity);
    std::vector<bool> active(c.flows.size(), false);
    for (std::size_t f = 0; f < c.flows.size(); ++f) sharing.add_flow();
    std::vector<double> known(c.flows.size(), 0);
    for (int change = 0; change < 3000; ++change) {
      const auto f = static_cast<std::size_t>(random.between(0, 59));
      if (active[f]) {
        sharing.stop(static_cast<std::uint32_t>(f));
        known[f] = 0;
      } else {
        sharing.start(static_cast<std::uint32_t>(f), c.flows[f]);
      }
      active[f] = !active[f];
      for (const FairSharing::Change& told : sharing.solve()) {
        REQUIRE(told.before == known[told.flow]);
        known[told.flow] = told.now;
      }
      Case now{c.capacities, {}};
      std::vector<double> ours;
      for (std::size_t k = 0; k < c.flows.size(); ++k) {
        REQUIRE(known[k] == sharing.rate(static_cast<std::uint32_t>(k)));
        if (!active[k]) continue;
        now.flows.push_back(c.flows[k]);
        ours.push_back(known[k]);
      }
      check_fair(now, ours);
      if (!equal_amounts) continue;
      const auto expected = progressive_filling(now);
      for (std::size_t k = 0; k < ours.size(); ++k) REQUIRE_THAT(ours[k], WithinRel(expected[k], 1e-12));
    }
  }
}

}  // namespace zeroplan::tests
