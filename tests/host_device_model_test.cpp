// Costs on a host that is the device: figures by hand, ranks that share cores, estimate and simulation.

#include "sim/host_device_model.h"

#include "models/error.h"
#include "models/lower.h"
#include "models/overloaded.h"
#include "sim/estimate.h"
#include "sim/simulate.h"
#include "tests/catch.h"
#include "tests/host_machine.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

const ModelSpec& tiny_llama() {
  static const ModelSpec model = read_model(
      R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
          "hidden_act": "silu", "rms_norm_eps": 1e-5})",
      "tiny");
  return model;
}

Plan tiny_plan(int ranks, int stage) {
  Plan plan;
  plan.ranks = ranks;
  plan.zero_stage = stage;
  plan.shard_ranks = stage == 0 ? 1 : ranks;
  plan.seq_len = 64;
  const int blocks = static_cast<int>(tiny_llama().sequence.size());
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, blocks);
  return plan;
}

HostDeviceModel model_of(int cores, int ranks) {
  return HostDeviceModel(host_machine(cores, ranks), ranks, DType::bf16, &tiny_llama());
}

Work clear(Bytes bytes) { return Compute{-1, kZero, Pass::backward, Pointwise{bytes}}; }

TEST_CASE("One rank on one core: a kernel takes its call and its elements") {
  const Demand d = model_of(1, 1).demand(clear(Bytes(4096)));
  CHECK_THAT(d.alone().base(), WithinRel(1e-6 + 4096e-9, 1e-12));
  CHECK(d.limit() == ResourceRole::sm);
}

TEST_CASE("A pool halves long work and leaves short work alone") {
  const double shortest = 1e-6 + 4096e-9;  // below what a thread takes to wake up
  CHECK_THAT(model_of(2, 1).demand(clear(Bytes(4096))).alone().base(), WithinRel(shortest, 1e-12));
  const double single = 1e-6 + (1 << 19) * 1e-9;
  // One thread comes 10 us late; two are 1.8 times one.
  CHECK_THAT(model_of(2, 1).demand(clear(Bytes(1 << 19))).alone().base(), WithinRel((single + 10e-6) / 1.8, 1e-12));
}

TEST_CASE("Ranks beyond the cores take turns") {
  const Work work = clear(Bytes(1 << 19));
  const double single = 1e-6 + (1 << 19) * 1e-9;
  CHECK_THAT(model_of(4, 4).demand(work).alone().base(), WithinRel(single * 4 / 3.6, 1e-12));
  CHECK_THAT(model_of(4, 8).demand(work).alone().base(), WithinRel(single * 8 / 3.6, 1e-12));
  CHECK(model_of(4, 8).demand(work).limit() == ResourceRole::cpu);
  CHECK_THAT(model_of(8, 2).demand(work)[ResourceRole::cpu].base(), WithinRel(2 * single / 7.2, 1e-12));
}

TEST_CASE("Collectives lie between the measured sizes and rank counts") {
  const auto seconds = [](int ranks, std::int64_t bytes) {
    const Collective c{CollectiveKind::all_gather, Group::shard, bytes / 2, bytes / 2, DType::bf16};
    const HostDeviceModel model = model_of(8, ranks);
    return (model.demand(c).alone() - model.handoff(c)).base();
  };
  CHECK_THAT(seconds(2, 1024), WithinRel(10e-6, 1e-12));
  CHECK_THAT(seconds(2, 1 << 20), WithinRel(200e-6, 1e-12));
  CHECK_THAT(seconds(4, 1 << 20), WithinRel(400e-6, 1e-12));
  CHECK_THAT(seconds(3, 1 << 20), WithinRel(300e-6, 1e-12));
  CHECK_THAT(seconds(8, 1 << 20), WithinRel(800e-6, 1e-12));
  CHECK_THAT(seconds(2, 1 << 21), WithinRel(400e-6, 1e-12));
  const double middle = seconds(2, 1 << 19);
  CHECK(middle > 100e-6);
  CHECK(middle < 200e-6);
  CHECK(seconds(1, 1024) == 0);
}

TEST_CASE("A kernel that was not probed, or a model that the host cannot run, is an input error") {
  MachineSpec machine = host_machine(2, 1);
  std::erase_if(machine.host_kernels->kernels, [](const HostKernelTime& t) { return t.kernel == "clear"; });
  const HostDeviceModel without(machine, 1, DType::bf16, &tiny_llama());
  CHECK_THROWS_WITH(without.demand(clear(Bytes(64))), HasText("no \"clear\" in u8"));
  const HostDeviceModel nobody(host_machine(2, 1), 1, DType::bf16, nullptr);
  const Schedule schedule = lower(tiny_llama(), tiny_plan(1, 0), Folding::layers);
  const auto needs_model = [](const Work& work) {
    const auto* compute = std::get_if<Compute>(&work);
    return compute != nullptr && compute->graph_op >= 0;
  };
  const auto of_graph = std::ranges::find_if(schedule.works(), needs_model);
  CHECK_THROWS_AS(nobody.demand(*of_graph), std::logic_error);
}

TEST_CASE("Every op that takes time has a cost, and a lone op takes what the estimate says") {
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      Plan plan = tiny_plan(ranks, stage);
      const MachineSpec machine = host_machine(2, ranks);
      const Schedule flat = lower(tiny_llama(), plan, Folding::none);
      const MachineCostModel cost(machine, plan.shard_ranks, DType::bf16, &tiny_llama());
      const std::vector<Demand> all = demands(flat, cost);
      for (std::size_t w = 0; w < all.size(); ++w) {
        const bool takes_time =
            std::visit(overloaded{[](const Alloc&) { return false; }, [](const Free&) { return false; },
                                  [](const Join&) { return false; }, [&](const Collective&) { return ranks > 1; },
                                  [](const auto&) { return true; }},
                       flat.works()[w]);
        REQUIRE((all[w].alone() > Seconds()) == takes_time);
        if (!takes_time) continue;
        ScheduleBuilder builder;
        builder.add(Stream::compute, Phase::forward, -1, builder.work(flat.works()[w]), {}, {});
        const Schedule lone = builder.finish();
        const std::vector<Demand> own = demands(lone, cost);
        REQUIRE_THAT(simulate(lone, own, machine, plan.shard_ranks).step.base(),
                     WithinRel(Estimator().run(lone, own).step.base(), 1e-12));
      }
    }
  }
}

TEST_CASE("A step takes no less than the estimate, nor than its cores need") {
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 3}) {
      const Plan plan = tiny_plan(ranks, stage);
      const MachineSpec machine = host_machine(2, ranks);
      const Schedule flat = lower(tiny_llama(), plan, Folding::none);
      const MachineCostModel cost(machine, plan.shard_ranks, DType::bf16, &tiny_llama());
      const std::vector<Demand> all = demands(flat, cost);
      const Estimate estimate = Estimator().run(flat, all);
      SimulateOptions options;
      options.ranks = SimulatedRanks::all;
      options.with_trace = true;
      const Simulation simulation = simulate(flat, all, machine, plan.shard_ranks, options);
      INFO(ranks << " ranks, stage " << stage);
      CHECK(simulation.step >= estimate.step * (1 - 1e-9));
      const Seconds cores = estimate.role_busy[static_cast<std::size_t>(ResourceRole::cpu)];
      CHECK(simulation.step >= cores * (1 - 1e-9));
      for (const ResourceUse& use : simulation.resources) CHECK(use.utilisation <= 1 + 1e-9);
    }
  }
}

TEST_CASE("Offloaded plans: copies, the host's Adam and the disk have costs") {
  Plan plan = tiny_plan(2, 3);
  const int blocks = plan.optimizer.total();
  plan.gradients = Tier::host;
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    plan.optimizer = Placement::all(tier, blocks);
    const MachineSpec machine = host_machine(2, 2);
    const Schedule flat = lower(tiny_llama(), plan, Folding::none);
    const MachineCostModel cost(machine, 2, DType::bf16, &tiny_llama());
    const std::vector<Demand> all = demands(flat, cost);
    CHECK(simulate(flat, all, machine, 2).step > Seconds());
    for (std::size_t w = 0; w < all.size(); ++w) {
      const auto* copy = std::get_if<Copy>(&flat.works()[w]);
      if (copy != nullptr) REQUIRE(all[w].alone() > Seconds());
    }
  }
}

}  // namespace
}  // namespace zeroplan::tests
