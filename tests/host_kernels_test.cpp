// What a probe writes: round trips, strictness, counts of kernels, a host as several devices.

#include "models/host_kernels.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "models/host_ranks.h"
#include "models/machine_spec.h"
#include "tests/catch.h"
#include "tests/host_machine.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

using Json = nlohmann::ordered_json;

TEST_CASE("A probed host is read back as it was written") {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const int cores = static_cast<int>(random.between(1, 64));
    MachineSpec machine = host_machine(cores, static_cast<int>(random.between(1, 9)));
    for (HostKernelTime& time : machine.host_kernels->kernels) {
      for (Seconds& term : time.terms) term = Seconds(random.unit() * 1e-6);
    }
    if (random.chance(30)) machine.host_kernels->disk.clear();
    if (random.chance(30)) machine.host_kernels->collectives.clear();
    const std::string text = write_machine(machine);
    const MachineSpec back = read_machine(text, "machine.json");
    REQUIRE(back == machine);
    REQUIRE(write_machine(back) == text);
  }
}

TEST_CASE("The example of a probed host is read, and written as it is") {
  const std::string path = std::string(ZEROPLAN_SOURCE_DIR) + "/examples/host/machine.json";
  std::ifstream file(path);
  REQUIRE(file);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const MachineSpec machine = read_machine(text, path);
  REQUIRE(machine.host_kernels);
  CHECK(write_machine(machine) == text);
}

std::string refusal(const std::string& pointer, const Json& value, bool erase = false) {
  Json j = Json::parse(write_machine(host_machine(4, 2)));
  const Json::json_pointer at(pointer);
  if (erase) {
    j[at.parent_pointer()].erase(at.back());
  } else {
    j[at] = value;
  }
  try {
    (void)read_machine(j.dump(2), "machine.json");
    return "";
  } catch (const InputError& e) {
    return e.what();
  }
}

TEST_CASE("A probe's figures that cannot be are refused with their place") {
  const std::string k = "/host_kernels";
  CHECK(refusal(k + "/tile_rows", 12).empty());
  CHECK_THAT(refusal(k + "/extra", 1), HasText("unknown key \"extra\""));
  CHECK_THAT(refusal(k + "/pool_wake", {}, true), HasText("pool_wake"));
  CHECK_THAT(refusal(k + "/pool_wake", 3), HasText("/host_kernels/pool_wake"));
  CHECK_THAT(refusal(k + "/instructions", "sse"), HasText("\"avx512\""));
  CHECK_THAT(refusal(k + "/shared_memory", "1 KiB"), HasText("at least \"near_memory\""));
  CHECK_THAT(refusal(k + "/speedups/0/threads", 8), HasText("ascending"));
  CHECK_THAT(refusal(k + "/memory/0/rate", "0 GB/s"), HasText("/host_kernels/memory/0/rate"));
  CHECK_THAT(refusal(k + "/kernels/0/kernel", "linear forwards"), HasText("linear forward"));
  CHECK_THAT(refusal(k + "/kernels/0/mac", {}, true), HasText("mac"));
  CHECK_THAT(refusal(k + "/kernels/0/element", "1 ns"), HasText("unknown key \"element\""));
  CHECK_THAT(refusal(k + "/kernels/0/call", "-1 us"), HasText("/host_kernels/kernels/0/call"));
  CHECK_THAT(refusal(k + "/kernels/1/type", "bf16"), HasText("there twice"));
  CHECK_THAT(refusal(k + "/collectives/0/ranks", 1), HasText("2 or more"));
  CHECK_THAT(refusal(k + "/collectives/0/messages/1", "1 KiB"), HasText("above the one before"));
  CHECK_THAT(refusal(k + "/collectives/0/times", Json::array()), HasText("one time for each"));
  CHECK_THAT(refusal(k + "/disk/0/direction", "up"), HasText("\"read\", \"write\""));
  CHECK_THAT(refusal("/nodes", 2), HasText("one node"));
  CHECK_THAT(refusal("/physical_cores", 0), HasText("physical_cores"));
  MachineSpec machine = host_machine(4, 2);
  machine.host_device = false;
  machine.gpu.pcie = 10_GBps;
  CHECK_THROWS_WITH(read_machine(write_machine(machine), "machine.json"), HasText("only for a machine with"));
}

TEST_CASE("Products are counted in whole tiles, and cut as the runtime cuts them") {
  const HostKernels host = host_kernels_by_hand(4);  // 6 x 16
  CHECK(matmul_counts(host, 7, 17, 10, false, 1, 0) == HostCounts{1, 12 * 32 * 10, 12 * 10, 32 * 10, 7 * 17, 0});
  // Two tasks a thread: the left operand is packed for each.
  CHECK(matmul_counts(host, 6, 256, 10, true, 4, 5) ==
        HostCounts{1, 6 * 256 * 10, 6 * 10 * 8, 256 * 10, 2 * 6 * 256, 5});
  // 1920 rows are two tasks: the right operand is packed twice.
  CHECK(matmul_counts(host, 1920, 16, 10, false, 1, 0)[3] == 2 * 16 * 10);
}

TEST_CASE("Attention's scores are those that its blocks of queries form") {
  const HostKernels host = host_kernels_by_hand(1);
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    AttentionShape shape;
    shape.kv_heads = random.between(1, 3);
    shape.heads = shape.kv_heads * random.between(1, 3);
    shape.qk_dim = shape.v_dim = 16 * random.between(1, 4);
    shape.causal = random.chance(70);
    if (shape.causal && random.chance(40)) shape.window = random.between(1, 200);
    const TokenShape tokens{random.between(1, 3), random.between(1, 400)};
    double scores = 0, blocks = 0;
    for (std::int64_t row = 0; row < tokens.seq_len; row += 128) {
      const std::int64_t end = std::min(row + 128, tokens.seq_len);
      std::int64_t first = tokens.seq_len, last = 0;
      for (std::int64_t i = row; i < end; ++i) {
        for (std::int64_t j = 0; j < tokens.seq_len; ++j) {
          const bool seen = (!shape.causal || j <= i) && (shape.window == 0 || j > i - shape.window);
          if (seen) first = std::min(first, j), last = std::max(last, j + 1);
        }
      }
      scores += static_cast<double>((end - row) * (last - first) * tokens.batch * shape.heads);
      blocks += static_cast<double>(tokens.batch * shape.heads);
    }
    const HostCounts counts = attention_counts(host, shape, tokens);
    REQUIRE(counts[1] == blocks);
    REQUIRE(counts[3] == scores);
    REQUIRE(counts[2] >= 2 * scores * static_cast<double>(shape.qk_dim));  // whole tiles
  }
}

TEST_CASE("Only what is beyond near and shared memory counts as far and distant") {
  const HostKernels host = host_kernels_by_hand(1);
  CHECK(elements_counts(host, 1000, 1_MiB) == HostCounts{1, 1000, 0, 0});
  CHECK(elements_counts(host, 1000, 2_MiB) == HostCounts{1, 1000, 500, 0});
  CHECK(elements_counts(host, 1024, 16_MiB) == HostCounts{1, 1024, 960, 512});
  CHECK(rows_counts(host, 10, 100, 2_MiB) == HostCounts{1, 10, 1000, 500, 0});
}

TEST_CASE("A host as several devices has no more memory and speed than it has") {
  const MachineSpec one = host_machine(8, 1);
  for (int ranks = 1; ranks <= 9; ++ranks) {
    MachineSpec machine = one;
    set_host_ranks(machine, ranks);
    CHECK(machine.ranks() == ranks);
    CHECK(ranks * machine.gpu.memory <= one.gpu.memory);
    CHECK(one.gpu.memory - ranks * machine.gpu.memory < ranks * Bytes(4096));
    CHECK_THAT(ranks * machine.gpu.peak_bf16->base(), WithinRel(one.gpu.peak_bf16->base(), 1e-12));
    CHECK(ranks * machine.gpu.memory + machine.usable_dram() <= machine.dram);
    CHECK(read_machine(write_machine(machine), "machine.json") == machine);
  }
  MachineSpec gpus = machine_for(parse_gpu_request("4xA100-80G"), 1);
  CHECK_THROWS_AS(set_host_ranks(gpus, 2), std::logic_error);
  MachineSpec two_nodes = one;
  CHECK_THROWS_WITH(set_nodes(two_nodes, 2), HasText("network was not measured"));
}

TEST_CASE("Ranks share the cores, one each at least") {
  CHECK(host_threads_per_rank(8, 1) == 8);
  CHECK(host_threads_per_rank(8, 3) == 2);
  CHECK(host_threads_per_rank(2, 8) == 1);
}

}  // namespace
}  // namespace zeroplan::tests
