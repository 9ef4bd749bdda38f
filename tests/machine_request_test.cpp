#include <fmt/format.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "models/error.h"
#include "models/machine_spec.h"
#include "tests/catch.h"

using namespace zeroplan;
using zeroplan::tests::HasText;

namespace {

std::string error_of(const std::string& text) {
  try {
    machine_for(parse_gpu_request(text), 1);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

const Assumption& assumption(const MachineSpec& machine, const std::string& what) {
  for (const Assumption& candidate : machine.assumptions) {
    if (candidate.what == what) return candidate;
  }
  FAIL("no assumption " << what);
  throw 0;
}

bool has_assumption(const MachineSpec& machine, const std::string& what) {
  for (const Assumption& candidate : machine.assumptions) {
    if (candidate.what == what) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("--gpus reads the spellings that people use") {
  struct Spelling {
    const char* text;
    int count;
    const char* gpu;
  };
  const Spelling spellings[] = {
      {"4xA100-80G", 4, "A100-SXM4-80GB"},
      {"4XA100-80G", 4, "A100-SXM4-80GB"},
      {"4xa100_80gb", 4, "A100-SXM4-80GB"},
      {"4xA100", 4, "A100-SXM4-80GB"},
      {"4xA100-80GB", 4, "A100-SXM4-80GB"},
      {"4xA100-80GiB", 4, "A100-SXM4-80GB"},
      {"4xA10080G", 4, "A100-SXM4-80GB"},
      {"4xA100 80G", 4, "A100-SXM4-80GB"},
      {" 4xA100-80G ", 4, "A100-SXM4-80GB"},
      {"4 x A100-80G", 4, "A100-SXM4-80GB"},
      {"4xA100-80", 4, "A100-SXM4-80GB"},
      {"4xA100-40G", 4, "A100-SXM4-40GB"},
      {"4xa100_40gb", 4, "A100-SXM4-40GB"},
      {"4xA100-SXM4-40G", 4, "A100-SXM4-40GB"},
      {"4xA100-SXM4", 4, "A100-SXM4-80GB"},
      {"4xA100-SXM", 4, "A100-SXM4-80GB"},
      {"4xA100-PCIe", 4, "A100-PCIe-80GB"},
      {"4xA100-PCIe-40G", 4, "A100-PCIe-40GB"},
      {"4xA100-PCIE-80GB", 4, "A100-PCIe-80GB"},
      {"1xNVIDIA A100 80GB PCIe", 1, "A100-PCIe-80GB"},
      {"8xH100", 8, "H100-SXM5-80GB"},
      {"8xh100", 8, "H100-SXM5-80GB"},
      {"8xH100-80G", 8, "H100-SXM5-80GB"},
      {"8xH100-SXM", 8, "H100-SXM5-80GB"},
      {"2xH100-NVL", 2, "H100-NVL-94GB"},
      {"2xH100-NVL-94G", 2, "H100-NVL-94GB"},
      {"1xH100-PCIe", 1, "H100-PCIe-80GB"},
      {"8xH200", 8, "H200-SXM-141GB"},
      {"8xH200-141G", 8, "H200-SXM-141GB"},
      {"8xh200_141gb", 8, "H200-SXM-141GB"},
      {"8xH20", 8, "H20-96GB"},
      {"8xH20-96G", 8, "H20-96GB"},
      {"8xB200", 8, "B200-SXM-180GB"},
      {"8xB200-180G", 8, "B200-SXM-180GB"},
      {"8xB300", 8, "B300-SXM-288GB"},
      {"4xGB200", 4, "GB200"},
      {"1xGH200", 1, "GH200-96GB"},
      {"1xGH200-144G", 1, "GH200-144GB"},
      {"2x3090-24G", 2, "RTX-3090"},
      {"2x3090", 2, "RTX-3090"},
      {"2xRTX3090", 2, "RTX-3090"},
      {"2xRTX 3090", 2, "RTX-3090"},
      {"2xrtx-3090-24gb", 2, "RTX-3090"},
      {"2x3090Ti", 2, "RTX-3090-Ti"},
      {"2x3090Ti-24G", 2, "RTX-3090-Ti"},
      {"1x4090", 1, "RTX-4090"},
      {"1x4090-24G", 1, "RTX-4090"},
      {"1x5090-32G", 1, "RTX-5090"},
      {"1x3080-10G", 1, "RTX-3080-10GB"},
      {"4xL40S", 4, "L40S"},
      {"4xL40S-48G", 4, "L40S"},
      {"4xL40-48G", 4, "L40"},
      {"4xL4-24G", 4, "L4"},
      {"4xL4", 4, "L4"},
      {"1xT4", 1, "T4"},
      {"1xT4-16G", 1, "T4"},
      {"8xV100", 8, "V100-SXM2-16GB"},
      {"8xV100-32G", 8, "V100-SXM2-32GB"},
      {"8xV100-16G", 8, "V100-SXM2-16GB"},
      {"4xV100-PCIe-16G", 4, "V100-PCIe-16GB"},
      {"2xA6000", 2, "RTX-A6000"},
      {"2xA6000-48G", 2, "RTX-A6000"},
      {"4xA10", 4, "A10"},
      {"4xA10-24G", 4, "A10"},
      {"4xA10G", 4, "A10G"},
      {"4xA10G-24G", 4, "A10G"},
      {"8xMI300X", 8, "MI300X"},
      {"8xMI300X-192G", 8, "MI300X"},
      {"8xGaudi2", 8, "Gaudi2"},
      {"8xgaudi-3", 8, "Gaudi3"},
  };
  for (const Spelling& spelling : spellings) {
    INFO(spelling.text);
    GpuRequest request;
    REQUIRE_NOTHROW(request = parse_gpu_request(spelling.text));
    CHECK(request.count == spelling.count);
    CHECK(request.gpu == spelling.gpu);
  }
}

TEST_CASE("A memory suffix equal to the label is accepted for every GPU that a name means, another one is refused") {
  for (const std::string& name : gpu_names()) {
    INFO(name);
    CHECK(parse_gpu_request("1x" + name).gpu == name);
  }
  CHECK_THAT(error_of("4xA100-64G"), HasText("A100-SXM4-80GB (80 GB)"));
  CHECK_THAT(error_of("2x3090-48G"), HasText("RTX-3090 (24 GB)"));
  CHECK_THAT(error_of("8xH100-94G"), HasText("H100-NVL-94GB (94 GB)"));
}

TEST_CASE("A name that leaves the memory open says what was taken and what else there is") {
  const auto gpu_assumption = [](const char* text) {
    for (const Assumption& a : machine_for(parse_gpu_request(text), 1).assumptions) {
      if (a.what == "GPU") return a.value + ": " + a.source;
    }
    return std::string();
  };
  CHECK(gpu_assumption("4xA100") == "A100-SXM4-80GB: A100 means that one; there is also A100-SXM4-40GB (40 GB)");
  CHECK(gpu_assumption("8xV100") == "V100-SXM2-16GB: V100 means that one; there is also V100-SXM2-32GB (32 GB)");
  for (const char* clear : {"4xA100-80G", "8xa100_40gb", "4xA100-SXM4-80GB", "8xH100", "2x3090-24G", "8xV100-32G"}) {
    INFO(clear);
    CHECK(gpu_assumption(clear).empty());
  }
}

TEST_CASE("Malformed --gpus texts say what is expected") {
  for (const char* text : {"", " ", "4", "x", "4x", "A100", "xA100", "4-A100", "4,A100", "H100x8", "four xA100",
                           "\n4xA100", "4xA100\n-80G", "--gpus"}) {
    INFO(text);
    CHECK_THROWS_AS(parse_gpu_request(text), InputError);
  }
  CHECK_THAT(error_of("0xA100-80G"), HasText("whole number"));
  CHECK_THAT(error_of("-4xA100"), HasText("\"-4\""));
  CHECK_THAT(error_of("4.5xA100"), HasText("\"4.5\""));
  CHECK_THAT(error_of("99999999999xH100"), HasText("99999999999"));
  CHECK_THAT(error_of("99999999999999999999999999xH100"), HasText("whole number"));
  CHECK_THAT(error_of("A100"), HasText("NxGPU"));
}

TEST_CASE("Unknown and ambiguous GPU names list the nearest ones") {
  CHECK_THAT(error_of("4xA10O-80G"), HasText("A100"));
  CHECK_THAT(error_of("8xH1000"), HasText("H100"));
  CHECK_THAT(error_of("1xRTX4O90"), HasText("4090"));
  const std::string ambiguous = error_of("4xV100-PCIe");
  CHECK_THAT(ambiguous, HasText("ambiguous"));
  CHECK_THAT(ambiguous, HasText("V100-PCIe-16GB"));
  CHECK_THAT(ambiguous, HasText("V100-PCIe-32GB"));
}

TEST_CASE("More GPUs than a node holds are refused with the --nodes spelling") {
  CHECK_THAT(error_of("16xH100"), HasText("--gpus 8xH100-SXM5-80GB --nodes 2"));
  CHECK_THAT(error_of("64xA100-80G"), HasText("--gpus 8xA100-SXM4-80GB --nodes 8"));
  CHECK_THAT(error_of("32xV100-32G"), HasText("--gpus 16xV100-SXM2-32GB --nodes 2"));
  CHECK(error_of("16xV100-32G") == "no error");
  CHECK_THROWS_WITH(machine_for(parse_gpu_request("16xH100"), 4), HasText("--nodes 8"));
}

TEST_CASE("A bare --gpus means the cheapest priced cloud node that states its host memory") {
  const MachineSpec machine = machine_for(parse_gpu_request("4xA100-80G"), 1);
  CHECK(machine.name == "a2-ultragpu-4g");
  CHECK(machine.dram == 680_GiB);
  REQUIRE(machine.price.has_value());
  const Assumption& taken = assumption(machine, "machine");
  CHECK_THAT(taken.value, HasText("a2-ultragpu-4g"));
  CHECK_THAT(taken.source, HasText("2026-08-03"));
  CHECK(machine_for(parse_gpu_request("8xH100"), 1).name == "lambda-gpu_8x_h100_sxm5");
  CHECK(machine_for(parse_gpu_request("8xA100-80G"), 1).name == "lambda-gpu_8x_a100_80gb_sxm4");
  CHECK(machine_for(parse_gpu_request("8xH200"), 1).name == "p5en.48xlarge");
  CHECK(machine_for(parse_gpu_request("4xL40S"), 1).name == "g6e.12xlarge");
  // Equal prices: the one with more host memory (g4dn.xlarge has 16 GiB).
  CHECK(machine_for(parse_gpu_request("1xT4"), 1).name == "Standard_NC4as_T4_v3");
}

TEST_CASE("Without a priced cloud node an on-premise entry is taken, and then a generic node") {
  const MachineSpec own = machine_for(parse_gpu_request("2x3090"), 1);
  CHECK(own.name == "ws-2x3090");
  CHECK_THAT(assumption(own, "machine").source, HasText("on-premise"));

  const MachineSpec generic = machine_for(parse_gpu_request("4x3090"), 1);
  CHECK(generic.provider == "generic");
  CHECK(generic.interconnect == Interconnect::root_complex);
  CHECK(generic.dram == 192_GiB);  // 2 x 4 x 24
  CHECK_FALSE(generic.price.has_value());
  CHECK(machine_for(parse_gpu_request("1x3080"), 1).dram == 64_GiB);  // at least

  CHECK(machine_for(parse_gpu_request("6xH100"), 1).interconnect == Interconnect::nvswitch);
  CHECK(machine_for(parse_gpu_request("3xA100"), 1).interconnect == Interconnect::nvlink_mesh);
  CHECK(machine_for(parse_gpu_request("4xMI300X"), 1).nvlink == 192_GBps);  // 3 of 7 links
}

TEST_CASE("Several nodes are equal, the price stays per node, and an unknown network is a stated default") {
  const MachineSpec known = machine_for(parse_gpu_request("8xH200"), 16);
  CHECK(known.ranks() == 128);
  CHECK(known.price->usd_per_hour == find_machine("p5en.48xlarge").price->usd_per_hour);
  CHECK_FALSE(has_assumption(known, "network of a node"));

  const MachineSpec unknown = machine_for(parse_gpu_request("8xH100"), 2);
  CHECK(unknown.network.bandwidth == 50_GBps);
  CHECK(assumption(unknown, "network of a node").value == "400 Gb/s");
  CHECK(machine_for(parse_gpu_request("8xA100-80G"), 2).network.bandwidth == 12.5_GBps);
  CHECK(machine_for(parse_gpu_request("4x3090"), 2).network.bandwidth == 1.25_GBps);
  CHECK_THROWS_AS(machine_for(parse_gpu_request("8xH100"), 0), InputError);
  CHECK_THROWS_AS(machine_for(parse_gpu_request("8xH100"), 1 << 20), InputError);
}

TEST_CASE("--nvme reads drives, size and rate") {
  const NvmeSpec plain = parse_nvme("4x2TB");
  CHECK(plain.drives == 4);
  CHECK(plain.capacity == Bytes(8e12));
  CHECK(plain.read == 8_GBps);
  CHECK(plain.write == 4_GBps);
  const NvmeSpec rated = parse_nvme("2x7.68TB@6.5GB/s");
  CHECK(rated.capacity == Bytes(15.36e12));
  CHECK(rated.read == 13_GBps);
  CHECK(rated.write == 6.5_GBps);
  for (const char* text : {"", "4", "x2TB", "0x2TB", "4x", "4x2", "4x0TB", "4x2TB@", "4x2TB@6.5", "4x2TB@0GB/s",
                           "-1x2TB", "4x2TB@6.5GB/s@1GB/s", "4x2GB/s", "9999999999x2TB"}) {
    INFO(text);
    CHECK_THROWS_AS(parse_nvme(text), InputError);
  }
}

TEST_CASE("What the user states replaces the value and its assumption") {
  MachineSpec machine = machine_for(parse_gpu_request("4x3090"), 1);
  REQUIRE(has_assumption(machine, "host memory"));
  REQUIRE(has_assumption(machine, "NVMe"));
  set_host_memory(machine, 1000_GiB);
  CHECK(machine.usable_dram() == 950_GiB);
  CHECK_FALSE(has_assumption(machine, "host memory"));
  CHECK(has_assumption(machine, "host memory bandwidth"));

  set_nvme(machine, "2x2TB");
  CHECK_FALSE(has_assumption(machine, "NVMe"));
  CHECK(assumption(machine, "NVMe read rate").value == "4.00 GB/s");
  set_nvme(machine, "2x2TB@6.5GB/s");
  CHECK_FALSE(has_assumption(machine, "NVMe read rate"));
  CHECK(assumption(machine, "NVMe write rate").value == "6.50 GB/s");
}

TEST_CASE("20,000 damaged --gpus and --nvme texts are read or refused, never anything else") {
  std::mt19937 random(20261130);
  const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  constexpr char kBytes[] = "0123456789xXaAgGbBiI-_. @/+TMhHsSlLrRpP\n\x00\xc3\xff";
  const std::string bytes(kBytes, sizeof kBytes - 1);
  const char* seeds[] = {"4xA100-80G", "8xH100-SXM5-80GB", "2xRTX 3090", "4x2TB@6.5GB/s", "16x7.68TB"};
  for (int i = 0; i < 20000; ++i) {
    std::string text = seeds[pick(5)];
    for (std::size_t edits = 1 + pick(4); edits > 0; --edits) {
      const std::size_t at = pick(text.size() + 1);
      if (pick(3) == 0 && at < text.size()) {
        text.erase(at, 1);
      } else {
        text.insert(at, 1, bytes[pick(bytes.size())]);
      }
    }
    try {
      const int read = i % 2 == 0 ? parse_gpu_request(text).count : parse_nvme(text).drives;
      CHECK(read >= 1);
    } catch (const InputError& error) {
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
    }
  }
}
