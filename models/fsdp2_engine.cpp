#include "models/fsdp2_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "models/error.h"

namespace zeroplan {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// Elements of a parameter's shard: dimension 0 is cut, the last ranks' part is padded.
std::int64_t shard_elements(const EagerParameter& parameter, int ranks) {
  if (parameter.shape.empty() || parameter.shape[0] == 0) return parameter.elements;
  const std::int64_t rows = parameter.shape[0];
  return (rows + ranks - 1) / ranks * (parameter.elements / rows);
}

/// What fully_shard() makes of a block, or of the root.
struct Unit {
  enum class State : std::uint8_t { idle, forward, before_backward, after_backward };
  int block = -1;
  std::vector<int> parameters;
  std::int64_t shard = 0;  // elements of all shards
  State state = State::idle;
  std::vector<TapeId> gathered;       // one buffer a parameter; empty while sharded
  TapeId receive = kNoBuffer;         // all-gather output not yet copied out
  std::vector<std::size_t> forwards;  // positions in the order of forwards, of calls whose backward is still to come
  std::vector<TapeId> gradients;      // complete, not yet reduced
  std::int64_t gradient_shard = 0;    // elements of those gradients' shards
  TapeId reduced = kNoBuffer;         // the sharded gradient
};

class Fsdp2Engine final : public EngineHooks {
 public:
  Fsdp2Engine(const EagerStep& step, const Fsdp2Options& options, EngineTape& tape);

  void initialize() override;
  void begin(const MicroStep& now) override;
  void forward_pre(int module) override;
  void forward_post(int module) override;
  void backward_pre(int module) override;
  void backward_post(int module) override;
  void gradient(int parameter, TapeId storage) override;
  void forward_end() override {}
  void backward_end() override;
  void update() override;

 private:
  Unit* unit_of(int module) {
    const int unit = unit_of_module_[at(module)];
    return unit < 0 ? nullptr : &units_[at(unit)];
  }
  Unit& root() { return units_.back(); }
  std::int64_t size(std::int64_t elements, DType type) const { return elements * size_of(type); }
  bool reshards(const Unit& unit) { return &unit == &root() ? options_.reshard_root : options_.reshard_after_forward; }

  TapeId bring_up(int parameter, std::int16_t block);
  std::vector<TapeId> gather_inputs(const Unit& unit);
  void gather(Unit& unit);
  void copy_out(Unit& unit);
  void wait_in_forward(Unit& unit);
  void wait_in_backward(Unit& unit);
  void reshard(Unit& unit);
  void reduce(Unit& unit);
  TapeId reduce_scatter(Unit& unit);
  void add_moments();
  TapeId temporary(std::size_t parameter);
  void adam_on_gpu(const AdamStep& step);
  void adam_by_parameter();

  const EagerStep& step_;
  Fsdp2Options options_;
  EngineTape& tape_;
  std::vector<std::int64_t> shards_;  // elements, by parameter
  std::vector<int> unit_of_module_;   // -1: not a unit's own module
  std::vector<int> unit_of_parameter_;
  std::vector<Unit> units_;          // blocks in order, the root last
  std::vector<std::size_t> order_;   // units in the order their forwards ended
  TapeId held_receive_ = kNoBuffer;  // forward: the last all-gather output, until the next one is copied out
  TapeId reduce_input_ = kNoBuffer;  // the last reduce-scatter's input, until the next one
  bool moments_made_ = false;
};

Fsdp2Engine::Fsdp2Engine(const EagerStep& step, const Fsdp2Options& options, EngineTape& tape)
    : step_(step), options_(options), tape_(tape) {
  for (const EagerParameter& parameter : step.parameters) {
    shards_.push_back(shard_elements(parameter, options.group()));
  }
  std::vector<int> unit_of_layer;
  unit_of_module_.assign(step.modules.size(), -1);
  for (std::size_t i = 0; i < step.modules.size(); ++i) {
    const EagerModule& module = step.modules[i];
    if (!module.is_block) continue;
    if (unit_of_layer.size() <= at(module.layer)) unit_of_layer.resize(at(module.layer) + 1, -1);
    unit_of_layer[at(module.layer)] = static_cast<int>(units_.size());
    unit_of_module_[i] = static_cast<int>(units_.size());
    units_.emplace_back().block = module.layer;
  }
  unit_of_module_[0] = static_cast<int>(units_.size());
  units_.emplace_back();
  unit_of_parameter_.assign(step.parameters.size(), static_cast<int>(units_.size()) - 1);
  for (const EagerModule& module : step.modules) {
    if (module.layer < 0) continue;
    for (const int parameter : module.parameters)
      unit_of_parameter_[at(parameter)] = unit_of_layer.at(at(module.layer));
  }
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    Unit& unit = units_[at(unit_of_parameter_[p])];
    unit.parameters.push_back(static_cast<int>(p));
    unit.shard += shards_[p];
  }
}

void Fsdp2Engine::initialize() {
  if (options_.offload) return;
  for (std::size_t p = 0; p < shards_.size(); ++p) {
    tape_.alloc({size(shards_[p], options_.parameters), Pool::compute, BufferRole::weight_shard, Owner::parameters,
                 static_cast<std::int16_t>(units_[at(unit_of_parameter_[p])].block)});
  }
}

void Fsdp2Engine::begin(const MicroStep&) {
  order_.clear();
  for (Unit& unit : units_) {
    unit.forwards.clear();
    unit.state = Unit::State::idle;
  }
}

/// One shard as the all-gather sends it: copied up from the host, then cast.
TapeId Fsdp2Engine::bring_up(int parameter, std::int16_t block) {
  const std::int64_t stored = size(shards_[at(parameter)], options_.parameters);
  const TapeId up = tape_.alloc({stored, Pool::gather, BufferRole::weight_staging, Owner::buffers, block});
  tape_.work(Stream::gather, Copy{Memory::pinned, Memory::hbm, Bytes(static_cast<double>(stored))},
             {{up, Access::write}});
  if (!options_.mixed()) return up;
  const std::int64_t cast_bytes = size(shards_[at(parameter)], options_.compute);
  const TapeId cast = tape_.alloc({cast_bytes, Pool::gather, BufferRole::weight_staging, Owner::buffers, block});
  tape_.pass(Stream::gather, stored + cast_bytes, {{up, Access::read}, {cast, Access::write}});
  tape_.free(up);
  return cast;
}

/// The all-gather's inputs besides the shards themselves: with offload one a parameter, else one cast copy of the unit.
std::vector<TapeId> Fsdp2Engine::gather_inputs(const Unit& unit) {
  const auto block = static_cast<std::int16_t>(unit.block);
  std::vector<TapeId> inputs;
  if (options_.offload) {
    for (const int parameter : unit.parameters) inputs.push_back(bring_up(parameter, block));
  } else if (options_.mixed()) {
    const std::int64_t bytes = size(unit.shard, options_.compute);
    inputs.push_back(tape_.alloc({bytes, Pool::gather, BufferRole::weight_staging, Owner::buffers, block}));
    tape_.pass(Stream::gather, bytes + size(unit.shard, options_.parameters), {{inputs.back(), Access::write}});
  }
  return inputs;
}

void Fsdp2Engine::gather(Unit& unit) {
  if (unit.receive != kNoBuffer || !unit.gathered.empty()) return;
  const auto block = static_cast<std::int16_t>(unit.block);
  const std::vector<TapeId> inputs = gather_inputs(unit);
  unit.receive = tape_.alloc({size(unit.shard * options_.group(), options_.compute), Pool::gather,
                              BufferRole::weight_staging, Owner::buffers, block});
  Collective collective{CollectiveKind::all_gather, Group::shard, 0, unit.shard * options_.group(), options_.compute};
  for (const int p : unit.parameters) collective.elements += step_.parameters[at(p)].elements;
  tape_.work(Stream::gather, collective, {{unit.receive, Access::write}});
  for (const TapeId input : inputs) tape_.free(input);
}

/// Each parameter gets a buffer of its own, filled from the all-gather's output.
void Fsdp2Engine::copy_out(Unit& unit) {
  tape_.wait(Stream::compute, Stream::gather);
  for (const int p : unit.parameters) {
    const std::int64_t bytes = size(shards_[at(p)] * options_.group(), options_.compute);
    unit.gathered.push_back(tape_.alloc(
        {bytes, Pool::compute, BufferRole::weights, Owner::parameters, static_cast<std::int16_t>(unit.block)}));
    tape_.pass(Stream::compute, 2 * bytes, {{unit.receive, Access::read}, {unit.gathered.back(), Access::write}});
  }
}

void Fsdp2Engine::wait_in_forward(Unit& unit) {
  if (unit.receive == kNoBuffer) return;
  copy_out(unit);
  tape_.free(held_receive_);
  held_receive_ = unit.receive;
  unit.receive = kNoBuffer;
}

void Fsdp2Engine::wait_in_backward(Unit& unit) {
  if (unit.receive == kNoBuffer) return;
  copy_out(unit);
  tape_.free(unit.receive);
  unit.receive = kNoBuffer;
}

void Fsdp2Engine::reshard(Unit& unit) {
  for (const TapeId buffer : unit.gathered) tape_.free(buffer);
  unit.gathered.clear();
}

void Fsdp2Engine::forward_pre(int module) {
  Unit* unit = unit_of(module);
  if (unit == nullptr) return;
  if (unit->state == Unit::State::before_backward) {  // checkpointing runs the forward again
    if (!unit->gathered.empty()) return;
    gather(*unit);
    wait_in_backward(*unit);
    return;
  }
  unit->state = Unit::State::forward;
  gather(*unit);
  wait_in_forward(*unit);
}

void Fsdp2Engine::forward_post(int module) {
  Unit* unit = unit_of(module);
  if (unit == nullptr || unit->state == Unit::State::before_backward) return;
  if (reshards(*unit)) reshard(*unit);
  unit->forwards.push_back(order_.size());
  order_.push_back(static_cast<std::size_t>(unit - units_.data()));
  unit->state = Unit::State::idle;
  if (unit == &root()) {
    tape_.free(held_receive_);
    held_receive_ = kNoBuffer;
  }
}

void Fsdp2Engine::backward_pre(int module) {
  Unit* unit = unit_of(module);
  if (unit == nullptr || unit->state == Unit::State::before_backward) return;
  unit->state = Unit::State::before_backward;
  gather(*unit);
  wait_in_backward(*unit);
  if (unit->forwards.empty()) return;
  const std::size_t position = unit->forwards.back();
  unit->forwards.pop_back();
  if (position > 0) gather(units_[order_[position - 1]]);
}

void Fsdp2Engine::backward_post(int module) {
  Unit* unit = unit_of(module);
  if (unit != nullptr && unit != &root()) reduce(*unit);
}

void Fsdp2Engine::gradient(int parameter, TapeId storage) {
  Unit& unit = units_[at(unit_of_parameter_[at(parameter)])];
  unit.gradients.push_back(storage);
  unit.gradient_shard += shards_[at(parameter)];
}

/// Post-backward: the unit is sharded again and its gradients are reduced to the rank's shard.
void Fsdp2Engine::reduce(Unit& unit) {
  unit.state = Unit::State::after_backward;
  reshard(unit);
  if (unit.gradients.empty()) return;
  tape_.free(reduce_input_);
  const TapeId output = reduce_scatter(unit);
  if (options_.offload) {
    const std::int64_t bytes = size(unit.gradient_shard, options_.parameters);
    tape_.work(Stream::reduce, Copy{Memory::hbm, Memory::pinned, Bytes(static_cast<double>(bytes))},
               {{output, Access::read}});
    tape_.free(output);
  } else if (unit.reduced != kNoBuffer) {
    tape_.pass(Stream::reduce, 3 * size(unit.gradient_shard, options_.parameters),
               {{output, Access::read}, {unit.reduced, Access::read_write}});
    tape_.free(output);
  } else {
    unit.reduced = output;
  }
  unit.gradient_shard = 0;
}

/// Returns the sharded gradient in the parameters' type.
TapeId Fsdp2Engine::reduce_scatter(Unit& unit) {
  const auto block = static_cast<std::int16_t>(unit.block);
  const std::int64_t full = unit.gradient_shard * options_.group();
  reduce_input_ =
      tape_.alloc({size(full, options_.reduction), Pool::compute, BufferRole::gradient_staging, Owner::buffers, block});
  tape_.pass(Stream::compute, size(full, options_.compute) + size(full, options_.reduction),
             {{reduce_input_, Access::write}});
  for (const TapeId gradient : unit.gradients) tape_.free(gradient);
  unit.gradients.clear();
  TapeId output = tape_.alloc({size(unit.gradient_shard, options_.reduction), Pool::reduce, BufferRole::gradient_shard,
                               Owner::gradients, block});
  tape_.wait(Stream::reduce, Stream::compute);
  tape_.work(Stream::reduce, Collective{CollectiveKind::reduce_scatter, Group::shard, full, full, options_.reduction},
             {{reduce_input_, Access::read}, {output, Access::write}});
  if (options_.group() < options_.ranks) {
    tape_.work(Stream::reduce,
               Collective{CollectiveKind::all_reduce, Group::replica, unit.gradient_shard, unit.gradient_shard,
                          options_.reduction},
               {{output, Access::read_write}});
  }
  if (options_.reduction == options_.parameters) return output;
  const TapeId cast = tape_.alloc({size(unit.gradient_shard, options_.parameters), Pool::reduce,
                                   BufferRole::gradient_shard, Owner::gradients, block});
  tape_.pass(Stream::reduce,
             size(unit.gradient_shard, options_.reduction) + size(unit.gradient_shard, options_.parameters),
             {{output, Access::read}, {cast, Access::write}});
  tape_.free(output);
  return cast;
}

void Fsdp2Engine::backward_end() {
  if (root().state != Unit::State::after_backward) reduce(root());
  for (Unit& unit : units_) {
    if (unit.state != Unit::State::after_backward) reduce(unit);
  }
  for (Unit& unit : units_) {  // gathered ahead and not used
    tape_.free(unit.receive);
    unit.receive = kNoBuffer;
  }
  tape_.wait(Stream::compute, Stream::reduce);
  tape_.free(reduce_input_);
  reduce_input_ = kNoBuffer;
}

/// The optimizer makes its states in its first step: two moments a parameter and, for the fused kernel, a step count of
/// 4 bytes (other forms keep it on the host).
void Fsdp2Engine::add_moments() {
  for (std::size_t p = 0; p < shards_.size(); ++p) {
    if (!step_.parameters[p].trainable) continue;
    const auto block = static_cast<std::int16_t>(units_[at(unit_of_parameter_[p])].block);
    if (options_.adam == AdamForm::fused)
      tape_.alloc({size_of(DType::fp32), Pool::compute, BufferRole::moments, Owner::optimizer, block});
    for (int i = 0; i < 2; ++i) {
      tape_.alloc({size(shards_[p], options_.parameters), Pool::compute, BufferRole::moments, Owner::optimizer, block});
    }
  }
  moments_made_ = true;
}

TapeId Fsdp2Engine::temporary(std::size_t parameter) {
  const auto block = static_cast<std::int16_t>(units_[at(unit_of_parameter_[parameter])].block);
  return tape_.alloc(
      {size(shards_[parameter], options_.parameters), Pool::compute, BufferRole::workspace, Owner::optimizer, block});
}

/// denom = (v.sqrt() / correction).add_(eps): the last parameter's lives until this one's is made.
void Fsdp2Engine::adam_by_parameter() {
  TapeId denominator = kNoBuffer;
  for (std::size_t p = 0; p < shards_.size(); ++p) {
    if (!step_.parameters[p].trainable) continue;
    const TapeId root = temporary(p);
    const TapeId quotient = temporary(p);
    tape_.free(root);
    tape_.free(denominator);
    denominator = quotient;
  }
  tape_.free(denominator);
}

void Fsdp2Engine::adam_on_gpu(const AdamStep& step) {
  std::vector<TapeId> roots;
  if (options_.adam == AdamForm::foreach) {
    for (std::size_t p = 0; p < shards_.size(); ++p) {
      if (step_.parameters[p].trainable) roots.push_back(temporary(p));
    }
  }
  tape_.work(Stream::compute, step);
  if (options_.adam == AdamForm::loop) adam_by_parameter();
  for (const TapeId root : roots) tape_.free(root);
}

void Fsdp2Engine::update() {
  std::int64_t owned = 0;
  for (std::size_t p = 0; p < shards_.size(); ++p) owned += step_.parameters[p].trainable ? shards_[p] : 0;
  if (!moments_made_ && !options_.offload) add_moments();
  const std::int64_t passes = options_.adam == AdamForm::fused ? kFusedAdamPasses : kUnfusedAdamPasses;
  const Bytes traffic(static_cast<double>(passes * size(owned, options_.parameters)));
  if (options_.offload) {
    tape_.host_waits(Stream::reduce);
    tape_.work(Stream::host, AdamStep{owned, UpdateOn::host, traffic});
    tape_.host_waits(Stream::host);
  } else {
    adam_on_gpu({owned, UpdateOn::device, traffic});
  }
  for (Unit& unit : units_) {
    tape_.free(unit.reduced);
    unit.reduced = kNoBuffer;
  }
}

}  // namespace

void check(const Fsdp2Options& options) {
  if (options.ranks < 1) throw InputError(fmt::format("fsdp2: ranks: expected at least 1, found {}", options.ranks));
  if (options.shard_ranks < 0 || options.ranks % options.group() != 0) {
    throw InputError(fmt::format("fsdp2: shard group: expected a divisor of {} ranks, found {}", options.ranks,
                                 options.shard_ranks));
  }
  if (options.adam == AdamForm::foreach && options.offload) {
    throw InputError("fsdp2: foreach AdamW: expected without offload: torch does not group on the CPU");
  }
  for (const DType type : {options.parameters, options.compute, options.reduction}) {
    if (type != DType::bf16 && type != DType::fp16 && type != DType::fp32) {
      throw InputError(fmt::format("fsdp2: expected a type of bf16, fp16 or fp32, found {}", to_string(type)));
    }
  }
}

std::unique_ptr<EngineHooks> make_fsdp2_engine(const EagerStep& step, const Fsdp2Options& options, EngineTape& tape) {
  check(options);
  return std::make_unique<Fsdp2Engine>(step, options, tape);
}

std::vector<HostBuffer> fsdp2_host_memory(const EagerStep& step, const Fsdp2Options& options) {
  std::vector<HostBuffer> host;
  if (!options.offload) return host;
  std::int64_t denominator = 0, temporaries = 0;  // as in adam_by_parameter()
  for (const EagerParameter& parameter : step.parameters) {
    const std::int64_t bytes = shard_elements(parameter, options.group()) * size_of(options.parameters);
    host.push_back({"weight shards", bytes, 1, HostKind::pinned});
    if (!parameter.trainable) continue;
    host.push_back({"gradient shards", bytes, 1, HostKind::pinned});
    host.push_back({"Adam moments", bytes, 2, HostKind::pageable});
    temporaries = std::max(temporaries, denominator + 2 * bytes);
    denominator = bytes;
  }
  if (temporaries > 0) host.push_back({"Adam temporaries", temporaries, 1, HostKind::pageable});
  return host;
}

}  // namespace zeroplan
