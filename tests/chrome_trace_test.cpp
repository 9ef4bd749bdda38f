// The trace as what Perfetto reads it as: JSON of the Trace Event Format whose slices, arrows and counters agree with
// the schedule.

#include "sim/chrome_trace.h"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "models/lower.h"
#include "sim/memory_timeline.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/sim_machines.h"

namespace zeroplan::tests {
namespace {

using nlohmann::json;

struct Traced {
  ModelSpec model;
  Schedule schedule;
  Simulation simulation;
  std::string text;
  json events;
};

/// ZeRO-3 with the optimizer on the host: all streams but NVMe are at work.
Traced traced() {
  Random random(21);
  MachineSpec machine = node_of("A100-SXM4-80GB", 4, Interconnect::nvswitch);
  machine.dram_bandwidth = 100.0_GBps;
  Traced t;
  t.model = shortened(find_model("llama-2-7b"), 3, random);
  Plan plan;
  plan.ranks = plan.shard_ranks = 4;
  plan.zero_stage = 3;
  const int blocks = static_cast<int>(t.model.sequence.size());
  plan.optimizer = Placement::all(Tier::host, blocks);
  plan.parameters = Placement::all(Tier::hbm, blocks);
  t.schedule = lower(t.model, plan, Folding::none);
  const MachineCostModel cost(machine, 4, DType::bf16);
  t.simulation = simulate(t.schedule, demands(t.schedule, cost), machine, 4, {SimulatedRanks::folded, 1, true});
  t.text = chrome_trace(t.schedule, t.model, t.simulation.trace, 1, &t.simulation);
  t.events = json::parse(t.text)["traceEvents"];
  return t;
}

/// What a phase of the Trace Event Format must carry.
bool well_formed(const json& event) {
  static const std::map<std::string, std::vector<const char*>> needs{
      {"M", {"name", "pid", "args"}},
      {"X", {"name", "cat", "pid", "tid", "ts", "dur"}},
      {"s", {"name", "cat", "id", "pid", "tid", "ts"}},
      {"f", {"name", "cat", "id", "pid", "tid", "ts", "bp"}},
      {"C", {"name", "pid", "ts", "args"}},
  };
  const auto at = needs.find(event.at("ph").get<std::string>());
  if (at == needs.end()) return false;
  for (const char* key : at->second) {
    if (!event.contains(key)) return false;
  }
  return !event.contains("ts") || event["ts"].get<double>() >= 0;
}

}  // namespace

TEST_CASE("A trace holds each op that takes time once, on its stream") {
  const Traced t = traced();
  std::set<std::size_t> seen;
  std::map<int, double> reached;
  for (const json& event : t.events) {
    REQUIRE(well_formed(event));
    if (event["ph"] != "X") continue;
    const auto op = event["args"]["op"].get<std::size_t>();
    CHECK(seen.insert(op).second);
    CHECK(event["tid"].get<int>() == static_cast<int>(t.schedule.ops()[op].stream));
    CHECK(event["name"].get<std::string>() == label(t.schedule, t.schedule.ops()[op], t.model));
    CHECK(event["ts"].get<double>() >= reached[event["tid"].get<int>()] - 0.002);  // rounded to nanoseconds
    reached[event["tid"].get<int>()] = event["ts"].get<double>() + event["dur"].get<double>();
  }
  CHECK(static_cast<std::int64_t>(seen.size()) == t.simulation.ops);
  CHECK(reached.size() == 6);
}

TEST_CASE("Arrows of a trace lead from the end of one op to the start of a later one on another stream") {
  const Traced t = traced();
  std::map<int, json> starts;
  int arrows = 0;
  for (const json& event : t.events) {
    if (event["ph"] == "s") starts[event["id"].get<int>()] = event;
    if (event["ph"] != "f") continue;
    ++arrows;
    const json& start = starts.at(event["id"].get<int>());
    CHECK(start["tid"] != event["tid"]);
    CHECK(start["ts"].get<double>() <= event["ts"].get<double>() + 0.001);
  }
  CHECK(arrows == static_cast<int>(starts.size()));
  CHECK(arrows > 20);
}

TEST_CASE("Counters of a trace show memory and the use of links") {
  const Traced t = traced();
  const double peak = MemoryTimeline(t.schedule).peak(Memory::hbm).bytes.base();
  double most = 0;
  std::map<std::string, double> busiest;
  for (const json& event : t.events) {
    if (event["ph"] != "C") continue;
    const auto name = event["name"].get<std::string>();
    if (name == "gpu memory") most = std::max(most, event["args"]["bytes"].get<double>());
    if (!event["args"].contains("percent")) continue;
    const double percent = event["args"]["percent"].get<double>();
    CHECK(percent >= 0);
    CHECK(percent <= 100.0);
    busiest[name] = std::max(busiest[name], percent);
  }
  CHECK(most == peak);
  CHECK(busiest.at("gpu 1 nvlink out") > 90);
  CHECK(busiest.at("gpu 1 sm") > 90);
  CHECK(busiest.at("host memory 0") > 50);
  CHECK(!busiest.contains("gpu 0 nvlink out"));
}

TEST_CASE("Equal simulations write equal traces") { CHECK(traced().text == traced().text); }

TEST_CASE("A trace of another schedule is refused") {
  const Traced t = traced();
  Trace shorter = t.simulation.trace;
  shorter.ops.pop_back();
  CHECK_THROWS_AS(chrome_trace(t.schedule, t.model, shorter, 0, nullptr), std::logic_error);
  const std::string plain = chrome_trace(t.schedule, t.model, t.simulation.trace, 0, nullptr);
  CHECK(json::accept(plain));
  CHECK(plain.size() < t.text.size());
}

}  // namespace zeroplan::tests
