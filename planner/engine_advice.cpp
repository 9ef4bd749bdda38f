#include "planner/engine_advice.h"

#include <algorithm>
#include <string>

#include "planner/engine_plans.h"

namespace zeroplan {
namespace {

void double_arithmetic(GpuSpec& gpu) {
  for (auto* peak : {&gpu.peak_bf16, &gpu.peak_fp16, &gpu.peak_fp32}) {
    if (*peak) *peak = **peak * 2;
  }
}

EngineTimeFit with_host_twice_as_fast(EngineTimeFit fit) {
  constexpr TimeFit kHost[] = {TimeFit::host_op,
                               TimeFit::host_op_deepspeed,
                               TimeFit::host_fsdp1,
                               TimeFit::host_fsdp2,
                               TimeFit::host_fsdp2_hugging_face,
                               TimeFit::host_hook_deepspeed,
                               TimeFit::optimizer_tensor_deepspeed};
  for (const TimeFit key : kHost) fit.values[static_cast<std::size_t>(key)].value /= 2;
  return fit;
}

class Adviser {
 public:
  Adviser(const Answer& answer, const Candidate& candidate)
      : machine_(answer.request.machine),
        plan_(candidate.plan),
        plans_(answer.request),
        now_(candidate.prediction.step) {}

  std::vector<Advice> run() {
    const bool host_update = plan_.optimizer.hbm < plan_.optimizer.total();
    const bool disks = plan_.optimizer.nvme > 0 || plan_.parameters.nvme > 0;
    changed("twice the GPU arithmetic", [](MachineSpec& m) { double_arithmetic(m.gpu); });
    changed("twice the GPU memory bandwidth",
            [](MachineSpec& m) { m.gpu.memory_bandwidth = m.gpu.memory_bandwidth * 2; });
    if (plan_.ranks > 1) collectives();
    if (host_update || plan_.parameters.hbm < plan_.parameters.total()) {
      changed("twice the PCIe bandwidth", [](MachineSpec& m) {
        m.gpu.pcie = m.gpu.pcie * 2;
        m.gpu.c2c = m.gpu.c2c * 2;
      });
    }
    if (host_update) {
      changed("twice the host's memory and cores", [](MachineSpec& m) {
        m.dram_bandwidth = m.dram_bandwidth * 2;
        m.physical_cores *= 2;
      });
    }
    if (disks) {
      changed("twice the NVMe rates", [](MachineSpec& m) {
        m.nvme.read = m.nvme.read * 2;
        m.nvme.write = m.nvme.write * 2;
      });
    }
    add("a host twice as fast at launching",
        plans_.time(plan_, machine_, with_host_twice_as_fast(builtin_engine_time_fit())).step);
    std::ranges::stable_sort(all_, [](const Advice& a, const Advice& b) { return a.speedup > b.speedup; });
    return all_;
  }

 private:
  void add(std::string what, Seconds then) {
    constexpr double kWorthSaying = 1.02;
    if (now_ / then >= kWorthSaying) all_.push_back({std::move(what), now_ / then});
  }
  template <class Change>
  void changed(std::string what, Change change) {
    MachineSpec faster = machine_;
    change(faster);
    add(std::move(what), plans_.time(plan_, faster, builtin_engine_time_fit()).step);
  }
  void collectives() {
    constexpr double kHalf = 0.5;
    const std::string links = "twice the " + role_name(ResourceRole::links, machine_);
    const std::string network = role_name(ResourceRole::network, machine_);
    add(machine_.nodes > 1 ? links + " and " + network + " rates" : links + " rate",
        plans_.time(plan_, machine_, builtin_engine_time_fit(), kHalf).step);
  }

  const MachineSpec& machine_;
  const Plan& plan_;
  EnginePlans plans_;
  Seconds now_;
  std::vector<Advice> all_;
};

}  // namespace

std::vector<Advice> advise_engine(const Answer& answer, const Candidate& candidate) {
  return Adviser(answer, candidate).run();
}

}  // namespace zeroplan
