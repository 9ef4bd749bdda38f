// The ladder queue against std::priority_queue, on kind and unkind distributions.

#include "sim/event_queue.h"

#include <cmath>
#include <functional>
#include <limits>
#include <queue>

#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

struct Later {
  bool operator()(const Event& a, const Event& b) const { return a.time > b.time || (a.time == b.time && a.id > b.id); }
};
using Heap = std::priority_queue<Event, std::vector<Event>, Later>;

/// A queue and its reference side by side.
class Pair {
 public:
  void push(double time) {
    const Event event{time, next_id_ * 2654435761u, next_id_};  // ids in no order
    ++next_id_;
    queue.push(event);
    heap.push(event);
  }
  /// Returns the time of the next event, or a negative one when the two differ.
  double pop() {
    const Event expected = heap.top();
    heap.pop();
    const double next = queue.next_time();
    const Event event = queue.pop();
    const bool same =
        event.time == expected.time && event.id == expected.id && event.stamp == expected.stamp && next == event.time;
    return same && queue.size() == heap.size() ? event.time : -1;
  }

  EventQueue queue;
  Heap heap;

 private:
  std::uint32_t next_id_ = 0;
};

using Gap = std::function<double(Random&)>;

/// Grows to `most` events, holds, and drains, several times over; counts pops that differ.
int differences(std::uint64_t seed, std::size_t most, const Gap& gap) {
  Random random(seed);
  Pair pair;
  double now = 0;
  int wrong = 0;
  const auto pop = [&] {
    const double time = pair.pop();
    if (time < now) ++wrong;
    now = std::max(now, time);
  };
  for (int round = 0; round < 3; ++round) {
    while (pair.heap.size() < most) {
      pair.push(now + gap(random));
      if (random.chance(20)) pop();
    }
    for (std::size_t i = 0; i < 2 * most; ++i) {
      pop();
      pair.push(now + gap(random));
    }
    while (!pair.heap.empty()) pop();
  }
  CHECK(pair.queue.empty());
  return wrong;
}

const std::vector<std::pair<const char*, Gap>>& gaps() {
  static const std::vector<std::pair<const char*, Gap>> all{
      {"uniform", [](Random& r) { return r.unit(); }},
      {"exponential", [](Random& r) { return -std::log(1 - r.unit()); }},
      {"all at once", [](Random&) { return 0.0; }},
      {"a few distinct times", [](Random& r) { return static_cast<double>(r.between(0, 3)); }},
      {"lockstep", [](Random&) { return 1.0; }},
      {"nearly lockstep", [](Random& r) { return 1.0 + 1e-15 * static_cast<double>(r.between(0, 4)); }},
      {"sixty orders of magnitude", [](Random& r) { return std::pow(10.0, 60 * r.unit() - 30); }},
      {"most now, few at the end of days", [](Random& r) { return r.chance(1) ? 1e300 : r.unit() * 1e-3; }},
      {"smaller and smaller", [n = 0](Random&) mutable { return std::ldexp(1.0, -(n++ % 1074)); }},
      {"denormal",
       [](Random& r) { return static_cast<double>(r.between(0, 9)) * std::numeric_limits<double>::denorm_min(); }},
      {"bursts far apart", [](Random& r) { return std::floor(r.unit() * 4) * 1e6 + r.unit() * 1e-6; }},
  };
  return all;
}

}  // namespace

TEST_CASE("Events come out as out of a heap, whatever their times") {
  for (const auto& [name, gap] : gaps()) {
    for (const std::size_t most : {1u, 5u, 100u, 5000u}) {
      INFO(name << ", " << most << " pending");
      CHECK(differences(most, most, gap) == 0);
    }
  }
}

TEST_CASE("A hundred thousand events of every distribution", "[.slow]") {
  for (const auto& [name, gap] : gaps()) {
    INFO(name);
    CHECK(differences(7, 100'000, gap) == 0);
  }
}

TEST_CASE("Distributions that change while events are pending") {
  Random random(11);
  Pair pair;
  double now = 0;
  int wrong = 0;
  for (int i = 0; i < 200'000; ++i) {
    const Gap& gap = gaps()[static_cast<std::size_t>(i / 5000) % 6].second;
    const bool more = pair.heap.empty() || random.chance((i / 20'000) % 2 == 0 ? 60 : 40);
    if (more) {
      pair.push(now + gap(random));
    } else {
      const double time = pair.pop();
      if (time < now) ++wrong;
      now = std::max(now, time);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("Equal times come out by id, also when pushed between pops") {
  EventQueue queue;
  for (std::uint32_t id : {5u, 1u, 9u}) queue.push({1.0, id, 0});
  CHECK(queue.pop().id == 1);
  queue.push({1.0, 3, 0});
  queue.push({1.0, 0, 0});
  CHECK(queue.pop().id == 0);
  CHECK(queue.pop().id == 3);
  CHECK(queue.pop().id == 5);
  CHECK(queue.pop().id == 9);
  CHECK(queue.empty());
}

TEST_CASE("An event in the past or at no time is refused") {
  EventQueue queue;
  queue.push({2.0, 0, 0});
  queue.pop();
  CHECK_THROWS_AS(queue.push({1.9, 0, 0}), std::logic_error);
  CHECK_THROWS_AS(queue.push({std::nan(""), 0, 0}), std::logic_error);
  CHECK_THROWS_AS(queue.push({std::numeric_limits<double>::infinity(), 0, 0}), std::logic_error);
  CHECK(queue.empty());
  queue.clear();
  queue.push({1.9, 0, 0});
  CHECK(queue.next_time() == 1.9);
}

TEST_CASE("A cleared queue starts anew") {
  EventQueue queue;
  for (std::uint32_t i = 0; i < 10'000; ++i) queue.push({1.0 + i, i, 0});
  for (int i = 0; i < 100; ++i) queue.pop();
  queue.clear();
  CHECK(queue.empty());
  for (std::uint32_t i = 0; i < 200; ++i) queue.push({0.001 * (200 - i), i, 0});
  double last = -1;
  while (!queue.empty()) {
    const double time = queue.pop().time;
    CHECK(time > last);
    last = time;
  }
}

}  // namespace zeroplan::tests
