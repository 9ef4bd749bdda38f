#include "models/machine_catalog.h"

#include <algorithm>
#include <set>
#include <string>

#include "models/catalog.h"
#include "tests/catch.h"
#include "tests/processor_time.h"

using namespace zeroplan;
using zeroplan::tests::HasText;
using zeroplan::tests::WithinRel;

namespace {

std::vector<std::string> list_at(const JsonValue& entry, std::string_view key) {
  std::vector<std::string> result;
  if (const JsonValue* list = entry.find(key)) {
    for (const JsonValue& item : list->items()) result.push_back(item.as_string());
  }
  return result;
}

std::size_t files_below(std::string_view folder) {
  return static_cast<std::size_t>(
      std::ranges::count_if(catalog_files(), [&](const CatalogFile& file) { return file.path.starts_with(folder); }));
}

}  // namespace

TEST_CASE("The GPU index is what gpus/ says: run scripts/index_catalog.py after a change") {
  CHECK(gpu_index().size() == files_below("gpus/"));
  for (const GpuEntry& row : gpu_index()) {
    INFO(row.name);
    const JsonDocument file = read_catalog("gpus/" + row.name + ".json");
    CHECK(file.root().at("name").as_string() == row.name);
    CHECK(file.root().at("label").as_int(1, 9999) == row.label);
    CHECK(list_at(file.root(), "aliases") == row.aliases);
    CHECK(list_at(file.root(), "default_for") == row.default_for);
  }
  CHECK(std::ranges::is_sorted(gpu_names()));
}

TEST_CASE("The node index is what nodes/ says: run scripts/index_catalog.py after a change") {
  CHECK(node_index().size() == files_below("nodes/"));
  for (const NodeEntry& row : node_index()) {
    INFO(row.name);
    const JsonDocument document = read_catalog("nodes/" + row.name + ".json");
    const JsonValue& file = document.root();
    CHECK(file.at("name").as_string() == row.name);
    CHECK(file.at("provider").as_string() == row.provider);
    CHECK(file.at("kind").as_string() == row.kind);
    CHECK(file.at("gpu").as_string() == row.gpu);
    CHECK(file.at("gpus_per_node").as_int(1, 9999) == row.gpus_per_node);
    CHECK(row.dram == (file.find("dram") == nullptr ? "" : file.at("dram").as_string()));
    const JsonValue* price = file.find("price");
    CHECK(row.usd_per_hour == (price == nullptr ? 0 : price->at("usd_per_hour").as_real(0, 1e9)));
    CHECK(list_at(file, "aliases") == row.aliases);
  }
  CHECK(std::ranges::is_sorted(machine_names()));
}

TEST_CASE("Every catalog GPU loads and is complete") {
  for (const std::string& name : gpu_names()) {
    INFO(name);
    const GpuSpec gpu = find_gpu(name);
    CHECK(gpu.name == name);
    CHECK(gpu.memory > 1_GiB);
    CHECK(gpu.memory_bandwidth > 1_GBps);
    CHECK((gpu.peak_bf16 || gpu.peak_fp16));
    CHECK(gpu.pcie > 1_GBps);
    CHECK_FALSE(gpu.sources.empty());
  }
  CHECK_THROWS_WITH(find_gpu("A100-SXM4-8OGB"), HasText("A100-SXM4-80GB"));
}

TEST_CASE("Every catalog node loads, is complete and names its sources") {
  for (const std::string& name : machine_names()) {
    INFO(name);
    const MachineSpec machine = find_machine(name);
    CHECK(machine.name == name);
    CHECK(machine.dram > 8_GiB);
    CHECK(machine.dram_bandwidth > 1_GBps);
    CHECK(machine.physical_cores > 0);
    CHECK((machine.interconnect == Interconnect::single) == (machine.gpus_per_node == 1));
    CHECK(machine.gpus_per_root_complex >= machine.gpus_per_pcie_switch);
    CHECK(machine.gpus_per_root_complex <= machine.gpus_per_node);
    CHECK((machine.sockets == 1) == (machine.socket_link.base() == 0));
    CHECK(machine.nvme.drives * machine.nvme.read.base() >= machine.nvme.drives);
    CHECK_FALSE(machine.sources.empty());
    if (machine.price) CHECK_FALSE(machine.price->source.empty());
  }
}

TEST_CASE("No name or alias means two GPUs or two nodes") {
  std::set<std::string> seen;
  for (const GpuEntry& gpu : gpu_index()) {
    std::set<std::string> own{normalized(gpu.name)};
    for (const std::string& alias : gpu.aliases) own.insert(normalized(alias));
    for (const std::string& name : gpu.default_for) own.insert(normalized(name));
    for (const std::string& name : own) CHECK(seen.insert(name).second);
  }
  seen.clear();
  for (const NodeEntry& node : node_index()) {
    std::set<std::string> own{normalized(node.name)};
    for (const std::string& alias : node.aliases) own.insert(normalized(alias));
    for (const std::string& name : own) CHECK(seen.insert(name).second);
  }
}

TEST_CASE("GPU capacity is the low end of what PyTorch reports, else a fraction of the driver's total or the label") {
  CHECK_THAT(find_gpu("H200-SXM-141GB").memory / 1_GiB, WithinRel(139.72, 1e-12));
  CHECK_THAT(find_gpu("A100-SXM4-80GB").memory / 1_GiB, WithinRel(79.14, 1e-12));
  CHECK_THAT(find_gpu("A40").memory / 1_MiB, WithinRel(0.985 * 46068, 1e-9));
  CHECK_THAT(find_gpu("MI355X").memory / 1_GiB, WithinRel(0.985 * 288, 1e-9));
  const MachineSpec machine = find_machine("modal-1x-b300-sxm-288gb");
  REQUIRE_FALSE(machine.assumptions.empty());
  CHECK(machine.assumptions.front().what == "GPU memory");
  CHECK_THAT(machine.assumptions.front().source, HasText("nvidia-smi total"));
}

TEST_CASE("A node's figures follow from what it states and the defaults") {
  const MachineSpec p5 = find_machine("p5.48xlarge");
  CHECK(p5.gpu.pcie_generation == 4);  // a Gen4 host for a Gen5 GPU
  CHECK(p5.gpu.pcie == 31.5_GBps);
  CHECK(p5.dram_bandwidth == BytesPerSecond(0.8 * 409.6e9));
  CHECK(p5.nvme.read == 16_GBps);  // 8 drives
  CHECK(p5.nvme.write == 8_GBps);
  CHECK(p5.network.bandwidth == 400_GBps);
  CHECK(p5.network.gpudirect);
  CHECK(p5.socket_link == 16_GBps);
  const MachineSpec h200 = find_machine("Standard_ND96isr_H200_v5");
  CHECK(h200.nvme.read == 48_GBps);
  CHECK(h200.nvme.write == 26_GBps);
  const MachineSpec x8 = find_machine("ws-2x5090");
  CHECK(x8.gpu.pcie == 31.5_GBps);  // x8 of Gen5
  const MachineSpec grace = find_machine("coreweave-gb200-4x");
  CHECK(grace.sockets == 2);
  CHECK(grace.gpu.c2c == 450_GBps);
}

TEST_CASE("Nodes are found by name, alias and path; an unknown name lists the nearest") {
  CHECK(find_machine("p4de").name == "p4de.24xlarge");
  CHECK(find_machine("P4DE-24XLARGE").name == "p4de.24xlarge");
  CHECK(find_machine("dgx-h100").name == "DGX-H100");
  CHECK(find_machine(std::string(ZEROPLAN_TESTS_DIR) + "/data/machines/two-3090.json").name == "my-box");
  CHECK_THROWS_WITH(find_machine("p5.48xlage"), HasText("p5.48xlarge"));
  CHECK_THROWS_AS(find_machine(""), InputError);
  CHECK_THROWS_AS(find_machine("/nowhere/machine.json"), InputError);
}

TEST_CASE("Looking up a machine takes milliseconds") {
  const double begin = tests::processor_seconds();
  constexpr int kRounds = 20;
  for (int i = 0; i < kRounds; ++i) CHECK(machine_for(parse_gpu_request("4xA100-80G"), 1).gpus_per_node == 4);
  const double spent = 1e3 * (tests::processor_seconds() - begin);
  WARN("parse and look-up: " << spent / kRounds << " ms");
  CHECK(spent / kRounds < 100);  // 0.3 ms in Release here; sanitizers are slow
}
