// zeroplan validate --against: an earlier run's tables beside this one's.

#include "models/error.h"
#include "planner/validate_earlier.h"
#include "tests/catch.h"

namespace zeroplan::tests {
namespace {

ErrorTable table(const std::string& source, Measured quantity, int rows, double mean, double largest) {
  ErrorTable result;
  result.source = source;
  result.quantity = quantity;
  result.rows = rows;
  result.mean_error = mean;
  result.largest_error = largest;
  return result;
}

Verdict verdict(const std::string& source, bool measured, bool predicted) {
  Verdict result;
  result.source = source;
  result.measured_fits = measured;
  result.predicted_fits = predicted;
  return result;
}

Validation two_sources() {
  Validation validation;
  validation.tables = {table("then/a.jsonl", Measured::host, 5, 0.01, 0.02),
                       table("then/a.jsonl", Measured::reserved, 5, 0.03, 0.04),
                       table("then/b.csv", Measured::host, 2, 0.1, 0.1)};
  StepTimeTable steps;
  steps.source = "then/b.csv";
  steps.group = "all";
  steps.rows = 4;
  steps.mean_error = 0.05;
  steps.largest_error = 0.2;
  validation.step_times = {steps};
  validation.verdicts = {verdict("then/b.csv", true, true), verdict("then/b.csv", false, false)};
  return validation;
}

}  // namespace

TEST_CASE("an equal run, and a better one, have no regressions") {
  const std::string earlier = validation_json(two_sources());
  Validation now = two_sources();
  for (ErrorTable& each : now.tables) each.source.replace(0, 4, "elsewhere");
  const EarlierComparison equal = compare_with_earlier(two_sources(), earlier, "e.json");
  CHECK(equal.regressions.empty());
  CHECK(equal.not_compared.empty());
  CHECK(equal.figures == 3 * 3 + 3 + 3);  // n and two figures of each table, of the step times, of the verdicts
  now.tables[0].mean_error /= 2;
  now.step_times[0].largest_error = 0;
  CHECK(compare_with_earlier(now, earlier, "e.json").regressions.empty());
}

TEST_CASE("what is worse is found: errors, rows without a prediction, verdicts") {
  const std::string earlier = validation_json(two_sources());
  Validation now = two_sources();
  now.tables[0].mean_error += 1e-6;  // 0.0001 %
  now.tables[1].rows = 4;
  now.step_times[0].largest_error = 0.21;
  now.verdicts[1].predicted_fits = true;
  const EarlierComparison result = compare_with_earlier(now, earlier, "e.json");
  std::vector<std::string> found;
  for (const Regression& each : result.regressions)
    found.push_back(each.source + " " + each.quantity + " " + each.figure);
  CHECK(found == std::vector<std::string>{"a.jsonl host mape", "a.jsonl reserved n", "b.csv step_seconds max",
                                          "b.csv verdicts called_fitting"});
  CHECK(result.regressions[0].earlier == Approx(1));
  CHECK(result.regressions[0].now == Approx(1.0001));
  CHECK_THAT(earlier_text(result, "e.json"), HasText("15 figures, 4 worse") && HasText("mape 1.0000 % -> 1.0001 %") &&
                                                 HasText("n 5 -> 4") && HasText("called_fitting 0 -> 1"));
  CHECK_THAT(validation_json(now, &result), HasText("\"figure\": \"called_fitting\""));

  Validation lost = two_sources();
  lost.tables.erase(lost.tables.begin());
  const EarlierComparison gone = compare_with_earlier(lost, earlier, "e.json");
  REQUIRE(gone.regressions.size() == 1);
  CHECK(gone.regressions[0].figure == "n");
  CHECK(gone.regressions[0].now == 0);
}

TEST_CASE("what cannot be compared is said") {
  const std::string earlier = validation_json(two_sources());
  Validation now = two_sources();
  now.tables[0].rows = 6;
  now.tables[0].mean_error = 1;
  now.tables.push_back(table("c.jsonl", Measured::host, 1, 0, 0));
  std::erase_if(now.tables, [](const ErrorTable& each) { return each.source == "then/b.csv"; });
  now.step_times.clear();
  now.verdicts.clear();
  const EarlierComparison result = compare_with_earlier(now, earlier, "e.json");
  CHECK(result.regressions.empty());
  CHECK(result.not_compared == std::vector<std::string>{"a.jsonl: host (all): 5 rows then, 6 now",
                                                        "b.csv: not read now", "c.jsonl: not read then"});
}

TEST_CASE("a text that is no earlier run is refused") {
  const Validation now = two_sources();
  const std::string earlier = validation_json(now);
  CHECK_THROWS_WITH(compare_with_earlier(now, "{}", "e.json"), HasText("e.json:1") && HasText("validate --json"));
  CHECK_THROWS_WITH(compare_with_earlier(now, "[1", "e.json"), HasText("e.json:1"));
  std::string other = earlier;
  other.replace(other.find("\"schema\": 1"), 11, "\"schema\": 2");
  CHECK_THROWS_WITH(compare_with_earlier(now, other, "e.json"), HasText("e.json:2") && HasText("schema"));
  CHECK_THROWS_WITH(compare_with_earlier(now, validation_json({}), "e.json"), HasText("none that can be compared"));
  Validation twice = two_sources();
  twice.tables.push_back(table("other/a.jsonl", Measured::host, 1, 0, 0));
  CHECK_THROWS_WITH(compare_with_earlier(twice, earlier, "e.json"), HasText("found two of a.jsonl"));
}

}  // namespace zeroplan::tests
