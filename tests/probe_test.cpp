// Parts of `zeroplan probe`. Its figures are the machine's; what can be tested is how they are made.

#include "runtime/probe.h"

#include <algorithm>
#include <set>

#include "runtime/host_traits.h"
#include "runtime/probe_disk.h"
#include "runtime/probe_fit.h"
#include "runtime/probe_kernels.h"
#include "runtime/probe_threads.h"
#include "runtime/thread_clock.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

TEST_CASE("A fit finds the times that made the samples, terms that cost nothing included") {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const auto terms = static_cast<std::size_t>(random.between(1, 5));
    std::vector<double> times;
    for (std::size_t i = 0; i < terms; ++i) times.push_back(random.chance(30) ? 0 : random.unit() * 1e-9 + 1e-12);
    if (std::ranges::max(times) == 0) times[0] = 1e-9;
    std::vector<HostSample> samples;
    for (int k = 0; k < 12; ++k) {
      HostSample& sample = samples.emplace_back();
      for (const double time : times) {
        sample.counts.push_back(static_cast<double>(random.between(1, 1 << 20)));
        sample.seconds += time * sample.counts.back();
      }
    }
    const std::vector<double> found = fit_terms(samples);
    for (std::size_t i = 0; i < terms; ++i) {
      INFO("seed " << seed << ", term " << i);
      REQUIRE_THAT(found[i], WithinAbs(times[i], 1e-6 * std::ranges::max(times)));
    }
  }
}

TEST_CASE("A fit of disturbed samples has no negative time, and no better fit by one term alone") {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    std::vector<HostSample> samples;
    for (int k = 0; k < 8; ++k) {
      HostSample& sample = samples.emplace_back();
      for (int i = 0; i < 4; ++i) sample.counts.push_back(static_cast<double>(random.between(0, 1000)));
      sample.seconds = 1e-6 * (random.unit() + 0.01);
    }
    const auto error = [&](const std::vector<double>& times) {
      double sum = 0;
      for (const HostSample& sample : samples) {
        double value = 0;
        for (std::size_t i = 0; i < times.size(); ++i) value += times[i] * sample.counts[i];
        sum += (value / sample.seconds - 1) * (value / sample.seconds - 1);
      }
      return sum;
    };
    std::vector<double> found = fit_terms(samples);
    const double least = error(found);
    for (std::size_t i = 0; i < found.size(); ++i) {
      REQUIRE(found[i] >= 0);
      for (const double factor : {0.9, 1.1}) {
        std::vector<double> other = found;
        other[i] = found[i] * factor + (found[i] == 0 ? 1e-12 : 0);
        REQUIRE(error(other) >= least - 1e-9);
      }
    }
  }
  CHECK_THROWS_AS(fit_terms({}), std::logic_error);
}

TEST_CASE("The samples cover every kernel with its own counts, and run") {
  const HostKernels host = host_traits();
  std::set<std::string> seen;
  for (const DType type : {DType::fp32, DType::u8}) {
    for (const ProbeSample& sample : probe_samples(type, host)) {
      const HostKernelForm* form = find_host_kernel(sample.kernel);
      REQUIRE(form != nullptr);
      REQUIRE(sample.counts.size() == terms_of(form->form).size());
      REQUIRE(sample.type == type);
      // Each kernel's first shape, which is small.
      if (seen.insert(sample.kernel).second) REQUIRE(time_of(sample.run, 0) > 0);
    }
  }
  for (const HostKernelForm& form : host_kernel_forms()) CHECK(seen.contains(std::string(form.name)));
}

TEST_CASE("The machine is known before it is measured") {
  const HostFacts facts = host_facts();
  CHECK(facts.cores >= 1);
  CHECK(facts.memory > 64_MiB);
  const HostKernels host = host_traits();
  CHECK(host.near_memory <= host.shared_memory);
  CHECK(probed_threads(1) == std::vector<int>{1});
  CHECK(probed_threads(6) == std::vector<int>{1, 2, 4, 6});
  CHECK(probed_threads(8) == std::vector<int>{1, 2, 4, 8});
}

TEST_CASE("Threads wake up, and it takes time") {
  CHECK(pool_wake() > Seconds());
  CHECK(stream_wake(1) > Seconds());
}

TEST_CASE("A whole probe is a machine that reads back", "[.slow]") {
  ProbeOptions options;
  options.rounds = 1;
  options.disk_directory = ".";
  const ProbeResult result = probe_host(options);
  const MachineSpec& machine = result.machine;
  CHECK(read_machine(write_machine(machine), "machine.json") == machine);
  CHECK(machine.host_device);
  REQUIRE(machine.host_kernels);
  CHECK(machine.gpu.memory <= 0.5 * machine.dram);
  CHECK(machine.nvme.drives == 1);
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const HostKernelForm& form : host_kernel_forms()) {
      const bool on_bytes = form.name == "copy" || form.name == "clear";
      INFO(form.name << " " << to_string(type));
      REQUIRE((machine.host_kernels->find(form.name, type) != nullptr) == !on_bytes);
    }
  }
}

}  // namespace
}  // namespace zeroplan::tests
