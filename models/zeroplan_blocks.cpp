// The zeroplan engine: weights on their way to the GPU, blocks forward and backward, the loss head.

#include "models/zeroplan_emitter.h"

namespace zeroplan::zeroplan_engine {

// --- weights ------------------------------------------------------------------------------------------

void Emitter::issue_gather(std::size_t u) {
  if (u >= uses_.size()) return;
  const int i = uses_[u];
  Block& b = block(i);
  Gather g;
  if (b.resident_weights || b.layout.padded == 0) {
    g.weights = b.weights;
    queue_.push_back(g);
    return;
  }
  g.owned = true;
  g.weights = declare(BufferRole::weights, Memory::hbm, Owner::buffers, Lifetime::step, i, -1,
                      bytes_of(b.layout.padded, compute_type()));
  if (b.parameters == Tier::hbm) {
    const OpRef born = alloc_one(i, g.weights);
    g.ready = gather_op(i, b, b.shard, g.weights, born);
  } else {
    fetch(i, b, g);
  }
  queue_.push_back(g);
}

OpRef Emitter::gather_op(int i, const Block& b, BufferId shard, BufferId full, OpRef after) {
  const WorkId work = shared(b.kind, kGather, [&] {
    return Collective{CollectiveKind::all_gather, Group::shard, b.layout.parameters, b.layout.padded, compute_type()};
  });
  return add(Stream::gather, i, work, {after}, {{shard, Access::read}, {full, Access::write}});
}

// Offloaded weights: [disk -> pinned ->] device staging -> all-gather; a lone rank copies straight into place.
void Emitter::fetch(int i, Block& b, Gather& g) {
  const Bytes bytes = bytes_of(b.layout.shard, compute_type());
  BufferId source = b.shard;
  OpRef loaded;
  if (b.parameters == Tier::nvme) {
    const Ring::Slot slot = nvme_weights_.take();
    const WorkId read = shared(b.kind, kGatherNvme, [&] { return Copy{Memory::nvme, Memory::pinned, bytes}; });
    loaded =
        add(Stream::nvme_read, i, read, {slot.free_after}, {{b.shard, Access::read}, {slot.buffer, Access::write}});
    source = slot.buffer;
  }
  const WorkId copy = shared(b.kind, kGatherH2d, [&] { return Copy{Memory::pinned, Memory::hbm, bytes}; });
  BufferId target = g.weights;
  OpRef born;
  if (sharded()) {
    g.has_staging = true;
    g.staging = declare(BufferRole::weight_staging, Memory::hbm, Owner::buffers, Lifetime::step, i, -1, bytes);
    target = g.staging;
    const std::array<Operand, 2> both{{{g.weights, Access::write}, {g.staging, Access::write}}};
    born = alloc(i, both);
  } else {
    born = alloc_one(i, g.weights);
  }
  const OpRef copied = add(Stream::h2d, i, copy, {born, loaded}, {{source, Access::read}, {target, Access::write}});
  if (b.parameters == Tier::nvme) nvme_weights_.give_back(copied);
  g.ready = sharded() ? gather_op(i, b, g.staging, g.weights, copied) : copied;
}

Gather Emitter::take_gather(int b, bool backward) {
  issue_gather(use_of(b, backward) + static_cast<std::size_t>(plan_.prefetch_layers));
  const Gather g = queue_.front();
  queue_.erase(queue_.begin());
  return g;
}

void Emitter::release(int i, const Gather& g) {
  if (!g.owned) return;
  std::array<Operand, 2> both{{{g.weights, Access::write}, {g.staging, Access::write}}};
  free(i, {both.data(), g.has_staging ? 2u : 1u});
}

// --- blocks ------------------------------------------------------------------------------------------------

const Instance& Emitter::instance(const Block& b) {
  const auto key = std::make_tuple(b.kind, b.recompute, accumulate_weights(b), b.resident_gradient);
  auto [it, fresh] = instances_.try_emplace(key);
  if (!fresh) return it->second;
  Instance& made = it->second;
  const BlockKind& kind = kind_of(b);
  made.program = &state_.program(b.kind, b.recompute);
  const WorkSizes sizes{plan_.micro_step(), compute_type(),
                        b.resident_gradient ? plan_.precision.accumulation : plan_.precision.gradients,
                        accumulate_weights(b)};
  for (const ProgramSlot& slot : made.program->slots) made.slot_size.push_back(slot_bytes(kind, slot, sizes));
  for (const auto* steps : {&made.program->forward, &made.program->backward}) {
    auto& works = steps == &made.program->forward ? made.forward : made.backward;
    for (const ProgramStep& step : *steps) {
      works.push_back(builder_.work(work_of(kind, b.kind, *made.program, step, sizes)));
    }
  }
  return made;
}

void Emitter::emit_steps(const std::vector<ProgramStep>& steps, const std::vector<WorkId>& works, const Instance& made,
                         StepContext& c) {
  Block& b = block(c.index);
  const BlockKind& kind = kind_of(b);
  for (std::size_t k = 0; k < steps.size(); ++k) {
    const ProgramStep& step = steps[k];
    if (!step.alloc_before.empty()) born(step.alloc_before, made, c.index);
    operands_.clear();
    for (const ProgramOperand& o : step.operands) {
      operands_.push_back({b.slots[static_cast<std::size_t>(o.slot)], o.access});
    }
    if (step.graph_op >= 0) parameter_operands(kind.ops[static_cast<std::size_t>(step.graph_op)], kind, step, c);
    add(Stream::compute, c.index, works[k], std::span<const OpRef>(&c.ready, 1), operands_);
    c.ready = {};
    if (!step.free_after.empty()) {
      operands_.clear();
      for (int s : step.free_after) operands_.push_back({b.slots[static_cast<std::size_t>(s)], Access::write});
      free(c.index, operands_);
    }
  }
}

void Emitter::born(const std::vector<int>& slots, const Instance& made, int i) {
  Block& b = block(i);
  operands_.clear();
  for (int s : slots) {
    const ProgramSlot& slot = made.program->slots[static_cast<std::size_t>(s)];
    const BufferId id = declare(slot.role, Memory::hbm, Owner::activations, Lifetime::step, i, slot.value,
                                made.slot_size[static_cast<std::size_t>(s)]);
    b.slots[static_cast<std::size_t>(s)] = id;
    operands_.push_back({id, Access::write});
  }
  alloc(i, operands_);
}

void Emitter::parameter_operands(const GraphOp& op, const BlockKind& kind, const ProgramStep& step,
                                 const StepContext& c) {
  if (op.inputs.empty() && step.pass == Pass::forward) operands_.push_back({token_ids_, Access::read});
  if (op.tensors.empty()) return;
  bool own = false, tied = false;
  for (int t : op.tensors) (kind.tensors[static_cast<std::size_t>(t)].tied ? tied : own) = true;
  const bool reads = step.pass != Pass::backward_weight && !op.inputs.empty();
  if (reads || step.pass == Pass::forward) {
    if (own) operands_.push_back({c.weights, Access::read});
    if (tied) operands_.push_back({embedding_.weights, Access::read});
  }
  if (step.weight_gradient) {
    // Tables were cleared, and a tied one has the head's part already.
    const bool adds = op.inputs.empty() || accumulate_weights(block(c.index));
    if (own) operands_.push_back({c.gradient, adds ? Access::read_write : Access::write});
    if (tied) operands_.push_back({embedding_gradient_, Access::read_write});
  }
}

void Emitter::forward_block(int i) {
  Block& b = block(i);
  const Gather g = take_gather(i, false);
  const Instance& made = instance(b);
  b.slots.assign(made.program->slots.size(), BufferId{});
  if (made.program->input >= 0) b.slots[static_cast<std::size_t>(made.program->input)] = hidden_;
  if (made.program->memory >= 0) b.slots[static_cast<std::size_t>(made.program->memory)] = memory_;
  if (i == 0) embedding_ = g;
  StepContext c{i, g.ready, g.weights, {}};
  emit_steps(made.program->forward, made.forward, made, c);
  if (made.program->output >= 0) hidden_ = b.slots[static_cast<std::size_t>(made.program->output)];
  if (kind_of(b).ends_encoder) memory_ = hidden_;
  if (!(i == 0 && tied_)) release(i, g);
}

BufferId Emitter::gradient_of(int i) {
  Block& b = block(i);
  if (b.layout.padded == 0) return {};
  if (b.resident_gradient) {
    if (micro_step_ == 0) clear_table(i, b.gradient);
    return b.gradient;
  }
  const BufferId id = declare(BufferRole::gradient, Memory::hbm, Owner::gradients, Lifetime::step, i, -1,
                              bytes_of(b.layout.padded, plan_.precision.gradients));
  alloc_one(i, id);
  clear_table(i, id);
  return id;
}

// Embeddings add to the rows of the tokens they saw; the other rows must be zero.
void Emitter::clear_table(int i, BufferId gradient) {
  const Block& b = block(i);
  if (b.role != BlockRole::embedding) return;
  const WorkId zero = shared(b.kind, kGradientZero, [&] {
    return Compute{-1, kZero, Pass::backward, Pointwise{builder_.buffer(gradient).size}};
  });
  add(Stream::compute, i, zero, {}, {{gradient, Access::write}});
}

void Emitter::backward_block(int i) {
  Block& b = block(i);
  const BlockKind& kind = kind_of(b);
  Gather g;
  if (i > 0 || uses_.back() == 0) g = take_gather(i, true);
  const Instance& made = instance(b);
  if (kind.ends_encoder) leave_decoder(i);
  if (made.program->memory_gradient >= 0) {
    b.slots[static_cast<std::size_t>(made.program->memory_gradient)] = memory_gradient(i);
  }
  StepContext c{i, g.ready, g.weights, {}};
  c.gradient = i == 0 && tied_ ? embedding_gradient_ : gradient_of(i);
  if (made.program->output_gradient >= 0) {
    b.slots[static_cast<std::size_t>(made.program->output_gradient)] = hidden_gradient_;
  }
  emit_steps(made.program->backward, made.backward, made, c);
  if (made.program->input_gradient >= 0) {
    hidden_gradient_ = b.slots[static_cast<std::size_t>(made.program->input_gradient)];
  }
  release(i, g);
  reduce(i, c.gradient);
}

// Encoder-decoder models: the gradient of the encoder output is summed by all decoder layers.
BufferId Emitter::memory_gradient(int i) {
  if (memory_gradient_.index != 0xffffffff) return memory_gradient_;
  memory_gradient_ = declare(BufferRole::value_gradient, Memory::hbm, Owner::activations, Lifetime::step, i, -1,
                             builder_.buffer(memory_).size);
  alloc_one(i, memory_gradient_);
  const WorkId zero = shared(-1, kMemoryZero, [&] {
    return Compute{-1, kZero, Pass::backward, Pointwise{builder_.buffer(memory_).size}};
  });
  add(Stream::compute, i, zero, {}, {{memory_gradient_, Access::write}});
  return memory_gradient_;
}

void Emitter::leave_decoder(int i) {
  hidden_gradient_ = memory_gradient(i);
  memory_gradient_ = {};
  free_one(i, memory_);
}

// --- loss head ---------------------------------------------------------------------------------------------

void Emitter::head_block(int i) {
  Block& b = block(i);
  const BlockKind& kind = kind_of(b);
  const Gather g = take_gather(i, false);
  const Instance& made = instance(b);
  b.slots.assign(made.program->slots.size(), BufferId{});
  b.slots[static_cast<std::size_t>(made.program->input)] = hidden_;
  StepContext c{i, g.ready, g.weights, {}};
  emit_steps(made.program->forward, made.forward, made, c);
  const BufferId head_input =
      made.program->output >= 0 ? b.slots[static_cast<std::size_t>(made.program->output)] : hidden_;
  phase_ = Phase::backward;
  c.gradient = gradient_of(i);
  if (tied_) embedding_gradient_ = gradient_of(0);
  hidden_gradient_ = declare(BufferRole::value_gradient, Memory::hbm, Owner::activations, Lifetime::step, i,
                             kind.output, builder_.buffer(head_input).size);
  alloc_one(i, hidden_gradient_);
  loss(i, kind, head_input, c);
  // The program keeps its output alive for the next block; the loss was its last reader.
  const auto& saved = made.program->saved;
  if (std::find(saved.begin(), saved.end(), made.program->output) == saved.end()) free_one(i, head_input);
  b.slots[static_cast<std::size_t>(made.program->output_gradient)] = hidden_gradient_;
  emit_steps(made.program->backward, made.backward, made, c);
  hidden_gradient_ = b.slots[static_cast<std::size_t>(made.program->input_gradient)];
  release(i, g);
  if (tied_) release(0, embedding_);
  reduce(i, c.gradient);
}

void Emitter::loss(int i, const BlockKind& kind, BufferId input, const StepContext& c) {
  const std::int64_t tokens = plan_.micro_step().tokens();
  if (kind.vocab == 0) {
    feature_loss(i, input);
    return;
  }
  const std::int64_t chunk = std::min(plan_.loss_chunk_tokens, tokens);
  const std::int64_t whole = tokens / chunk;
  // The first chunk overwrites the weight gradient unless it adds to earlier micro-steps.
  const bool adds = accumulate_weights(block(i)) || (tied_ && accumulate_weights(block(0)));
  loss_chunk(i, kind, chunk, input, c, adds);
  const std::int64_t more = whole - 1;
  if (fold_layers_ && more >= 2) {
    repeat(more, [&] { loss_chunk(i, kind, chunk, input, c, true); });
  } else {
    for (std::int64_t k = 0; k < more; ++k) loss_chunk(i, kind, chunk, input, c, true);
  }
  if (tokens % chunk != 0) loss_chunk(i, kind, tokens % chunk, input, c, true);
}

// No output matrix (ViT trunk): the caller's loss reads the features and writes their gradient.
void Emitter::feature_loss(int i, BufferId input) {
  const Bytes traffic = 2.0 * builder_.buffer(input).size;
  const WorkId work = shared(-1, kFeatureLoss, [&] {
    return Compute{-1, kHeadLoss, Pass::backward, Pointwise{traffic}};
  });
  add(Stream::compute, i, work, {}, {{input, Access::read}, {hidden_gradient_, Access::write}});
}

const ChunkWorks& Emitter::chunk_works(const BlockKind& kind, std::int64_t rows, bool adds, bool fp32_gradient) {
  auto [it, fresh] = chunk_works_.try_emplace({rows, adds});
  if (!fresh) return it->second;
  const DType type = compute_type();
  const std::int64_t v = kind.vocab, h = model_.hidden;
  const auto gemm = [&](std::int16_t op, Pass pass, Gemm g) { return builder_.work(Compute{-1, op, pass, g}); };
  it->second.logits = gemm(kHeadLogits, Pass::forward, {rows, v, h, 1, type, false, false});
  it->second.loss =
      builder_.work(Compute{-1, kHeadLoss, Pass::backward, Pointwise{3.0 * bytes_of(rows * v, type), rows * v}});
  it->second.data = gemm(kHeadData, Pass::backward_data, {rows, h, v, 1, type, false, false});
  it->second.weight = gemm(kHeadWeight, Pass::backward_weight, {v, h, rows, 1, type, fp32_gradient, adds});
  return it->second;
}

// Logits of some tokens, their loss and gradient in place, and both gradient products.
void Emitter::loss_chunk(int i, const BlockKind& kind, std::int64_t rows, BufferId input, const StepContext& c,
                         bool adds) {
  const TensorSpec& matrix = kind.tensors[static_cast<std::size_t>(kind.head_tensor)];
  const Block& owner = block(matrix.tied ? 0 : i);
  const DType gradient_type = owner.resident_gradient ? plan_.precision.accumulation : plan_.precision.gradients;
  const ChunkWorks& w = chunk_works(kind, rows, adds, gradient_type == DType::fp32);
  const BufferId weights = matrix.tied ? embedding_.weights : c.weights;
  const BufferId gradient = matrix.tied ? embedding_gradient_ : c.gradient;
  const BufferId logits = declare(BufferRole::logits, Memory::hbm, Owner::logits, Lifetime::step, i, -1,
                                  bytes_of(rows * kind.vocab, compute_type()));
  alloc_one(i, logits);
  add(Stream::compute, i, w.logits, {}, {{input, Access::read}, {weights, Access::read}, {logits, Access::write}});
  add(Stream::compute, i, w.loss, {},
      {{logits, Access::read_write}, {token_ids_, Access::read}, {scalars_, Access::read_write}});
  add(Stream::compute, i, w.data, {},
      {{logits, Access::read}, {weights, Access::read}, {hidden_gradient_, Access::write}});
  add(Stream::compute, i, w.weight, {},
      {{logits, Access::read}, {input, Access::read}, {gradient, adds ? Access::read_write : Access::write}});
  free_one(i, logits);
}

}  // namespace zeroplan::zeroplan_engine
