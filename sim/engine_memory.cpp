#include "sim/engine_memory.h"

#include <fmt/format.h>

#include <algorithm>

namespace zeroplan {
namespace {

Bytes bytes(std::int64_t value) { return Bytes(static_cast<double>(value)); }

class Replay {
 public:
  Replay(const EngineTape& tape, const AllocatorOptions& options, PeakCounting counting, HostLead lead)
      : tape_(tape), allocator_(options), counting_(counting), lead_(lead), blocks_(tape.buffers().size()) {}

  RunMemory run() {
    for (const TapeOp& op : tape_.ops()) {
      if (!play(op)) break;
    }
    reset();
    memory_.num_alloc_retries = allocator_.stats().num_alloc_retries;
    return std::move(memory_);
  }

 private:
  bool play(const TapeOp& op) {
    switch (op.kind) {
      case TapeKind::alloc:
        return alloc(op);
      case TapeKind::free:
        allocator_.free(blocks_[op.id]);
        break;
      case TapeKind::record_stream:
        if (lead_ == HostLead::to_sync) allocator_.record_stream(blocks_[op.id], static_cast<int>(pool_of(op.stream)));
        break;
      case TapeKind::wait:
        break;
      case TapeKind::host_wait:
        allocator_.complete_all();
        break;
      case TapeKind::empty_cache:
        allocator_.complete_all();
        allocator_.empty_cache();
        break;
      case TapeKind::mark:
        mark(op.mark);
        break;
      case TapeKind::work:
        break;
    }
    return true;
  }

  bool alloc(const TapeOp& op) {
    const TapeBuffer& buffer = tape_.buffer(static_cast<TapeId>(op.id));
    const auto result = allocator_.allocate(buffer.bytes, static_cast<int>(buffer.pool));
    if (const auto* block = std::get_if<CachingAllocator::Block>(&result)) {
      blocks_[op.id] = *block;
      return true;
    }
    memory_.out_of_memory = std::get<CachingAllocator::OutOfMemory>(result);
    memory_.failed_at =
        in_init_ ? "initialize" : fmt::format("step {} {}", memory_.steps.size() + 1, to_string(op.phase));
    return false;
  }

  static Pool pool_of(Stream stream) {
    return stream == Stream::gather ? Pool::gather : stream == Stream::reduce ? Pool::reduce : Pool::compute;
  }

  void mark(Mark mark) {
    const Bytes peak = bytes(allocator_.stats().peak_allocated);
    const auto largest = [&](Bytes& value) { value = std::max(value, peak); };
    switch (mark) {
      case Mark::init_end:
        memory_.init_peak = peak;
        memory_.after_init = bytes(allocator_.stats().allocated);
        in_init_ = false;
        break;
      case Mark::step_begin:
        step_ = {};
        allocator_.complete_all();
        reset();
        break;
      case Mark::micro_begin:
        if (counting_ == PeakCounting::each_phase) reset();
        break;
      case Mark::forward_end:
        allocator_.complete_all();
        largest(step_.forward);
        if (counting_ == PeakCounting::each_phase) reset();
        break;
      case Mark::backward_end:
        allocator_.complete_all();
        largest(step_.backward);
        if (counting_ == PeakCounting::each_phase) reset();
        break;
      case Mark::micro_end:
        largest(step_.step);
        break;
      case Mark::step_end:
        step_.after = bytes(allocator_.stats().allocated);
        step_.reserved = bytes(allocator_.stats().peak_reserved);
        memory_.steps.push_back(step_);
        break;
    }
  }

  void reset() {
    memory_.peak_reserved = std::max(memory_.peak_reserved, bytes(allocator_.stats().peak_reserved));
    allocator_.reset_peaks();
  }

  const EngineTape& tape_;
  CachingAllocator allocator_;
  PeakCounting counting_;
  HostLead lead_;
  std::vector<CachingAllocator::Block> blocks_;
  RunMemory memory_;
  StepMemory step_;
  bool in_init_ = true;
};

}  // namespace

RunMemory replay(const EngineTape& tape, const AllocatorOptions& options, PeakCounting counting, HostLead lead) {
  return Replay(tape, options, counting, lead).run();
}

HostUse host_use(std::span<const HostBuffer> buffers) {
  HostUse use;
  for (const HostBuffer& buffer : buffers) {
    const auto count = static_cast<double>(buffer.count);
    switch (buffer.kind) {
      case HostKind::pageable:
        use.pageable += bytes(buffer.bytes) * count;
        break;
      case HostKind::pinned:
        use.pinned += bytes(PinnedHostAllocator::rounded(buffer.bytes)) * count;
        break;
      case HostKind::locked:
        use.pinned += bytes(buffer.bytes) * count;
        break;
    }
  }
  return use;
}

}  // namespace zeroplan
