#pragma once
// What an engine does, in the order in which the host issues it, from loading on: a flat recording of initialize, the
// first steps and one steady step. The allocator model replays its allocations and frees; its steady step becomes a
// Schedule (engine_schedule.h). A tape is the light form: no edges, no checks, buffers that outlive steps.

#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "models/schedule.h"

namespace zeroplan {

/// The stream whose pool of the caching allocator a GPU buffer comes from. Values are allocator streams.
enum class Pool : std::uint8_t { compute, gather, reduce };

struct TapeBuffer {
  std::int64_t bytes = 0;
  Pool pool = Pool::compute;
  BufferRole role = BufferRole::value;
  Owner owner = Owner::activations;
  std::int16_t block = -1;  // layer; -1: outside the layers
};

using TapeId = std::int32_t;
inline constexpr TapeId kNoBuffer = -1;

/// Moments that measurements refer to.
enum class Mark : std::uint8_t {
  init_end,
  step_begin,
  micro_begin,
  forward_end,
  backward_end,
  micro_end,  // after the engine's step() of a micro-step; only the last one updates
  step_end,
};

enum class TapeKind : std::uint8_t {
  alloc,
  free,
  work,
  wait,
  wait_written,
  host_wait,
  hook,
  record_stream,
  empty_cache,
  mark,
};

struct TapeOp {
  TapeKind kind = TapeKind::mark;
  Stream stream = Stream::compute;  // work: where it runs; wait: who waits; record_stream: who uses the buffer
  Stream awaited = Stream::compute;
  Phase phase = Phase::forward;
  Mark mark = Mark::init_end;
  std::int16_t block = -1;
  std::uint16_t num_operands = 0;
  std::uint32_t id = 0;  // buffer of alloc, free, wait_written and record_stream; index into works()
  std::uint32_t first_operand = 0;
};

struct TapeOperand {
  TapeId buffer = kNoBuffer;
  Access access = Access::read;
};

class EngineTape {
 public:
  /// Nothing is recorded for 0 bytes: kNoBuffer. Throws std::logic_error on a negative size.
  TapeId alloc(const TapeBuffer& buffer);
  /// kNoBuffer is fine, so that a buffer that an option leaves out needs no condition.
  void free(TapeId buffer);
  /// Operands that are kNoBuffer are dropped.
  void work(Stream stream, Work work, std::initializer_list<TapeOperand> operands = {}) {
    this->work(stream, std::move(work), std::span(operands.begin(), operands.size()));
  }
  void work(Stream stream, Work work, std::span<const TapeOperand> operands);
  /// The same in two parts, for a work that runs again and again: its index in works(), and one run of it.
  std::uint32_t add_work(Work work);
  void run(Stream stream, std::uint32_t work, std::span<const TapeOperand> operands = {});
  /// One pass over memory by a kernel: bytes read and written together.
  void pass(Stream stream, std::int64_t traffic, std::initializer_list<TapeOperand> operands = {});
  /// Later work of `waiter` starts after everything issued to `awaited` so far.
  void wait(Stream waiter, Stream awaited);
  /// Later work of `waiter` starts after the work that wrote `buffer` last: the handle of an asynchronous collective.
  /// What was issued behind it is not waited for.
  void wait_written(Stream waiter, TapeId buffer);
  /// The host waits for `awaited`: whatever is issued later starts after it.
  void host_waits(Stream awaited);
  /// The host runs one of the engine's module hooks: Python time between what stands before and after.
  void hook();
  /// Tensor.record_stream: once freed, the block is reusable only when `user` has passed this point.
  void record_stream(TapeId buffer, Stream user);
  void empty_cache();
  void mark(Mark mark);

  void set_phase(Phase phase) { phase_ = phase; }
  void set_block(int block) { block_ = static_cast<std::int16_t>(block); }
  int block() const { return block_; }
  Phase phase() const { return phase_; }

  std::span<const TapeOp> ops() const { return ops_; }
  const TapeBuffer& buffer(TapeId id) const { return buffers_[static_cast<std::size_t>(id)]; }
  std::span<const TapeBuffer> buffers() const { return buffers_; }
  std::span<const Work> works() const { return works_; }
  std::span<const TapeOperand> operands(const TapeOp& op) const {
    return {operands_.data() + op.first_operand, op.num_operands};
  }

 private:
  TapeOp& push(TapeKind kind);

  std::vector<TapeOp> ops_;
  std::vector<TapeBuffer> buffers_;
  std::vector<Work> works_;
  std::vector<TapeOperand> operands_;
  Phase phase_ = Phase::forward;
  std::int16_t block_ = -1;
};

}  // namespace zeroplan
