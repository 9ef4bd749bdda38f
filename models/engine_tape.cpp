#include "models/engine_tape.h"

#include <stdexcept>

namespace zeroplan {

TapeOp& EngineTape::push(TapeKind kind) {
  TapeOp op;
  op.kind = kind;
  op.phase = phase_;
  op.block = block_;
  return ops_.emplace_back(op);
}

TapeId EngineTape::alloc(const TapeBuffer& buffer) {
  if (buffer.bytes < 0) throw std::logic_error("EngineTape: negative size");
  if (buffer.bytes == 0) return kNoBuffer;
  buffers_.push_back(buffer);
  const auto id = static_cast<TapeId>(buffers_.size() - 1);
  push(TapeKind::alloc).id = static_cast<std::uint32_t>(id);
  return id;
}

void EngineTape::free(TapeId buffer) {
  if (buffer != kNoBuffer) push(TapeKind::free).id = static_cast<std::uint32_t>(buffer);
}

void EngineTape::work(Stream stream, Work work, std::span<const TapeOperand> operands) {
  run(stream, add_work(std::move(work)), operands);
}

std::uint32_t EngineTape::add_work(Work work) {
  works_.push_back(std::move(work));
  return static_cast<std::uint32_t>(works_.size() - 1);
}

void EngineTape::run(Stream stream, std::uint32_t work, std::span<const TapeOperand> operands) {
  const auto first = static_cast<std::uint32_t>(operands_.size());
  for (const TapeOperand& operand : operands) {
    if (operand.buffer != kNoBuffer) operands_.push_back(operand);
  }
  TapeOp& op = push(TapeKind::work);
  op.stream = stream;
  op.id = work;
  op.first_operand = first;
  op.num_operands = static_cast<std::uint16_t>(operands_.size() - first);
}

void EngineTape::pass(Stream stream, std::int64_t traffic, std::initializer_list<TapeOperand> operands) {
  Compute compute;
  compute.kernel = Pointwise{Bytes(static_cast<double>(traffic))};
  compute.on_host = stream == Stream::host;
  work(stream, compute, operands);
}

void EngineTape::wait(Stream waiter, Stream awaited) {
  TapeOp& op = push(TapeKind::wait);
  op.stream = waiter;
  op.awaited = awaited;
}

void EngineTape::wait_written(Stream waiter, TapeId buffer) {
  if (buffer == kNoBuffer) return;
  TapeOp& op = push(TapeKind::wait_written);
  op.stream = waiter;
  op.id = static_cast<std::uint32_t>(buffer);
}

void EngineTape::host_waits(Stream awaited) { push(TapeKind::host_wait).awaited = awaited; }

void EngineTape::hook() { push(TapeKind::hook); }

void EngineTape::record_stream(TapeId buffer, Stream user) {
  if (buffer == kNoBuffer) return;
  TapeOp& op = push(TapeKind::record_stream);
  op.id = static_cast<std::uint32_t>(buffer);
  op.stream = user;
}

void EngineTape::empty_cache() { push(TapeKind::empty_cache); }

void EngineTape::mark(Mark mark) { push(TapeKind::mark).mark = mark; }

}  // namespace zeroplan
