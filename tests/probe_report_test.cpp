#include "runtime/probe_report.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/catch.h"

namespace zeroplan {
namespace {

using Json = nlohmann::json;
using tests::HasText;

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST_CASE("probe as JSON: the figures that the text prints, the machine that is written, and no key without a value") {
  const std::string path = ZEROPLAN_SOURCE_DIR "/examples/host/machine.json";
  ProbeResult result;
  result.machine = read_machine(text_of(path), path);
  result.notes = {"no disk"};
  REQUIRE(result.machine.host_kernels);
  const Json json = Json::parse(probe_json(result, "here.json"));
  CHECK(json["name"] == result.machine.name);
  CHECK(json["cpu"] == result.machine.cpu);
  CHECK(json["memory_bytes"] == std::llround(result.machine.dram.base()));
  CHECK(json["flops_per_second"]["fp32"] == result.machine.gpu.peak_fp32->base());
  REQUIRE(json["memory_rates"].size() == result.machine.host_kernels->memory.size());
  CHECK(json["memory_rates"][0]["threads"] == result.machine.host_kernels->memory[0].threads);
  CHECK(json["memory_rates"][0]["bytes_per_second"] == result.machine.host_kernels->memory[0].rate.base());
  CHECK(json.contains("disk") == (result.machine.nvme.drives > 0));
  CHECK(json["notes"] == Json::array({"no disk"}));
  CHECK(json["written_to"] == "here.json");
  CHECK_FALSE(Json::parse(probe_json(result, "")).contains("written_to"));
  // The machine inside is the file: it reads back to the same machine.
  CHECK(read_machine(json["machine"].dump(), "machine") == result.machine);
  result.machine.nvme = {};
  result.machine.gpu.peak_fp16.reset();
  const Json less = Json::parse(probe_json(result, ""));
  CHECK_FALSE(less.contains("disk"));
  CHECK_FALSE(less["flops_per_second"].contains("fp16"));
  CHECK_THAT(report_probe(result.machine, "here.json"), HasText("Written to here.json"));
}

}  // namespace
}  // namespace zeroplan
