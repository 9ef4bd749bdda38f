// Host work against the figures measured on two H200 hosts of 16 cores: 132 GB/s read-modify-write (perf-anchors.md
// section 10) and 107.9 GB/s (docs/measurements/h200/host.csv).

#include "sim/host_model.h"

#include "tests/catch.h"
#include "tests/sim_machines.h"

namespace zeroplan::tests {
namespace {

MachineSpec h200_host(BytesPerSecond dram = 132.0_GBps) {
  MachineSpec machine = node_of("H200-SXM-141GB", 1, Interconnect::single);
  machine.physical_cores = 16;
  machine.dram_bandwidth = dram;
  machine.nvme = {1, Bytes(1e12), 2.0_GBps, 1.0_GBps};
  return machine;
}

}  // namespace

TEST_CASE("host: bytes of an Adam update count every type once") {
  CHECK(adam_traffic({}) == Bytes(28));
  CHECK(adam_traffic({DType::bf16, DType::fp32, DType::fp32, false}) == Bytes(26));
  CHECK(adam_traffic({DType::bf16, DType::fp32, DType::bf16, true}) == Bytes(20));
  CHECK(adam_traffic({DType::bf16, DType::fp32, DType::bf16, false}) == Bytes(18));
  CHECK(adam_traffic({DType::fp32, DType::fp32, DType::fp32, true}) == Bytes(30));
}

TEST_CASE("host: Adam is between the rates measured on two hosts with one and two cores, and memory bound with all") {
  const auto rate = [](BytesPerSecond dram, int cores) {
    MachineSpec machine = h200_host(dram);
    machine.physical_cores = cores;
    const HostModel host(machine);
    return 1 / host.alone(host.adam(1'000'000'000, {})).base();  // G parameters/s
  };
  CHECK_THAT(rate(132.0_GBps, 16), WithinRel(4.7, 0.05));  // 4.6 to 4.9 with 12 and 16 threads
  CHECK_THAT(rate(107.9_GBps, 16), WithinRel(4.09, 0.07));
  CHECK_THAT(rate(107.9_GBps, 1), WithinRel(0.73, 0.03));  // 0.87 on the other host
  CHECK(rate(107.9_GBps, 2) > 1.2);
  CHECK(rate(107.9_GBps, 2) < 1.6);
}

TEST_CASE("host: pinned copies reach the measured rates") {
  const HostModel host(h200_host());
  const auto rate = [&host](double bytes) { return bytes / host.alone(host.copy(Bytes(bytes))).base() / 1e9; };
  CHECK_THAT(rate(256 * kMiB), WithinRel(55.4, 0.005));  // pcie.csv: 55.46 up, 55.29 down
  CHECK_THAT(rate(4 * kMiB), WithinRel(53.8, 0.01));     // 53.5, 54.1
  CHECK_THAT(rate(kMiB), WithinRel(49.3, 0.03));         // 48.4, 50.3
  CHECK_THAT(rate(64 * kKiB), WithinRel(19.5, 0.12));    // 17.3, 21.7
  CHECK_THAT(host.pcie_total_capacity().base() / 2e9, WithinRel(50.8, 0.005));
  CHECK(host.alone(host.copy(Bytes())) == Seconds());
  const HostModel a100(node_of("A100-SXM4-80GB", 8, Interconnect::nvswitch));
  CHECK_THAT(a100.pcie_total_capacity().base() / 2e9, WithinRel(19.0, 0.03));
}

TEST_CASE("host: reading and writing share the disks") {
  const HostModel host(h200_host());
  CHECK_THAT(host.alone(host.disk_read(Bytes(1.8e9))).base(), WithinRel(1.0, 1e-9));
  CHECK_THAT(host.alone(host.disk_write(Bytes(0.9e9))).base(), WithinRel(1.0, 1e-9));
  const DiskTransfer read = host.disk_read(Bytes(1.8e9)), write = host.disk_write(Bytes(0.9e9));
  CHECK_THAT((read.read_equivalent + write.read_equivalent) / host.nvme_capacity() / Seconds(1), WithinRel(2.0, 1e-9));
}

TEST_CASE("host: an accumulation moves ten bytes a parameter") {
  const HostModel host(h200_host());
  CHECK(host.accumulate(1000).dram == Bytes(10000));
  CHECK(host.assumptions().size() >= 4);
}

}  // namespace zeroplan::tests
