// Step times of DeepSpeed and FSDP: every term by hand, laws on generated runs, what is refused.

#include "sim/engine_time.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "models/error.h"
#include "sim/collective_model.h"
#include "sim/engine_time_parts.h"
#include "sim/engine_time_work.h"
#include "sim/host_model.h"
#include "tests/catch.h"
#include "tests/processor_time.h"

namespace zeroplan::tests {
namespace {

constexpr double kSame = 1e-9;

MachineSpec node_of(const std::string& gpu, int gpus, int nodes = 1) {
  MachineSpec machine;
  machine.name = gpu;
  machine.gpu = find_gpu(gpu);
  machine.gpus_per_node = gpus;
  machine.nodes = nodes;
  machine.interconnect = gpus == 1 ? Interconnect::single : Interconnect::nvswitch;
  machine.nvlink = machine.gpu.nvlink;
  machine.sockets = 2;
  machine.physical_cores = 96;
  machine.dram_bandwidth = 300.0_GBps;
  machine.network.nics = 8;
  machine.network.bandwidth = 400.0_GBps;
  machine.network.kind = "InfiniBand";
  return machine;
}

/// One H200 whose peers are fakes: no communication, so that terms stand alone.
EngineTimeRun alone(TimedEngine engine, std::int64_t batch, std::int64_t seq) {
  EngineTimeRun run;
  run.engine = engine;
  run.stage = engine == TimedEngine::deepspeed ? 2 : 3;
  run.tokens = {batch, seq};
  run.ranks = 8;
  run.communicates = false;
  run.optimizer = engine == TimedEngine::deepspeed ? OptimizerSoftware::deepspeed : OptimizerSoftware::torch_fused;
  return run;
}

EngineTimeFit with(TimeFit key, double value) {
  EngineTimeFit fit = builtin_engine_time_fit();
  fit.values[static_cast<std::size_t>(key)].value = value;
  return fit;
}

double sum(const EngineTime& t) {
  return (t.compute + t.exposed_communication + t.host + t.optimizer + t.offload).base();
}

constexpr double kH200Memory = 4800e9, kH200Peak = 989e12;
// Llama-2 7B
constexpr double kLayers = 32, kHidden = 4096, kWidth = 11008, kVocabulary = 32000, kLayerParameters = 202383360,
                 kParameters = 6738415616;

}  // namespace

TEST_CASE(
    "Streaming kernels of a Llama layer move 84 h + 10 f + 20 (q + k) bytes a token forward, 132, 16, 24 backward") {
  const ModelSpec model = find_model("llama-2-7b");
  const EngineTimeFit fit = with(TimeFit::memory_rate_hugging_face, 0.5);
  EngineTimeRun run = alone(TimedEngine::deepspeed, 4, 2048);
  const EngineTime time = predict_engine_time(model, node_of("H200-SXM-141GB", 1), run, fit);
  const double forward = 84 * kHidden + 10 * kWidth + 20 * 2 * kHidden;
  const double backward = 132 * kHidden + 16 * kWidth + 24 * 2 * kHidden;
  const double copies = 8 * kLayerParameters;
  const double bytes = kLayers * (8192 * (forward + backward) + copies);
  CHECK_THAT(time.streaming.base(), WithinRel(bytes / (0.5 * kH200Memory), kSame));
  run.recompute = TimedRecompute::full;
  const EngineTime again = predict_engine_time(model, node_of("H200-SXM-141GB", 1), run, fit);
  CHECK_THAT((again.streaming - time.streaming).base(),
             WithinRel(kLayers * 8192 * forward / (0.5 * kH200Memory), kSame));
}

TEST_CASE(
    "Fused attention does 4 s h T / 2 FLOPs forward, at its share of the peak, an exponential a score, and 2.5 times "
    "that backward") {
  const ModelSpec model = find_model("llama-2-7b");
  EngineTimeFit fit = builtin_engine_time_fit();
  for (AttentionEfficiency& each : fit.attention)
    each.value = each.arch == "Hopper" && each.kernel == "SDPA" ? 0.4 : 0.1;
  EngineTimeRun run = alone(TimedEngine::fsdp2, 2, 4096);
  const double forward = 4.0 * 4096 * kHidden * 8192 * (4097.0 / 8192);
  // A Hopper multiprocessor: 4096 FLOPs of products and 16 exponentials a clock, 4 x 128 FLOPs a score.
  const double rate = kH200Peak / (1 / 0.4 + 4096.0 / 16 / (4 * 128));
  const MachineSpec machine = node_of("H200-SXM-141GB", 1);
  CHECK_THAT(predict_engine_time(model, machine, run, fit).attention.base(),
             WithinRel(kLayers * forward * 3.5 / rate, kSame));
  run.recompute = TimedRecompute::full;
  CHECK_THAT(predict_engine_time(model, machine, run, fit).attention.base(),
             WithinRel(kLayers * forward * 4.5 / rate, kSame));
  run.recompute = TimedRecompute::selective;  // its output is kept
  CHECK_THAT(predict_engine_time(model, machine, run, fit).attention.base(),
             WithinRel(kLayers * forward * 3.5 / rate, kSame));
}

TEST_CASE("A GPU without fused attention computes all scores and moves each ten bytes") {
  const ModelSpec model = find_model("gpt2-xl");
  EngineTimeFit fit = with(TimeFit::unfused_attention_rate, 0.25);
  fit.values[static_cast<std::size_t>(TimeFit::memory_rate_hugging_face)].value = 0.5;
  EngineTimeRun run = alone(TimedEngine::deepspeed, 2, 1024);
  run.type = DType::fp16;
  const EngineTime time = predict_engine_time(model, node_of("V100-SXM2-32GB", 1), run, fit);
  const double scores = 25.0 * 1024 * 2048;
  const double matmul = 4 * 64 * scores / (0.25 * 125e12);
  const double traffic = 10 * scores / (0.5 * 900e9);
  CHECK_THAT(time.attention.base(), WithinRel(48 * (matmul * 3 + traffic * 2.3), kSame));
}

TEST_CASE(
    "Exponentials take a larger part of attention with small heads, and a smaller one on GPUs of slower products") {
  CHECK(exponential_dims(find_gpu("H200-SXM-141GB")) == 64);
  CHECK(exponential_dims(find_gpu("A100-SXM4-80GB")) == 32);
  CHECK(exponential_dims(find_gpu("B200-SXM-180GB")) == 128);
  CHECK(exponential_dims(find_gpu("B300-SXM-288GB")) == 64);  // twice the special functions
  CHECK(exponential_dims(find_gpu("L40S")) == 16);
  CHECK(exponential_dims(find_gpu("A10G")) == 8);  // 70 of GA102's 140 TFLOP/s
  CHECK(exponential_dims(find_gpu("RTX-4090")) == Approx(8).epsilon(0.01));
  CHECK(exponential_dims(find_gpu("H20-96GB")) == Approx(13.45).epsilon(0.01));
  CHECK(exponential_dims(find_gpu("V100-SXM2-32GB")) == 0);  // no fused kernel runs there
}

TEST_CASE("Eager attention moves 16 bytes a score forward and 18 backward, twice that around bf16 softmax in fp32") {
  const auto attention = [](const std::string& name, DType type,
                            AttentionSoftware software = AttentionSoftware::eager) {
    EngineTimeFit fit = with(TimeFit::memory_rate_scores, 0.5);
    fit.values[static_cast<std::size_t>(TimeFit::unfused_attention_rate)].value = 0.25;
    EngineTimeRun run = alone(TimedEngine::deepspeed, 2, 1024);
    run.attention = software;
    run.type = type;
    run.matmul_efficiency = 0.25;
    return predict_engine_time(find_model(name), node_of("H200-SXM-141GB", 1), run, fit).attention.base();
  };
  const auto expected = [](double layers, double heads, double width, double bytes, double peak) {
    const double scores = layers * heads * 1024 * 2048;
    return 3 * 4 * width * scores / (0.25 * peak) + bytes * scores / (0.5 * kH200Memory);
  };
  CHECK_THAT(attention("gpt2-xl", DType::bf16), WithinRel(expected(48, 25, 64, 34, kH200Peak), kSame));
  CHECK_THAT(attention("llama-2-7b", DType::bf16), WithinRel(expected(32, 32, 128, 68, kH200Peak), kSame));
  CHECK_THAT(attention("llama-2-7b", DType::fp16), WithinRel(expected(32, 32, 128, 34 + 18, kH200Peak), kSame));
  const double fp32 = find_gpu("H200-SXM-141GB").peak_fp32->base();
  CHECK_THAT(attention("llama-2-7b", DType::fp32), WithinRel(expected(32, 32, 128, 68, fp32), kSame));
  // SDPA has nothing better for grouped heads in fp32.
  CHECK_THAT(attention("tinyllama-1.1b", DType::fp32, AttentionSoftware::sdpa),
             WithinRel(expected(22, 32, 64, 68, fp32), kSame));
}

TEST_CASE("Alone on its host, DeepSpeed's backward takes a share of the forward's ops and a hook a tensor") {
  const ModelSpec model = find_model("tinyllama-1.1b");
  EngineTimeFit fit = with(TimeFit::host_op, 100);
  fit.values[static_cast<std::size_t>(TimeFit::host_op_backward)].value = 0.5;
  fit.values[static_cast<std::size_t>(TimeFit::host_hook_deepspeed)].value = 200;
  EngineTimeRun run = alone(TimedEngine::deepspeed, 1, 16);  // no kernels to speak of
  const EngineTime time = predict_engine_time(model, node_of("H200-SXM-141GB", 1), run, fit);
  CHECK_THAT((time.compute + time.host).base(), WithinRel(22 * (40 * 150e-6 + 9 * 200e-6), 0.1));
  run.stage = 0;  // no hooks
  const EngineTime unhooked = predict_engine_time(model, node_of("H200-SXM-141GB", 1), run, fit);
  CHECK_THAT((time.compute + time.host - unhooked.compute - unhooked.host).base(), WithinRel(22 * 9 * 200e-6, 1e-6));
  run.stage = 2;
  run.recompute = TimedRecompute::full;
  const EngineTime again = predict_engine_time(model, node_of("H200-SXM-141GB", 1), run, fit);
  CHECK_THAT((again.compute + again.host - time.compute - time.host).base(), WithinRel(22 * 40 * 100e-6, 0.02));
}

TEST_CASE("Matmuls take FLOPs over the efficiency, and recompute stops before the last linear") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = node_of("A100-SXM4-80GB", 1);
  EngineTimeRun run = alone(TimedEngine::fsdp2, 8, 2048);
  run.matmul_efficiency = 0.7;
  const EngineTime once = predict_engine_time(model, machine, run);
  const double linear = kLayerParameters - 2 * kHidden;
  const double flops = kLayers * 6 * 16384 * linear;
  // Shapes cost a few percent over the flat rate, nothing is faster than it.
  CHECK(once.matmul.base() >= flops / (0.7 * 312e12));
  CHECK(once.matmul.base() <= 1.12 * flops / (0.7 * 312e12));
  run.matmul_efficiency = 0.35;
  CHECK_THAT(predict_engine_time(model, machine, run).matmul.base(), WithinRel(2 * once.matmul.base(), 1e-6));
  run.matmul_efficiency = 0.7;
  run.recompute = TimedRecompute::full;
  run.early_stop = false;
  const double whole = (predict_engine_time(model, machine, run).matmul - once.matmul).base();
  run.early_stop = true;
  const double stopped = (predict_engine_time(model, machine, run).matmul - once.matmul).base();
  const double last = kHidden * kWidth / linear;
  CHECK_THAT(stopped, WithinRel(whole * (1 - last), kSame));
  CHECK(last == Approx(0.2228).margin(1e-4));  // step-time.md: Llama repeats 0.78
}

TEST_CASE("The optimizer streams its bytes a local parameter") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = node_of("H200-SXM-141GB", 1);
  EngineTimeFit fit = with(TimeFit::optimizer_fused, 50);
  fit.values[static_cast<std::size_t>(TimeFit::optimizer_start)].value = 6;
  EngineTimeRun run = alone(TimedEngine::fsdp2, 1, 2048);
  CHECK_THAT(predict_engine_time(model, machine, run, fit).optimizer.base(),
             WithinRel(kParameters / 8 * 50 / kH200Memory + 0.006, kSame));
  run.shard_ranks = 2;  // HSDP: states are shared by the ranks of one copy
  CHECK_THAT(predict_engine_time(model, machine, run, fit).optimizer.base(),
             WithinRel(kParameters / 2 * 50 / kH200Memory + 0.006, kSame));
  fit = with(TimeFit::optimizer_deepspeed, 150);
  fit.values[static_cast<std::size_t>(TimeFit::optimizer_tensor_deepspeed)].value = 0.11;
  const double tensors = (32 * 9 + 3) * 0.11e-3;
  // Two norms, seven matrices a layer; embedding, final norm, head: stage 0 in 16 bits visits each.
  EngineTimeRun plain = alone(TimedEngine::deepspeed, 1, 2048);
  plain.stage = 0;
  const Seconds visited = predict_engine_time(model, machine, plain, fit).optimizer;
  EngineTimeFit at_once = fit;
  at_once.values[static_cast<std::size_t>(TimeFit::optimizer_tensor_deepspeed)].value = 0;
  CHECK_THAT((visited - predict_engine_time(model, machine, plain, at_once).optimizer).base(),
             WithinRel(tensors, 1e-6));
  fit.values[static_cast<std::size_t>(TimeFit::optimizer_deepspeed_all)].value = 4;
  fit.values[static_cast<std::size_t>(TimeFit::optimizer_start_deepspeed)].value = 10;
  CHECK_THAT(predict_engine_time(model, machine, alone(TimedEngine::deepspeed, 1, 2048), fit).optimizer.base(),
             WithinRel(kParameters * (150.0 / 8 + 4) / kH200Memory + 0.010 + tensors / 8, kSame));
}

TEST_CASE("The loss moves its bytes a token a vocabulary entry") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = node_of("H200-SXM-141GB", 1);
  EngineTimeRun run = alone(TimedEngine::deepspeed, 1, 4096);
  CHECK(loss_bytes(run) == 36);
  const Seconds plain = predict_engine_time(model, machine, run).head;
  run.chunked_loss = true;
  CHECK(loss_bytes(run) == 24);
  const double rate = builtin_engine_time_fit()[TimeFit::memory_rate_hugging_face] * kH200Memory;
  CHECK_THAT((plain - predict_engine_time(model, machine, run).head).base(),
             WithinRel(12 * kVocabulary * 4096 / rate, 1e-6));
  run.stack = KernelStack::compiled_blocks;
  CHECK(loss_bytes(run) == 20);
}

TEST_CASE("Few tokens leave the host as the limit: ops of the layer times the time of one") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = node_of("H200-SXM-141GB", 1);
  EngineTimeFit fit = with(TimeFit::host_op, 100);
  fit.values[static_cast<std::size_t>(TimeFit::host_fsdp2_hugging_face)].value = 2;
  EngineTimeRun run = alone(TimedEngine::fsdp2, 1, 64);
  const EngineTime time = predict_engine_time(model, machine, run, fit);
  CHECK(time.limit == StepLimit::host);
  const double layer = 40 * 100e-6 + 2e-3;  // 40 ops a Llama layer
  CHECK_THAT((time.forward + time.backward - time.head).base(), WithinRel(kLayers * 2 * layer, kSame));
  run.recompute = TimedRecompute::full;  // backward issues the forward again
  const EngineTime again = predict_engine_time(model, machine, run, fit);
  CHECK_THAT((again.forward + again.backward - again.head).base(), WithinRel(kLayers * 3 * layer, kSame));
}

TEST_CASE("A layer takes the ops that were counted for its family") {
  const auto ops = [](const std::string& name, KernelStack stack) {
    const ModelSpec model = find_model(name);
    const GpuModel gpu(find_gpu("A100-SXM4-80GB"));
    EngineTimeRun run = alone(TimedEngine::deepspeed, 1, 128);
    run.stack = stack;
    KernelRates rates;
    rates.gpu = &gpu;
    rates.fused_attention = rates.unfused_attention = 100.0_TFLOPS;
    rates.streaming = rates.scores = 1000.0_GBps;
    for (const BlockKind& kind : model.kinds)
      if (kind.role == BlockRole::layer)
        return layer_work(kind, run, run.tokens, rates, builtin_engine_time_fit()).host_ops;
    return 0.0;
  };
  CHECK(ops("llama-2-7b", KernelStack::hugging_face) == 40);
  CHECK(ops("opt-6.7b", KernelStack::hugging_face) == 28);
  CHECK(ops("gpt2-xl", KernelStack::hugging_face) == 30);
  CHECK(ops("mpt-7b", KernelStack::composer) == Approx(16).epsilon(0.01));
  CHECK(ops("llama-2-7b", KernelStack::compiled_blocks) == Approx(40 * 0.35));
}

TEST_CASE("CPU Adam: a node's parameters over its rate, gradients down in backward, weights up") {
  const ModelSpec model = find_model("llama-2-7b");
  MachineSpec machine = node_of("A100-SXM4-80GB", 8);
  const EngineTimeFit fit = with(TimeFit::pcie_rate, 0.8);
  EngineTimeRun run = alone(TimedEngine::deepspeed, 4, 2048);
  run.ranks = 8;
  run.offload_optimizer = OffloadedOptimizer::host;
  run.host_adam = 5e9;
  const double link = 0.8 * 31.5e9, local = kParameters / 8;
  // A fake process group is one rank on its host.
  CHECK_THAT(predict_engine_time(model, machine, run, fit).offload.base(),
             WithinRel(local / 5e9 + local * 2 / link + local * 4 / link, 1e-6));
  run.communicates = true;
  CHECK_THAT(predict_engine_time(model, machine, run, fit).offload.base(),
             WithinRel(kParameters / 5e9 + local * 2 / link + local * 4 / link, 1e-6));
  run.accumulation = 3;  // gradients go down in every micro-step
  CHECK_THAT(predict_engine_time(model, machine, run, fit).offload.base(),
             WithinRel(kParameters / 5e9 + local * 2 / link + 3 * local * 4 / link, 1e-6));
  run.host_adam.reset();
  const HostModel host(machine);
  const double rate = 1e9 / host.alone(host.adam(1'000'000'000, AdamTypes{})).base() * fit[TimeFit::cpu_adam_deepspeed];
  CHECK_THAT(predict_engine_time(model, machine, run, fit).offload.base(),
             WithinRel(kParameters / rate + local * 2 / link + 3 * local * 4 / link, 1e-6));
  run.accumulation = 1;
  run.host_adam = 5e9;
  run.tensor_parallel = 2;  // eight GPUs still hold all parameters of the node
  run.ranks = 4;
  CHECK_THAT(predict_engine_time(model, machine, run, fit).offload.base(),
             WithinRel(kParameters / 5e9 + local * 2 / link + local * 4 / link, 1e-6));
}

TEST_CASE("DeepSpeed's share of a network is of InfiniBand's; other networks keep their ratio to it") {
  const ModelSpec model = find_model("llama-2-7b");
  MachineSpec machine = node_of("A100-SXM4-80GB", 8, 2);
  EngineTimeRun run = alone(TimedEngine::deepspeed, 4, 2048);
  run.communicates = true;
  run.ranks = 16;
  // 0.87 of the NICs' sum on InfiniBand, 0.83 with RoCE (nccl.md section 5): RoCE needs 0.87 / 0.83 times the NICs.
  const double infiniband = predict_engine_time(model, machine, run).exposed_communication.base();
  machine.network.kind = "RoCE";
  CHECK(predict_engine_time(model, machine, run).exposed_communication.base() > 1.01 * infiniband);
  machine.network.bandwidth = machine.network.bandwidth * (0.87 / 0.83);
  CHECK_THAT(predict_engine_time(model, machine, run).exposed_communication.base(), WithinRel(infiniband, 1e-9));
}

TEST_CASE("Hidden collectives slow kernels by the contention, and only the first and last stay exposed") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = node_of("H100-SXM5-80GB", 8);
  EngineTimeRun run = alone(TimedEngine::fsdp2, 8, 4096);
  run.communicates = true;
  run.ranks = 0;
  const EngineTime free = predict_engine_time(model, machine, run, with(TimeFit::contention, 0));
  const EngineTime slowed = predict_engine_time(model, machine, run, with(TimeFit::contention, 0.3));
  CHECK(free.exposed_communication > Seconds());
  CHECK_THAT(slowed.compute.base(), WithinRel(free.compute.base(), kSame));
  // Layer by layer kernels outlast collectives, so contention adds 0.3 x what is hidden: forward one gather, backward a
  // gather and a reduction, for 32 layers.
  const double hidden = (slowed.exposed_communication - free.exposed_communication).base() / 0.3;
  CollectiveCost gather = CollectiveModel(machine, CollectiveSetting::in_step)
                              .cost(CollectiveKind::all_gather, Bytes(2 * kLayerParameters), {8, 1, 8});
  CollectiveCost reduce = CollectiveModel(machine, CollectiveSetting::in_step)
                              .cost(CollectiveKind::reduce_scatter, Bytes(2 * kLayerParameters), {8, 1, 8});
  CHECK_THAT(hidden, WithinRel(kLayers * (2 * gather.alone() + reduce.alone()).base(), 1e-6));
}

TEST_CASE("Gradients: DeepSpeed's stages 0 to 2 all-reduce them, stage 3 and FSDP reduce-scatter") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = node_of("H100-SXM5-80GB", 8);
  const CollectiveModel collectives(machine, CollectiveSetting::in_step);
  const double parameters = 2e8;
  const auto time = [&](CollectiveKind kind, int messages) {
    return (collectives.cost(kind, Bytes(2 * parameters / messages), {8, 1, 8}).alone() * messages).base();
  };
  const auto reduce = [&](TimedEngine engine, int stage) {
    EngineTimeRun run = alone(engine, 4, 2048);
    run.communicates = true;
    run.stage = stage;
    return EngineTimeContext(model, machine, run, with(TimeFit::deepspeed_messages, 2)).reduce(parameters).base();
  };
  for (const int stage : {0, 1, 2})
    CHECK_THAT(reduce(TimedEngine::deepspeed, stage), WithinRel(time(CollectiveKind::all_reduce, 1), 1e-9));
  CHECK_THAT(reduce(TimedEngine::deepspeed, 3), WithinRel(time(CollectiveKind::reduce_scatter, 2), 1e-9));
  CHECK_THAT(reduce(TimedEngine::fsdp2, 3), WithinRel(time(CollectiveKind::reduce_scatter, 1), 1e-9));
}

TEST_CASE("A slow network is the limit, and hides the kernels") {
  const ModelSpec model = find_model("llama-2-7b");
  MachineSpec machine = node_of("H100-SXM5-80GB", 8, 4);
  machine.network.bandwidth = 5.0_GBps;
  for (const TimedEngine engine : {TimedEngine::fsdp1, TimedEngine::fsdp2, TimedEngine::deepspeed}) {
    EngineTimeRun run = alone(engine, 1, 2048);
    run.stage = 3;
    run.communicates = true;
    run.ranks = 0;
    const EngineTime time = predict_engine_time(model, machine, run);
    CAPTURE(to_string(engine));
    CHECK(time.limit == StepLimit::communication);
    // Two gathers and a reduction of 2 bytes a parameter cross 31/32 of the ring, at 5 GB/s at best.
    CHECK(time.step.base() > 3 * 2 * kParameters * 31 / 32 / 5e9);
  }
}

TEST_CASE("The parts of a step add up, and more work never takes less time, on generated runs") {
  std::mt19937 random(7);
  const char* models[] = {"llama-2-7b", "gpt2-xl", "opt-1.3b", "qwen3-8b", "mpt-7b", "gemma-2-9b", "phi-2"};
  const char* gpus[] = {"A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "RTX-4090", "B200-SXM-180GB"};
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int i = 0; i < 300; ++i) {
    const ModelSpec model = find_model(models[pick(7)]);
    MachineSpec machine = node_of(gpus[pick(5)], 8, 1 << pick(4));
    if (!(machine.nvlink > BytesPerSecond())) machine.interconnect = Interconnect::root_complex;
    EngineTimeRun run;
    run.engine = static_cast<TimedEngine>(pick(3));
    run.stage = run.engine == TimedEngine::deepspeed ? pick(4) : 2 + pick(2);
    run.tokens = {1 + pick(8), 256 << pick(5)};
    run.accumulation = 1 + pick(4);
    run.remainder_batch = pick(2) * pick(static_cast<int>(run.tokens.batch));
    run.recompute = static_cast<TimedRecompute>(pick(4));
    run.stack = static_cast<KernelStack>(pick(7));
    run.attention = static_cast<AttentionSoftware>(pick(4));
    constexpr OffloadedOptimizer kEveryStage[] = {OffloadedOptimizer::none, OffloadedOptimizer::host,
                                                  OffloadedOptimizer::states};
    run.offload_optimizer = kEveryStage[pick(3)];
    run.offload_parameters = pick(2) == 1 && run.stage == 3;
    run.tensor_parallel = 1 << pick(2);
    const EngineTime time = predict_engine_time(model, machine, run);
    CAPTURE(model.name, machine.gpu.name, i);
    CHECK_THAT(sum(time), WithinRel(time.step.base(), kSame));
    for (const Seconds part : {time.compute, time.exposed_communication, time.host, time.optimizer, time.offload})
      CHECK(part.base() >= -1e-12);
    CHECK_THAT((time.matmul + time.attention + time.streaming + time.head).base(),
               WithinRel(time.compute.base(), 1e-6));
    EngineTimeRun more = run;
    more.accumulation += 1;
    CHECK(predict_engine_time(model, machine, more).step > time.step);
    MachineSpec faster = machine;
    faster.network.bandwidth = machine.network.bandwidth * 2;
    CHECK(predict_engine_time(model, faster, run).step.base() <= time.step.base() * (1 + kSame));
  }
}

TEST_CASE("LoRA needs no weight gradients of frozen matrices and almost no optimizer") {
  const ModelSpec full = find_model("llama-2-7b");
  ModelSpec lora = full;
  apply_lora(lora, 8);
  const MachineSpec machine = node_of("H200-SXM-141GB", 1);
  const EngineTimeRun run = alone(TimedEngine::deepspeed, 4, 2048);
  const EngineTime whole = predict_engine_time(full, machine, run);
  const EngineTime adapters = predict_engine_time(lora, machine, run);
  CHECK(adapters.matmul < whole.matmul * 0.85);
  CHECK(adapters.matmul > whole.matmul * 0.66);
  CHECK(adapters.optimizer < whole.optimizer * 0.5);
  // On several ranks only the adapters' gradients cross: a slow network hides less of a full step.
  MachineSpec nodes = node_of("H100-SXM5-80GB", 8, 4);
  nodes.network.bandwidth = 10.0_GBps;
  EngineTimeRun spread = run;
  spread.communicates = true;
  spread.ranks = 0;
  const double full_exposed = predict_engine_time(full, nodes, spread).exposed_communication.base();
  CHECK(predict_engine_time(lora, nodes, spread).exposed_communication.base() < 0.05 * full_exposed);
}

TEST_CASE("What is not modelled is refused with a reason") {
  const ModelSpec llama = find_model("llama-2-7b");
  const MachineSpec machine = node_of("H100-SXM5-80GB", 8);
  const auto refuses = [&](const ModelSpec& model, const MachineSpec& where, const EngineTimeRun& run,
                           const std::string& reason) {
    try {
      predict_engine_time(model, where, run);
      FAIL("expected: " << reason);
    } catch (const InputError& error) {
      CHECK_THAT(error.what(), HasText(reason));
    }
  };
  EngineTimeRun run = alone(TimedEngine::fsdp2, 1, 512);
  run.stack = KernelStack::torchtitan;
  refuses(find_model("mixtral-8x7b"), machine, run, "experts");
  run.stack = KernelStack::hugging_face;
  run.offload_optimizer = OffloadedOptimizer::nvme;
  refuses(llama, machine, run, "NVMe");
  run.offload_optimizer = OffloadedOptimizer::none;
  run.stage = 1;
  refuses(llama, machine, run, "FSDP has no stage 1");
  run.stage = 4;
  refuses(llama, machine, run, "stage 0 to 3");
  run = alone(TimedEngine::deepspeed, 1, 512);
  run.tensor_parallel = 16;
  refuses(llama, machine, run, "tensor-parallel");
  run.tensor_parallel = 1;
  run.shard_ranks = 3;
  refuses(llama, machine, run, "shard groups");
  run.shard_ranks = 0;
  run.ranks = 12;
  run.communicates = true;
  refuses(llama, machine, run, "whole nodes");
  run.ranks = 24;
  for (const int across : {3, 12}) {  // some groups would lie across two nodes, others not
    run.shard_ranks = across;
    refuses(llama, machine, run, "whole groups in a node of 8 ranks");
  }
  run.shard_ranks = 0;
  run.ranks = 8;
  run.tokens = {0, 512};
  refuses(llama, machine, run, "micro-step");
  run.tokens = {1, 512};
  run.fp8 = true;
  refuses(llama, machine, run, "fp8 under DeepSpeed");
  run.engine = TimedEngine::fsdp2;
  run.stage = 3;
  refuses(llama, node_of("A100-SXM4-80GB", 8), run, "fp8");
  run.fp8 = false;
  run.type = DType::i32;
  refuses(llama, machine, run, "matmul rate");
  run.type = DType::bf16;
  run.matmul_efficiency = 0;
  refuses(llama, machine, run, "matmul efficiency");
  run.matmul_efficiency.reset();
  run.offload_optimizer = OffloadedOptimizer::host;
  MachineSpec unknown = machine;
  unknown.dram_bandwidth = {};
  refuses(llama, unknown, run, "dram_bandwidth");
  unknown = machine;
  unknown.gpu.pcie = {};
  refuses(llama, unknown, run, "gpu.pcie");
}

TEST_CASE("A GPU gets its own matmul efficiency, that of its software's time first, else 0.88 of the sustained rate") {
  EngineTimeFit fit = builtin_engine_time_fit();
  fit.matmul = {{"A100", "any", 0.7, true, "a"}, {"H100", "old", 0.6, true, "b"}, {"H100-96GB", "any", 0.5, true, "c"}};
  GpuSpec gpu = find_gpu("H100-SXM5-80GB");
  CHECK(matmul_efficiency(find_gpu("A100-SXM4-40GB"), "old", fit).value == 0.7);
  CHECK(matmul_efficiency(gpu, "old", fit).value == 0.6);
  const ChosenEfficiency rule = matmul_efficiency(gpu, "", fit);
  CHECK(rule.from_rule);
  CHECK_THAT(rule.value, WithinRel(0.88 * 794.5 / 989, kSame));
  gpu.name = "H100-96GB";
  CHECK(matmul_efficiency(gpu, "old", fit).value == 0.5);
}

TEST_CASE("The fit file is read strictly and written as it was read") {
  const EngineTimeFit& fit = builtin_engine_time_fit();
  const std::string text = write_engine_time_fit(fit);
  CHECK(write_engine_time_fit(read_engine_time_fit(text)) == text);
  for (std::size_t i = 0; i < kNumTimeFits; ++i) {
    CHECK(fit.values[i].value > 0);
    CHECK(fit.values[i].source.size() > 10);
  }
  const auto broken = [&](const std::string& from, const std::string& to, const std::string& reason) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    CHECK_THROWS_WITH(read_engine_time_fit(changed), HasText(reason));
  };
  broken("\"contention\"", "\"contentions\"", "expected \"contention\"");
  broken("\"unit\": \"us\"", "\"unit\": \"ms\"", "expected \"us\"");
  broken("\"fitted\"", "\"fit\"", "fit");
  broken("\"schema\": 1", "\"schema\": 2", "schema");
}

TEST_CASE("A prediction takes well under a millisecond") {
  const ModelSpec model = find_model("llama-2-70b");
  const MachineSpec machine = node_of("H100-SXM5-80GB", 8, 8);
  EngineTimeRun run;
  run.tokens = {1, 4096};
  Seconds total;
  const double start = processor_seconds();
  constexpr int kCalls = 200;
  for (int i = 0; i < kCalls; ++i) {
    run.accumulation = 1 + i % 4;
    total += predict_engine_time(model, machine, run).step;
  }
  const double took = processor_seconds() - start;
  CHECK(total > Seconds());
  CHECK(took / kCalls < 1e-3);
}

namespace {

bool says_unmeasured(const EngineTime& time, std::string_view what) {
  return std::any_of(time.assumptions.begin(), time.assumptions.end(), [&](const Assumption& a) {
    return a.what == what && a.source.starts_with("by mechanism, not measured");
  });
}

EngineTimeRun swapping_run() {
  EngineTimeRun run;
  run.engine = TimedEngine::deepspeed;
  run.stage = 3;
  run.tokens = {1, 2048};
  run.recompute = TimedRecompute::full;
  run.offload_optimizer = OffloadedOptimizer::nvme;
  run.host_adam = 2e9;
  return run;
}

MachineSpec node_with_drives(BytesPerSecond read, BytesPerSecond write) {
  MachineSpec machine = node_of("A100-SXM4-80GB", 8);
  machine.nvme.drives = 4;
  machine.nvme.capacity = Bytes(16e12);
  machine.nvme.read = read;
  machine.nvme.write = write;
  return machine;
}

}  // namespace

TEST_CASE(
    "States on NVMe: 16 bytes read and 12 written a parameter on shared drives, beside Adam as far as pipelines go") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = node_with_drives(10.0_GBps, 5.0_GBps);
  const HostModel host(machine);
  const auto all = static_cast<double>(model.parameters());
  const double read = host.alone(host.disk_read(Bytes(16 * all))).base();
  const double write = host.alone(host.disk_write(Bytes(12 * all))).base();
  const double adam = all / 2e9;
  EngineTimeRun run = swapping_run();
  const auto step = [&](bool reads, bool writes) {
    run.pipelined_read = reads;
    run.pipelined_write = writes;
    return predict_engine_time(model, machine, run).step.base();
  };
  const double serial = step(false, false);
  CHECK(serial - step(true, false) == Approx(read + adam - std::max(read, adam)).epsilon(1e-6));
  CHECK(serial - step(false, true) == Approx(adam + write - std::max(adam, write)).epsilon(1e-6));
  CHECK(serial - step(true, true) == Approx(read + adam + write - std::max(adam, read + write)).epsilon(1e-6));
  CHECK(step(true, true) > read + write);
  // The same run with the states in host memory reads and writes nothing.
  run.offload_optimizer = OffloadedOptimizer::host;
  const EngineTime in_memory = predict_engine_time(model, machine, run);
  CHECK(serial - in_memory.step.base() >= read + write);
  CHECK(in_memory.host_update.base() == Approx(adam));
  run.offload_optimizer = OffloadedOptimizer::nvme;
  CHECK(says_unmeasured(predict_engine_time(model, machine, run), "step time of NVMe"));
  CHECK_FALSE(says_unmeasured(in_memory, "step time of NVMe"));
}

TEST_CASE("Faster drives never make a step longer, and weights on them cost no less than in host memory") {
  const ModelSpec model = find_model("llama-2-7b");
  EngineTimeRun run = swapping_run();
  run.offload_parameters = run.parameters_on_nvme = true;
  double last = std::numeric_limits<double>::infinity();
  for (const double rate : {1e9, 2e9, 5e9, 2e10, 1e12}) {
    const MachineSpec machine = node_with_drives(BytesPerSecond(rate), BytesPerSecond(rate / 2));
    const double step = predict_engine_time(model, machine, run).step.base();
    CHECK(step <= last);
    last = step;
    EngineTimeRun host_weights = run;
    host_weights.parameters_on_nvme = false;
    CHECK(predict_engine_time(model, machine, host_weights).step.base() <= step);
  }
  MachineSpec none = node_of("A100-SXM4-80GB", 8);
  CHECK_THROWS_AS(predict_engine_time(model, none, run), InputError);
}

TEST_CASE("Experts: between a dense model of the active and one of all parameters; encoders: as two stacks of layers") {
  const MachineSpec machine = node_of("H100-SXM5-80GB", 8);
  for (const TimedEngine engine : {TimedEngine::deepspeed, TimedEngine::fsdp2}) {
    EngineTimeRun run = alone(engine, 8, 2048);
    const ModelSpec mixtral = find_model("mixtral-8x7b");
    const EngineTime experts = predict_engine_time(mixtral, machine, run);
    CHECK(says_unmeasured(experts, "step time of experts"));
    // Two of eight experts: Mistral's attention, twice its MLP.
    const EngineTime dense = predict_engine_time(find_model("mistral-7b-v0.1"), machine, run);
    CHECK(experts.matmul > dense.matmul);
    CHECK(experts.matmul < 3 * dense.matmul);
    CHECK(experts.attention.base() == Approx(dense.attention.base()).epsilon(0.05));
    CHECK(experts.streaming > dense.streaming);
    CHECK(says_unmeasured(predict_engine_time(find_model("t5-base"), machine, run), "step time of encoders"));
  }
}

}  // namespace zeroplan::tests
