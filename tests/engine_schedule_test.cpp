// DeepSpeed's and FSDP2's steady steps as schedules: no races, no leaks, the tape's memory, and times on which the
// readers agree.

#include "models/engine_schedule.h"

#include <random>

#include "models/deepspeed_engine.h"
#include "models/fsdp2_engine.h"
#include "models/machine_catalog.h"
#include "sim/engine_memory.h"
#include "sim/memory_timeline.h"
#include "tests/catch.h"
#include "tests/engine_models.h"
#include "tests/simulate_support.h"

namespace zeroplan {
namespace {

constexpr int kRanks = 8;

ModelSpec small_llama() {
  return read_model(R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 1001, "max_position_embeddings": 512, "tie_word_embeddings": false})",
                    "small.json");
}

struct Recorded {
  ModelSpec model;
  EagerStep step;
  EngineTape tape;
  std::vector<HostBuffer> host;
  int shard_ranks = kRanks;
};

EagerOptions eager_options(bool checkpointing) {
  EagerOptions options;
  options.tokens = {2, 128};
  options.checkpointing = checkpointing;
  return options;
}

void record_deepspeed(Recorded& run, DeepSpeedJob job, bool checkpointing) {
  run.model = small_llama();
  run.step = eager_step(run.model, eager_options(checkpointing));
  const auto engine = make_deepspeed_engine(run.step, job, run.tape);
  record_run(*engine, run.step, {deepspeed_steady_steps(job), job.accumulation, 32 << 20, {2, 128}}, run.tape);
  run.host = deepspeed_host_memory(run.step, job);
  if (job.config.hpz()) run.shard_ranks = static_cast<int>(job.config.hpz_ranks);
  if (job.config.mics()) run.shard_ranks = job.shard_ranks();
  if (job.config.quantized_gradients) run.shard_ranks = job.ranks_per_node;
}

void record_fsdp2(Recorded& run, const Fsdp2Options& options, int accumulation, bool checkpointing) {
  run.model = small_llama();
  run.step = eager_step(run.model, eager_options(checkpointing));
  const auto engine = make_fsdp2_engine(run.step, options, run.tape);
  record_run(*engine, run.step, {3, accumulation, 32 << 20, {2, 128}}, run.tape);
  run.host = fsdp2_host_memory(run.step, options);
  run.shard_ranks = options.group();
}

/// MiCS, 8-bit weights or 4-bit gradients, where they are possible.
void add_groups(std::mt19937& random, DeepSpeedJob& job) {
  DeepSpeedConfig& config = job.config;
  const unsigned which = static_cast<unsigned>(random() % 4);
  if (which == 0 && !config.optimizer_on_host() && !config.parameters_on_host()) {
    config.hpz_ranks = 1;
    config.mics_ranks = random() % 2 == 0 ? 2 : 4;
    config.mics_hierarchical = config.mics_ranks == 4 && random() % 2 == 0;
    job.ranks_per_node = 2;
  } else if (which == 1 && !config.parameters_on_host()) {
    config.quantized_weights = true;
  } else if (which == 2) {
    config.quantized_gradients = config.reduce_scatter = true;
    config.hpz_ranks = 1;
    job.ranks_per_node = 4;
  }
}

DeepSpeedJob random_job(std::mt19937& random) {
  const auto pick = [&](auto... values) {
    const std::array list{values...};
    return list[random() % list.size()];
  };
  DeepSpeedJob job;
  job.ranks = kRanks;
  job.accumulation = pick(1, 1, 2, 3);
  DeepSpeedConfig& config = job.config;
  config.stage = pick(0, 1, 2, 3, 3);
  config.precision = pick(DType::bf16, DType::bf16, DType::fp16);
  config.overlap_comm = pick(true, false);
  config.contiguous_gradients = pick(true, true, false);
  config.reduce_scatter = pick(true, true, false);
  config.round_robin = pick(false, false, true);
  config.reduce_bucket = pick(50'000, 300'000, 500'000'000);
  config.sub_group = pick(100'000, 1'000'000'000);
  config.prefetch_bucket = pick(0, 100'000, 50'000'000);
  config.max_live = pick(300'000, 1'000'000'000);
  config.max_reuse = pick(0, 200'000, 1'000'000'000);
  config.param_persistence = pick(0, 1000, 100'000);
  config.hpz_ranks = config.stage == 3 ? pick(1, 1, 2, 4) : 1;
  if (config.stage > 0 && pick(true, false)) {
    config.offload_optimizer.device =
        config.stage == 3 ? pick(OffloadDevice::cpu, OffloadDevice::nvme) : OffloadDevice::cpu;
  }
  config.offload_optimizer.pin_memory = pick(true, true, false);
  if (config.optimizer_on_nvme()) {
    config.offload_optimizer.buffer_count = 11;
    config.offload_optimizer.pipeline_read = pick(true, false);
    config.offload_optimizer.pipeline_write = pick(true, false);
  }
  if (config.stage == 3 && pick(true, false, false))
    config.offload_param.device = pick(OffloadDevice::cpu, OffloadDevice::nvme);
  if (pick(true, false, false)) config.communication = DType::fp32;
  if (config.stage > 1 && pick(true, false, false)) config.grad_accum = DType::fp32;
  if (config.stage == 1 && config.precision == DType::bf16 && pick(true, false)) config.grad_accum = DType::fp32;
  job.zero_init = config.stage == 3 && pick(true, false);
  if (config.stage == 3) add_groups(random, job);
  return job;
}

Fsdp2Options random_fsdp2(std::mt19937& random) {
  Fsdp2Options options;
  options.ranks = kRanks;
  options.shard_ranks = random() % 2 == 0 ? 0 : 4;
  options.reshard_after_forward = options.reshard_root = random() % 3 > 0;
  if (random() % 3 == 0) options.parameters = DType::bf16;
  options.reduction = random() % 2 == 0 ? DType::fp32 : DType::bf16;
  options.offload = random() % 4 == 0;
  return options;
}

Bytes aligned(std::int64_t bytes) {
  return Bytes(static_cast<double>((bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment));
}

/// Peak of the last step straight from the tape.
Bytes tape_peak(const EngineTape& tape) {
  Bytes alive, peak;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind == TapeKind::alloc) alive += aligned(tape.buffer(static_cast<TapeId>(op.id)).bytes);
    if (op.kind == TapeKind::free) alive -= aligned(tape.buffer(static_cast<TapeId>(op.id)).bytes);
    if (op.kind == TapeKind::mark && op.mark == Mark::step_begin) peak = alive;
    peak = std::max(peak, alive);
  }
  return peak;
}

void check_schedule(const Recorded& run) {
  const Schedule schedule = steady_schedule(run.tape, run.model, run.host);
  CHECK_NOTHROW(validate(schedule, run.model));
  const MemoryTimeline memory(schedule);
  CHECK(memory.peak(Memory::hbm).bytes == tape_peak(run.tape));
  Bytes pinned, pageable;
  for (const HostBuffer& buffer : run.host) {
    const std::int64_t taken =
        buffer.kind == HostKind::pinned ? PinnedHostAllocator::rounded(buffer.bytes) : buffer.bytes;
    (buffer.kind == HostKind::pageable ? pageable : pinned) += aligned(taken * buffer.count);
  }
  CHECK(memory.peak(Memory::pinned).bytes == pinned);
  CHECK(memory.peak(Memory::dram).bytes == pageable);
  const MachineSpec machine = machine_for(parse_gpu_request("8xH100-80G"), 1);
  const tests::Both both = tests::play(schedule, machine, {}, run.shard_ranks);
  CHECK(both.estimate.step > Seconds());
  CHECK(both.simulation.step >= both.longest_path() * (1 - tests::kAgreement));
  for (const Op& op : schedule.ops()) REQUIRE_FALSE(label(schedule, op, run.model).empty());
}

}  // namespace

TEST_CASE("DeepSpeed's steady step is a schedule without races whose memory is the tape's") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const DeepSpeedJob job = random_job(random);
    const bool checkpointing = random() % 2 == 0;
    CAPTURE(seed, job.config.stage, job.accumulation, checkpointing, job.config.overlap_comm);
    Recorded run;
    record_deepspeed(run, job, checkpointing);
    check_schedule(run);
  }
}

TEST_CASE("FSDP2's steady step is a schedule without races whose memory is the tape's") {
  for (unsigned seed = 0; seed < 16; ++seed) {
    std::mt19937 random(seed);
    const Fsdp2Options options = random_fsdp2(random);
    const bool checkpointing = random() % 2 == 0;
    const int accumulation = 1 + static_cast<int>(random() % 2);
    CAPTURE(seed, options.group(), options.offload, accumulation, checkpointing);
    Recorded run;
    record_fsdp2(run, options, accumulation, checkpointing);
    check_schedule(run);
  }
}

TEST_CASE("FSDP2's unfused AdamW passes over the share once an operation, fused AdamW once a tensor") {
  for (const AdamForm form : {AdamForm::fused, AdamForm::foreach, AdamForm::loop}) {
    Fsdp2Options options;
    options.ranks = kRanks;
    options.adam = form;
    Recorded run;
    record_fsdp2(run, options, 1, false);
    int updates = 0;
    for (const Work& work : run.tape.works()) {
      const auto* adam = std::get_if<AdamStep>(&work);
      if (adam == nullptr) continue;
      ++updates;
      // Fused: p, g, m, v read and p, m, v written. Else: eight operations write one tensor each and read 12.
      CHECK(adam->traffic.base() ==
            (form == AdamForm::fused ? 4 + 3 : 12 + 8) * 4.0 * static_cast<double>(adam->parameters));
    }
    CHECK(updates > 0);
    check_schedule(run);
  }
}

TEST_CASE("Steps repeat: nothing leaks, and the allocator counts no less than the tensors") {
  for (unsigned seed = 100; seed < 130; ++seed) {
    std::mt19937 random(seed);
    DeepSpeedJob job = random_job(random);
    CAPTURE(seed, job.config.stage, job.accumulation);
    const ModelSpec model = small_llama();
    const EagerStep step = eager_step(model, eager_options(seed % 2 == 0));
    EngineTape tape;
    const int steps = deepspeed_steady_steps(job) + 2;
    record_run(*make_deepspeed_engine(step, job, tape), step, {steps, job.accumulation, 32 << 20, {2, 128}}, tape);
    const test::PlainRun plain = test::count_plainly(tape);
    const std::size_t steady = static_cast<std::size_t>(deepspeed_steady_steps(job)) - 1;
    for (std::size_t i = steady; i < plain.steps.size(); ++i) {
      CHECK(plain.steps[i].start == plain.steps[steady].start);
      CHECK(plain.steps[i].after == plain.steps[steady].after);
      CHECK(plain.steps[i].forward == plain.steps[steady].forward);
      CHECK(plain.steps[i].backward == plain.steps[steady].backward);
      CHECK(plain.steps[i].step == plain.steps[steady].step);
    }
    const RunMemory run = replay(tape, {}, PeakCounting::each_phase);
    REQUIRE(run.steps.size() == plain.steps.size());
    for (std::size_t i = 0; i < run.steps.size(); ++i) {
      CHECK(run.steps[i].forward >= Bytes(static_cast<double>(plain.steps[i].forward)));
      CHECK(run.steps[i].backward >= Bytes(static_cast<double>(plain.steps[i].backward)));
      CHECK(run.steps[i].reserved >= run.steps[i].backward);
    }
  }
}

TEST_CASE("A smaller card says what fails and where; a large enough one changes nothing") {
  const ModelSpec model = small_llama();
  const EagerStep step = eager_step(model, eager_options(false));
  DeepSpeedJob job;
  job.ranks = kRanks;
  job.config.stage = 2;
  job.config.precision = DType::bf16;
  job.config.reduce_bucket = 1'000'000;
  EngineTape tape;
  record_run(*make_deepspeed_engine(step, job, tape), step, {3, 1, 32 << 20, {2, 128}}, tape);
  const RunMemory whole = replay(tape, {}, PeakCounting::each_phase);
  REQUIRE_FALSE(whole.out_of_memory.has_value());
  AllocatorOptions exact;
  exact.capacity = static_cast<std::int64_t>(whole.peak_reserved.base());
  const RunMemory same = replay(tape, exact, PeakCounting::each_phase);
  CHECK_FALSE(same.out_of_memory.has_value());
  CHECK(same.num_alloc_retries == 0);
  CHECK(same.steps.back().after == whole.steps.back().after);
  AllocatorOptions small;
  small.capacity = static_cast<std::int64_t>(whole.steps.back().backward.base() * 0.8);
  const RunMemory failed = replay(tape, small, PeakCounting::each_phase);
  REQUIRE(failed.out_of_memory.has_value());
  CHECK(failed.failed_at.starts_with("step "));
  CHECK(failed.num_alloc_retries > 0);
}

namespace {

/// One step: a kernel, a buffer of `pool` that `reduce` works on and compute drops, another kernel.
Schedule step_with_side_stream(Pool pool, bool recorded) {
  EngineTape tape;
  tape.mark(Mark::step_begin);
  const TapeId buffer = tape.alloc({1024, pool});
  tape.pass(Stream::compute, 1024);
  tape.work(Stream::reduce, Collective{CollectiveKind::all_reduce, Group::all, 512, 512, DType::bf16},
            {{buffer, Access::read_write}});
  if (recorded) tape.record_stream(buffer, Stream::reduce);
  tape.free(buffer);
  tape.pass(Stream::compute, 1024);
  tape.mark(Mark::step_end);
  return steady_schedule(tape, small_llama(), {});
}

bool some_compute_op_waits(const Schedule& schedule) {
  return std::ranges::any_of(schedule.ops(),
                             [&](const Op& op) { return op.stream == Stream::compute && !schedule.after(op).empty(); });
}

}  // namespace

TEST_CASE("Compute frees a block of another stream's pool without waiting, one of its own only after its users") {
  CHECK(some_compute_op_waits(step_with_side_stream(Pool::compute, false)));
  CHECK_FALSE(some_compute_op_waits(step_with_side_stream(Pool::compute, true)));
  CHECK_FALSE(some_compute_op_waits(step_with_side_stream(Pool::reduce, false)));
}

TEST_CASE("A wait for a buffer leaves out what its stream does afterwards") {
  EngineTape tape;
  tape.mark(Mark::step_begin);
  const TapeId first = tape.alloc({1024, Pool::gather}), second = tape.alloc({1024, Pool::gather});
  const Collective gather{CollectiveKind::all_gather, Group::all, 512, 512, DType::bf16};
  tape.work(Stream::gather, gather, {{first, Access::write}});
  tape.work(Stream::gather, gather, {{second, Access::write}});
  tape.wait_written(Stream::compute, first);
  tape.pass(Stream::compute, 1024);
  tape.free(first);
  tape.free(second);
  tape.mark(Mark::step_end);
  const Schedule schedule = steady_schedule(tape, small_llama(), {});
  const auto kernel = std::ranges::find_if(
      schedule.ops(), [&](const Op& op) { return std::holds_alternative<Compute>(schedule.work(op)); });
  REQUIRE(kernel != schedule.ops().end());
  REQUIRE(schedule.after(*kernel).size() == 1);
  const auto index = schedule.after(*kernel)[0].index();
  CHECK(std::holds_alternative<Collective>(schedule.work(schedule.ops()[index])));
  CHECK(std::holds_alternative<Collective>(schedule.work(schedule.ops()[index + 1])));  // the other one comes later
}

}  // namespace zeroplan
