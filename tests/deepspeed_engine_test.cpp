// DeepSpeed's engines: volumes of communication, accumulation types, ranks, refusals.

#include "models/deepspeed_engine.h"

#include <limits>

#include "models/error.h"
#include "tests/catch.h"
#include "tests/engine_models.h"

namespace zeroplan::test {

// deepspeed.md section 10: ring volume a rank sends in a step, the factor (N - 1) / N dropped, in units of all
// parameters.
TEST_CASE("A step moves the volumes that each stage is known for") {
  struct Volumes {
    double all = 0, shard = 0, replica = 0;  // over all ranks; inside the groups of hpZ and MiCS; between those of MiCS
  };
  const auto volumes = [](DeepSpeedJob job, bool checkpointed) {
    const EagerStep step = chain_step({.checkpointed = checkpointed});
    Volumes sum;
    for (const Collective& collective : collectives_of_last_step(tape_of(step, job))) {
      if (collective.elements == 1) continue;  // norms and flags
      const double passes = collective.kind == CollectiveKind::all_reduce ? 2 : 1;
      const double share = static_cast<double>(collective.elements) / static_cast<double>(parameters_of(step));
      (collective.group == Group::all     ? sum.all
       : collective.group == Group::shard ? sum.shard
                                          : sum.replica) += passes * share;
    }
    return sum;
  };
  constexpr std::int64_t kEverything = 1'000'000'000;
  for (const int a : {1, 2, 3}) {
    CAPTURE(a);
    const auto stage = [&](int number) {
      DeepSpeedJob job = job_of(number, 4);
      job.accumulation = a;
      return job;
    };
    const auto stage3 = [&](std::int64_t reuse, std::int64_t threshold) {
      DeepSpeedJob job = stage(3);
      job.config.prefetch_bucket = 0;
      job.config.max_reuse = reuse;
      job.config.param_persistence = threshold;
      return job;
    };
    CHECK(volumes(stage(0), false).all == Approx(2));
    CHECK(volumes(stage(1), false).all == Approx(3));
    DeepSpeedJob bf16_optimizer = stage(1);
    bf16_optimizer.config.grad_accum = DType::fp32;
    CHECK(volumes(bf16_optimizer, false).all == Approx(3));
    CHECK(volumes(stage(2), false).all == Approx(2 * a + 1));
    CHECK(volumes(stage3(0, 0), false).all == Approx(3 * a));
    CHECK(volumes(stage3(kEverything, 0), false).all == Approx(2 * a));
    CHECK(volumes(stage3(0, kEverything), false).all == Approx(a + 1));
    CHECK(volumes(stage3(0, 0), true).all == Approx(4 * a).epsilon(0.001));  // norms stay from recompute to backward
    DeepSpeedJob hpz = stage3(0, 0);
    hpz.config.hpz_ranks = 2;
    CHECK(volumes(hpz, false).all == Approx(a + 1));
    CHECK(volumes(hpz, false).shard == Approx(2 * a - 1));
    DeepSpeedJob mics = stage3(0, 0);
    mics.config.mics_ranks = 2;
    CHECK(volumes(mics, false).all == 0);
    CHECK(volumes(mics, false).shard == Approx(3 * a));
    CHECK(volumes(mics, false).replica == Approx(2.0 / 2));  // once a step, of a rank's half
    mics.config.mics_ranks = 4;                              // one group
    CHECK(volumes(mics, false).shard == Approx(3 * a));
    CHECK(volumes(mics, false).replica == 0);
    DeepSpeedJob all_reduced = stage3(0, 0);
    all_reduced.config.reduce_scatter = false;
    CHECK(volumes(all_reduced, false).all == Approx(4 * a));
  }
}

namespace {

/// Forward peak and what is alive after a step, without an allocator.
PlainStep steady(const DeepSpeedJob& job, const EagerStep& step) {
  return count_plainly(tape_of(step, job)).steps.back();
}

}  // namespace

// deepspeed.md 5.12, measured: docs/measurements/h200/deepspeed_more.md.
TEST_CASE("MiCS shards as fewer ranks would, without stage 3's flat copies") {
  const EagerStep step = chain_step({});
  for (const int group : {2, 4}) {
    DeepSpeedJob mics = job_of(3, 8), plain = job_of(3, group);
    mics.zero_init = true;
    mics.config.mics_ranks = group;
    CHECK(steady(mics, step).after == steady(plain, step).after);
    CHECK(steady(mics, step).forward < steady(plain, step).forward);
    plain.config.prefetch_bucket = mics.config.prefetch_bucket = 0;  // a bias and its weight in one gather
    CHECK(steady(mics, step).forward <= steady(plain, step).forward);
    plain.config.allgather_sequential = true;  // one parameter, one buffer
    CHECK(steady(mics, step).forward == steady(plain, step).forward);
  }
}

TEST_CASE("Hierarchical gathers of MiCS copy what the nodes have, parameter by parameter") {
  const EagerStep step = chain_step({});
  DeepSpeedJob job = job_of(3, 8);
  job.zero_init = true;
  job.config.mics_ranks = 4;
  job.config.prefetch_bucket = job.config.max_reuse = 0;
  const PlainStep flat = steady(job, step);
  job.config.mics_hierarchical = true;
  job.ranks_per_node = 2;
  const PlainStep hierarchical = steady(job, step);
  CHECK(hierarchical.after == flat.after);
  CHECK(hierarchical.forward >= flat.forward);
  CHECK(hierarchical.forward <= flat.forward + 2 * 2048 * 512 / 2);  // two of four shards of the largest weight
  job.ranks_per_node = 4;                                            // a group in one node
  CHECK_THROWS_AS(tape_of(step, job), InputError);
}

TEST_CASE("Weights that torch's linear keeps stay until backward when MiCS_Init did not build the model") {
  const EagerStep step = chain_step({});
  DeepSpeedJob job = job_of(3, 8);
  job.config.mics_ranks = 4;
  job.config.prefetch_bucket = job.config.max_reuse = job.config.param_persistence = 0;
  const std::int64_t kept = steady(job, step).end_of_forward;
  job.zero_init = true;
  const std::int64_t given_up = steady(job, step).end_of_forward;
  const std::int64_t weights = 2 * (8 * 2 * 2048 * 512 + 512 * 101);
  CHECK(static_cast<double>(kept - given_up) == Approx(static_cast<double>(weights)).epsilon(0.001));
}

// partition_parameters.py: 8-bit values and fp32 scales in flight, everything in fp16 when waited for.
TEST_CASE("8-bit weights move one byte a parameter and its scales") {
  const EagerStep step = chain_step({.classes = 128});
  DeepSpeedJob job = job_of(3, 4);
  job.config.prefetch_bucket = job.config.max_reuse = job.config.param_persistence = 0;
  job.config.quantized_weights = true;
  double values = 0, scales = 0, others = 0;
  for (const Collective& c : collectives_of_last_step(tape_of(step, job))) {
    if (c.kind != CollectiveKind::all_gather) continue;
    (c.type == DType::u8 ? values : c.type == DType::fp32 ? scales : others) += static_cast<double>(c.padded);
  }
  const auto parameters = static_cast<double>(parameters_of(step));
  CHECK(values / parameters == Approx(2).epsilon(1e-9));  // forward and backward
  CHECK(scales / parameters < 2.0 / 4000);
  CHECK(scales / parameters > 2.0 / 16000);
  CHECK(others == 0);
  // A share of 26 values has no groups of 8: DeepSpeed stops.
  CHECK_THROWS_AS(tape_of(chain_step({}), job), InputError);
}

// coalesced_collectives.py: half a byte a value inside the node, the node's share of it between nodes; vectors and what
// is no multiple of 2 N as ever.
TEST_CASE("4-bit gradients cross in two hops, vectors do not") {
  const EagerStep step = chain_step({});  // the head's 512 x 101 are 16 x 3232
  DeepSpeedJob job = job_of(3, 8);
  job.config.quantized_gradients = true;
  job.ranks_per_node = 4;
  double inside = 0, between = 0, plain = 0, matrices = 0, vectors = 0;
  for (const EagerParameter& p : step.parameters)
    (p.shape.size() > 1 ? matrices : vectors) += static_cast<double>(p.elements);
  for (const Collective& c : collectives_of_last_step(tape_of(step, job))) {
    if (c.kind != CollectiveKind::reduce_scatter || c.type == DType::fp32) continue;
    (c.group == Group::shard ? inside : c.group == Group::replica ? between : plain) += static_cast<double>(c.elements);
  }
  CHECK(inside == matrices / 2);
  CHECK(between == matrices / 2 / 4);
  CHECK(plain == vectors);
  // Its buffers are one parameter's, not a bucket's.
  DeepSpeedJob ordinary = job_of(3, 8);
  CHECK(steady(job, step).after == steady(ordinary, step).after);
  CHECK(steady(job, step).backward < steady(ordinary, step).backward);
}

// engine-rules.md 2.9: stage 2 with fp32 accumulation holds one fp32 buffer of the rank's share and no flat copy.
TEST_CASE("fp32 accumulation at stage 2 replaces the owned gradients and their copies") {
  DeepSpeedJob job = job_of(2, 4);
  job.config.grad_accum = DType::fp32;
  const EagerStep step = chain_step({});
  const auto parameters = static_cast<double>(parameters_of(step));
  const PlainRun run = count_plainly(tape_of(step, job));
  const double share = parameters / 4;
  const double largest_slice = 2048 * 512;
  CHECK(static_cast<double>(run.steps.back().step) ==
        Approx(2 * parameters + 16 * share + 8 * largest_slice).epsilon(0.001));
  CHECK(static_cast<double>(run.steps.back().after) == Approx(2 * parameters + 12 * share).epsilon(0.001));
}

// torch 2.11, optim/adam.py: foreach's square roots. Measured: groundtruth/deepspeed_h200_unseen.jsonl, rows 28 and 29.
TEST_CASE("torch_adam holds the square roots of the second moments in the update") {
  EagerOptions options;
  options.tokens = {1, 16};
  const EagerStep step = eager_step(find_model("pythia-160m"), options);
  const auto step_peak = [&](int stage, bool torch_adam) {
    DeepSpeedJob job = job_of(stage, 4);
    job.config.torch_adam = torch_adam;
    EngineTape tape;
    record_run(*make_deepspeed_engine(step, job, tape), step, {3, 1, 0, options.tokens}, tape);
    std::int64_t now = 0, peak = 0;
    for (const TapeOp& op : tape.ops()) {
      if (op.kind == TapeKind::mark && op.mark == Mark::backward_end) peak = now;
      if (op.kind != TapeKind::alloc && op.kind != TapeKind::free) continue;
      const std::int64_t size = tape.buffer(static_cast<TapeId>(op.id)).bytes;
      now += op.kind == TapeKind::alloc ? size : -size;
      peak = std::max(peak, now);
    }
    return peak;
  };
  std::int64_t share = 0;
  for (const EagerParameter& parameter : step.parameters) share += (parameter.elements + 3) / 4;
  // Stage 3's gradients are 2 + 4 bytes an element before the update, 4 in it: the roots are half above that.
  CHECK(step_peak(3, true) - step_peak(3, false) == 2 * share);
  CHECK(step_peak(1, true) >= step_peak(1, false));
  DeepSpeedJob job = job_of(3, 4);
  job.config.torch_adam = true;
  job.config.torch_foreach = false;
  CHECK_THROWS_AS(check(job), InputError);
  job = job_of(2, 4);
  job.config.torch_adam = true;
  job.config.offload_optimizer.device = OffloadDevice::cpu;
  CHECK_THROWS_AS(check(job), InputError);
}

// Measured: 1 MiB more after the step where products add biases, 2 with checkpointing (groundtruth, Qwen, GPT-2, OPT,
// Pythia), none for Llama.
TEST_CASE("cuBLASLt has a workspace in forward, and in backward where biased products are recomputed") {
  const auto workspaces = [](const char* model, bool checkpointing) {
    EagerOptions options;
    options.tokens = {1, 16};
    options.checkpointing = checkpointing;
    const EagerStep step = eager_step(find_model(model), options);
    EngineTape tape;
    record_run(*make_deepspeed_engine(step, job_of(2, 4), tape), step, {3, 1, 32 << 20, options.tokens}, tape);
    return std::ranges::count_if(tape.buffers(), [](const TapeBuffer& buffer) {
      return buffer.role == BufferRole::workspace && buffer.bytes == 1 << 20;
    });
  };
  CHECK(workspaces("pythia-160m", false) == 1);
  CHECK(workspaces("pythia-160m", true) == 2);
  CHECK(workspaces("smollm2-135m", true) == 0);
}

// Expected: DeepSpeed 0.19.8 itself on CPU tensors under a fake process group (torch 2.11, transformers 5.17,
// 2026-11-30), bytes alive after each backward of the first step above those after initialize, less 32 of scalars. The
// reference replay keeps the sums of stage 1 until the step, and each micro-step's gradients of stage 2.
TEST_CASE("Gradients summed over micro-steps live as long as DeepSpeed's") {
  const char* const small_llama = R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
    "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 1000, "max_position_embeddings": 4096, "tie_word_embeddings": false})";
  EagerOptions options;
  options.tokens = {1, 16};
  options.checkpointing = true;
  const EagerStep step = eager_step(read_model(small_llama, "small"), options);
  const auto after_backward = [&](int stage, bool overlaps, bool contiguous) {
    DeepSpeedJob job = job_of(stage, 4);
    job.accumulation = 3;
    job.config.overlap_comm = overlaps;
    job.config.contiguous_gradients = contiguous;
    job.config.reduce_bucket = 100'000;
    EngineTape tape;
    record_run(*make_deepspeed_engine(step, job, tape), step, {1, 3, 0, options.tokens}, tape);
    std::vector<std::int64_t> bytes;
    std::int64_t now = 0;
    for (const TapeOp& op : tape.ops()) {
      if (op.kind == TapeKind::alloc) now += tape.buffer(static_cast<TapeId>(op.id)).bytes;
      if (op.kind == TapeKind::free) now -= tape.buffer(static_cast<TapeId>(op.id)).bytes;
      if (op.kind == TapeKind::mark && op.mark == Mark::init_end) now = 0;
      if (op.kind == TapeKind::mark && op.mark == Mark::backward_end) bytes.push_back(now);
    }
    return bytes;
  };
  CHECK(after_backward(1, true, true) == std::vector<std::int64_t>{2'495'360, 2'495'360, 563'200});
  CHECK(after_backward(2, false, false) == std::vector<std::int64_t>{563'200, 563'200, 563'200});
}

TEST_CASE("The worst rank is the one that owns most") {
  for (const int ranks : {2, 3, 4, 8, 16}) {
    const EagerStep step = chain_step({});
    DeepSpeedJob job = job_of(2, ranks);
    job.rank = deepspeed_worst_rank(step, job);
    const std::int64_t worst = count_plainly(tape_of(step, job)).steps.back().step;
    for (job.rank = 0; job.rank < ranks; ++job.rank) {
      CAPTURE(ranks, job.rank);
      CHECK(count_plainly(tape_of(step, job)).steps.back().step <= worst);
    }
  }
}

TEST_CASE("What no rule covers is refused by its key") {
  const auto message = [](auto change) {
    DeepSpeedJob job = job_of(3, 4);
    change(job);
    try {
      check(job);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message([](DeepSpeedJob&) {}).empty());
  CHECK(message([](DeepSpeedJob& j) { j.config.mics_ranks = 2; }).empty());
  CHECK(message([](DeepSpeedJob& j) { j.config.mics_ranks = 3; }).find("mics_shard_size") != std::string::npos);
  CHECK(message([](DeepSpeedJob& j) { j.config.quantized_gradients = true; }).find("quantized_gradients") !=
        std::string::npos);
  CHECK(message([](DeepSpeedJob& j) {
          j.config.quantized_gradients = true;
          j.ranks_per_node = 4;  // one node: the ordinary reduce-scatter
        }).empty());
  CHECK(message([](DeepSpeedJob& j) { j.config.quantized_nontrainable = true; }).find("nontrainable") !=
        std::string::npos);
  CHECK(message([](DeepSpeedJob& j) { j.config.autocast = true; }).find("torch_autocast") != std::string::npos);
  CHECK(message([](DeepSpeedJob& j) { j.config.optimizer = "Lion"; }).find("optimizer.type") != std::string::npos);
  CHECK(message([](DeepSpeedJob& j) { j.config.hpz_ranks = 3; }).find("hpz") != std::string::npos);
  CHECK(message([](DeepSpeedJob& j) { j.rank = 4; }).find("rank") != std::string::npos);
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  CHECK(message([](DeepSpeedJob& j) { j.config.reduce_bucket = kHuge; }).find("reduce_bucket") != std::string::npos);
  CHECK(message([](DeepSpeedJob& j) { j.config.offload_param.buffer_size = kHuge; }).find("buffer_size") !=
        std::string::npos);
  CHECK(message([](DeepSpeedJob& j) {
          j.config.stage = 0;
          j.config.grad_accum = DType::fp32;
        }).find("stage 0") != std::string::npos);
}

// deepspeed.md section 7: four swap buffers a sub-group, four more for one read ahead, three for one written behind.
TEST_CASE("Too few swap buffers are refused as DeepSpeed does") {
  const EagerStep step = chain_step({});
  const auto works = [&](std::int64_t buffers, bool reads_ahead, bool writes_behind, std::int64_t sub_group) {
    DeepSpeedJob job = job_of(3, 4);
    job.config.sub_group = sub_group;
    DeepspeedOffload& offload = job.config.offload_optimizer;
    offload.device = OffloadDevice::nvme;
    offload.buffer_count = buffers;
    offload.pipeline_read = reads_ahead;
    offload.pipeline_write = writes_behind;
    try {
      tape_of(step, job);
    } catch (const InputError& error) {
      CHECK(std::string(error.what()).find("buffer_count") != std::string::npos);
      return false;
    }
    return true;
  };
  constexpr std::int64_t kOne = 1'000'000'000, kSeveral = 1'000'000;
  CHECK(works(4, false, false, kSeveral));
  CHECK_FALSE(works(3, false, false, kSeveral));
  CHECK(works(8, true, false, kSeveral));
  CHECK_FALSE(works(7, true, false, kSeveral));
  CHECK(works(11, true, true, kSeveral));
  CHECK_FALSE(works(10, true, true, kSeveral));
  CHECK(works(4, true, true, kOne));  // nothing to read ahead
}

// Gradients down, twelve bytes a parameter written after the update, sixteen read before it.
TEST_CASE("A step with states on NVMe reads 16 bytes a parameter and writes 16") {
  for (const bool pipelined : {false, true}) {
    DeepSpeedJob job = job_of(3, 4);
    job.config.sub_group = 1'500'000;
    job.config.offload_optimizer.device = OffloadDevice::nvme;
    job.config.offload_optimizer.buffer_count = 11;
    job.config.offload_optimizer.pipeline_read = job.config.offload_optimizer.pipeline_write = pipelined;
    const EagerStep step = chain_step({});
    const EngineTape tape = tape_of(step, job);
    double read = 0, written = 0;
    for (const TapeOp& op : tape.ops()) {
      if (op.kind == TapeKind::mark && op.mark == Mark::step_begin) read = written = 0;
      if (op.kind != TapeKind::work) continue;
      const auto* copy = std::get_if<Copy>(&tape.works()[op.id]);
      if (copy == nullptr) continue;
      if (copy->from == Memory::nvme) read += copy->bytes.base();
      if (copy->to == Memory::nvme) written += copy->bytes.base();
    }
    const double share = static_cast<double>(parameters_of(step)) / 4;
    CHECK(read / share == Approx(16).epsilon(0.001));
    CHECK(written / share == Approx(16).epsilon(0.02));  // biases and norms are too small to be written in backward
  }
}

}  // namespace zeroplan::test
