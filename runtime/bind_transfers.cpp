// Copies between memories and collectives.

#include <cstring>
#include <stdexcept>

#include "runtime/op_binding.h"

namespace zeroplan {
namespace {

struct Piece {
  BufferId buffer;
  std::int64_t bytes = 0;
};

/// The buffers on one side of a copy, with what of each takes part. Master and moments of a block go one after the
/// other into a slot; everything else is one buffer to one buffer.
class CopySides {
 public:
  CopySides(const RankContext& context, const Op& op, const Copy& work) {
    for (const Operand& operand : context.schedule.operands(op)) {
      (operand.access == Access::read ? from : to).push_back({operand.buffer, 0});
    }
    for (auto* side : {&from, &to}) measure(context, *side, static_cast<std::int64_t>(work.bytes.base()));
  }
  std::vector<Piece> from, to;

 private:
  // A state's buffer is exactly as long as the state: elements come in units of 128 or more.
  static void measure(const RankContext& context, std::vector<Piece>& side, std::int64_t bytes) {
    if (side.empty()) throw std::logic_error("executor: a copy from or to nothing");
    std::int64_t left = bytes;
    for (Piece& piece : side) {
      const auto size = static_cast<std::int64_t>(context.schedule.buffer(piece.buffer).size.base());
      piece.bytes = side.size() == 1 ? bytes : size;
      left -= piece.bytes;
    }
    if (left != 0) throw std::logic_error("executor: the buffers of a copy do not add up to its bytes");
  }
};

/// Pieces in memory as one list of ranges.
std::vector<std::span<std::byte>> ranges(const RankContext& context, const std::vector<Piece>& side) {
  std::vector<std::span<std::byte>> result;
  for (const Piece& piece : side) result.push_back(context.part(piece.buffer, piece.bytes));
  return result;
}

/// Calls use(a, b) on ranges of equal length that cover both lists.
template <class Use>
void zip(std::vector<std::span<std::byte>> a, std::vector<std::span<std::byte>> b, Use use) {
  std::size_t i = 0, k = 0;
  while (i < a.size() && k < b.size()) {
    const std::size_t n = std::min(a[i].size(), b[k].size());
    use(a[i].first(n), b[k].first(n));
    a[i] = a[i].subspan(n);
    b[k] = b[k].subspan(n);
    if (a[i].empty()) ++i;
    if (b[k].empty()) ++k;
  }
}

// The parts of `memory` that belong to each buffer on disk.
template <class Byte>
std::vector<DiskPart<Byte>> disk_parts(const RankContext& context, const std::vector<Piece>& on_disk,
                                       const std::vector<Piece>& in_memory) {
  if (in_memory.size() != 1) throw std::logic_error("executor: a disk copy with several buffers in memory");
  std::span<std::byte> all = context.part(in_memory.front().buffer, in_memory.front().bytes);
  std::vector<DiskPart<Byte>> parts;
  for (const Piece& piece : on_disk) {
    const auto n = static_cast<std::size_t>(piece.bytes);
    parts.push_back({context.memory.disk_buffer(piece.buffer), 0, all.first(n)});
    all = all.subspan(n);
  }
  return parts;
}

}  // namespace

Action bind_copy(const RankContext& context, const Op& op, const Copy& work) {
  const CopySides sides(context, op, work);
  DiskFile* disk = context.memory.has_disk() ? &context.memory.disk() : nullptr;
  if (work.from == Memory::nvme) {
    return [disk, parts = disk_parts<std::byte>(context, sides.from, sides.to)]() -> std::optional<TimePoint> {
      disk->read(parts);
      return {};
    };
  }
  if (work.to == Memory::nvme) {
    return [disk, parts = disk_parts<const std::byte>(context, sides.to, sides.from)]() -> std::optional<TimePoint> {
      disk->write(parts);
      return {};
    };
  }
  struct Move {
    std::span<std::byte> to, from;
  };
  std::vector<Move> moves;
  zip(ranges(context, sides.to), ranges(context, sides.from), [&](std::span<std::byte> to, std::span<std::byte> from) {
    moves.push_back({to, from});
  });
  return [moves]() -> std::optional<TimePoint> {
    for (const Move& m : moves) std::memcpy(m.to.data(), m.from.data(), m.to.size());
    return {};
  };
}

Action bind_collective(const RankContext& context, const Op& op, const Collective& work) {
  Communicator* c = context.communicator(work.group, op.stream);
  if (c == nullptr) throw std::logic_error("executor: a collective of one rank");
  const auto operands = context.schedule.operands(op);
  const auto message = static_cast<std::int64_t>(work.message().base());
  const auto view = [&](std::span<std::byte> bytes) {
    return TensorView{bytes.data(), static_cast<std::int64_t>(bytes.size()) / size_of(work.type), work.type};
  };
  const auto whole = [&](const Operand& operand) {
    return context.memory.bytes(operand.buffer).first(static_cast<std::size_t>(message));
  };
  switch (work.kind) {
    case CollectiveKind::all_reduce: {
      const TensorView tensor = view(context.part(operands[0].buffer, message));
      return [c, tensor]() -> std::optional<TimePoint> { return c->all_reduce(tensor); };
    }
    case CollectiveKind::all_gather: {
      const auto full = whole(operands[operands.size() - 1]);
      const TensorView shard = view(context.part(operands[0].buffer, message / c->size()));
      return [c, shard, to = view(full)]() -> std::optional<TimePoint> { return c->all_gather(shard, to); };
    }
    case CollectiveKind::reduce_scatter: {
      const auto full = whole(operands[0]);
      const TensorView shard = view(context.part(operands[operands.size() - 1].buffer, message / c->size()));
      return [c, shard, from = view(full)]() -> std::optional<TimePoint> { return c->reduce_scatter(from, shard); };
    }
  }
  throw std::logic_error("executor: unknown collective");
}

}  // namespace zeroplan
