// What goes wrong in a training run: each a named error in seconds, the checkpoint before it intact, no hang.

#include <fmt/format.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "models/error.h"
#include "runtime/exact_sum.h"
#include "runtime/op_binding.h"
#include "runtime/stream_threads.h"
#include "runtime/trainer.h"
#include "tests/catch.h"
#include "tests/child_process.h"
#include "tests/disk_support.h"
#include "tests/host_job.h"
#include "tests/process_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;
namespace fs = std::filesystem;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ZEROPLAN_SANITIZED 1
#else
#define ZEROPLAN_SANITIZED 0
#endif

namespace {

ModelSpec tiny_llama(int hidden = 32) {
  return read_model(fmt::format(R"({{"model_type": "llama", "hidden_size": {}, "intermediate_size": 88,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false}})",
                                hidden),
                    "tiny.json");
}

PlanFile plan_file(int ranks, int stage, DType type = DType::bf16, double clip = 1.0) {
  PlanFile file;
  file.model = tiny_llama();
  file.plan = plain_plan(file.model, ranks, type, 24, 4 / ranks);
  file.plan.zero_stage = stage;
  file.plan.shard_ranks = stage == 0 ? 1 : ranks;
  file.plan.clip_norm = clip;
  file.machine.gpus_per_node = ranks;
  return file;
}

TrainOptions options_in(const fs::path& checkpoints, std::int64_t steps) {
  TrainOptions o;
  o.steps = steps;
  o.checkpoints = checkpoints.string();
  return o;
}

std::string error_of(const PlanFile& file, const TrainOptions& options,
                     const std::function<void(const StepReport&)>& on_step = {}) {
  try {
    train_threads(file, options, on_step);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("A run that diverges names the step, keeps the weights before it and the checkpoints") {
  const TemporaryDirectory scratch;
  const PlanFile file = plan_file(2, 3);
  TrainOptions o = options_in(fs::path(scratch.path()) / "ck", 6);
  o.checkpoint_every = 1;
  o.adam.learning_rate = 1e37;
  std::int64_t last = 0;
  const std::string error = error_of(file, o, [&](const StepReport& r) { last = r.step; });
  CHECK_THAT(error, HasText("training diverged at step " + std::to_string(last)) &&
                        HasText("the weights are those of the step before"));
  REQUIRE(last > 1);
  CHECK(CheckpointReader(o.checkpoints, file.model, file.plan).meta().step == last - 1);
}

TEST_CASE("Without a global norm a step of bad gradients is taken: it is said, and never stored") {
  const TemporaryDirectory scratch;
  const PlanFile file = plan_file(2, 3, DType::bf16, 0.0);
  TrainOptions o = options_in(fs::path(scratch.path()) / "ck", 6);
  o.checkpoint_every = 1;
  o.adam.learning_rate = 1e37;
  const std::string error = error_of(file, o);
  CHECK_THAT(error, HasText("training diverged") && (HasText("go back to a checkpoint") || HasText("no checkpoint")));
  // What is stored is finite.
  const CheckpointReader reader(o.checkpoints, file.model, file.plan);
  std::vector<float> master(64);
  reader.read({1, 0, 64}, master, {}, {});
  for (const float x : master) CHECK(std::isfinite(x));
}

TEST_CASE("fp16 that overflows at the smallest loss scale ends with the step; the weights are sound") {
  const TemporaryDirectory scratch;
  const PlanFile file = plan_file(2, 2, DType::fp16);
  TrainOptions o = options_in(fs::path(scratch.path()) / "ck", 100);
  o.checkpoint_every = 1;
  o.adam.learning_rate = 1e37;
  o.loss_scaling.hysteresis = 1;
  std::int64_t last = 0;
  const std::string error = error_of(file, o, [&](const StepReport& r) { last = r.step; });
  CHECK_THAT(error, HasText("smallest loss scale, 1") && HasText("at step " + std::to_string(last)));
  const CheckpointReader reader(o.checkpoints, file.model, file.plan);
  CHECK(reader.meta().step == last - 1);
  CHECK(reader.meta().loss_scale.scale == 1);
}

namespace {

/// States on disk, two ranks.
PlanFile plan_on_disk() {
  PlanFile file = plan_file(2, 3);
  file.plan.optimizer = Placement::all(Tier::nvme, static_cast<int>(file.model.sequence.size()));
  file.plan.update = UpdateOn::host;
  return file;
}

/// EIO in the n-th transfer from the moment when it is set; ranks and directions count together.
struct FailingDisk {
  std::atomic<int> left = -1, seen = 0;
  DiskFile::MakeBackend backend() {
    return faulty([this](int) -> std::optional<Fault> {
      ++seen;
      if (left < 0 || left-- != 0) return std::nullopt;
      return Fault{Fault::Kind::error, EIO, 0};
    });
  }
};

/// Trains two steps and leaves their checkpoint: options of a run that goes on from it.
TrainOptions resume_after_two_steps(const TemporaryDirectory& scratch, const PlanFile& file) {
  TrainOptions o = options_in(fs::path(scratch.path()) / "ck", 2);
  o.memory.nvme_directory = scratch.path();
  train_threads(file, o, {});
  o.resume = true;
  return o;
}

void check_disk_error(const std::string& error) {
  CHECK_THAT(error, HasText("/zeroplan-rank") && HasText(" bytes at offset ") && HasText(": Input/output error"));
}

}  // namespace

TEST_CASE("Whichever transfer of a step fails, every thread hears of it and the checkpoint before it resumes") {
  const TemporaryDirectory scratch;
  const PlanFile file = plan_on_disk();
  TrainOptions o = resume_after_two_steps(scratch, file);
  o.checkpoint_every = 1000;
  const auto run = [&](int fail_at, std::int64_t steps, int& transfers) {
    FailingDisk disk;
    o.steps = steps;
    o.memory.disk_backend = disk.backend();
    int before = 0;
    const std::string error = error_of(file, o, [&](const StepReport& r) {
      if (r.step == 3) {
        before = disk.seen;
        disk.left = fail_at;
      }
      if (r.step == 4) transfers = disk.seen - before;
    });
    CHECK((fail_at < 0 || disk.left < 0));
    return error;
  };
  int transfers = 0, unused = 0;
  const TemporaryDirectory apart;  // the count must not add a checkpoint
  const std::string checkpoints = o.checkpoints;
  o.checkpoints = apart.path() + "/ck";
  o.resume = false;
  o.steps = 2;
  train_threads(file, o, {});
  o.resume = true;
  CHECK(run(-1, 3, transfers) == "");
  REQUIRE(transfers > 20);
  o.checkpoints = checkpoints;
  for (int k = 0; k < transfers; ++k) {
    INFO("transfer " << k << " of " << transfers);
    check_disk_error(run(k, 1000, unused));
    CHECK(CheckpointReader(o.checkpoints, file.model, file.plan).meta().step == 2);
  }
  o.memory.disk_backend = {};
  o.steps = 1;
  CHECK(error_of(file, o) == "");
  CHECK(CheckpointReader(o.checkpoints, file.model, file.plan).meta().step == 3);
}

TEST_CASE("A transfer that fails in a step of one process ends the others, and the checkpoint before it resumes") {
  const TemporaryDirectory scratch;
  const PlanFile file = plan_on_disk();
  TrainOptions o = resume_after_two_steps(scratch, file);
  o.steps = 1000;
  for (const int victim : {0, 1}) {
    for (const int transfer : {150, 163, 171}) {  // some steps on: loading takes fewer than 60
      CAPTURE(victim, transfer);
      const Outcome outcome = on_every_process(2, [&](World& world) -> std::string {
        FailingDisk disk;
        TrainOptions mine = o;
        mine.memory.disk_backend = disk.backend();
        if (world.rank() == victim) disk.left = transfer;
        std::int64_t last = 0;
        try {
          train(file, world, mine, [&](const StepReport& r) { last = r.step; });
        } catch (const DeviceError& e) {
          return fmt::format("{} steps: {}", last, e.what());
        }
        return "no error";
      });
      check_all(outcome, ": Input/output error");
      check_all(outcome, fmt::format("/zeroplan-rank{}", victim));
      CHECK(outcome.seconds < kNotByLimit);
      CHECK_THAT(outcome.texts[0], !HasText("0 steps"));
      CHECK(CheckpointReader(o.checkpoints, file.model, file.plan).meta().step == 2);
    }
  }
}

TEST_CASE("Sequences longer than a table of positions are refused before anything is allocated") {
  PlanFile file = plan_file(2, 3);
  file.model = read_model(R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 23,
    "vocab_size": 77})",
                          "short.json");
  CHECK_THAT(error_of(file, {}), HasText("plan: seq_len: expected at most 23") && HasText("found 24"));
}

TEST_CASE("Configurations that would train another model are refused by key") {
  const auto refused = [](const std::string& key, const std::string& value) {
    const ModelSpec model = read_model(
        fmt::format(R"({{"model_type": "llama", "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
          "head_dim": {}, "hidden_act": "silu", "{}": {}}})",
                    key == "head_dim" ? value : "10", key == "head_dim" ? "unused" : key, value),
        "odd.json");
    try {
      model_constants(model);
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refused("rms_norm_eps", "1e-5") == "");
  CHECK(refused("rms_norm_eps", "null") == "");
  CHECK_THAT(refused("head_dim", "9"), HasText("odd.json: head_dim") && HasText("even number, got 9"));
  CHECK_THAT(refused("rms_norm_eps", "\"x\""), HasText("rms_norm_eps: expected a number, got \"x\""));
  CHECK_THAT(refused("rms_norm_eps", "-1"), HasText("rms_norm_eps: expected a positive number, got -1"));
  CHECK_THAT(refused("rope_theta", "0"), HasText("rope_theta: expected a positive number"));
  CHECK_THAT(refused("partial_rotary_factor", "0.5"), HasText("partial_rotary_factor"));
  CHECK_THAT(refused("rope_scaling", R"({"rope_type": "llama3", "factor": "8"})"),
             HasText("factor: expected a number"));
}

TEST_CASE("An exception of the caller's own ends every rank and comes back as it was") {
  const PlanFile file = plan_file(4, 3);
  TrainOptions o;
  o.steps = 100000;
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_AS(train_threads(file, o,
                                [](const StepReport& r) {
                                  if (r.step == 3) throw std::length_error("enough");
                                }),
                  std::length_error);
  CHECK_THROWS_AS(train_threads(file, o, [](const StepReport&) { throw 7; }), int);
  CHECK(std::chrono::steady_clock::now() - begin < kTrainingWaitLimit / 4);
}

TEST_CASE("A second run in a directory of checkpoints is refused while the first one trains") {
  const TemporaryDirectory scratch;
  const PlanFile file = plan_file(2, 2);
  TrainOptions o = options_in(fs::path(scratch.path()) / "ck", 2);
  std::string second, resumed;
  train_threads(file, o, [&](const StepReport& r) {
    if (r.step != 1) return;
    second = error_of(file, o);
    TrainOptions again = o;
    again.resume = true;
    resumed = error_of(file, again);
  });
  CHECK_THAT(second, HasText("another run writes its checkpoints here"));
  CHECK_THAT(resumed, HasText("another run writes its checkpoints here"));
  o.resume = true;
  CHECK(error_of(file, o) == "");
}

TEST_CASE("A run resumes only what fits it, and from a named step goes on beside it") {
  const TemporaryDirectory scratch;
  const PlanFile file = plan_file(2, 3);
  TrainOptions o = options_in(fs::path(scratch.path()) / "ck", 2);
  train_threads(file, o, {});
  o.resume = true;
  CHECK_THAT(error_of(plan_file(2, 3, DType::fp32), o), HasText("weights are bf16 there and fp32 in the plan"));
  PlanFile wider = file;
  wider.model = tiny_llama(64);
  CHECK_THAT(error_of(wider, o), HasText("hidden_size is 32 there and 64 here"));
  PlanFile more = file;
  more.plan.accumulation = 2;
  CHECK_THAT(error_of(more, o), HasText("global batch"));
  o.checkpoints = (fs::path(scratch.path()) / "ck/step-000002").string();
  CHECK(error_of(file, o) == "");
  CHECK(fs::exists(fs::path(scratch.path()) / "ck/step-000004/manifest.json"));
  CHECK_FALSE(fs::exists(fs::path(scratch.path()) / "ck/step-000002/step-000004"));
}

#if !ZEROPLAN_SANITIZED  // they reserve address space themselves
TEST_CASE("However little memory there is: a result or a named error, on every rank, and no hang") {
  int failed = 0, done = 0;
  for (const int more : {0, 1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96, 128, 192, 256, 4096}) {
    INFO(more << " MiB more");
    const std::string text = in_child([&]() -> std::string {
      std::ifstream file("/proc/self/statm");
      rlim_t pages = 0;
      file >> pages;
      const rlim_t limit = pages * 4096 + static_cast<rlim_t>(more) * (1 << 20);
      const rlimit both{limit, limit};
      if (setrlimit(RLIMIT_AS, &both) != 0) return "no limit";
      TrainOptions o;
      o.steps = 2;
      o.cores = 8;
      o.ranks_here = 4;
      try {
        train_threads(plan_file(4, 3), o, {});
      } catch (const DeviceError&) {
        return "DeviceError";
      }
      return "done";
    });
    CHECK((text == "DeviceError" || text == "done"));
    (text == "done" ? done : failed) += 1;
  }
  CHECK(failed > 2);
  CHECK(done > 0);
}
#endif

namespace {

/// A rank alone, whose ops run in an order of the test's choice.
struct LoneRank {
  LoneRank()
      : model(tiny_llama()),
        plan(plain_plan(model, 1, DType::fp32, 12, 1)),
        constants(model_constants(model)),
        schedule(lower(model, plan, Folding::none)),
        memory(model, plan, schedule, 0, poisoned()),
        rotary(rotary_table(model, constants, plan.seq_len)),
        pool(1),
        context{model, constants, plan, schedule, memory, rotary, 0, pool, pool, {}, input, output},
        actions(bind_ops(context)) {
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(7 * i % 101);
    input.inputs = input.targets = ids;
    output.losses.resize(1);
    for (std::uint32_t i = 0; i < schedule.buffers().size(); ++i) {
      const Buffer& b = schedule.buffers()[i];
      if (b.role == BufferRole::gradient) clear_padding(context, {i});
      if (b.role == BufferRole::norm) norm = {i};
      if (b.role != BufferRole::weights) continue;
      const auto bytes = memory.bytes({i});
      const std::span<float> w(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
      for (std::size_t k = 0; k < w.size(); ++k) w[k] = 0.01f * static_cast<float>(k * 37 % 19) - 0.08f;
    }
  }
  static MemoryOptions poisoned() {
    MemoryOptions options;
    options.poison = true;
    return options;
  }

  /// Ops in their order, but op `early` before op `before`. False when the loss or the gradients are not finite.
  bool sound(std::uint32_t early, std::uint32_t before) {
    for (std::uint32_t i = 0; i < actions.size(); ++i) {
      if (i == before) actions[early]();
      if (i != early) actions[i]();
    }
    const std::span<const float, ExactSum::kDigits> digits(reinterpret_cast<const float*>(memory.bytes(norm).data()),
                                                           ExactSum::kDigits);
    return std::isfinite(output.losses[0]) && std::isfinite(ExactSum::from_digits(digits).value());
  }

  ModelSpec model;
  Plan plan;
  ModelConstants constants;
  Schedule schedule;
  RankMemory memory;
  RotaryTable rotary;
  ThreadPool pool;
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(12);
  StepInput input;
  StepOutput output;
  RankContext context;
  std::vector<Action> actions;
  BufferId norm;
};

/// The last op before `end` that reads the buffer, or none.
std::optional<std::uint32_t> last_reader(const Schedule& schedule, BufferId buffer, std::uint32_t end) {
  for (std::uint32_t i = end; i-- > 0;) {
    for (const Operand& o : schedule.operands(schedule.ops()[i])) {
      if (o.buffer.index == buffer.index && o.access != Access::write) return i;
    }
  }
  return {};
}

}  // namespace

TEST_CASE("A schedule that frees a buffer before its last reader is found, whichever buffer it is") {
  const LoneRank right;
  const auto run = [](std::uint32_t early, std::uint32_t before) {
    return in_child([=] { return LoneRank().sound(early, before) ? "sound" : "not finite"; });
  };
  CHECK(run(0, 0) == "sound");
  int broken = 0;
  for (std::uint32_t i = 0; i < right.schedule.ops().size(); ++i) {
    const Op& op = right.schedule.ops()[i];
    if (!std::holds_alternative<Free>(right.schedule.work(op))) continue;
    const BufferId freed = right.schedule.operands(op)[0].buffer;
    const auto reader = last_reader(right.schedule, freed, i);
    if (!reader) continue;
    INFO(label(right.schedule, op, right.model));
    ++broken;
    const std::string found = run(i, *reader);
#if defined(__SANITIZE_ADDRESS__)
    CHECK(found.starts_with("exit"));  // the sanitizer's report
#else
    CHECK(found == "not finite");  // the poison's NaN
#endif
  }
  CHECK(broken > 20);
}

TEST_CASE("Streams: what an op throws comes back, whatever it is, and nobody waits for ever") {
  ScheduleBuilder builder;
  const WorkId work = builder.work(Join{});
  std::vector<OpRef> refs;
  for (int i = 0; i < 12; ++i) {
    const OpRef before = refs.empty() ? OpRef{} : refs.back();
    refs.push_back(
        builder.add(static_cast<Stream>(i % 4), Phase::forward, -1, work, std::span<const OpRef>(&before, 1), {}));
  }
  const Schedule schedule = builder.finish();
  for (std::size_t bad = 0; bad < 12; ++bad) {
    std::vector<int> ran;
    std::vector<Action> actions;
    for (std::size_t i = 0; i < 12; ++i) {
      actions.push_back([&ran, i, bad]() -> std::optional<TimePoint> {
        if (i == bad) throw std::string("not an exception class");
        ran.push_back(static_cast<int>(i));
        return {};
      });
    }
    std::vector<std::string> told;
    StreamThreads threads(schedule, actions, [&](const std::string& what) { told.push_back(what); });
    CHECK_THROWS_AS(threads.run(), std::string);
    CHECK_THROWS_AS(threads.run(), std::string);
    CHECK(told == std::vector<std::string>{"an exception of unknown type"});
    CHECK(ran.size() == bad);
  }
}
