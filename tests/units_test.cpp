#include "models/units.h"

#include "models/error.h"
#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;

TEST_CASE("parse_bytes reads decimal and binary units") {
  CHECK(parse_bytes("80GB", "--host-memory") == 80_GB);
  CHECK(parse_bytes("80GiB", "--host-memory") == 80_GiB);
}
