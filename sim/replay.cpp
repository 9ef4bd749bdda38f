#include "sim/replay.h"

#include <algorithm>
#include <limits>
#include <map>

namespace zeroplan {
namespace {

constexpr std::uint32_t kAllOps = std::numeric_limits<std::uint32_t>::max();

bool same_waits(std::span<const Wait> a, std::span<const Wait> b) { return std::ranges::equal(a, b); }

/// Which (stream, group kind) pairs have collectives: players number their slots by it.
std::vector<std::pair<std::size_t, int>> collective_slots(const TimedProgram& program,
                                                          const std::vector<PlayedWork>& works) {
  std::vector<std::pair<std::size_t, int>> slots;
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    for (const TimedOp& op : program.stream(s)) {
      const std::pair<std::size_t, int> slot{s, works[op.work].group};
      const bool collective = works[op.work].kind == WorkClass::collective;
      if (collective && std::ranges::find(slots, slot) == slots.end()) slots.push_back(slot);
    }
  }
  return slots;
}

}  // namespace

/// By stream: the first op that differs from the run before; kAllOps when none does.
std::array<std::uint32_t, kNumStreams> Replay::same_ops(const TimedProgram& program,
                                                        const std::vector<PlayedWork>& works) const {
  std::map<std::pair<std::uint32_t, std::uint32_t>, bool> compared;
  const auto same_work = [&](std::uint32_t before, std::uint32_t now) {
    const auto [at, fresh] = compared.try_emplace({before, now}, false);
    if (fresh) at->second = works_[before] == works[now];
    return at->second;
  };
  std::array<std::uint32_t, kNumStreams> same{};
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    const auto before = program_.stream(s), now = program.stream(s);
    std::size_t i = 0;
    const std::size_t both = std::min(before.size(), now.size());
    while (i < both && same_work(before[i].work, now[i].work) &&
           same_waits(program_.waits(before[i]), program.waits(now[i])))
      ++i;
    same[s] = i == both && before.size() == now.size() ? kAllOps : static_cast<std::uint32_t>(i);
  }
  return same;
}

PlayerOutput Replay::play(const RunSettings& settings, PlayerInput input, const TimedProgram& program,
                          const std::vector<PlayedWork>& works) {
  if (!(settings == settings_) || collective_slots(program, works) != collective_slots(program_, works_))
    checkpoints_.clear();
  if (!checkpoints_.empty()) {
    const auto same = same_ops(program, works);
    while (!checkpoints_.empty() && !checkpoints_.back().leads_here(program, same)) checkpoints_.pop_back();
  }
  settings_ = settings;
  program_ = program;
  works_ = works;
  input.program = &program_;
  input.works = works_;
  for (ClusterPlayer& checkpoint : checkpoints_) checkpoint.retarget(input);
  ClusterPlayer player;
  resumed_at_ = 0;
  if (checkpoints_.empty()) {
    player.start(input);
  } else {
    player = checkpoints_.back();
    resumed_at_ = player.now();
  }
  const auto ranks = static_cast<std::int64_t>(input.num_nodes) * input.gpus_per_node;
  const std::int64_t step =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(program_.num_ops()) * ranks / kCheckpoints);
  while (player.advance(step)) checkpoints_.push_back(player);
  return player.finish();
}

}  // namespace zeroplan
