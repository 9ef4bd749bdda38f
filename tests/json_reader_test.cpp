#include "models/json_reader.h"

#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;

TEST_CASE("Values know their line") {
  const JsonDocument document = JsonDocument::parse("{\"a\": 1\n,\"b\":\n2\n}", "e.json");
  CHECK(document.root().at("a").line() == 1);
  CHECK(document.root().at("b").line() == 3);
}
