// ZeRO++ and ZeRO-3's gathers in a step: terms by hand, the coordinator's own count beside the rule, all-to-all on the
// graph, what is refused.

#include <algorithm>
#include <random>

#include "models/deepspeed_engine.h"
#include "models/engine_walk.h"
#include "models/error.h"
#include "sim/all_to_all.h"
#include "sim/engine_time_fetch.h"
#include "sim/engine_time_parts.h"
#include "tests/catch.h"

namespace zeroplan::tests {
namespace {

MachineSpec nodes_of(const std::string& gpu, int nodes, BytesPerSecond network) {
  MachineSpec machine;
  machine.name = gpu;
  machine.gpu = find_gpu(gpu);
  machine.gpus_per_node = 8;
  machine.nodes = nodes;
  machine.interconnect = Interconnect::nvswitch;
  machine.nvlink = machine.gpu.nvlink;
  machine.sockets = 2;
  machine.physical_cores = 96;
  machine.dram_bandwidth = 300.0_GBps;
  machine.network.nics = 8;
  machine.network.bandwidth = network;
  machine.network.kind = "InfiniBand";
  return machine;
}

EngineTimeRun stage3_run() {
  EngineTimeRun run;
  run.stage = 3;
  run.tokens = {1, 2048};
  run.recompute = TimedRecompute::full;
  return run;
}

double step_of(const ModelSpec& model, const MachineSpec& machine, const EngineTimeRun& run) {
  return predict_engine_time(model, machine, run).step.base();
}

ModelSpec small_llama(int layers) {
  return read_model(R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1001,
    "max_position_embeddings": 512, "tie_word_embeddings": false, "num_hidden_layers": )" +
                        std::to_string(layers) + "}",
                    "small.json");
}

/// Elements gathered in backward of the last step that DeepSpeed's engine records.
std::int64_t recorded_gathers(const ModelSpec& model, const EngineTimeRun& run, std::int64_t prefetch) {
  DeepSpeedJob job;
  job.ranks = 8;
  job.config.stage = 3;
  job.config.max_reuse = run.max_reuse;
  job.config.param_persistence = run.persistence;
  job.config.prefetch_bucket = prefetch;
  EagerOptions options;
  options.tokens = {1, 128};
  options.checkpointing = run.recompute == TimedRecompute::full;
  const EagerStep step = eager_step(model, options);
  EngineTape tape;
  record_run(*make_deepspeed_engine(step, job, tape), step,
             {deepspeed_steady_steps(job), job.accumulation, 32 << 20, {1, 128}}, tape);
  std::int64_t sum = 0;
  bool backward = false;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind == TapeKind::mark && op.mark == Mark::step_begin) sum = 0;
    if (op.kind == TapeKind::mark && op.mark == Mark::forward_end) backward = true;
    if (op.kind == TapeKind::mark && op.mark == Mark::backward_end) backward = false;
    if (op.kind != TapeKind::work || !backward) continue;
    const auto* collective = std::get_if<Collective>(&tape.works()[op.id]);
    if (collective != nullptr && collective->kind == CollectiveKind::all_gather) sum += collective->elements;
  }
  return sum;
}

double gathers_by_rule(const ModelSpec& model, const EngineTimeRun& run) {
  const std::vector<double> shares = gathers_in_backward(model, run);
  double sum = 0;
  for (const int kind : model.sequence) {
    const BlockKind& block = model.kinds[static_cast<std::size_t>(kind)];
    double weights = 0;
    for (const TensorSpec& tensor : block.tensors)
      if (tensor.shape.size() >= 2 && !tensor.tied) weights += static_cast<double>(tensor.elements());
    sum += shares[static_cast<std::size_t>(kind)] * weights;
  }
  return sum;
}

}  // namespace

TEST_CASE("Gathers in backward are those that DeepSpeed's coordinator makes, whatever it may keep") {
  constexpr std::int64_t kVectors = 1000;  // norms stay gathered
  std::mt19937 random(3);
  for (int i = 0; i < 24; ++i) {
    const ModelSpec model = small_llama(1 + static_cast<int>(random() % 5));
    EngineTimeRun run = stage3_run();
    run.recompute = random() % 2 == 0 ? TimedRecompute::full : TimedRecompute::none;
    run.max_reuse = std::int64_t{1} << (10 + random() % 14);
    run.persistence = random() % 4 == 0 ? 100'000 : kVectors;
    CAPTURE(i, model.num_layers, run.max_reuse, run.persistence, run.recompute);
    const double rule = gathers_by_rule(model, run);
    CHECK(rule == Approx(static_cast<double>(recorded_gathers(model, run, 0))));
    // A prefetch that reaches a later use keeps a weight that the rule gives up.
    CHECK(static_cast<double>(recorded_gathers(model, run, 200'000)) <= rule * (1 + 1e-9));
  }
}

TEST_CASE("Blocks above half the reuse distance are gathered again between recompute and backward") {
  EngineTimeRun run = stage3_run();
  run.early_stop = false;
  // 12 h^2 parameters: q, k, v as one of 3, out 1, up and down 4 each; the way back from up is 8 h^2.
  const ModelSpec model = find_model("gpt3-175b");
  const std::vector<double> shares = gathers_in_backward(model, run);
  const double layer = shares[static_cast<std::size_t>(model.sequence[1])];
  CHECK(layer == Approx(1 + 8.0 / 12));
  run.max_reuse = 10'000'000'000;
  CHECK(gathers_in_backward(model, run)[static_cast<std::size_t>(model.sequence[1])] < 1);
  const MachineSpec machine = nodes_of("A100-SXM4-80GB", 16, 100.0_GBps);
  EngineTimeRun keeps = run, drops = run;
  drops.max_reuse = 0;
  CHECK(step_of(model, machine, keeps) < step_of(model, machine, drops));
}

TEST_CASE("qwZ: an 8-bit value and an fp16 one for each gathered, and a cast where weights are not fp16") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = nodes_of("A100-SXM4-80GB", 1, 200.0_GBps);
  for (const DType type : {DType::fp16, DType::bf16}) {
    EngineTimeRun run = stage3_run();
    run.type = type;
    run.communicates = false;
    run.ranks = 8;
    run.max_reuse = 0;  // three gathers of a layer, one of embedding and head
    const EngineTime plain = predict_engine_time(model, machine, run);
    run.quantized_weights = true;
    const EngineTime quantized = predict_engine_time(model, machine, run);
    double layers = 0;
    for (const int kind : model.sequence) {
      const BlockKind& block = model.kinds[static_cast<std::size_t>(kind)];
      if (block.role == BlockRole::layer) layers += static_cast<double>(block.parameters());
    }
    const double share = gathers_in_backward(model, run)[static_cast<std::size_t>(model.sequence[1])];
    const double roots = static_cast<double>(model.parameters()) - layers;
    const double bytes = (type == DType::fp16 ? 3 : 7) * (layers * (1 + share) + roots);
    const double rate =
        machine.gpu.memory_bandwidth.base() * builtin_engine_time_fit()[TimeFit::memory_rate_hugging_face];
    CHECK((quantized.compute - plain.compute).base() == Approx(bytes / rate).epsilon(1e-6));
    CHECK(share == Approx(2).epsilon(0.35));
  }
}

TEST_CASE(
    "qwZ halves what a slow network carries of gathers; hpZ leaves it one gather a step; qgZ quarters gradients") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = nodes_of("H100-SXM5-80GB", 4, 2.0_GBps);
  // Time of one more micro-step of a run that the network decides.
  const auto more = [&](EngineTimeRun run) {
    run.accumulation = 4;
    const double four = step_of(model, machine, run);
    run.accumulation = 5;
    return step_of(model, machine, run) - four;
  };
  EngineTimeRun run = stage3_run();
  run.max_reuse = 0;
  const double plain = more(run);
  EngineTimeRun weights = run, secondary = run, gradients = run, all = run;
  weights.quantized_weights = true;
  secondary.hpz_ranks = 8;
  gradients.quantized_gradients = true;
  all.quantized_weights = all.quantized_gradients = true;
  all.hpz_ranks = 8;
  // Forward one gather, backward up to two, one reduction, all of two bytes a parameter.
  const double share = gathers_in_backward(model, run)[static_cast<std::size_t>(model.sequence[1])];
  const double traffic = 1 + share + 1;
  CHECK(more(weights) / plain == Approx((0.5 * (1 + share) + 1) / traffic).epsilon(0.1));
  CHECK(more(secondary) / plain == Approx(1 / traffic).epsilon(0.2));
  CHECK(more(gradients) / plain == Approx((1 + share + 0.25 / 8) / traffic).epsilon(0.1));
  CHECK(more(all) < 0.2 * plain);
  // The first forward of a step gathers over all ranks.
  secondary.accumulation = 1;
  CHECK(step_of(model, machine, secondary) > 1.5 * more(secondary));
}

TEST_CASE("A matrix under qgZ: kernels and four exchanges, two in the node and two between nodes") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = nodes_of("H100-SXM5-80GB", 4, 400.0_GBps);
  EngineTimeRun run = stage3_run();
  run.quantized_gradients = true;
  EngineTimeFit fit = builtin_engine_time_fit();
  // Leave the network as the collective model has it.
  fit.values[static_cast<std::size_t>(TimeFit::deepspeed_network_hopper)].value = 0.87;
  const EngineTimeContext context(model, machine, run, fit);
  BlockKind block;
  TensorSpec matrix;
  matrix.shape = {4096, 1024};
  block.tensors = {matrix};
  const CollectiveModel waited(machine, CollectiveSetting::in_step), at_once(machine, CollectiveSetting::queued);
  const auto sent = [](const CollectiveModel& how, double bytes, RankGroup group) {
    return how.cost(CollectiveKind::reduce_scatter, Bytes(bytes), group).alone().base();
  };
  const double n = 4096.0 * 1024, held = n / 8;
  const double bytes = 2.5 * n + 0.5 * n + 0.5 * held + 2.5 * held + 5 * 6 * held / 4;
  const double kernels = bytes / context.rates.streaming.base();
  const RankGroup inside{8, 1, 8}, between{4, 4, 1};
  const double exchanges = sent(waited, n / 2, inside) + sent(at_once, 4 * 4096.0, inside) +
                           sent(waited, held / 2, between) + sent(at_once, 4 * 4096.0 / 8, between);
  CHECK(context.reduce_exchanged(block).base() == Approx(kernels + exchanges).epsilon(1e-9));
  // A frozen one is not reduced; one that two hops cannot cut is reduce-scattered.
  block.tensors[0].trainable = false;
  CHECK(context.reduce_exchanged(block) == Seconds());
  block.tensors[0].trainable = true;
  block.tensors[0].shape = {4095, 1023};
  CHECK(context.reduce_exchanged(block).base() == Approx(sent(at_once, 2 * 4095.0 * 1023, {32, 4, 8})));
}

TEST_CASE("On one node qgZ changes nothing, hpZ and qwZ win nothing") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = nodes_of("H100-SXM5-80GB", 1, 0.0_GBps);
  EngineTimeRun run = stage3_run();
  const double plain = step_of(model, machine, run);
  EngineTimeRun gradients = run, secondary = run;
  gradients.quantized_gradients = true;
  CHECK(step_of(model, machine, gradients) == plain);
  secondary.hpz_ranks = 8;
  CHECK(step_of(model, machine, secondary) >= plain * (1 - 1e-12));  // the same sum, in another order
  run.ranks = 1;
  EngineTimeRun alone = run;
  alone.quantized_weights = true;
  CHECK(step_of(model, machine, alone) == step_of(model, machine, run));
}

TEST_CASE("An all-to-all fills a switch like a ring, and the way between two sockets more") {
  MachineSpec machine = nodes_of("A100-SXM4-80GB", 1, 0.0_GBps);
  const auto beyond = [&](int inside) { return (all_to_all_beyond_ring(machine, inside) * Bytes(1e9)).base(); };
  CHECK(beyond(8) == 0);
  CHECK(beyond(1) == 0);
  //   0 1 2 3 - socket 0 = socket 1 - 4 5 6 7: of parts of 1/8, 4 x 4 pairs cross each way, of a ring one part of 7/8.
  machine = find_machine("server-8xA100-PCIe");
  const double link = machine.socket_link.base() / 1e9;
  machine.socket_link = BytesPerSecond(1e9);
  CHECK(beyond(8) == Approx(16.0 / 8 - 7.0 / 8));
  CHECK(beyond(4) == Approx(0));
  // As the catalog has the link: near the 0.0268 s a GB that 8 A100 PCIe were seen to take beyond their ring.
  machine.socket_link = BytesPerSecond(link * 1e9);
  CHECK(beyond(8) > 0.0268 / 3);
  CHECK(beyond(8) < 0.0268 * 3);
}

TEST_CASE("Between nodes DeepSpeed gets its share of the NICs, for plans and for the steps that are played") {
  const double share = builtin_engine_time_fit()[TimeFit::deepspeed_network_ampere];
  const MachineSpec machine = nodes_of("A100-SXM4-80GB", 4, 100.0_GBps);
  CHECK(deepspeed_network(machine).network.bandwidth.base() == Approx(share / 0.87 * 100e9));
  const MachineSpec alone = nodes_of("A100-SXM4-80GB", 1, 100.0_GBps);
  CHECK(deepspeed_network(alone) == alone);
}

TEST_CASE("ZeRO++ is refused where DeepSpeed has none of it") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = nodes_of("H100-SXM5-80GB", 4, 400.0_GBps);
  const auto refuses = [&](const EngineTimeRun& run, const std::string& reason) {
    try {
      predict_engine_time(model, machine, run);
      FAIL("expected: " << reason);
    } catch (const InputError& error) {
      CHECK_THAT(error.what(), HasText(reason));
    }
  };
  EngineTimeRun run = stage3_run();
  run.quantized_weights = true;
  run.stage = 2;
  refuses(run, "expected DeepSpeed's stage 3");
  run.stage = 3;
  run.engine = TimedEngine::fsdp2;
  refuses(run, "expected DeepSpeed's stage 3");
  run.engine = TimedEngine::deepspeed;
  run.shard_ranks = 8;
  refuses(run, "without MiCS");
  run = stage3_run();
  run.hpz_ranks = 3;
  refuses(run, "divides 32 ranks");
  run.hpz_ranks = 32;
  CHECK(step_of(model, machine, run) > 0);
  const EngineTime time = predict_engine_time(model, machine, run);
  CHECK(std::any_of(time.assumptions.begin(), time.assumptions.end(), [](const Assumption& a) {
    return a.what == "step time of ZeRO++" && a.source.find("none has one alone") != std::string::npos;
  }));
}

}  // namespace zeroplan::tests
