// Laws of step times under DeepSpeed and FSDP2 on random models, machines and runs of the catalogs.

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <random>

#include "models/error.h"
#include "sim/engine_time.h"
#include "tests/catch.h"

namespace zeroplan::tests {
namespace {

constexpr double kSame = 1e-9;

struct Triple {
  const ModelSpec* model = nullptr;
  MachineSpec machine;
  EngineTimeRun run;
};

class RandomTriples {
 public:
  explicit RandomTriples(unsigned seed) : random_(seed) {
    for (const std::string& name : model_names()) models_.push_back(find_model(name));
    for (const std::string& name : machine_names()) machines_.push_back(find_machine(name));
    std::erase_if(machines_, [](const MachineSpec& machine) { return machine.host_device; });
  }

  Triple next() {
    Triple t;
    t.model = &models_[random_() % models_.size()];
    t.machine = machines_[random_() % machines_.size()];
    if (pick(2) == 0 && t.machine.nodes == 1) set_nodes(t.machine, 1 << pick(6));
    if (t.machine.nvme.drives == 0) {
      t.machine.nvme.drives = 2;
      t.machine.nvme.capacity = Bytes(4e12);
      t.machine.nvme.read = BytesPerSecond(1e9 * (1 + pick(10)));
      t.machine.nvme.write = t.machine.nvme.read / 2;
    }
    set_run(t);
    return t;
  }

 private:
  int pick(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  bool chance(int one_in) { return pick(one_in) == 0; }

  void set_run(Triple& t) {
    EngineTimeRun& run = t.run;
    run.engine = chance(2) ? TimedEngine::deepspeed : TimedEngine::fsdp2;
    const bool deepspeed = run.engine == TimedEngine::deepspeed;
    run.stage = deepspeed ? pick(4) : 2 + pick(2);
    run.tokens = {1 + pick(8), 128 << pick(7)};
    run.accumulation = 1 + pick(5);
    run.recompute = chance(2) ? TimedRecompute::full : TimedRecompute::none;
    run.optimizer = deepspeed ? OptimizerSoftware::deepspeed : OptimizerSoftware::torch_fused;
    const GpuSpec& gpu = t.machine.gpu;
    run.type = gpu.peak_bf16 ? DType::bf16 : gpu.peak_fp16 ? DType::fp16 : DType::fp32;
    run.reduction = deepspeed ? run.type : DType::fp32;
    run.fp32_gradients = chance(3);
    if (run.stage == 0) return;
    if (chance(3)) run.offload_optimizer = OffloadedOptimizer::host;
    if (run.stage == 3 && chance(4)) run.offload_parameters = true;
    if (!deepspeed) {
      if (run.offload_parameters) run.offload_optimizer = OffloadedOptimizer::host;
      if (chance(4) && t.machine.nodes > 1) run.shard_ranks = t.machine.gpus_per_node;
      return;
    }
    if (run.stage < 3) return;
    if (run.offload_optimizer == OffloadedOptimizer::host && chance(2)) {
      run.offload_optimizer = OffloadedOptimizer::nvme;
      run.pipelined_read = run.pipelined_write = chance(2);
    }
    run.quantized_weights = chance(4);
    run.quantized_gradients = chance(4);
    if (chance(4)) run.hpz_ranks = t.machine.gpus_per_node;
    if (chance(3)) run.max_reuse = chance(2) ? 0 : std::int64_t{1} << (20 + pick(15));
  }

  std::mt19937 random_;
  std::vector<ModelSpec> models_;
  std::vector<MachineSpec> machines_;
};

using Change = std::function<void(Triple&)>;
/// A change that must not make a step shorter.
struct Law {
  std::string_view name;
  Change change;
  std::function<bool(const Triple&)> applies = [](const Triple&) { return true; };
  bool exposed = false;  // holds when nothing hides: a collective more may hide where a shorter one did not
};

/// Collectives hide behind nothing and slow nothing.
EngineTimeFit without_overlap() {
  EngineTimeFit fit = builtin_engine_time_fit();
  fit.values[static_cast<std::size_t>(TimeFit::deepspeed_hidden)].value = 0;
  fit.values[static_cast<std::size_t>(TimeFit::contention)].value = 0;
  return fit;
}

bool several(const Triple& t) { return t.machine.ranks() > 1; }

std::vector<Law> laws() {
  const auto halve = [](BytesPerSecond& rate) { rate = rate / 2; };
  return {
      {"a longer batch", [](Triple& t) { t.run.tokens.batch += 1; }},
      {"longer sequences", [](Triple& t) { t.run.tokens.seq_len *= 2; }},
      {"a micro-step more", [](Triple& t) { t.run.accumulation += 1; }},
      {"a smaller micro-step more", [](Triple& t) { t.run.remainder_batch = 1; }},
      {"a slower network", [=](Triple& t) { halve(t.machine.network.bandwidth); },
       [](const Triple& t) { return t.machine.nodes > 1; }},
      {"slower NVLink", [=](Triple& t) { halve(t.machine.nvlink); },
       [](const Triple& t) { return t.machine.nvlink > BytesPerSecond(); }},
      {"slower PCIe", [=](Triple& t) { halve(t.machine.gpu.pcie); }},
      {"slower host memory", [=](Triple& t) { halve(t.machine.dram_bandwidth); },
       // qgZ without peer access: the graph's ring is bound by host memory where the measured one is not.
       [](const Triple& t) { return !t.run.quantized_gradients || t.machine.gpu.p2p_over_pcie.value_or(false); }},
      {"slower drives", [=](Triple& t) { halve(t.machine.nvme.read), halve(t.machine.nvme.write); }},
      {"slower GPU memory", [=](Triple& t) { halve(t.machine.gpu.memory_bandwidth); }},
      {"collectives twice as long", [](Triple& t) { t.run.collective_scale = 2; }},
      {"unpinned buffers", [](Triple& t) { t.run.pinned = t.run.pinned_parameters = false; }},
      // It brings the uses of a weight nearer to each other, so that ZeRO-3 may keep what it gave up.
      {"recompute", [](Triple& t) { t.run.recompute = TimedRecompute::full; },
       [](const Triple& t) {
         return t.run.engine != TimedEngine::deepspeed || t.run.stage < 3 || t.run.max_reuse == 0;
       }},
      {"fp32 gradients", [](Triple& t) { t.run.fp32_gradients = true; }},
      {"unfused attention", [](Triple& t) { t.run.attention = AttentionSoftware::unfused; }},
      {"no reuse of gathered weights", [](Triple& t) { t.run.max_reuse = 0; }},
      {"nothing persistent", [](Triple& t) { t.run.persistence = 0; }},
      {"a slower matmul", [](Triple& t) { t.run.matmul_efficiency = 0.1; }},
      {"optimizer on the host", [](Triple& t) { t.run.offload_optimizer = OffloadedOptimizer::host; },
       [](const Triple& t) {
         // A card hardly faster than its host's memory is no slower there.
         constexpr double kFaster = 4;
         const bool faster =
             t.machine.gpu.memory_bandwidth > kFaster * t.machine.dram_bandwidth / t.machine.gpus_per_node;
         return faster && t.run.stage > 0 && t.run.offload_optimizer == OffloadedOptimizer::none;
       }},
      {"optimizer on NVMe", [](Triple& t) { t.run.offload_optimizer = OffloadedOptimizer::nvme; },
       [](const Triple& t) {
         return t.run.engine == TimedEngine::deepspeed && t.run.stage == 3 &&
                t.run.offload_optimizer == OffloadedOptimizer::host;
       }},
      // With the optimizer on the host at stage 3, DeepSpeed's Adam is slower than with the weights there too
      // (docs/step-time.md), and the weights have to come back.
      {"parameters on the host", [](Triple& t) { t.run.offload_parameters = true; },
       [](const Triple& t) {
         return t.run.stage == 3 && t.run.engine == TimedEngine::deepspeed &&
                t.run.offload_optimizer == OffloadedOptimizer::none;
       }},
      {"resharding after forward", [](Triple& t) { t.run.stage = 3; },
       [](const Triple& t) { return several(t) && t.run.engine == TimedEngine::fsdp2 && t.run.stage == 2; }},
      // One micro-step moves as much at both stages: 2 P all-reduced and P gathered, P gathered twice and P reduced.
      {"ZeRO-3 for ZeRO-2", [](Triple& t) { t.run.stage = 3, t.run.max_reuse = 0; },
       [](const Triple& t) {
         return several(t) && t.run.engine == TimedEngine::deepspeed && t.run.stage == 2 && t.run.accumulation > 1 &&
                t.run.offload_optimizer == OffloadedOptimizer::none;
       },
       true},
  };
}

double model_utilisation(const Triple& t, const EngineTime& time) {
  const double flops =
      model_flops(*t.model, t.run.tokens, AttentionCount::causal).base() * static_cast<double>(t.run.accumulation);
  const GpuSpec& gpu = t.machine.gpu;
  const FlopsPerSecond peak = t.run.type == DType::fp32 ? gpu.peak_fp32.value_or(FlopsPerSecond())
                                                        : std::max(gpu.peak_bf16.value_or(FlopsPerSecond()),
                                                                   gpu.peak_fp16.value_or(FlopsPerSecond()));
  return flops / time.step.base() / peak.base();
}

/// What is wrong with one time by itself; "" when nothing is.
std::string flaw(const Triple& t, const EngineTime& time) {
  const std::pair<std::string_view, Seconds> parts[] = {{"compute", time.compute},
                                                        {"communication", time.exposed_communication},
                                                        {"host", time.host},
                                                        {"optimizer", time.optimizer},
                                                        {"offload", time.offload}};
  double sum = 0;
  for (const auto& [name, part] : parts) {
    if (!std::isfinite(part.base()) || part.base() < -1e-9 * time.step.base()) return std::string(name);
    sum += part.base();
  }
  if (!(time.step > Seconds()) || !std::isfinite(time.step.base())) return "step";
  if (std::abs(sum / time.step.base() - 1) > kSame) return "sum of parts";
  const double mfu = model_utilisation(t, time);
  if (!(mfu > 0 && mfu < 1)) return "utilisation " + std::to_string(mfu);
  const double kernels = (time.matmul + time.attention + time.streaming + time.head).base();
  if (std::abs(kernels / time.compute.base() - 1) > 1e-6) return "kernels do not sum to compute";
  return "";
}

struct Report {
  int tried = 0, refused = 0;
  std::map<std::string, int> broken;
  std::map<std::string, std::string> example;
  void add(const std::string& law, const Triple& t, double before, double after) {
    if (broken[law]++ > 0 && !example[law].empty()) return;
    example[law] = t.model->name + " on " + t.machine.name + " x " + std::to_string(t.machine.nodes) + ", " +
                   std::string(to_string(t.run.engine)) + " stage " + std::to_string(t.run.stage) + ", " +
                   std::to_string(before) + " -> " + std::to_string(after);
  }
};

Report examine(int triples, unsigned seed) {
  Report report;
  RandomTriples random(seed);
  const std::vector<Law> all = laws();
  const EngineTimeFit usual = builtin_engine_time_fit(), exposed = without_overlap();
  while (report.tried < triples) {
    const Triple t = random.next();
    EngineTime time;
    try {
      time = predict_engine_time(*t.model, t.machine, t.run);
    } catch (const InputError&) {
      ++report.refused;
      continue;
    }
    ++report.tried;
    if (const std::string wrong = flaw(t, time); !wrong.empty()) report.add(wrong, t, time.step.base(), 0);
    for (const Law& law : all) {
      if (!law.applies(t)) continue;
      Triple changed = t;
      law.change(changed);
      try {
        const EngineTimeFit& fit = law.exposed ? exposed : usual;
        const double before = predict_engine_time(*t.model, t.machine, t.run, fit).step.base();
        const double after = predict_engine_time(*changed.model, changed.machine, changed.run, fit).step.base();
        if (after < before * (1 - kSame)) report.add(std::string(law.name), t, before, after);
      } catch (const InputError&) {
        // Not every run exists after it.
      }
    }
  }
  return report;
}

void check_laws(int triples, unsigned seed) {
  const Report report = examine(triples, seed);
  CHECK(report.refused < report.tried);
  for (const auto& [law, count] : report.broken) {
    UNSCOPED_INFO(law << ": " << count << " of " << report.tried << ", first " << report.example.at(law));
  }
  CHECK(report.broken.empty());
}

}  // namespace

TEST_CASE("No change that costs something makes a step shorter, and every step is a time, on random triples") {
  check_laws(2500, 12);
}

TEST_CASE("The same on many", "[.slow]") { check_laws(60'000, 13); }

}  // namespace zeroplan::tests
