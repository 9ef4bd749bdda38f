#include "models/error.h"

#include "tests/catch.h"

using namespace zeroplan;

namespace {
const std::vector<std::string> kGpus = {"A100-SXM4-80GB", "A100-PCIe-80GB", "H100-SXM", "RTX-3090"};
}

TEST_CASE("nearest_names orders by edit distance and ignores case, dashes, underscores and blanks") {
  CHECK(nearest_names("a100 sxm4_80gb", kGpus, 1) == std::vector<std::string>{"A100-SXM4-80GB"});
  CHECK(nearest_names("a100-pcie-40gb", kGpus, 2) == std::vector<std::string>{"A100-PCIe-80GB", "A100-SXM4-80GB"});
}

TEST_CASE("nearest_names leaves out far candidates unless nothing is nearer") {
  CHECK(nearest_names("rtx3080", kGpus) == std::vector<std::string>{"RTX-3090"});
  CHECK(nearest_names("zzz", kGpus, 2).size() == 2);
  CHECK(nearest_names("zzz", {}, 2).empty());
}

TEST_CASE("nearest_names keeps the given order of ties and survives long texts") {
  const std::vector<std::string> names = {"ab", "ac", "ad"};
  CHECK(nearest_names("ax", names) == names);
  CHECK(nearest_names(std::string(1'000'000, 'x'), kGpus).size() == 3);
}

TEST_CASE("did_you_mean is a sentence") {
  const std::vector<std::string> names = {"ab", "ac", "ad"};
  CHECK(did_you_mean("ax", names) == "did you mean ab, ac or ad?");
  CHECK(did_you_mean("ax", std::span(names).first(2)) == "did you mean ab or ac?");
  CHECK(did_you_mean("ax", std::span(names).first(1)) == "did you mean ab?");
  CHECK(did_you_mean("ax", {}).empty());
}
