#include "tests/engine_models.h"

#include <algorithm>

#include "models/engine_walk.h"

namespace zeroplan::test {
namespace {

class ChainBuilder {
 public:
  explicit ChainBuilder(const ChainModel& model) : model_(model) {}

  EagerStep build() {
    add_module("", "Chain", -1);
    for (int i = 0; i < model_.blocks; ++i) {
      const std::string name = "blocks." + std::to_string(i);
      Block block;
      block.container = add_module(name, "Block", i);
      step_.modules.back().is_block = true;
      block.norm = add_module(name + ".norm", "LayerNorm", i, {{model_.width}, {model_.width}});
      block.up = add_module(name + ".up", "Linear", i, {{4 * model_.width, model_.width}, {4 * model_.width}});
      block.down = add_module(name + ".down", "Linear", i, {{model_.width, 4 * model_.width}, {model_.width}});
      blocks_.push_back(block);
    }
    head_ = add_module("head", "Linear", -1, {{model_.classes, model_.width}, {model_.classes}});
    forward();
    backward();
    return std::move(step_);
  }

 private:
  struct Block {
    int container, norm, up, down;
  };

  int add_module(const std::string& name, const std::string& type, int layer,
                 const std::vector<std::vector<std::int64_t>>& shapes = {}) {
    EagerModule module;
    module.name = name;
    module.type = type;
    module.layer = layer;
    for (const auto& shape : shapes) {
      EagerParameter parameter;
      parameter.name = name + (module.parameters.empty() ? ".weight" : ".bias");
      parameter.shape = shape;
      parameter.elements = 1;
      for (const std::int64_t size : shape) parameter.elements *= size;
      module.parameters.push_back(static_cast<int>(step_.parameters.size()));
      step_.parameters.push_back(parameter);
    }
    step_.modules.push_back(module);
    return static_cast<int>(step_.modules.size()) - 1;
  }

  void event(EagerEventKind kind, int id) { step_.events.push_back({kind, id, -1, 0}); }

  void forward_of(int module) {
    event(EagerEventKind::forward_pre, module);
    event(EagerEventKind::forward_post, module);
  }
  void forward_block(const Block& block) {
    event(EagerEventKind::forward_pre, block.container);
    for (const int module : {block.norm, block.up, block.down}) forward_of(module);
    event(EagerEventKind::forward_post, block.container);
  }
  void forward() {
    event(EagerEventKind::forward_pre, 0);
    for (const Block& block : blocks_) forward_block(block);
    forward_of(head_);
    event(EagerEventKind::forward_post, 0);
    event(EagerEventKind::forward_end, 0);
  }

  /// Both gradients are made by one kernel.
  void gradients(int module) {
    const std::vector<int>& parameters = step_.modules[static_cast<std::size_t>(module)].parameters;
    const int first = storages_;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::int64_t elements = step_.parameters[static_cast<std::size_t>(parameters[i])].elements;
      step_.events.push_back({EagerEventKind::alloc, storages_++, -1, elements * model_.element_size});
    }
    const bool reversed = model_.bias_first && step_.modules[static_cast<std::size_t>(module)].type == "Linear";
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::size_t at = reversed ? parameters.size() - 1 - i : i;
      step_.events.push_back({EagerEventKind::gradient, parameters[at], first + static_cast<int>(at), 0});
    }
  }
  void backward_of(int module) {
    event(EagerEventKind::backward_pre, module);
    gradients(module);
    event(EagerEventKind::backward_post, module);
  }
  void backward() {
    event(EagerEventKind::backward_pre, 0);
    backward_of(head_);
    for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
      if (model_.checkpointed) forward_block(*block);
      event(EagerEventKind::backward_pre, block->container);
      for (const int module : {block->down, block->up, block->norm}) backward_of(module);
      event(EagerEventKind::backward_post, block->container);
    }
    event(EagerEventKind::backward_post, 0);
    event(EagerEventKind::backward_end, 0);
  }

  ChainModel model_;
  EagerStep step_;
  std::vector<Block> blocks_;
  int head_ = 0;
  int storages_ = 0;
};

}  // namespace

EagerStep chain_step(const ChainModel& model) { return ChainBuilder(model).build(); }

std::int64_t parameters_of(const EagerStep& step) {
  std::int64_t count = 0;
  for (const EagerParameter& parameter : step.parameters) count += parameter.elements;
  return count;
}

DeepSpeedJob job_of(int stage, int ranks) {
  DeepSpeedJob job;
  job.ranks = ranks;
  job.config.stage = stage;
  job.config.precision = DType::bf16;
  job.config.overlap_comm = stage == 3;
  job.config.reduce_bucket = 3'000'000;
  return job;
}

EngineTape tape_of(const EagerStep& step, const DeepSpeedJob& job) {
  EngineTape tape;
  EngineRun run;
  run.steps = deepspeed_steady_steps(job);
  run.accumulation = job.accumulation;
  run.cublas_workspace = 0;
  run.tokens = {0, 0};
  record_run(*make_deepspeed_engine(step, job, tape), step, run, tape);
  return tape;
}

PlainRun count_plainly(const EngineTape& tape) {
  PlainRun run;
  std::int64_t alive = 0, peak = 0;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind == TapeKind::alloc) peak = std::max(peak, alive += tape.buffer(static_cast<TapeId>(op.id)).bytes);
    if (op.kind == TapeKind::free) alive -= tape.buffer(static_cast<TapeId>(op.id)).bytes;
    if (op.kind != TapeKind::mark) continue;
    switch (op.mark) {
      case Mark::init_end:
        run.init_peak = peak;
        run.after_init = alive;
        break;
      case Mark::step_begin:
        run.steps.emplace_back().start = alive;
        break;
      case Mark::micro_begin:
        break;
      case Mark::forward_end:
        run.steps.back().forward = std::max(run.steps.back().forward, peak);
        run.steps.back().end_of_forward = alive;
        break;
      case Mark::backward_end:
        run.steps.back().backward = std::max(run.steps.back().backward, peak);
        break;
      case Mark::micro_end:
        run.steps.back().step = peak;
        break;
      case Mark::step_end:
        run.steps.back().after = alive;
        break;
    }
    peak = alive;
  }
  return run;
}

std::vector<Collective> collectives_of_last_step(const EngineTape& tape) {
  std::vector<Collective> found;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind == TapeKind::mark && op.mark == Mark::step_begin) found.clear();
    if (op.kind != TapeKind::work) continue;
    if (const auto* collective = std::get_if<Collective>(&tape.works()[op.id])) found.push_back(*collective);
  }
  return found;
}

}  // namespace zeroplan::test
