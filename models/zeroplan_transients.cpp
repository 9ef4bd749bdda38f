// What the zeroplan engine does before and after steps: states made or read into place, checkpoints, exported weights.
// Block by block, one after the other, through staging buffers of host memory, as runtime/rank_states.cpp does it. The
// step's resident buffers stand all the while.

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <optional>
#include <vector>

#include "models/lower.h"

namespace zeroplan {
namespace {

/// States are loaded and saved in pieces of so many elements (runtime/rank_states.cpp). The schedule has a block's
/// pieces as one op: they pass through the same staging one after the other.
constexpr std::int64_t kPiece = 1 << 22;

/// Where one block's states are.
struct BlockStates {
  std::optional<BufferId> weights;  // whole
  std::optional<BufferId> shard, master, moments;
  FlatLayout layout;
  std::int64_t count = 0;  // elements that the rank updates
};

Bytes bytes_for(std::int64_t elements, int each) { return Bytes(static_cast<double>(elements * each)); }

std::vector<BlockStates> block_states(const ModelSpec& model, const Plan& plan, std::span<const Buffer> buffers) {
  std::vector<BlockStates> blocks(model.sequence.size());
  std::map<int, FlatLayout> layouts;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const int kind = model.sequence[i];
    auto [at, fresh] = layouts.try_emplace(kind);
    if (fresh)
      at->second = flat_layout(model.kinds[static_cast<std::size_t>(kind)], plan.precision.weights, plan.shard_ranks);
    blocks[i].layout = at->second;
    blocks[i].count = plan.zero_stage == 0 ? at->second.padded : at->second.shard;
  }
  for (std::uint32_t k = 0; k < buffers.size(); ++k) {
    const Buffer& buffer = buffers[k];
    if (buffer.lifetime != Lifetime::resident || buffer.block < 0) continue;
    BlockStates& b = blocks[static_cast<std::size_t>(buffer.block)];
    if (buffer.role == BufferRole::weights) b.weights = BufferId{k};
    if (buffer.role == BufferRole::weight_shard) b.shard = BufferId{k};
    if (buffer.role == BufferRole::master) b.master = BufferId{k};
    if (buffer.role == BufferRole::moments) b.moments = BufferId{k};
  }
  return blocks;
}

/// Bytes of staging that each part of the work needs.
class Staging {
 public:
  explicit Staging(const Plan& plan) : plan_(plan) {}

  /// fp32 values and what they are rounded to; splitting makes the remainders as well.
  Bytes weights(const BlockStates& b) const {
    return bytes_for(piece(b.weights ? b.layout.padded : b.count), 4 + weight() + (split() ? 2 : 0));
  }
  /// Master and moments, and what the master is split into or the weights are rounded to.
  Bytes optimizer(const BlockStates& b) const {
    return bytes_for(piece(b.count), 4 + 2 * state() + (split() ? 4 : weight()));
  }
  /// Moments and fp32 values; without a whole master also what these are made of.
  Bytes checkpoint(const BlockStates& b) const {
    const bool whole_master = plan_.precision.master && !split();
    return bytes_for(piece(stored(b)), 4 + 2 * state() + (whole_master ? 0 : weight()) + (split() ? 2 : 0));
  }
  Bytes exported(const BlockStates& b) const { return bytes_for(b.layout.padded, weight()); }

  /// Replicas share the storing of what they all hold: the most that one stores.
  std::int64_t stored(const BlockStates& b) const { return (b.count + plan_.replicas() - 1) / plan_.replicas(); }
  int weight() const { return size_of(plan_.precision.weights); }
  int state() const { return size_of(plan_.precision.states); }
  bool split() const { return plan_.precision.master && plan_.precision.split_master; }

 private:
  static std::int64_t piece(std::int64_t elements) { return std::min(kPiece, elements); }

  const Plan& plan_;
};

class TransientEmitter {
 public:
  TransientEmitter(const ModelSpec& model, const Plan& plan, int ranks_per_node)
      : plan_(plan), staging_(plan), ranks_per_node_(ranks_per_node) {
    const Schedule step = lower(model, plan, Folding::layers);
    std::vector<Buffer> residents;
    for (const Buffer& buffer : step.buffers())
      if (buffer.lifetime == Lifetime::resident) residents.push_back(buffer);
    for (const Buffer& buffer : residents) builder_.declare(buffer);
    blocks_ = block_states(model, plan, residents);
    alloc_ = builder_.work(Alloc{});
    free_ = builder_.work(Free{});
  }

  Schedule run(Transient what) {
    for (int i = 0; i < static_cast<int>(blocks_.size()); ++i) {
      const BlockStates& b = blocks_[static_cast<std::size_t>(i)];
      if (b.layout.padded == 0) continue;
      switch (what) {
        case Transient::initialise:
        case Transient::resume:
          load_weights(i, b, what == Transient::resume);
          load_optimizer(i, b, what == Transient::resume);
          break;
        case Transient::checkpoint:
          save(i, b);
          break;
        case Transient::export_weights:
          export_block(i, b);
          break;
      }
    }
    builder_.add(Stream::compute, kPhase, -1, builder_.work(Join{}), std::span<const OpRef>(&last_, 1), {});
    return builder_.finish();
  }

 private:
  static constexpr Phase kPhase = Phase::optimizer;

  OpRef add(Stream stream, int i, Work work, std::initializer_list<OpRef> after,
            std::initializer_list<Operand> operands) {
    return last_ = builder_.add(stream, kPhase, i, builder_.work(work), {after.begin(), after.size()},
                                {operands.begin(), operands.size()});
  }
  BufferId stage(int i, Bytes size, Memory memory = Memory::pinned, BufferRole role = BufferRole::state_slot) {
    const BufferId buffer = builder_.declare({role, memory, memory == Memory::hbm ? Owner::parameters : Owner::buffers,
                                              Lifetime::step, static_cast<std::int16_t>(i), -1, size});
    const Operand operand{buffer, Access::write};
    last_ = builder_.add(Stream::compute, kPhase, i, alloc_, std::span<const OpRef>(&last_, 1), {&operand, 1});
    return buffer;
  }
  void drop(int i, BufferId buffer) {
    const Operand operand{buffer, Access::write};
    last_ = builder_.add(Stream::compute, kPhase, i, free_, std::span<const OpRef>(&last_, 1), {&operand, 1});
  }
  Memory memory_of(BufferId buffer) const { return builder_.buffer(buffer).memory; }

  // Each op waits for the one before: the host works through a block's states piece by piece.

  OpRef host_pass(int i, Bytes traffic, BufferId buffer) {
    const Compute work{-1, kHostPass, Pass::forward, Pointwise{traffic, 0}, true};
    return add(Stream::host, i, work, {last_}, {{buffer, Access::read_write}});
  }
  /// Fills `elements` values of `each` bytes: made by the host, or read from a checkpoint's files.
  void fill(int i, BufferId buffer, std::int64_t elements, int each, bool from_files) {
    const Bytes bytes = bytes_for(elements, each);
    if (from_files)
      add(Stream::nvme_read, i, Copy{Memory::nvme, Memory::pinned, bytes}, {last_}, {{buffer, Access::write}});
    else
      host_pass(i, bytes, buffer);
  }
  void place(int i, BufferId from, BufferId to, Bytes bytes) {
    const Memory memory = memory_of(to);
    const auto copy = [&](Stream stream) {
      add(stream, i, Copy{Memory::pinned, memory, bytes}, {last_}, {{from, Access::read}, {to, Access::write}});
    };
    if (memory == Memory::hbm) return copy(Stream::h2d);
    if (memory == Memory::nvme) return copy(Stream::nvme_write);
    const Compute work{-1, kHostPass, Pass::forward, Pointwise{2.0 * bytes, 0}, true};
    add(Stream::host, i, work, {last_}, {{from, Access::read}, {to, Access::write}});
  }
  void fetch(int i, BufferId from, BufferId to, Bytes bytes) {
    const Memory memory = memory_of(from);
    const auto copy = [&](Stream stream) {
      add(stream, i, Copy{memory, Memory::pinned, bytes}, {last_}, {{from, Access::read}, {to, Access::write}});
    };
    if (memory == Memory::hbm) return copy(Stream::d2h);
    if (memory == Memory::nvme) return copy(Stream::nvme_read);
    const Compute work{-1, kHostPass, Pass::forward, Pointwise{2.0 * bytes, 0}, true};
    add(Stream::host, i, work, {last_}, {{from, Access::read}, {to, Access::write}});
  }

  void load_weights(int i, const BlockStates& b, bool from_files) {
    const std::int64_t n = b.weights ? b.layout.padded : b.count;
    const BufferId buffer = stage(i, staging_.weights(b));
    fill(i, buffer, n, 4, from_files);
    host_pass(i, bytes_for(n, 4 + staging_.weight()), buffer);  // rounded
    place(i, buffer, b.weights ? *b.weights : b.shard.value(), bytes_for(n, staging_.weight()));
    drop(i, buffer);
  }

  void load_optimizer(int i, const BlockStates& b, bool from_files) {
    const BufferId buffer = stage(i, staging_.optimizer(b));
    fill(i, buffer, b.count, 4 + 2 * staging_.state(), from_files);
    place(i, buffer, b.moments.value(), bytes_for(b.count, 2 * staging_.state()));
    if (b.master) {
      if (staging_.split()) host_pass(i, bytes_for(b.count, 8), buffer);
      place(i, buffer, *b.master, bytes_for(b.count, staging_.split() ? 2 : 4));
    }
    drop(i, buffer);
  }

  void save(int i, const BlockStates& b) {
    const BufferId buffer = stage(i, staging_.checkpoint(b));
    const std::int64_t stored = staging_.stored(b);
    fetch(i, b.moments.value(), buffer, bytes_for(stored, 2 * staging_.state()));
    if (b.master) fetch(i, *b.master, buffer, bytes_for(stored, staging_.split() ? 2 : 4));
    if (!b.master || staging_.split()) {
      fetch(i, b.weights ? *b.weights : b.shard.value(), buffer, bytes_for(stored, staging_.weight()));
    }
    host_pass(i, bytes_for(stored, 8), buffer);  // joined or picked out
    add(Stream::nvme_write, i, Copy{Memory::pinned, Memory::nvme, bytes_for(stored, 4 + 2 * staging_.state())}, {last_},
        {{buffer, Access::read}});
    drop(i, buffer);
  }

  /// The first rank writes the files: its node's drives take what one rank holds, which every rank of a node is
  /// charged its part of.
  void export_block(int i, const BlockStates& b) {
    const Bytes whole = staging_.exported(b);
    const BufferId buffer = stage(i, whole);
    if (b.weights) {
      fetch(i, *b.weights, buffer, whole);
    } else if (plan_.shard_ranks == 1) {
      fetch(i, b.shard.value(), buffer, whole);
    } else {
      gather(i, b, buffer, whole);
    }
    add(Stream::nvme_write, i, Copy{Memory::pinned, Memory::nvme, whole / ranks_per_node_}, {last_},
        {{buffer, Access::read}});
    drop(i, buffer);
  }

  void gather(int i, const BlockStates& b, BufferId buffer, Bytes whole) {
    const DType type = plan_.precision.weights;
    const BufferId full = stage(i, whole, Memory::hbm, BufferRole::weights);
    const Collective work{CollectiveKind::all_gather, Group::shard, b.layout.parameters, b.layout.padded, type};
    const BufferId shard = b.shard.value();
    if (memory_of(shard) == Memory::hbm) {
      add(Stream::gather, i, work, {last_}, {{shard, Access::read}, {full, Access::write}});
    } else {
      const Bytes part = bytes_of(b.layout.shard, type);
      if (memory_of(shard) == Memory::nvme) fetch(i, shard, buffer, part);
      const BufferId from = memory_of(shard) == Memory::nvme ? buffer : shard;
      add(Stream::h2d, i, Copy{Memory::pinned, Memory::hbm, part}, {last_},
          {{from, Access::read}, {full, Access::write}});
      add(Stream::gather, i, work, {last_}, {{full, Access::read_write}});
    }
    add(Stream::d2h, i, Copy{Memory::hbm, Memory::pinned, whole}, {last_},
        {{full, Access::read}, {buffer, Access::write}});
    drop(i, full);
  }

  const Plan& plan_;
  Staging staging_;
  int ranks_per_node_;
  ScheduleBuilder builder_;
  std::vector<BlockStates> blocks_;
  WorkId alloc_, free_;
  OpRef last_;
};

}  // namespace

std::string_view to_string(Transient what) {
  switch (what) {
    case Transient::initialise:
      return "initialise";
    case Transient::resume:
      return "resume";
    case Transient::checkpoint:
      return "checkpoint";
    case Transient::export_weights:
      return "export weights";
  }
  return "";
}

Schedule lower_transient(const ModelSpec& model, const Plan& plan, Transient what, int ranks_per_node) {
  return TransientEmitter(model, plan, ranks_per_node).run(what);
}

Bytes transient_staging(const ModelSpec& model, const Plan& plan, const Schedule& step) {
  const Staging staging(plan);
  const auto padded_up = [](Bytes bytes) {
    return Bytes(std::ceil(bytes.base() / kBufferAlignment) * kBufferAlignment);
  };
  Bytes most;
  for (const BlockStates& b : block_states(model, plan, step.buffers())) {
    if (b.layout.padded == 0) continue;
    for (const Bytes part : {staging.weights(b), staging.optimizer(b), staging.checkpoint(b), staging.exported(b)})
      most = std::max(most, padded_up(part));
  }
  return most;
}

}  // namespace zeroplan
