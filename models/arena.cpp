#include "models/arena.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>

#include "models/arena_parts.h"

namespace zeroplan {
namespace {

using arena::Life;

std::int64_t bytes(const Buffer& buffer) { return static_cast<std::int64_t>(buffer.size.base()); }

/// +1, -1, 0 by work: most ops are neither Alloc nor Free, and equal ops share their work.
std::vector<int> signs_of(const Schedule& schedule) {
  std::vector<int> signs;
  signs.reserve(schedule.works().size());
  for (const Work& work : schedule.works()) {
    signs.push_back(std::holds_alternative<Alloc>(work) ? 1 : std::holds_alternative<Free>(work) ? -1 : 0);
  }
  return signs;
}

[[noreturn]] void fail(std::uint32_t buffer, const char* what) {
  throw std::logic_error("arena: buffer " + std::to_string(buffer) + " " + what);
}

/// Innermost repeated block around the current op, -1 outside; ops are asked for in order.
class RepeatCursor {
 public:
  explicit RepeatCursor(const Schedule& schedule) : repeats_(schedule.repeats()) {}
  int at(std::uint32_t op) {
    while (!open_.empty() && repeats_[static_cast<std::size_t>(open_.back())].end <= op) open_.pop_back();
    while (next_ < repeats_.size() && repeats_[next_].begin <= op) open_.push_back(static_cast<int>(next_++));
    return open_.empty() ? -1 : open_.back();
  }

 private:
  std::span<const Repeat> repeats_;
  std::vector<int> open_;
  std::size_t next_ = 0;
};

/// Step buffers of `memory` in order of birth. Time counts Alloc ops: between two of them nothing new must fit.
std::vector<Life> lives_of(const Schedule& schedule, Memory memory) {
  constexpr std::uint32_t kUnborn = 0xffffffff, kDead = 0xfffffffe;
  const std::vector<int> signs = signs_of(schedule);
  std::vector<Life> lives;
  std::vector<int> block_of;
  std::vector<std::uint32_t> life_of(schedule.buffers().size(), kUnborn);
  RepeatCursor cursor(schedule);
  std::int32_t time = 0;
  const auto ops = schedule.ops();
  for (std::uint32_t i = 0; i < ops.size(); ++i) {
    const int sign = signs[ops[i].work.index];
    if (sign == 0) continue;
    const int repeat = cursor.at(i);
    for (const Operand& operand : schedule.operands(ops[i])) {
      const std::uint32_t b = operand.buffer.index;
      const Buffer& buffer = schedule.buffers()[b];
      if (buffer.memory != memory) continue;
      std::uint32_t& life = life_of[b];
      if (sign > 0) {
        if (life != kUnborn) fail(b, "is allocated twice");
        life = static_cast<std::uint32_t>(lives.size());
        lives.push_back({time, -1, bytes(buffer), b});
        block_of.push_back(repeat);
      } else {
        if (life == kUnborn || life == kDead) fail(b, "is freed but not allocated");
        if (block_of[life] != repeat)
          fail(b, "is allocated and freed in different repeated blocks: the arena needs flat layers");
        lives[life].end = time;
        life = kDead;
      }
    }
    if (sign > 0) ++time;
  }
  for (const Life& life : lives) {
    if (life.end < 0) fail(life.buffer, "is never freed");
  }
  return lives;
}

}  // namespace

ArenaLayout lay_out(const Schedule& schedule, Memory memory, LayoutEffort effort) {
  ArenaLayout layout;
  layout.offset.assign(schedule.buffers().size(), -1);
  std::int64_t resident = 0;
  for (std::size_t b = 0; b < layout.offset.size(); ++b) {
    const Buffer& buffer = schedule.buffers()[b];
    if (buffer.lifetime != Lifetime::resident || buffer.memory != memory) continue;
    layout.offset[b] = resident;
    resident += bytes(buffer);
  }
  const std::vector<Life> lives = lives_of(schedule, memory);
  const arena::Placed placed = arena::place(lives, effort);
  for (std::size_t i = 0; i < lives.size(); ++i) layout.offset[lives[i].buffer] = resident + placed.offset[i];
  layout.size = Bytes(static_cast<double>(resident + placed.height));
  layout.lower_bound = Bytes(static_cast<double>(resident + placed.live_peak));
  return layout;
}

namespace {

/// The ranges in use while a schedule runs.
class Occupancy {
 public:
  Occupancy(const Schedule& schedule, Memory memory, const ArenaLayout& layout)
      : schedule_(schedule), memory_(memory), layout_(layout) {
    for (std::uint32_t b = 0; b < schedule.buffers().size(); ++b) {
      if (schedule.buffers()[b].lifetime == Lifetime::resident) take(b);
    }
  }
  void run(const Op& op) {
    const Work& work = schedule_.work(op);
    const bool born = std::holds_alternative<Alloc>(work);
    if (!born && !std::holds_alternative<Free>(work)) return;
    for (const Operand& operand : schedule_.operands(op))
      born ? take(operand.buffer.index) : give(operand.buffer.index);
  }

 private:
  struct Range {
    std::int64_t end;
    std::uint32_t buffer;
  };

  void take(std::uint32_t b) {
    const Buffer& buffer = schedule_.buffers()[b];
    if (buffer.memory != memory_) return;
    const std::int64_t begin = layout_.offset.at(b), end = begin + bytes(buffer);
    if (begin < 0 || static_cast<double>(end) > layout_.size.base()) fail(b, "lies outside the arena");
    if (begin % kBufferAlignment != 0) fail(b, "is not aligned");
    if (begin == end) return;
    const auto above = in_use_.lower_bound(begin);
    if (above != in_use_.end() && above->first < end) clash(b, above->second.buffer);
    if (above != in_use_.begin() && std::prev(above)->second.end > begin) clash(b, std::prev(above)->second.buffer);
    in_use_.emplace_hint(above, begin, Range{end, b});
  }
  void give(std::uint32_t b) {
    const Buffer& buffer = schedule_.buffers()[b];
    if (buffer.memory != memory_ || bytes(buffer) == 0) return;
    const auto it = in_use_.find(layout_.offset.at(b));
    if (it == in_use_.end() || it->second.buffer != b) fail(b, "is freed but not allocated");
    in_use_.erase(it);
  }
  [[noreturn]] static void clash(std::uint32_t a, std::uint32_t b) {
    fail(a, ("shares bytes with buffer " + std::to_string(b) + ", which lives at the same time").c_str());
  }

  const Schedule& schedule_;
  Memory memory_;
  const ArenaLayout& layout_;
  std::map<std::int64_t, Range> in_use_;
};

void run_range(const Schedule& schedule, std::uint32_t begin, std::uint32_t end, std::size_t next,
               Occupancy& occupancy) {
  const auto repeats = schedule.repeats();
  for (std::uint32_t i = begin; i < end;) {
    if (next == repeats.size() || repeats[next].begin != i || repeats[next].end > end) {
      occupancy.run(schedule.ops()[i++]);
      continue;
    }
    const std::uint32_t after = repeats[next].end;
    const int times = repeats[next].count > 1 ? 2 : 1;
    for (int k = 0; k < times; ++k) run_range(schedule, i, after, next + 1, occupancy);
    while (next < repeats.size() && repeats[next].begin < after) ++next;
    i = after;
  }
}

}  // namespace

void check_layout(const Schedule& schedule, Memory memory, const ArenaLayout& layout) {
  if (layout.offset.size() != schedule.buffers().size()) throw std::logic_error("arena: a layout of another schedule");
  Occupancy occupancy(schedule, memory, layout);
  run_range(schedule, 0, static_cast<std::uint32_t>(schedule.ops().size()), 0, occupancy);
}

}  // namespace zeroplan
