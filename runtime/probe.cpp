#include "runtime/probe.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <thread>

#include "models/error.h"
#include "runtime/host_memory.h"
#include "runtime/host_traits.h"
#include "runtime/probe_disk.h"
#include "runtime/probe_fit.h"
#include "runtime/probe_kernels.h"
#include "runtime/probe_threads.h"
#include "runtime/thread_clock.h"

namespace zeroplan {
namespace {

/// To four digits, more than repeats; as text gives the same number back.
double rounded(double value) { return std::strtod(fmt::format("{:.4g}", value).c_str(), nullptr); }
template <class Q>
Q rounded(Q value) {
  return Q(rounded(value.base()));
}

// --- kernels ----------------------------------------------------------------------------------------

/// The samples of one type, measured `rounds` times, all before any is measured again: a disturbance meets one round.
/// On a machine so busy that this takes long, fewer times, but thrice.
std::vector<HostKernelTime> kernel_times(DType type, const HostKernels& host, int rounds) {
  constexpr double kLeastSeconds = 200e-6, kLong = 6;
  constexpr int kFewest = 3;
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<ProbeSample> samples = probe_samples(type, host);
  std::vector<std::vector<double>> times(samples.size());
  for (int round = 0; round < rounds; ++round) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    if (round >= kFewest && passed.count() > kLong) break;
    for (std::size_t i = 0; i < samples.size(); ++i) times[i].push_back(time_of(samples[i].run, kLeastSeconds));
  }
  std::vector<HostKernelTime> result;
  for (const HostKernelForm& form : host_kernel_forms()) {
    std::vector<HostSample> of_kernel;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      if (samples[i].kernel == form.name) of_kernel.push_back({samples[i].counts, median_of(times[i])});
    }
    if (of_kernel.empty()) continue;
    HostKernelTime& time = result.emplace_back();
    time.kernel = form.name;
    time.type = type;
    for (const double term : fit_terms(of_kernel)) time.terms.emplace_back(rounded(term));
  }
  return result;
}

void round_all(HostKernels& host) {
  host.pool_wake = rounded(host.pool_wake);
  host.stream_wake = rounded(host.stream_wake);
  for (HostSpeedup& s : host.speedups) s.compute = rounded(s.compute);
  for (HostMemoryRate& m : host.memory) m.rate = rounded(m.rate);
  for (HostCollectiveTime& c : host.collectives) {
    for (Seconds& time : c.times) time = rounded(time);
  }
  for (HostDiskRate& d : host.disk) d.rate = rounded(d.rate);
}

HostKernels measured_host(int cores, int rounds) {
  HostKernels host = host_traits();
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32, DType::u8}) {
    for (HostKernelTime& time : kernel_times(type, host, rounds)) host.kernels.push_back(std::move(time));
  }
  host.pool_wake = pool_wake();
  host.stream_wake = stream_wake(cores);
  host.memory = memory_rates(cores);
  host.speedups = speedups(cores);
  host.collectives = collective_times(cores);
  return host;
}

// --- the machine ------------------------------------------------------------------------------------

/// A product so large that only its multiply-adds count, on all cores.
std::optional<FlopsPerSecond> peak_of(const HostKernels& host, DType type) {
  const HostKernelTime* time = host.find("linear backward weight", type);
  constexpr std::size_t kMacTerm = 1;
  if (time == nullptr || !(time->terms[kMacTerm] > Seconds())) return std::nullopt;
  return FlopsPerSecond(rounded(2 / time->terms[kMacTerm].base() * host.speedups.back().compute));
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm date{};
  gmtime_r(&now, &date);
  return fmt::format("{:04}-{:02}-{:02}", date.tm_year + 1900, date.tm_mon + 1, date.tm_mday);
}

GpuSpec device_of(const HostFacts& facts, const HostKernels& host, const std::string& source) {
  constexpr double kPage = 4096;
  GpuSpec device;
  device.name = "host";
  device.vendor = "host";
  device.arch = host.instructions;
  device.memory = Bytes(std::floor(facts.memory.base() / 2 / kPage) * kPage);
  device.memory_bandwidth = host.memory.back().rate;
  device.peak_bf16 = peak_of(host, DType::bf16);
  device.peak_fp16 = peak_of(host, DType::fp16);
  device.peak_fp32 = peak_of(host, DType::fp32);
  device.sources = {source};
  return device;
}

}  // namespace

HostFacts host_facts() {
  HostFacts facts;
  cpu_set_t set;
  CPU_ZERO(&set);
  facts.cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set)
                                                             : static_cast<int>(std::thread::hardware_concurrency());
  facts.cores = std::max(1, facts.cores);
  std::ifstream cpus("/proc/cpuinfo");
  for (std::string line; facts.cpu.empty() && std::getline(cpus, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) facts.cpu = line.substr(colon + 2);
  }
  const std::optional<Bytes> memory = host_memory("MemTotal"), limit = container_memory();
  if (!memory) throw DeviceError("/proc/meminfo: no MemTotal");
  facts.memory = limit && *limit > Bytes() ? std::min(*memory, *limit) : *memory;
  return facts;
}

ProbeResult probe_host(const ProbeOptions& options) {
  const HostFacts facts = host_facts();
  ProbeResult result;
  MachineSpec& machine = result.machine;
  DiskProbe disk;  // first: a wrong directory is told at once
  if (options.disk_directory.empty()) {
    result.notes.push_back("no disk was measured: plans for this machine keep nothing on disk");
  } else {
    disk = probe_disk(options.disk_directory);
    result.notes = disk.notes;
    machine.nvme = disk.drive;
    machine.nvme.read = rounded(machine.nvme.read);
    machine.nvme.write = rounded(machine.nvme.write);
  }
  HostKernels host = measured_host(facts.cores, std::max(1, options.rounds));
  host.disk = std::move(disk.rates);
  round_all(host);
  const std::string source = fmt::format("measured: zeroplan probe, {}", today());
  machine.name = fmt::format("host of {} cores", facts.cores);
  machine.provider = "user";
  machine.kind = "probed";
  machine.gpu = device_of(facts, host, source);
  machine.physical_cores = facts.cores;
  machine.cpu = facts.cpu;
  machine.dram = facts.memory;
  machine.dram_bandwidth = host.memory.back().rate;
  machine.host_device = true;
  machine.host_kernels = std::move(host);
  machine.sources = {source};
  return result;
}

}  // namespace zeroplan
