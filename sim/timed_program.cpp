#include "sim/timed_program.h"

#include <algorithm>
#include <stdexcept>

namespace zeroplan {
namespace {

/// How many timed ops of each stream have ended for certain.
using Clock = std::array<std::uint32_t, kNumStreams>;

void join(Clock& clock, const Clock& other) {
  for (std::size_t s = 0; s < kNumStreams; ++s) clock[s] = std::max(clock[s], other[s]);
}

}  // namespace

class TimedProgram::Unroller {
 public:
  Unroller(const Schedule& schedule, const std::vector<bool>& timed, TimedProgram& program)
      : schedule_(schedule),
        timed_(timed),
        program_(program),
        end_(schedule.ops().size()),
        carried_(schedule.carried().size()) {}

  void run() {
    std::size_t next_repeat = 0;
    play(0, static_cast<std::uint32_t>(schedule_.ops().size()), next_repeat);
  }

 private:
  Clock clock(OpRef ref) const {
    return ref.none() ? Clock{} : ref.carried() ? carried_[ref.index()] : end_[ref.index()];
  }

  void play(std::uint32_t begin, std::uint32_t end, std::size_t& next_repeat) {
    const auto repeats = schedule_.repeats();
    for (std::uint32_t i = begin; i < end;) {
      if (next_repeat < repeats.size() && repeats[next_repeat].begin == i) {
        const Repeat& repeat = repeats[next_repeat];
        play_repeat(repeat, next_repeat);
        i = repeat.end;
        while (next_repeat < repeats.size() && repeats[next_repeat].begin < i) ++next_repeat;
      } else {
        play_op(i++);
      }
    }
  }

  void play_repeat(const Repeat& repeat, std::size_t index) {
    const auto step = [&](auto from) {
      std::vector<Clock> values;
      for (std::uint32_t k = 0; k < repeat.num_carried; ++k)
        values.push_back(clock(from(schedule_.carried()[repeat.first_carried + k])));
      std::ranges::copy(values, carried_.begin() + repeat.first_carried);
    };
    step([](const Carried& c) { return c.first; });
    for (std::int64_t i = 0; i < repeat.count; ++i) {
      std::size_t inner = index + 1;
      play(repeat.begin, repeat.end, inner);
      step([](const Carried& c) { return c.next; });
    }
  }

  void play_op(std::uint32_t index) {
    const Op& op = schedule_.ops()[index];
    const auto s = static_cast<std::size_t>(op.stream);
    Clock need = known_[s];
    for (OpRef ref : schedule_.after(op)) join(need, clock(ref));
    auto& stream = program_.streams_[s];
    need[s] = static_cast<std::uint32_t>(stream.size());
    if (timed_[op.work.index]) {
      if (need[s] >= Wait::kMostOps) throw std::logic_error("simulate: a stream of more than 5e8 ops");
      TimedOp timed{op.work.index, index, static_cast<std::uint32_t>(program_.waits_.size()), 0};
      for (std::size_t other = 0; other < kNumStreams; ++other) {
        if (other == s || need[other] <= waited_[s][other] || implied(need, other, s)) continue;
        program_.waits_.emplace_back(other, need[other]);
        ++timed.num_waits;
      }
      stream.push_back(timed);
      waited_[s] = need;
      ++need[s];
      closure_[s].push_back(need);
    }
    known_[s] = need;
    end_[index] = need;
  }

  /// Whether what op waits for on some third stream cannot have ended before need[other] ops of `other` have.
  bool implied(const Clock& need, std::size_t other, std::size_t own) const {
    for (std::size_t third = 0; third < kNumStreams; ++third) {
      if (third == other || third == own || need[third] <= waited_[own][third]) continue;
      if (closure_[third][need[third] - 1][other] >= need[other]) return true;
    }
    return false;
  }

  const Schedule& schedule_;
  const std::vector<bool>& timed_;
  TimedProgram& program_;
  std::vector<Clock> end_;  // by op, latest iteration: what has ended once it has
  std::vector<Clock> carried_;
  std::array<Clock, kNumStreams> known_{};   // by stream: what the next op need not ask for, untimed ops included
  std::array<Clock, kNumStreams> waited_{};  // by stream: what its last timed op waited for
  std::array<std::vector<Clock>, kNumStreams> closure_;  // by stream and timed op
};

TimedProgram::TimedProgram(const Schedule& schedule, const std::vector<bool>& timed) {
  Unroller(schedule, timed, *this).run();
}

std::size_t TimedProgram::num_ops() const {
  std::size_t count = 0;
  for (const auto& stream : streams_) count += stream.size();
  return count;
}

}  // namespace zeroplan
