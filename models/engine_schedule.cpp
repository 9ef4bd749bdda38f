#include "models/engine_schedule.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <vector>

namespace zeroplan {
namespace {

std::span<const TapeOp> last_step(const EngineTape& tape, std::size_t& begin) {
  const auto ops = tape.ops();
  std::size_t end = ops.size();
  while (end > 0 && !(ops[end - 1].kind == TapeKind::mark && ops[end - 1].mark == Mark::step_end)) --end;
  begin = end;
  while (begin > 0 && !(ops[begin - 1].kind == TapeKind::mark && ops[begin - 1].mark == Mark::step_begin)) --begin;
  if (begin == 0) throw std::logic_error("engine tape: no whole step");
  return ops.subspan(begin, end - begin);
}

class Builder {
 public:
  Builder(const EngineTape& tape, const ModelSpec& model) : tape_(tape), uses_(tape.buffers().size()) {
    for (std::size_t i = 0; i < model.sequence.size(); ++i) {
      const auto kind = static_cast<std::size_t>(model.sequence[i]);
      if (model.kinds[kind].role == BlockRole::layer) layers_.push_back(static_cast<int>(i));
    }
  }

  Schedule build(std::span<const HostBuffer> host) {
    std::size_t begin = 0;
    const std::span<const TapeOp> step = last_step(tape_, begin);
    find_lives(begin, step);
    find_keepers();
    builder_.reserve(step.size() + 64);
    declare(host);
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      if (uses_[i].before && uses_[i].dies) allocate(static_cast<TapeId>(i), Phase::forward, -1);
    }
    for (const TapeOp& op : step) play(op);
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      if (uses_[i].born && !uses_[i].dies) release(static_cast<TapeId>(i), Phase::optimizer, -1);
    }
    return builder_.finish();
  }

 private:
  static constexpr std::size_t kStreams = kNumStreams;
  /// What the schedule knows of a buffer, and who touched it last.
  struct Use {
    bool before = false, born = false, dies = false;  // alive when the step begins; allocated, freed in it
    std::array<bool, kStreams> kept{};                // streams whose use the allocator waits for, not the Free
    BufferId id;
    OpRef written;
    Stream writer = Stream::compute;
    std::array<OpRef, kStreams> read{};  // since then, the last one of each stream
  };
  Use& use(TapeId id) { return uses_[static_cast<std::size_t>(id)]; }

  /// A block of a stream's own pool, or one that record_stream ties to it, is given out again only when that stream has
  /// passed; nothing else waits for it.
  void find_keepers() {
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      const Pool pool = tape_.buffer(static_cast<TapeId>(i)).pool;
      if (pool == Pool::gather) uses_[i].kept[index(Stream::gather)] = true;
      if (pool == Pool::reduce) uses_[i].kept[index(Stream::reduce)] = true;
    }
    for (const TapeOp& op : tape_.ops()) {
      if (op.kind == TapeKind::record_stream && op.stream != Stream::compute)
        uses_[op.id].kept[index(op.stream)] = true;
    }
  }

  void find_lives(std::size_t begin, std::span<const TapeOp> step) {
    for (const TapeOp& op : tape_.ops().first(begin)) {
      if (op.kind == TapeKind::alloc) uses_[op.id].before = true;
      if (op.kind == TapeKind::free) uses_[op.id].before = false;
    }
    for (const TapeOp& op : step) {
      if (op.kind == TapeKind::alloc) uses_[op.id].born = true;
      if (op.kind == TapeKind::free) uses_[op.id].dies = true;
    }
  }

  int block(std::int16_t layer) const {
    return layer >= 0 && static_cast<std::size_t>(layer) < layers_.size() ? layers_[static_cast<std::size_t>(layer)]
                                                                          : -1;
  }

  void declare(std::span<const HostBuffer> host) {
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      Use& each = uses_[i];
      if (!each.before && !each.born) continue;
      const TapeBuffer& source = tape_.buffer(static_cast<TapeId>(i));
      Buffer buffer;
      buffer.role = source.role;
      buffer.owner = source.owner;
      buffer.lifetime = each.before && !each.dies ? Lifetime::resident : Lifetime::step;
      buffer.block = static_cast<std::int16_t>(block(source.block));
      buffer.size = Bytes(static_cast<double>(source.bytes));
      each.id = builder_.declare(buffer);
    }
    for (const HostBuffer& source : host) {
      const bool rounded = source.kind == HostKind::pinned;
      const auto bytes =
          rounded ? std::bit_ceil(static_cast<std::uint64_t>(source.bytes)) : static_cast<std::uint64_t>(source.bytes);
      Buffer buffer;
      buffer.role = BufferRole::state_slot;
      buffer.memory = source.kind == HostKind::pageable ? Memory::dram : Memory::pinned;
      buffer.owner = Owner::optimizer;
      buffer.lifetime = Lifetime::resident;
      buffer.size = Bytes(static_cast<double>(bytes) * static_cast<double>(source.count));
      builder_.declare(buffer);
    }
  }

  void play(const TapeOp& op) {
    const auto id = static_cast<TapeId>(op.id);
    switch (op.kind) {
      case TapeKind::alloc:
        allocate(id, op.phase, block(op.block));
        break;
      case TapeKind::free:
        release(id, op.phase, block(op.block));
        break;
      case TapeKind::work:
        run(op);
        break;
      case TapeKind::wait:
        wait(op.stream, op.awaited);
        break;
      case TapeKind::wait_written:
        if (!use(id).written.none()) waits_[index(op.stream)].push_back(use(id).written);
        break;
      case TapeKind::host_wait:
        for (int i = 0; i < kNumStreams; ++i) {
          if (static_cast<Stream>(i) != op.awaited) wait(static_cast<Stream>(i), op.awaited);
        }
        break;
      case TapeKind::hook:
      case TapeKind::record_stream:
      case TapeKind::empty_cache:
      case TapeKind::mark:
        break;
    }
  }

  void wait(Stream waiter, Stream awaited) {
    const OpRef last = last_[index(awaited)];
    if (!last.none()) waits_[index(waiter)].push_back(last);
  }
  void allocate(TapeId id, Phase phase, int at) {
    if (!alloc_made_) alloc_ = builder_.work(Alloc{}), alloc_made_ = true;
    const TapeOperand operand{id, Access::write};
    add(Stream::compute, phase, at, alloc_, {&operand, 1});
  }
  void release(TapeId id, Phase phase, int at) {
    if (!free_made_) free_ = builder_.work(Free{}), free_made_ = true;
    const TapeOperand operand{id, Access::write};
    add(Stream::compute, phase, at, free_, {&operand, 1});
  }
  void run(const TapeOp& op) {
    if (works_.empty()) works_.resize(tape_.works().size(), WorkId{0xffffffff});
    WorkId& work = works_[op.id];
    if (work.index == 0xffffffff) work = builder_.work(tape_.works()[op.id]);
    add(op.stream, op.phase, block(op.block), work, tape_.operands(op));
  }

  /// Adds an op with the edges that its operands and the waits before it ask for.
  void add(Stream stream, Phase phase, int at, WorkId work, std::span<const TapeOperand> operands) {
    const bool frees = free_made_ && work.index == free_.index;
    after_ = std::move(waits_[index(stream)]);
    waits_[index(stream)].clear();
    operands_.clear();
    for (const TapeOperand& operand : operands) {
      const Use& each = use(operand.buffer);
      if (!each.kept[index(stream)]) operands_.push_back({each.id, operand.access});
      const auto waits_for = [&](Stream other, OpRef op) {
        const bool left_to_allocator = frees && each.kept[index(other)];
        if (other != stream && !op.none() && !left_to_allocator) after_.push_back(op);
      };
      waits_for(each.writer, each.written);
      if (operand.access == Access::read) continue;
      for (std::size_t s = 0; s < kStreams; ++s) waits_for(static_cast<Stream>(s), each.read[s]);
    }
    std::sort(after_.begin(), after_.end(), [](OpRef a, OpRef b) { return a.bits < b.bits; });
    after_.erase(std::unique(after_.begin(), after_.end()), after_.end());
    const OpRef op = builder_.add(stream, phase, at, work, after_, operands_);
    last_[index(stream)] = op;
    for (const TapeOperand& operand : operands) {
      Use& each = use(operand.buffer);
      if (operand.access == Access::read) {
        each.read[index(stream)] = op;
      } else {
        each.written = op;
        each.writer = stream;
        each.read.fill(OpRef{});
      }
    }
  }

  static std::size_t index(Stream stream) { return static_cast<std::size_t>(stream); }

  const EngineTape& tape_;
  ScheduleBuilder builder_;
  std::vector<Use> uses_;
  std::vector<int> layers_;  // block of each layer
  std::vector<WorkId> works_;
  WorkId alloc_, free_;
  bool alloc_made_ = false, free_made_ = false;
  std::array<std::vector<OpRef>, kStreams> waits_;  // what the next op of each stream waits for
  std::array<OpRef, kStreams> last_{};
  std::vector<OpRef> after_;
  std::vector<Operand> operands_;
};

}  // namespace

Schedule steady_schedule(const EngineTape& tape, const ModelSpec& model, std::span<const HostBuffer> host) {
  return Builder(tape, model).build(host);
}

}  // namespace zeroplan
