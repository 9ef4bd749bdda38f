// Where the most is alive: by hand on small tapes, and against the memory timeline on whole runs.

#include "planner/engine_peak.h"

#include "planner/engine_prediction.h"
#include "tests/catch.h"

using namespace zeroplan;

namespace {

TapeId buffer(EngineTape& tape, std::int64_t bytes, Owner owner) {
  return tape.alloc({bytes, Pool::compute, BufferRole::value, owner, -1});
}
void kernel(EngineTape& tape, Pass pass) {
  Compute work;
  work.pass = pass;
  work.kernel = AttentionWork{};
  tape.work(Stream::compute, work);
}

/// initialize takes `init` bytes for a moment, each part of a micro-step and the update what is given.
struct Sizes {
  std::int64_t init = 0, embedding = 0, layer = 0, head = 0, head_backward = 0, layer_backward = 0, rest = 0,
               update = 0;
};

EnginePeak peak_of(const Sizes& sizes) {
  EngineTape tape;
  const auto passing = [&](std::int64_t bytes, Phase phase, int block, Pass pass) {
    tape.set_phase(phase);
    tape.set_block(block);
    const TapeId id = buffer(tape, bytes, Owner::activations);
    kernel(tape, pass);
    tape.free(id);
  };
  buffer(tape, 5, Owner::parameters);
  passing(sizes.init, Phase::forward, -1, Pass::forward);
  tape.mark(Mark::init_end);
  tape.mark(Mark::step_begin);
  tape.mark(Mark::micro_begin);
  passing(sizes.embedding, Phase::forward, -1, Pass::forward);
  passing(sizes.layer, Phase::forward, 3, Pass::forward);
  passing(sizes.head, Phase::forward, -1, Pass::forward);
  tape.mark(Mark::forward_end);
  passing(sizes.head_backward, Phase::backward, -1, Pass::backward);
  passing(sizes.layer_backward, Phase::backward, 3, Pass::backward);
  passing(sizes.rest, Phase::backward, -1, Pass::backward);
  tape.mark(Mark::backward_end);
  passing(sizes.update, Phase::optimizer, -1, Pass::forward);
  tape.mark(Mark::micro_end);
  tape.mark(Mark::step_end);
  return peak_moment(tape);
}

}  // namespace

TEST_CASE("The op at the peak is named by the part of the model and what runs there") {
  const ModelSpec model = find_model("gpt2");
  const auto named = [&](const Sizes& sizes) { return label(peak_of(sizes), model); };
  CHECK(named({.init = 9}) == "initialize: attention");
  CHECK(named({.embedding = 9}) == "embedding forward: attention");
  CHECK(named({.layer = 9}) == "layer 3 forward: attention");
  CHECK(named({.head = 9}) == "head forward: attention");
  CHECK(named({.head_backward = 9}) == "head backward: attention backward");
  CHECK(named({.layer_backward = 9}) == "layer 3 backward: attention backward");
  CHECK(named({.rest = 9}) == "step backward: attention backward");
  CHECK(named({.update = 9}) == "step optimizer: attention");
  CHECK(named({.init = 9, .layer = 9}) == "initialize: attention");  // the first of equal ones
  const OwnerBytes owners = peak_of({.init = 3, .layer = 9}).owners;
  CHECK(owners[static_cast<std::size_t>(Owner::parameters)] == Bytes(5));
  CHECK(owners[static_cast<std::size_t>(Owner::activations)] == Bytes(9));
  CHECK(label(peak_moment(EngineTape()), model).find(':') == std::string::npos);
}

TEST_CASE("Owners at the peak add up to the live peak of the run") {
  EagerOptions options;
  options.tokens = {2, 64};
  const ModelSpec model = find_model("smollm2-135m");
  const EagerStep step = eager_step(model, options);
  for (const int stage : {0, 1, 2, 3}) {
    DeepSpeedJob job;
    job.config = read_deepspeed_config(ConfigText::parse(
        R"({"bf16": {"enabled": true}, "zero_optimization": {"stage": )" + std::to_string(stage) + "}}", "ds.json"));
    job.ranks = 4;
    const EngineRecording recording = record_deepspeed(step, options.tokens, job, {});
    const EnginePeak peak = peak_moment(recording.tape);
    Bytes sum;
    for (const Bytes bytes : peak.owners) sum += bytes;
    CHECK(sum == live_peak(recording.tape));
    CHECK(peak.work.has_value());
  }
}
