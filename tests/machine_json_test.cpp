#include "models/machine_json.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "tests/catch.h"

using namespace zeroplan;
using zeroplan::tests::HasText;

namespace {

std::string data_file(const std::string& name) {
  std::ifstream stream(std::string(ZEROPLAN_TESTS_DIR) + "/data/machines/" + name, std::ios::binary);
  REQUIRE(stream);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

std::string error_of(const std::string& text) {
  try {
    read_machine(text, "m.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("Every catalog machine round-trips through machine.json, for 1, 2 and 128 nodes") {
  for (const std::string& name : machine_names()) {
    for (const int nodes : {1, 2, 128}) {
      INFO(name << " x " << nodes);
      MachineSpec machine = find_machine(name);
      set_nodes(machine, nodes);
      const std::string text = write_machine(machine);
      const MachineSpec again = read_machine(text, name);
      CHECK(again == machine);
      CHECK(write_machine(again) == text);
    }
  }
}

TEST_CASE("A machine written by hand is read to the values it states") {
  const MachineSpec machine = read_machine(data_file("two-3090.json"), "two-3090.json");
  CHECK(machine.name == "my-box");
  CHECK(machine.ranks() == 2);
  CHECK(machine.gpu.memory == Bytes(23.52 * kGiB));
  CHECK(machine.gpu.memory_bandwidth == 936_GBps);
  CHECK(machine.gpu.peak_bf16 == 71.0_TFLOPS);
  CHECK_FALSE(machine.gpu.measured_matmul.has_value());
  CHECK(machine.interconnect == Interconnect::nvlink_pairs);
  CHECK(machine.nvlink == 56.25_GBps);
  CHECK(machine.dram == 128_GiB);
  CHECK(machine.usable_dram() == 120_GiB);
  CHECK(machine.nvme.drives == 1);
  CHECK(machine.network.bandwidth == 1.25_GBps);  // 10 Gb/s
  CHECK_FALSE(machine.price.has_value());
}

TEST_CASE("Usable host memory is what the larger of 8 GiB and 5 % leaves") {
  MachineSpec machine;
  machine.dram = 100_GiB;
  CHECK(machine.usable_dram() == 92_GiB);
  machine.dram = 1000_GiB;
  CHECK(machine.usable_dram() == 950_GiB);
  machine.dram = 4_GiB;
  CHECK(machine.usable_dram() == 0_GiB);
}

TEST_CASE("Errors in machine.json name file, line, key, what was expected and what was found") {
  const std::string good = data_file("two-3090.json");
  CHECK(error_of(good) == "no error");
  SECTION("an unknown key") {
    const std::string error = error_of(replaced(good, "\"memory_bandwidth\"", "\"memory_bandwith\""));
    CHECK_THAT(error, HasText("m.json:7"));
    CHECK_THAT(error, HasText("memory_bandwith"));
    CHECK_THAT(error, HasText("memory_bandwidth"));
  }
  SECTION("a missing key") { CHECK_THAT(error_of(replaced(good, "\"dram\": \"128 GiB\",", "")), HasText("dram")); }
  SECTION("a number without its unit") {
    const std::string error = error_of(replaced(good, "\"128 GiB\"", "128"));
    CHECK_THAT(error, HasText("m.json:"));
    CHECK_THAT(error, HasText("/dram"));
  }
  SECTION("the wrong kind of unit") {
    CHECK_THAT(error_of(replaced(good, "\"936 GB/s\"", "\"936 GB\"")), HasText("/gpu/memory_bandwidth"));
  }
  SECTION("a zero, negative or huge amount") {
    CHECK_THAT(error_of(replaced(good, "\"128 GiB\"", "\"0 GiB\"")), HasText("above zero"));
    CHECK_THAT(error_of(replaced(good, "\"128 GiB\"", "\"-1 GiB\"")), HasText("/dram"));
    CHECK_THAT(error_of(replaced(good, "\"128 GiB\"", "\"1e300 GiB\"")), HasText("/dram"));
  }
  SECTION("an unknown interconnect lists the nearest") {
    CHECK_THAT(error_of(replaced(good, "\"nvlink_pairs\"", "\"nvlink_pair\"")), HasText("nvlink_pairs"));
  }
  SECTION("another schema") {
    CHECK_THAT(error_of(replaced(good, "\"schema\": 1", "\"schema\": 2")), HasText("schema 1"));
  }
  SECTION("a schema that is no number") {
    CHECK_THAT(error_of(replaced(good, "\"schema\": 1", "\"schema\": \"1\"")), HasText("schema 1"));
  }
  SECTION("counts out of range") {
    CHECK_THAT(error_of(replaced(good, "\"gpus_per_node\": 2", "\"gpus_per_node\": 0")), HasText("/gpus_per_node"));
    CHECK_THAT(error_of(replaced(good, "\"gpus_per_node\": 2", "\"gpus_per_node\": 2.5")), HasText("/gpus_per_node"));
  }
  SECTION("wirings that contradict themselves") {
    CHECK_THAT(error_of(replaced(good, "\"nvlink_pairs\"", "\"single\"")), HasText("single"));
    CHECK_THAT(error_of(replaced(good, "\"nvlink\": \"56.25 GB/s\",\n  \"gpus", "\"gpus")), HasText("needs nvlink"));
    CHECK_THAT(error_of(replaced(good, "\"sockets\": 1", "\"sockets\": 2")), HasText("socket_link"));
    CHECK_THAT(error_of(replaced(good, "\"sockets\": 1", "\"sockets\": 65")), HasText("from 1 to 64"));
  }
  SECTION("not an object") {
    CHECK_THAT(error_of("[1]"), HasText("object"));
    CHECK_THAT(error_of(""), HasText("m.json"));
  }
}

TEST_CASE("5,000 mutations of a machine.json are read or refused, never anything else") {
  const std::string good = write_machine(find_machine("p4de.24xlarge"));
  std::mt19937 random(20261130);
  const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  constexpr char kBytes[] = "{}[]\",:0123456789.eE-+truefalsn \n\\GBi/s\x00\x7f\xc3\xff";
  const std::string bytes(kBytes, sizeof kBytes - 1);
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string text = good;
    for (std::size_t edits = 1 + pick(4); edits > 0; --edits) {
      const std::size_t at = pick(text.size());
      switch (pick(4)) {
        case 0:
          text[at] = bytes[pick(bytes.size())];
          break;
        case 1:
          text.erase(at, 1 + pick(20));
          break;
        case 2:
          text.insert(at, 1, bytes[pick(bytes.size())]);
          break;
        default:
          text.insert(at, text.substr(pick(text.size()), pick(40)));
      }
      if (text.empty()) text = "x";
    }
    try {
      const MachineSpec machine = read_machine(text, "mutated.json");
      CHECK(read_machine(write_machine(machine), "again") == machine);
    } catch (const InputError& error) {
      ++refused;
      CHECK_FALSE(std::string(error.what()).empty());
    }
  }
  CHECK(refused > 3000);
}
