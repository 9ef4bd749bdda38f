// Training runs: resume, export, loss scale, errors.

#include "runtime/trainer.h"

#include <fmt/format.h>

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "models/error.h"
#include "runtime/checkpoint.h"
#include "runtime/train_report.h"
#include "tests/catch.h"
#include "tests/child_process.h"
#include "tests/host_job.h"

using namespace zeroplan;
using namespace zeroplan::tests;
namespace fs = std::filesystem;

namespace {

/// A folder that goes with the test.
struct Scratch {
  std::string in(const std::string& name) const { return (path / name).string(); }
  TemporaryDirectory directory;
  fs::path path = directory.path();
};

ModelSpec tiny_llama() {
  return read_model(R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false})",
                    "tiny.json");
}

PlanFile plan_file(const ModelSpec& model, int ranks, int stage, DType type = DType::bf16, std::int64_t batch = 4) {
  PlanFile file;
  file.model = model;
  file.plan = plain_plan(model, ranks, type, 24, batch / ranks);
  file.plan.zero_stage = stage;
  file.plan.shard_ranks = stage == 0 ? 1 : ranks;
  file.machine.gpus_per_node = ranks;
  return file;
}

TrainOptions options(std::int64_t steps) {
  TrainOptions o;
  o.steps = steps;
  o.adam.learning_rate = 5e-3;
  return o;
}

std::vector<double> losses(const TrainResult& result) { return result.measured.losses; }

}  // namespace

TEST_CASE("Training on made-up data learns, and the record of it is whole") {
  const PlanFile file = plan_file(tiny_llama(), 2, 3);
  const TrainResult result = train_threads(file, options(60), {});
  REQUIRE(result.steps.size() == 60);
  CHECK(result.steps.front().loss == Approx(std::log(101)).margin(0.2));
  CHECK(result.steps.back().loss < 0.6 * result.steps.front().loss);
  const Measured& m = result.measured;
  CHECK(m.ops.size() == lower(file.model, file.plan, Folding::none).ops().size());
  for (const MeasuredTier& tier : m.memory) CHECK(tier.planned == tier.used);
  CHECK(read_measured(write_measured(m), "measured.json") == m);
  CHECK(m.traffic.all_gather > 0);
  CHECK(m.traffic.sent > 0);
  CHECK(nlohmann::json::parse(training_json(file, result)).at("losses").size() == 60);
  CHECK_FALSE(report_training(file, result).empty());
}

TEST_CASE("A run that stops and resumes has the bits of one that did not, at any stage") {
  const Scratch scratch;
  const ModelSpec model = tiny_llama();
  const auto whole = losses(train_threads(plan_file(model, 2, 0), options(8), {}));
  for (const int stage : {0, 2, 3}) {
    INFO("first half at stage 3, second at stage " << stage);
    TrainOptions first = options(5), second = options(3);
    first.checkpoints = second.checkpoints = scratch.in(fmt::format("stage{}", stage));
    second.resume = true;
    train_threads(plan_file(model, 2, 3), first, {});
    const TrainResult rest = train_threads(plan_file(model, 2, stage), second, {});
    CHECK(rest.first_step == 5);
    for (std::size_t k = 0; k < 3; ++k) CHECK(losses(rest)[k] == whole[5 + k]);
  }
}

namespace {

/// All states of the newest checkpoint.
struct States {
  std::vector<float> master;
  std::vector<std::byte> moments;
  bool operator==(const States&) const = default;
};
States states_in(const std::string& checkpoints, const PlanFile& file) {
  const CheckpointReader reader(checkpoints, file.model, file.plan);
  const std::vector<std::int64_t> elements = stored_elements(file.model, file.plan.precision.weights);
  States all;
  for (std::size_t block = 0; block < elements.size(); ++block) {
    const auto n = static_cast<std::size_t>(elements[block]), each = n * sizeof(float);
    std::vector<float> master(n);
    std::vector<std::byte> moments(2 * each);
    const std::span<std::byte> both(moments);
    reader.read({static_cast<int>(block), 0, elements[block]}, master, both.first(each), both.subspan(each));
    all.master.insert(all.master.end(), master.begin(), master.end());
    all.moments.insert(all.moments.end(), moments.begin(), moments.end());
  }
  return all;
}

}  // namespace

TEST_CASE("States of blocks that are loaded and saved in several pieces, wherever they are") {
  const Scratch scratch;
  // 4.5 M elements in the embedding: a piece and a bit.
  const ModelSpec model = read_model(R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 88,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 140007,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true})",
                                     "wide.json");
  const auto trained = [&](const PlanFile& file, const std::string& name, std::int64_t steps, bool resume) {
    TrainOptions o = options(steps);
    o.checkpoints = scratch.in(name);
    o.resume = resume;
    o.memory.nvme_directory = scratch.path.string();
    train_threads(file, o, {});
    return states_in(o.checkpoints, file);
  };
  for (const bool split : {false, true}) {
    PlanFile here = plan_file(model, 1, 0, DType::bf16, 1);
    here.plan.precision.split_master = split;
    PlanFile on_disk = here;
    on_disk.plan.zero_stage = 3;
    on_disk.plan.optimizer = Placement::all(Tier::nvme, static_cast<int>(model.sequence.size()));
    INFO((split ? "split master" : "fp32 master"));
    const States whole = trained(here, fmt::format("whole{}", split), 2, false);
    trained(on_disk, fmt::format("parts{}", split), 1, false);
    CHECK(trained(on_disk, fmt::format("parts{}", split), 1, true) == whole);
  }
}

TEST_CASE("States move between rank counts bit for bit") {
  const Scratch scratch;
  const ModelSpec model = tiny_llama();
  TrainOptions o = options(4);
  o.checkpoints = scratch.in("checkpoints");
  train_threads(plan_file(model, 4, 3), o, {});
  o.resume = true;
  o.steps = 1;
  // One sequence a rank of four, or four of one rank: the loss of the next step comes before any sum over ranks.
  TrainOptions again = o;
  std::vector<double> next;
  for (const int ranks : {4, 2, 1}) {
    const fs::path copy = scratch.path / fmt::format("copy{}", ranks);
    fs::copy(o.checkpoints, copy, fs::copy_options::recursive);
    again.checkpoints = copy.string();
    next.push_back(losses(train_threads(plan_file(model, ranks, ranks == 1 ? 0 : 2), again, {}))[0]);
  }
  CHECK(next[1] == Approx(next[0]).epsilon(1e-12));
  CHECK(next[2] == Approx(next[0]).epsilon(1e-12));
}

TEST_CASE("The exported weights start another run where this one ended") {
  const Scratch scratch;
  const ModelSpec model = tiny_llama();
  TrainOptions o = options(3);
  o.export_to = scratch.in("weights");
  o.checkpoints = scratch.in("checkpoints");
  train_threads(plan_file(model, 2, 3, DType::fp32), o, {});
  TrainOptions resumed = options(1);
  resumed.checkpoints = o.checkpoints;
  resumed.resume = true;
  const double right = losses(train_threads(plan_file(model, 2, 3, DType::fp32), resumed, {}))[0];
  // The data of step 0 are another batch: the imported weights are run on the resumed run's batch by skipping none.
  TrainOptions imported = options(1);
  imported.weights = scratch.in("weights");
  const TrainResult fresh = train_threads(plan_file(model, 1, 0, DType::fp32), imported, {});
  CHECK(std::isfinite(fresh.steps[0].loss));
  CHECK(fresh.steps[0].loss < std::log(101) + 0.05);
  CHECK(std::isfinite(right));
  CHECK(nlohmann::json::parse(std::ifstream(scratch.in("weights/config.json"))).at("model_type") == "llama");
}

TEST_CASE("fp16 finds its loss scale: overflows are skipped and the scale halves") {
  PlanFile file = plan_file(tiny_llama(), 2, 2, DType::fp16);
  TrainOptions o = options(30);
  o.loss_scaling.initial = std::ldexp(1.0, 30);
  o.loss_scaling.hysteresis = 1;
  const TrainResult result = train_threads(file, o, {});
  CHECK(result.steps.front().skipped);
  CHECK_FALSE(result.steps.back().skipped);
  CHECK(result.steps.back().loss_scale < o.loss_scaling.initial);
  CHECK(result.steps.back().loss < result.steps.front().loss);
}

TEST_CASE("Loss scale: hysteresis, window and minimum") {
  const LossScaling16 rule{.initial = 8, .window = 3, .hysteresis = 2, .minimum = 2};
  LossScaleState s = initial_loss_scale(rule);
  update_loss_scale(s, rule, true);
  CHECK(s.scale == 8);  // the first overflow only uses up hysteresis
  update_loss_scale(s, rule, true);
  CHECK(s.scale == 4);
  for (int k = 0; k < 3; ++k) update_loss_scale(s, rule, false);
  CHECK(s.scale == 8);
  CHECK(s.hysteresis_left == 2);
  CHECK(s.skipped_steps == 2);
  for (int k = 0; k < 3; ++k) update_loss_scale(s, rule, true);
  CHECK(s.scale == 2);
  CHECK_THROWS_AS(update_loss_scale(s, rule, true), DeviceError);
  // As DynamicLossScaler of DeepSpeed: a minimum between two halvings is reached before training counts as diverged.
  const LossScaling16 odd_rule{.initial = 8, .window = 3, .hysteresis = 1, .minimum = 3};
  LossScaleState odd = initial_loss_scale(odd_rule);
  update_loss_scale(odd, odd_rule, true);
  CHECK(odd.scale == 4);
  update_loss_scale(odd, odd_rule, true);
  CHECK(odd.scale == 3);
  CHECK_THROWS_AS(update_loss_scale(odd, odd_rule, true), DeviceError);
}

TEST_CASE("Wrong inputs of a run are named") {
  const Scratch scratch;
  const PlanFile file = plan_file(tiny_llama(), 2, 3);
  TrainOptions o = options(1);
  o.data = scratch.in("missing.tokens");
  CHECK_THROWS_AS(train_threads(file, o, {}), InputError);
  o = options(1);
  o.checkpoints = scratch.in("none");
  o.resume = true;
  CHECK_THROWS_AS(train_threads(file, o, {}), InputError);
  o = options(2);
  o.checkpoints = scratch.in("here");
  train_threads(file, o, {});
  o.resume = true;
  o.data_seed = 9;
  CHECK_THROWS_WITH(train_threads(file, o, {}), Catch::Contains("data") && Catch::Contains("seed 9"));
}
