#include "sim/memory_timeline.h"

#include <algorithm>

namespace zeroplan {
namespace {

/// Bytes relative to the start of a range of ops.
struct Profile {
  std::array<double, kNumOwners> net{};
  double total = 0;
  double peak = 0;
  std::uint32_t at_op = 0;
  std::array<double, kNumOwners> at_peak{};
};

class Scanner {
 public:
  Scanner(const Schedule& schedule, Memory memory) : schedule_(schedule), memory_(memory) {
    for (std::size_t w = 0; w < schedule.works().size(); ++w) {
      const Work& work = schedule.works()[w];
      sign_.push_back(std::holds_alternative<Alloc>(work) ? 1 : std::holds_alternative<Free>(work) ? -1 : 0);
    }
  }

  Profile scan(std::uint32_t begin, std::uint32_t end, std::size_t& next_repeat) const {
    Profile p;
    const auto ops = schedule_.ops();
    const auto repeats = schedule_.repeats();
    for (std::uint32_t i = begin; i < end;) {
      if (next_repeat < repeats.size() && repeats[next_repeat].begin == i && repeats[next_repeat].end <= end) {
        const Repeat& repeat = repeats[next_repeat++];
        append(p, scan(repeat.begin, repeat.end, next_repeat), static_cast<double>(repeat.count));
        i = repeat.end;
        continue;
      }
      step(p, ops[i], i);
      ++i;
    }
    return p;
  }

 private:
  void step(Profile& p, const Op& op, std::uint32_t index) const {
    const int sign = sign_[op.work.index];
    if (sign == 0) return;
    for (const Operand& operand : schedule_.operands(op)) {
      const Buffer& buffer = schedule_.buffer(operand.buffer);
      if (buffer.memory != memory_) continue;
      p.net[static_cast<std::size_t>(buffer.owner)] += sign * buffer.size.base();
      p.total += sign * buffer.size.base();
    }
    if (p.total > p.peak) {
      p.peak = p.total;
      p.at_op = index;
      p.at_peak = p.net;
    }
  }

  static void append(Profile& p, const Profile& body, double count) {
    const double before = body.total > 0 ? count - 1 : 0;  // iterations before the highest one
    const double peak = p.total + before * body.total + body.peak;
    if (body.peak > 0 && peak > p.peak) {
      p.peak = peak;
      p.at_op = body.at_op;
      for (std::size_t o = 0; o < kNumOwners; ++o) p.at_peak[o] = p.net[o] + before * body.net[o] + body.at_peak[o];
    }
    for (std::size_t o = 0; o < kNumOwners; ++o) p.net[o] += count * body.net[o];
    p.total += count * body.total;
  }

  const Schedule& schedule_;
  Memory memory_;
  std::vector<int> sign_;
};

}  // namespace

MemoryTimeline::MemoryTimeline(const Schedule& schedule) {
  std::array<bool, kNumMemories> comes_and_goes{};
  for (const Buffer& buffer : schedule.buffers()) {
    if (buffer.lifetime != Lifetime::resident) {
      comes_and_goes[static_cast<std::size_t>(buffer.memory)] = true;
      continue;
    }
    MemoryPeak& peak = peaks_[static_cast<std::size_t>(buffer.memory)];
    peak.resident += buffer.size;
    peak.owners[static_cast<std::size_t>(buffer.owner)] += buffer.size;
  }
  for (MemoryPeak& peak : peaks_) peak.bytes = peak.resident;
  for (const Memory memory : {Memory::hbm, Memory::pinned, Memory::dram, Memory::nvme}) {
    if (!comes_and_goes[static_cast<std::size_t>(memory)]) continue;
    std::size_t next_repeat = 0;
    const Profile p = Scanner(schedule, memory).scan(0, static_cast<std::uint32_t>(schedule.ops().size()), next_repeat);
    MemoryPeak& peak = peaks_[static_cast<std::size_t>(memory)];
    peak.bytes += Bytes(p.peak);
    peak.at_op = p.at_op;
    for (std::size_t o = 0; o < kNumOwners; ++o) peak.owners[o] += Bytes(p.at_peak[o]);
  }
}

std::vector<BufferId> live_after(const Schedule& schedule, std::uint32_t at_op, Memory memory) {
  std::vector<bool> alive(schedule.buffers().size(), false);
  for (std::size_t b = 0; b < alive.size(); ++b) alive[b] = schedule.buffers()[b].lifetime == Lifetime::resident;
  const auto ops = schedule.ops();
  for (std::uint32_t i = 0; i <= at_op && i < ops.size(); ++i) {
    const Work& work = schedule.work(ops[i]);
    const bool born = std::holds_alternative<Alloc>(work), dies = std::holds_alternative<Free>(work);
    if (!born && !dies) continue;
    for (const Operand& operand : schedule.operands(ops[i])) alive[operand.buffer.index] = born;
  }
  std::vector<BufferId> live;
  for (std::uint32_t b = 0; b < alive.size(); ++b) {
    if (alive[b] && schedule.buffers()[b].memory == memory) live.push_back({b});
  }
  std::stable_sort(live.begin(), live.end(),
                   [&](BufferId a, BufferId b) { return schedule.buffer(a).size > schedule.buffer(b).size; });
  return live;
}

}  // namespace zeroplan
