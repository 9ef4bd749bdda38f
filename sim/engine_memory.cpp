#include "sim/engine_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <queue>
#include <unordered_map>

#include "sim/cost_model.h"

namespace zeroplan {
namespace {

Bytes bytes(std::int64_t value) { return Bytes(static_cast<double>(value)); }

/// The host's clock and the streams', and which freed blocks wait for a stream to pass.
class Clocks {
 public:
  Clocks(const EngineTape& tape, const WorkTimes& times) : tape_(tape), times_(times) {}

  void work(const TapeOp& op) {
    const bool reduction = op.stream == Stream::reduce && std::holds_alternative<Collective>(tape_.works()[op.id]);
    if (reduction) wait_for_reductions();
    std::deque<Seconds>& pending = pending_[static_cast<std::size_t>(op.stream)];
    if (static_cast<int>(pending.size()) >= times_.pace.launches) {
      host_ = std::max(host_, pending.front());
      pending.pop_front();
    }
    host_ +=
        times_.pace.scale * (op.phase == Phase::forward ? times_.pace.kernel_forward : times_.pace.kernel_backward);
    Seconds& end = stream(op.stream);
    end = std::max(end, host_) + times_.seconds[op.id];
    pending.push_back(end);
    for (const TapeOperand& operand : tape_.operands(op)) {
      if (operand.access != Access::read) written_[static_cast<std::uint32_t>(operand.buffer)] = end;
    }
    if (reduction) reductions_.push_back(end);
  }
  void hook() { host_ += times_.pace.scale * times_.pace.hook; }
  void wait(Stream waiter, Stream awaited) { stream(waiter) = std::max(stream(waiter), stream(awaited)); }
  void wait_written(Stream waiter, std::uint32_t buffer) {
    const auto end = written_.find(buffer);
    if (end != written_.end()) stream(waiter) = std::max(stream(waiter), end->second);
  }
  void host_wait(Stream awaited) { host_ = std::max(host_, stream(awaited)); }
  void synchronize() {
    for (const Seconds end : streams_) host_ = std::max(host_, end);
  }

  void record(std::uint32_t buffer, Stream user) { users_[buffer].push_back(user); }
  /// The buffer is freed now. Defers the block's return if a stream that uses it has not come so far.
  void freed(std::uint32_t buffer, CachingAllocator& allocator, CachingAllocator::Block block) {
    const auto users = users_.find(buffer);
    if (users == users_.end()) return;
    Seconds passed;
    for (const Stream user : users->second) passed = std::max(passed, stream(user));
    users_.erase(users);
    if (passed <= host_) return;
    allocator.record_stream(block, next_event_);
    events_.push({passed, next_event_++});
  }
  /// Blocks whose streams have passed by now return.
  void give_back(CachingAllocator& allocator) {
    while (!events_.empty() && events_.top().first <= host_) {
      allocator.complete(events_.top().second);
      events_.pop();
    }
  }

 private:
  static constexpr int kFirstEvent = 1000;  // beyond any stream's number
  using Event = std::pair<Seconds, int>;

  Seconds& stream(Stream which) { return streams_[static_cast<std::size_t>(which)]; }
  void wait_for_reductions() {
    while (!reductions_.empty() && reductions_.front() <= host_) reductions_.pop_front();
    if (static_cast<int>(reductions_.size()) <= times_.pace.reductions) return;
    host_ = std::max(host_, reductions_.front());
    reductions_.pop_front();
  }

  const EngineTape& tape_;
  const WorkTimes& times_;
  Seconds host_;
  std::array<Seconds, kNumStreams> streams_{};
  std::array<std::deque<Seconds>, kNumStreams> pending_;  // ends of the launches that a stream's queue may hold
  std::deque<Seconds> reductions_;                        // ends of those under way
  std::unordered_map<std::uint32_t, std::vector<Stream>> users_;
  std::unordered_map<std::uint32_t, Seconds> written_;  // by buffer, when its last writer ends
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  int next_event_ = kFirstEvent;
};

class Replay {
 public:
  Replay(const EngineTape& tape, const AllocatorOptions& options, PeakCounting counting, const WorkTimes* times)
      : tape_(tape), allocator_(options), counting_(counting), blocks_(tape.buffers().size()) {
    if (times != nullptr) clocks_.emplace(tape, *times);
  }

  RunMemory run() {
    for (const TapeOp& op : tape_.ops()) {
      if (clocks_) tick(op);
      if (!play(op)) break;
    }
    reset();
    memory_.num_alloc_retries = allocator_.stats().num_alloc_retries;
    return std::move(memory_);
  }

 private:
  void tick(const TapeOp& op) {
    switch (op.kind) {
      case TapeKind::alloc:
        clocks_->give_back(allocator_);
        break;
      case TapeKind::free:
        clocks_->freed(op.id, allocator_, blocks_[op.id]);
        break;
      case TapeKind::record_stream:
        if (pool_of(op.stream) != tape_.buffer(static_cast<TapeId>(op.id)).pool) clocks_->record(op.id, op.stream);
        break;
      case TapeKind::wait:
        clocks_->wait(op.stream, op.awaited);
        break;
      case TapeKind::wait_written:
        clocks_->wait_written(op.stream, op.id);
        break;
      case TapeKind::host_wait:
        clocks_->host_wait(op.awaited);
        break;
      case TapeKind::hook:
        clocks_->hook();
        break;
      case TapeKind::work:
        clocks_->work(op);
        break;
      case TapeKind::empty_cache:
        clocks_->synchronize();
        break;
      case TapeKind::mark:  // measuring scripts synchronize between phases
        if (op.mark != Mark::micro_begin && op.mark != Mark::init_end) clocks_->synchronize();
        clocks_->give_back(allocator_);
        break;
    }
  }

  bool play(const TapeOp& op) {
    switch (op.kind) {
      case TapeKind::alloc:
        return alloc(op);
      case TapeKind::free:
        allocator_.free(blocks_[op.id]);
        break;
      case TapeKind::empty_cache:
        allocator_.complete_all();
        allocator_.empty_cache();
        break;
      case TapeKind::mark:
        mark(op.mark);
        break;
      case TapeKind::record_stream:
      case TapeKind::wait:
      case TapeKind::wait_written:
      case TapeKind::host_wait:
      case TapeKind::hook:
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
        reset();
        break;
      case Mark::micro_begin:
        if (counting_ == PeakCounting::each_phase) reset();
        break;
      case Mark::forward_end:
        largest(step_.forward);
        if (counting_ == PeakCounting::each_phase) reset();
        break;
      case Mark::backward_end:
        largest(step_.backward);
        if (counting_ == PeakCounting::each_phase) reset();
        break;
      case Mark::micro_end:
        largest(step_.step);
        break;
      case Mark::step_end:
        step_.after = bytes(allocator_.stats().allocated);
        step_.reserved = bytes(allocator_.stats().peak_reserved);
        step_.reserved_after = bytes(allocator_.stats().reserved);
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
  std::vector<CachingAllocator::Block> blocks_;
  RunMemory memory_;
  StepMemory step_;
  std::optional<Clocks> clocks_;
  bool in_init_ = true;
};

}  // namespace

WorkTimes work_times(const EngineTape& tape, const CostModel& cost) {
  WorkTimes times;
  times.seconds.reserve(tape.works().size());
  for (const Work& work : tape.works()) times.seconds.push_back(cost.demand(work).alone());
  return times;
}

RunMemory replay(const EngineTape& tape, const AllocatorOptions& options, PeakCounting counting,
                 const WorkTimes* times) {
  return Replay(tape, options, counting, times).run();
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
