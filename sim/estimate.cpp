#include "sim/estimate.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "sim/blame.h"

namespace zeroplan {
namespace {

constexpr double kNever = -1e300;
/// Two advances from iteration to iteration are equal when they differ by less than this part of the time reached.
constexpr double kSteadyTolerance = 1e-14;
/// Predecessors that end within this part of the time reached end together: the first one named is waited for. So
/// rounding does not decide whom a wait is blamed on.
constexpr double kTieTolerance = 1e-13;

using Sums = std::array<double, kNumBlames>;

}  // namespace

class Estimator::Player {
 public:
  Estimate run(const Schedule& schedule, std::span<const Demand> demands, bool with_trace) {
    schedule_ = &schedule;
    const std::size_t n = schedule.ops().size();
    alone_.resize(demands.size());
    for (std::size_t w = 0; w < demands.size(); ++w) alone_[w] = demands[w].alone().base();
    end_.assign(n, 0);
    advance_.assign(n, 0);
    blame_.assign(n, 0);
    winner_.assign(n, OpRef{});
    carried_.assign(schedule.carried().size(), kNever);
    carried_cause_.assign(schedule.carried().size(), Cause{});
    stream_end_.fill(0);
    sums_.fill(0);
    if (with_trace && schedule.folded()) throw std::logic_error("estimate: a trace needs a flat schedule");
    start_.assign(with_trace ? n : 0, 0);
    with_trace_ = with_trace;
    std::size_t next_repeat = 0;
    play(0, static_cast<std::uint32_t>(n), next_repeat);
    return result(demands);
  }

 private:
  double value(OpRef ref) const {
    return ref.none() ? kNever : ref.carried() ? carried_[ref.index()] : end_[ref.index()];
  }

  void play(std::uint32_t begin, std::uint32_t end, std::size_t& next_repeat) {
    const auto repeats = schedule_->repeats();
    for (std::uint32_t i = begin; i < end;) {
      if (next_repeat < repeats.size() && repeats[next_repeat].begin == i && repeats[next_repeat].end <= end) {
        play_repeat(next_repeat);
        i = repeats[next_repeat].end;
        while (next_repeat < repeats.size() && repeats[next_repeat].begin < i) ++next_repeat;
        continue;
      }
      play_op(i++);
    }
  }

  void play_op(std::uint32_t index) {
    const Op& op = schedule_->ops()[index];
    const auto stream = static_cast<std::size_t>(op.stream);
    const double own = stream_end_[stream];
    double start = own, won = own + kTieTolerance * own;
    OpRef winner;
    for (OpRef ref : schedule_->after(op)) {
      const double t = value(ref);
      if (t > won) {
        won = t + kTieTolerance * t;
        winner = ref;
      }
      start = std::max(start, t);
    }
    const double alone = alone_[op.work.index];
    const double end = start + alone;
    const Blame mine = blame_of(op, schedule_->works()[op.work.index]);
    auto blame = static_cast<std::uint8_t>(mine);
    const Cause cause = cause_of(winner);
    if (cause.op != OpRef::kNone) {
      // A transfer that mostly waited for a slower one upstream passes the blame on.
      const Op& upstream = schedule_->ops()[cause.op];
      if (upstream.stream != Stream::compute && alone_[upstream.work.index] > alone) blame = cause.blame;
    }
    if (op.stream == Stream::compute) {
      sums_[static_cast<std::size_t>(mine)] += alone;
      if (start > own) sums_[cause.blame] += start - own;
    }
    changed_ = changed_ || winner_[index] != winner || blame_[index] != blame;
    winner_[index] = winner;
    advance_[index] = end - end_[index];
    end_[index] = end;
    blame_[index] = blame;
    stream_end_[stream] = end;
    if (with_trace_) start_[index] = start;
  }

  /// Who is behind an edge, and on whom a wait for it is blamed.
  struct Cause {
    std::uint32_t op = OpRef::kNone;
    std::uint8_t blame = static_cast<std::uint8_t>(Blame::idle);
    friend bool operator==(Cause, Cause) = default;
  };

  Cause cause_of(OpRef ref) const {
    if (ref.none()) return {};
    return ref.carried() ? carried_cause_[ref.index()] : Cause{ref.index(), blame_[ref.index()]};
  }

  // --- repeated blocks -------------------------------------------------------------------------------

  /// What flows from iteration to iteration.
  struct State {
    std::array<double, kNumStreams> streams;
    std::vector<double> carried;
  };

  State state(const Repeat& r) const {
    const auto first = carried_.begin() + r.first_carried;
    return {stream_end_, {first, first + r.num_carried}};
  }

  /// All at once: a value may become what another one was.
  void set_carried(const Repeat& r, OpRef Carried::*from) {
    scratch_.clear();
    scratch_causes_.clear();
    for (std::uint32_t k = 0; k < r.num_carried; ++k) {
      const OpRef ref = schedule_->carried()[r.first_carried + k].*from;
      scratch_.push_back(value(ref));
      scratch_causes_.push_back(cause_of(ref));
    }
    const auto causes = carried_cause_.begin() + r.first_carried;
    changed_ = changed_ || !std::equal(scratch_causes_.begin(), scratch_causes_.end(), causes);
    std::copy(scratch_causes_.begin(), scratch_causes_.end(), causes);
    std::copy(scratch_.begin(), scratch_.end(), carried_.begin() + r.first_carried);
  }

  static bool has_inner(std::span<const Repeat> repeats, std::size_t index) {
    return index + 1 < repeats.size() && repeats[index + 1].begin < repeats[index].end;
  }

  void play_repeat(std::size_t index) {
    const Repeat& r = schedule_->repeats()[index];
    set_carried(r, &Carried::first);
    const bool innermost = !has_inner(schedule_->repeats(), index);
    State before = state(r), advance_before = before;
    Sums sums_before = sums_, gained_before{};
    for (std::int64_t i = 0; i < r.count; ++i) {
      std::size_t inner = index + 1;
      if (innermost) changed_ = false;
      play(r.begin, r.end, inner);
      if (!innermost) changed_ = false;  // inside, winners change from block to block: what goes around must not
      set_carried(r, &Carried::next);
      const State now = state(r);
      const State advance = difference(now, before);
      Sums gained;
      for (std::size_t s = 0; s < kNumBlames; ++s) gained[s] = sums_[s] - sums_before[s];
      const std::int64_t left = r.count - 1 - i;
      if (i >= 2 && left > 0 && !changed_ &&
          (innermost ? steady(r, now, advance, advance_before, left) : uniform(r, now, advance, advance_before))) {
        extrapolate(index, now, advance, innermost, left);
        add_waits(gained, innermost ? gained_before : gained, left);
        changed_ = true;  // for the block around this one
        return;
      }
      before = now;
      advance_before = advance;
      gained_before = gained;
      sums_before = sums_;
    }
    changed_ = true;
  }

  static State difference(const State& a, const State& b) {
    State d = a;
    for (std::size_t s = 0; s < kNumStreams; ++s) d.streams[s] -= b.streams[s];
    for (std::size_t k = 0; k < d.carried.size(); ++k) d.carried[k] -= b.carried[k];
    return d;
  }

  double tolerance(const State& now) const {
    double reached = 0;
    for (double t : now.streams) reached = std::max(reached, t);
    return kSteadyTolerance * reached;
  }

  static bool equal(const State& a, const State& b, double tolerance) {
    for (std::size_t s = 0; s < kNumStreams; ++s) {
      if (std::abs(a.streams[s] - b.streams[s]) > tolerance) return false;
    }
    for (std::size_t k = 0; k < a.carried.size(); ++k) {
      if (std::abs(a.carried[k] - b.carried[k]) > tolerance) return false;
    }
    return true;
  }

  /// A carried value that comes from inside the block; the others are constants there.
  bool from_inside(const Repeat& r, std::uint32_t carried) const {
    const std::uint32_t op = carried_cause_[carried].op;
    return op != OpRef::kNone && op >= r.begin;
  }

  /// Every stream that the block uses advances by the same time: max-plus maps commute with a shift of all inputs, so
  /// every further iteration is a copy of this one. (Inputs from before the block only fall further behind.)
  bool uniform(const Repeat& r, const State& now, const State& advance, const State& before) const {
    const double tol = tolerance(now);
    if (!equal(advance, before, tol)) return false;
    double common = -1;
    for (std::uint32_t i = r.begin; i < r.end; ++i) {
      const double a = advance.streams[static_cast<std::size_t>(schedule_->ops()[i].stream)];
      if (common < 0) common = a;
      if (std::abs(a - common) > tol) return false;
    }
    for (std::uint32_t k = 0; k < r.num_carried; ++k) {
      // What the block hands on untouched, or never had, is an older input.
      const std::uint32_t own = (r.first_carried + k) | OpRef::kCarriedBit;
      const bool older = schedule_->carried()[r.first_carried + k].next.bits == own || now.carried[k] <= kNever / 2;
      if (!older && std::abs(advance.carried[k] - common) > tol) return false;
    }
    return true;
  }

  /// Streams may advance at different rates. Steady when all state advanced as in the iteration before and, op by op,
  /// the winner of this iteration still wins `left` iterations later if everybody keeps its rate. Then rates do keep,
  /// by induction over ops.
  bool steady(const Repeat& r, const State& now, const State& advance, const State& before, std::int64_t left) const {
    const double tol = tolerance(now);
    if (!equal(advance, before, tol)) return false;
    const auto horizon = static_cast<double>(left);
    std::array<double, kNumStreams> last = now.streams, rate = advance.streams;
    for (std::size_t s = 0; s < kNumStreams; ++s) last[s] -= advance.streams[s];  // at the start of this iteration
    for (std::uint32_t i = r.begin; i < r.end; ++i) {
      const Op& op = schedule_->ops()[i];
      const auto stream = static_cast<std::size_t>(op.stream);
      const double start = end_[i] - alone_[op.work.index];
      const double at_end = start + horizon * advance_[i];
      const double margin = tol * (horizon + 1);
      if (last[stream] + horizon * rate[stream] > at_end + margin) return false;
      for (OpRef ref : schedule_->after(op)) {
        double v, a;
        if (ref.none()) continue;
        if (ref.carried()) {
          const std::uint32_t k = ref.index() - r.first_carried;
          const bool own = ref.index() >= r.first_carried && k < r.num_carried;
          v = own ? now.carried[k] - advance.carried[k] : carried_[ref.index()];
          a = own ? advance.carried[k] : 0;
        } else {
          v = end_[ref.index()];
          a = ref.index() >= r.begin ? advance_[ref.index()] : 0;
        }
        if (v + horizon * a > at_end + margin) return false;
      }
      last[stream] = end_[i];
      rate[stream] = advance_[i];
    }
    return true;
  }

  void extrapolate(std::size_t index, const State& now, const State& advance, bool innermost, std::int64_t left) {
    const auto repeats = schedule_->repeats();
    const Repeat& r = repeats[index];
    const auto n = static_cast<double>(left);
    for (std::size_t s = 0; s < kNumStreams; ++s) stream_end_[s] = now.streams[s] + n * advance.streams[s];
    for (std::uint32_t k = 0; k < r.num_carried; ++k)
      carried_[r.first_carried + k] = now.carried[k] + n * advance.carried[k];
    // Ops of blocks further inside know their advance from layer to layer, not from micro-step to micro-step; there all
    // that the block touches advances together, the values carried inside too.
    for (std::uint32_t i = r.begin; i < r.end; ++i) {
      const auto stream = static_cast<std::size_t>(schedule_->ops()[i].stream);
      end_[i] += n * (innermost ? advance_[i] : advance.streams[stream]);
    }
    const double common = advance.streams[static_cast<std::size_t>(schedule_->ops()[r.begin].stream)];
    for (std::size_t inner = index + 1; inner < repeats.size() && repeats[inner].begin < r.end; ++inner) {
      const std::uint32_t first = repeats[inner].first_carried;
      for (std::uint32_t k = first; k < first + repeats[inner].num_carried; ++k) {
        if (from_inside(r, k)) carried_[k] += n * common;
      }
    }
  }

  // Waits grow or shrink by the same amount each time.
  void add_waits(const Sums& gained, const Sums& gained_before, std::int64_t left) {
    const auto n = static_cast<double>(left);
    for (std::size_t s = 0; s < kNumBlames; ++s) {
      const double growth = gained[s] - gained_before[s];
      sums_[s] +=
          n * gained[s] + (std::abs(growth) > kSteadyTolerance * std::abs(gained[s]) ? growth * n * (n + 1) / 2 : 0);
    }
  }

  Estimate result(std::span<const Demand> demands) const {
    Estimate e;
    double step = 0;
    for (double t : stream_end_) step = std::max(step, t);
    e.step = Seconds(step);
    const auto sum = [&](Blame b) { return Seconds(sums_[static_cast<std::size_t>(b)]); };
    e.breakdown = {sum(Blame::compute), sum(Blame::communication), sum(Blame::offload), sum(Blame::optimizer),
                   sum(Blame::idle)};
    const auto times = schedule_->multiplicities();
    for (std::size_t i = 0; i < times.size(); ++i) {
      const Op& op = schedule_->ops()[i];
      const Demand& demand = demands[op.work.index];
      const auto n = static_cast<double>(times[i]);
      e.stream_busy[static_cast<std::size_t>(op.stream)] += n * Seconds(alone_[op.work.index]);
      for (std::size_t r = 0; r < kNumRoles; ++r) e.role_busy[r] += n * demand.busy[r];
    }
    if (with_trace_) {
      for (std::size_t i = 0; i < start_.size(); ++i) e.trace.ops.push_back({Seconds(start_[i]), Seconds(end_[i])});
    }
    return e;
  }

  const Schedule* schedule_ = nullptr;
  std::vector<double> alone_;    // by work
  std::vector<double> end_;      // by op, this iteration
  std::vector<double> advance_;  // by op: end minus the end one iteration before
  std::vector<double> start_;
  std::vector<double> carried_;
  std::vector<Cause> carried_cause_;
  std::vector<double> scratch_;
  std::vector<Cause> scratch_causes_;
  std::vector<std::uint8_t> blame_;
  std::vector<OpRef> winner_;  // by op: the predecessor that set its start
  bool changed_ = false;       // a winner or a blame is another one than in the iteration before
  std::array<double, kNumStreams> stream_end_{};
  Sums sums_{};
  bool with_trace_ = false;
};

Estimator::Estimator() : player_(std::make_unique<Player>()) {}
Estimator::~Estimator() = default;
Estimator::Estimator(Estimator&&) noexcept = default;

Estimate Estimator::run(const Schedule& schedule, std::span<const Demand> demands, bool with_trace) {
  return player_->run(schedule, demands, with_trace);
}

std::vector<Demand> demands(const Schedule& schedule, const CostModel& cost) {
  std::vector<Demand> all;
  all.reserve(schedule.works().size());
  for (const Work& work : schedule.works()) all.push_back(cost.demand(work));
  return all;
}

Estimate estimate(const Schedule& schedule, const CostModel& cost, bool with_trace) {
  return Estimator().run(schedule, demands(schedule, cost), with_trace);
}

}  // namespace zeroplan
