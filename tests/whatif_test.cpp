// Laws of whatif within a budget and a deadline, on small models.

#include "planner/whatif.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "planner/csv_table.h"
#include "planner/on_premise.h"
#include "planner/parallel.h"
#include "planner/report_json.h"
#include "planner/whatif_csv.h"
#include "planner/whatif_verdict.h"
#include "tests/catch.h"

namespace zeroplan {
namespace {

using Json = nlohmann::json;
using tests::HasText;
using tests::WithinRel;

constexpr double kDay = 86400;

Alternative searched(const std::string& gpus, std::optional<double> usd) {
  Alternative a{gpus, machine_for(parse_gpu_request(gpus), 1), gpus, false};
  a.machine.price.reset();
  if (usd) a.machine.price = PriceSpec{*usd, "", "", "test"};
  return a;
}

Alternative given(const std::string& gpus, int nodes, double usd) {
  Alternative a = searched(gpus, usd);
  a.nodes_given = true;
  a.name = fmt::format("{}x{}", nodes, gpus);
  set_nodes(a.machine, nodes);
  return a;
}

Request small_workload() {
  Request workload;
  workload.model = find_model("gpt2");
  workload.seq_len = 1024;
  workload.global_batch = 64;
  workload.constraints.recompute = Recompute::none;
  return workload;
}

WhatifLimits limits_of(std::optional<double> usd, std::optional<double> days, Prefer prefer = Prefer::cheapest) {
  WhatifLimits limits;
  limits.tokens = 1e11;
  limits.budget_usd = usd;
  if (days) limits.deadline = Seconds(*days * kDay);
  limits.prefer = prefer;
  return limits;
}

std::vector<Alternative> three_machines() {
  return {searched("4xA100-80G", 12), searched("2x3090-24G", 0.8), searched("8xH100", 30)};
}

/// The run that is taken, if any is.
std::optional<WhatifRun> taken(const WhatifAnswer& answer) {
  if (!answer.verdict->recommended) return std::nullopt;
  return answer.rows[*answer.verdict->recommended].run(answer.limits);
}

TEST_CASE("Numbers of nodes are those that share the batch evenly") {
  CHECK(node_counts(128, 8, 1) == std::vector<int>{1, 2, 4, 8, 16});
  CHECK(node_counts(144, 8, 1) == std::vector<int>{1, 2, 3, 6, 9, 18});
  CHECK(node_counts(128, 8, 4) == std::vector<int>{1, 2, 4});
  CHECK(node_counts(100, 8, 1) == std::vector<int>{1});  // none can; the search says so
  const std::vector<int> many = node_counts(8 * 5040, 8, 1);
  CHECK(many.size() <= 12);
  CHECK(many.front() == 1);
  CHECK(many.back() == 5040);
  for (std::size_t i = 0; i < many.size(); ++i) {
    CHECK(5040 % many[i] == 0);
    if (i > 0) CHECK(many[i] > many[i - 1]);
  }
}

TEST_CASE("The cost of every run is hours x nodes x price, and its hours are tokens / speed") {
  const WhatifAnswer answer = plan_alternatives(small_workload(), three_machines(), limits_of(1e6, 30));
  REQUIRE(answer.rows.size() == 3);
  for (const WhatifRow& row : answer.rows) {
    REQUIRE(row.trials.size() > 1);
    const double price = row.alternative.machine.price->usd_per_hour;
    for (const NodeTrial& trial : row.trials) {
      REQUIRE(trial.run);
      const double hours = 1e11 / trial.tokens_per_second / 3600;
      CHECK_THAT(trial.run->time.base(), WithinRel(hours * 3600, 1e-12));
      CHECK_THAT(*trial.run->usd, WithinRel(hours * trial.nodes * price, 1e-12));
    }
    CHECK_THAT(*row.run(answer.limits)->usd, WithinRel(row.cost()->usd_per_million_tokens * 1e5, 1e-9));
    // What is said of a number of nodes is what `plan` says of it.
    Request request = answer.workload;
    request.machine = row.alternative.machine;
    CHECK(search(request).plans.front().prediction.tokens_per_second == row.best()->prediction.tokens_per_second);
  }
}

TEST_CASE("A larger budget loses no row, and a longer deadline never costs more") {
  const auto alternatives = three_machines();
  std::optional<WhatifRun> before;
  std::vector<bool> kept_before(alternatives.size(), false);
  for (const double usd : {100.0, 300.0, 1000.0, 3000.0, 1e4, 1e5}) {
    const WhatifAnswer answer = plan_alternatives(small_workload(), alternatives, limits_of(usd, 20));
    for (std::size_t i = 0; i < alternatives.size(); ++i) {
      const auto run = answer.rows[i].run(answer.limits);
      const bool kept = run && run->meets(answer.limits);
      CHECK((kept || !kept_before[i]));
      kept_before[i] = kept;
    }
  }
  CHECK(kept_before[0]);
  for (const double days : {0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 200.0}) {
    const WhatifAnswer answer = plan_alternatives(small_workload(), alternatives, limits_of(std::nullopt, days));
    const auto now = taken(answer);
    if (before) {
      REQUIRE(now);
      CHECK(*now->usd <= *before->usd * (1 + 1e-12));
    }
    if (now) {
      CHECK(now->time <= *answer.limits.deadline);
      before = now;
    }
  }
  CHECK(before);
}

TEST_CASE("With more money the fastest is never slower") {
  std::optional<Seconds> before;
  for (const double usd : {300.0, 500.0, 1000.0, 5000.0, 1e5}) {
    const WhatifAnswer answer =
        plan_alternatives(small_workload(), three_machines(), limits_of(usd, std::nullopt, Prefer::fastest));
    const auto now = taken(answer);
    if (before) REQUIRE(now);
    if (!now) continue;
    if (before) CHECK(now->time <= *before);
    CHECK(*now->usd <= usd);
    before = now->time;
  }
  CHECK(before);
}

TEST_CASE("What is taken is the best of all that was planned") {
  for (const Prefer prefer : {Prefer::cheapest, Prefer::fastest}) {
    const WhatifAnswer answer = plan_alternatives(small_workload(), three_machines(), limits_of(2000, 3, prefer));
    const auto best = taken(answer);
    REQUIRE(best);
    for (const WhatifRow& row : answer.rows) {
      CHECK(row.recommended == (&row == &answer.rows[*answer.verdict->recommended]));
      for (const NodeTrial& trial : row.trials) {
        if (!trial.run || !trial.run->meets(answer.limits)) continue;
        if (prefer == Prefer::cheapest) CHECK(*trial.run->usd >= *best->usd);
        if (prefer == Prefer::fastest) CHECK(trial.run->time >= best->time);
      }
    }
  }
}

TEST_CASE("Every change that is named does what it says") {
  for (const auto& [usd, days] :
       std::vector<std::pair<double, double>>{{50, 0.1}, {1e6, 0.01}, {100, 50}, {300, 0.3}}) {
    const std::vector<Alternative> alternatives = {given("4xA100-80G", 1, 12), searched("8xH100", 30)};
    const WhatifLimits limits = limits_of(usd, days);
    const WhatifAnswer answer = plan_alternatives(small_workload(), alternatives, limits);
    INFO(usd << " USD, " << days << " days: " << answer.verdict->why);
    if (answer.verdict->recommended) continue;
    REQUIRE(answer.verdict->nearest);
    REQUIRE_FALSE(answer.verdict->changes.empty());
    for (const WhatifChange& change : answer.verdict->changes) {
      INFO(change.what << " | " << change.flag);
      WhatifLimits wider = limits;
      const auto value = [&](std::string_view flag) {
        const std::size_t at = change.flag.find(flag);
        return at == std::string::npos ? std::nullopt : std::optional(std::stod(change.flag.substr(at + flag.size())));
      };
      if (const auto longer = value("--deadline ")) wider.deadline = Seconds(*longer * kDay);
      if (const auto larger = value("--budget ")) wider.budget_usd = *larger;
      std::vector<Alternative> others = alternatives;
      if (change.flag.starts_with("--hardware ")) others = {given("4xA100-80G", change.run.nodes, 12)};
      CHECK(taken(plan_alternatives(small_workload(), others, wider)));
    }
  }
}

TEST_CASE("More nodes of a machine whose number was given are named when they alone do") {
  Request workload = small_workload();
  workload.global_batch = 1024;  // enough of it that the network between nodes is not what limits
  const std::vector<Alternative> one = {given("4xA100-80G", 1, 12)};
  const auto slow = plan_alternatives(workload, one, limits_of(std::nullopt, 1000));
  REQUIRE(taken(slow));
  const double days = taken(slow)->time.base() / kDay;
  const WhatifAnswer answer = plan_alternatives(workload, one, limits_of(std::nullopt, days / 1.5));
  INFO(answer.verdict->why);
  REQUIRE_FALSE(answer.verdict->recommended);
  CHECK_FALSE(answer.satisfied());
  REQUIRE(answer.verdict->changes.size() == 2);  // more nodes, and a longer deadline
  const WhatifChange& change = answer.verdict->changes.front();
  CHECK(change.run.nodes > 1);
  CHECK(change.flag == fmt::format("--hardware {}x4xA100-80G", change.run.nodes));
  CHECK(answer.verdict->changes.back().run.nodes == 1);
}

TEST_CASE("A row without a price is left out of the budget and never costs 0") {
  std::vector<Alternative> alternatives = {searched("8xH100", std::nullopt), searched("4xA100-80G", 12)};
  const WhatifAnswer answer = plan_alternatives(small_workload(), alternatives, limits_of(1e6, 30));
  REQUIRE(answer.verdict->recommended);
  CHECK(*answer.verdict->recommended == 1);
  CHECK_FALSE(answer.rows[0].run(answer.limits)->usd);
  CHECK_FALSE(answer.rows[0].run(answer.limits)->meets(answer.limits));
  const Json json = Json::parse(whatif_json({{"", answer, {}}}));
  CHECK_FALSE(json["rows"][0]["run"].contains("usd"));
  CHECK_FALSE(json["rows"][0]["run"].contains("within_limits"));
  CHECK_FALSE(json["rows"][0]["run"].contains("over_budget_usd"));
  CHECK(json["rows"][1]["run"]["within_limits"] == true);
  CHECK(json["verdict"]["recommended"] == "4xA100-80G");
  // With a deadline alone it is the fastest that is taken where no price is known.
  const WhatifAnswer timed = plan_alternatives(small_workload(), {alternatives[0]}, limits_of(std::nullopt, 30));
  CHECK(timed.verdict->recommended);
  CHECK_THAT(timed.verdict->why, HasText("no"));
  CHECK_THROWS_WITH(plan_alternatives(small_workload(), {alternatives[0]}, limits_of(1e6, std::nullopt)),
                    HasText("no price is known"));
}

TEST_CASE("Limits without the number of tokens are refused") {
  WhatifLimits limits = limits_of(1e6, std::nullopt);
  limits.tokens.reset();
  CHECK_THROWS_WITH(plan_alternatives(small_workload(), three_machines(), limits), HasText("--budget: needs --tokens"));
}

TEST_CASE("An hour of a node that is owned: capital over the hours it works, and its electricity") {
  const OnPremise terms{350000, 4, 10.2, 0.12, 0.8, "quote 4711"};
  const OwnedHour hour = owned_hour(terms);
  CHECK_THAT(hour.capital_usd, WithinRel(350000 / (4 * 8766 * 0.8), 1e-12));
  CHECK_THAT(hour.electricity_usd, WithinRel(10.2 * 0.12, 1e-12));
  const PriceSpec price = price_of(terms);
  CHECK_THAT(price.usd_per_hour, WithinRel(hour.usd(), 1e-12));
  for (const char* part : {"350,000 USD", "4 years", "80 %", "10.2 kW", "0.12 USD/kWh", "quote 4711"}) {
    CHECK_THAT(price.source, HasText(part));
  }
  // Twice the use halves the capital's part and leaves the electricity.
  OnPremise busier = terms;
  busier.utilisation = 0.4;
  CHECK_THAT(owned_hour(busier).capital_usd, WithinRel(2 * hour.capital_usd, 1e-12));
  CHECK(owned_hour(busier).electricity_usd == hour.electricity_usd);
}

TEST_CASE("Many cheap cards or few expensive ones: five boxes by price and power") {
  // docs/user-cases.md, pages-3090rig: prices and power as asked there (A100: the middle); years, use and electricity
  // are ours.
  struct Box {
    const char* gpus;
    double usd, watts, step_seconds;
  };
  std::vector<Alternative> boxes;
  const std::vector<Box> all = {{"4x3090", 3000, 1400, 94.6},
                                {"2x4090", 3600, 900, 95.7},
                                {"1x5090", 2250, 575, 0},
                                {"1xA100-80G", 13000, 300, 103},
                                {"2xA6000", 5000, 600, 122}};
  for (const Box& box : all) {
    boxes.push_back(given(box.gpus, 1, 1));
    boxes.back().machine.price = price_of({box.usd, 3, box.watts / 1000, 0.15, 0.5, ""});
  }
  Request workload;
  workload.model = find_model("7B");
  workload.seq_len = 2048;
  WhatifLimits limits = limits_of(std::nullopt, 60);
  limits.tokens = 1e9;
  const WhatifAnswer answer = plan_alternatives(workload, boxes, limits);
  REQUIRE(answer.verdict->recommended);
  CHECK(*answer.verdict->recommended == 1);
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO(all[i].gpus);
    const Candidate* best = answer.rows[i].best();
    CHECK((best != nullptr) == (all[i].step_seconds > 0));
    if (best != nullptr) CHECK_THAT(best->prediction.step.base(), WithinRel(all[i].step_seconds, 0.02));
  }
}

TEST_CASE("The CSV has a line for each row, and commas and quotes in names stay in their cells") {
  std::vector<Alternative> alternatives = {searched("8xH100", std::nullopt), searched("4xA100-80G", 12)};
  alternatives[1].machine.price->source = "a \"quote\", of today\nand more";
  WhatifAnswer answer = plan_alternatives(small_workload(), alternatives, limits_of(1e6, 30));
  const std::string text = whatif_csv({{"first, of two", answer, {"", "a/plan.json"}}, {"second", answer, {}}});
  const CsvTable table = CsvTable::parse(text, "whatif.csv");
  REQUIRE(table.rows().size() == 4);
  const CsvTable::Row& priced = table.rows()[1];
  CHECK(table.at(priced, "workload") == "first, of two");
  CHECK(table.at(priced, "price_source") == alternatives[1].machine.price->source);
  CHECK(table.at(priced, "plan_file") == "a/plan.json");
  CHECK(table.at(priced, "within_limits") == "yes");
  CHECK_THAT(std::stod(table.at(priced, "usd")), WithinRel(*answer.rows[1].run(answer.limits)->usd, 1e-12));
  CHECK(table.at(table.rows()[0], "usd").empty());
  CHECK(table.at(table.rows()[0], "usd_per_node_hour").empty());
}

TEST_CASE("Tasks in parallel run once each, and the first that throws is heard") {
  std::vector<int> seen(1000, 0);
  run_parallel(seen.size(), [&](std::size_t i) { ++seen[i]; });
  CHECK(std::ranges::count(seen, 1) == 1000);
  run_parallel(0, [](std::size_t) { throw std::runtime_error("never"); });
  CHECK_THROWS_WITH(run_parallel(8,
                                 [&](std::size_t i) {
                                   ++seen[i];
                                   if (i >= 3) throw std::runtime_error(fmt::format("task {}", i));
                                 }),
                    HasText("task 3"));
  CHECK(seen[7] == 2);  // the others ended
}

}  // namespace
}  // namespace zeroplan
