#include "sim/simulation_report.h"

#include <algorithm>

#include "sim/blame.h"

namespace zeroplan {
namespace {

/// Whom each op of the reported rank waited for, and so what the compute stream did.
class Attribution {
 public:
  explicit Attribution(const ReportInput& input) : in_(input) {}

  TimeBreakdown run() {
    for (std::size_t s = 0; s < kNumStreams; ++s) blames_[s].reserve(in_.program.stream(s).size());
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t s = 0; s < kNumStreams; ++s) moved = advance(s) || moved;
    }
    end_of_step();
    const auto sum = [&](Blame b) { return Seconds(sums_[static_cast<std::size_t>(b)]); };
    return {sum(Blame::compute), sum(Blame::communication), sum(Blame::offload), sum(Blame::optimizer),
            sum(Blame::idle)};
  }

 private:
  struct Cause {
    double end = 0;
    std::size_t stream = 0, op = 0;
  };

  bool known(const TimedOp& op) const {
    return std::ranges::all_of(in_.program.waits(op),
                               [&](const Wait& w) { return blames_[w.stream()].size() >= w.count(); });
  }

  bool advance(std::size_t s) {
    const auto ops = in_.program.stream(s);
    const std::size_t before = blames_[s].size();
    while (blames_[s].size() < ops.size() && known(ops[blames_[s].size()])) attribute(s, ops[blames_[s].size()]);
    return blames_[s].size() > before;
  }

  void attribute(std::size_t s, const TimedOp& op) {
    const std::size_t at = blames_[s].size();
    const auto& watched = in_.output.watched;
    const double own = at == 0 ? 0 : watched[s][at - 1].end;
    const WatchedOp& times = watched[s][at];
    Cause cause{own, kNumStreams, 0};
    for (const Wait& w : in_.program.waits(op)) {
      const double end = watched[w.stream()][w.count() - 1].end;
      if (end > cause.end) cause = {end, w.stream(), w.count() - 1};
    }
    const Blame mine = blame_of(in_.schedule.ops()[op.op], in_.schedule.works()[op.work]);
    const Blame theirs = cause.stream == kNumStreams ? Blame::idle : blames_[cause.stream][cause.op];
    Blame blame = mine;
    if (cause.stream != kNumStreams && static_cast<Stream>(cause.stream) != Stream::compute) {
      // A transfer that mostly waited for a slower one upstream passes the blame on.
      const WatchedOp& slower = watched[cause.stream][cause.op];
      if (slower.end - slower.start > times.end - times.start) blame = theirs;
    }
    if (static_cast<Stream>(s) == Stream::compute) {
      sums_[static_cast<std::size_t>(mine)] += times.end - times.start;
      sums_[static_cast<std::size_t>(theirs)] += times.start - own;
    }
    blames_[s].push_back(blame);
  }

  /// The step ends when all streams have: the compute stream waits for the last.
  void end_of_step() {
    const auto& compute = in_.output.watched[static_cast<std::size_t>(Stream::compute)];
    Cause last{compute.empty() ? 0 : compute.back().end, kNumStreams, 0};
    const double own = last.end;
    for (std::size_t s = 0; s < kNumStreams; ++s) {
      const auto& ops = in_.output.watched[s];
      if (!ops.empty() && ops.back().end > last.end) last = {ops.back().end, s, ops.size() - 1};
    }
    if (last.stream != kNumStreams) sums_[static_cast<std::size_t>(blames_[last.stream][last.op])] += last.end - own;
  }

  const ReportInput& in_;
  std::array<std::vector<Blame>, kNumStreams> blames_;
  std::array<double, kNumBlames> sums_{};
};

std::array<StreamTime, kNumStreams> stream_times(const ReportInput& in) {
  std::array<StreamTime, kNumStreams> all{};
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    const auto ops = in.program.stream(s);
    double busy = 0, wait = 0, alone = 0;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const WatchedOp& op = in.output.watched[s][i];
      busy += op.end - op.start;
      wait += op.begin - op.start;
      alone += in.demands[ops[i].work].alone().base();
    }
    all[s] = {Seconds(busy), Seconds(wait), Seconds(std::max(0.0, busy - wait - alone)),
              static_cast<std::int64_t>(ops.size())};
  }
  return all;
}

std::vector<std::int64_t> work_counts(const ReportInput& in) {
  std::vector<std::int64_t> counts(in.works.size());
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    for (const TimedOp& op : in.program.stream(s)) ++counts[op.work];
  }
  return counts;
}

/// Seconds that each resource of the reported rank's node was taken, by all ranks of it.
std::vector<double> resource_seconds(const ReportInput& in, const std::vector<std::int64_t>& counts) {
  std::vector<double> seconds(in.costs.resources().size());
  const int gpus = in.costs.gpus_per_node(), rank = in.options.rank % gpus;
  const auto node = static_cast<std::uint32_t>(in.options.rank / gpus);
  for (std::size_t w = 0; w < in.works.size(); ++w) {
    const PlayedWork& work = in.works[w];
    const auto times = static_cast<double>(counts[w]);
    if (work.kind == WorkClass::kernel) {
      seconds[in.costs.sm(rank)] += times * work.sm;
      seconds[in.costs.hbm(rank)] += times * work.hbm;
    }
    seconds[in.costs.hbm(rank)] += times * work.take.hbm_time;
    if (work.kind == WorkClass::transfer) {
      for (const auto& uses : work.uses) {
        for (const Use& use : uses) seconds[use.resource] += times * use.amount;
      }
    }
    if (work.kind != WorkClass::collective) continue;
    for (const auto& parts : in.groups[work.group].parts) {
      for (const auto& part : parts) {
        if (part.node != node) continue;
        for (const Use& use : work.uses[part.shape]) seconds[use.resource] += times * use.amount;
      }
    }
  }
  seconds[in.costs.sm(rank)] += in.output.sm_held;
  return seconds;
}

void add_resources(const ReportInput& in, const std::vector<double>& seconds, Simulation& result) {
  const int rank = in.options.rank % in.costs.gpus_per_node();
  const auto& resources = in.costs.resources();
  const auto count = static_cast<std::uint32_t>(resources.size());
  std::vector<std::uint32_t> shown(count, count);
  for (std::uint32_t i = 0; i < count; ++i) {
    const Resource& r = resources[i];
    const bool of_gpu = r.kind == ResourceKind::sm || r.kind == ResourceKind::hbm;
    if (of_gpu && i != in.costs.sm(rank) && i != in.costs.hbm(rank)) continue;
    if (!(r.capacity > 0)) continue;
    shown[i] = static_cast<std::uint32_t>(result.resources.size());
    result.resources.push_back({r.name, r.kind, in.output.step > 0 ? seconds[i] / in.output.step : 0});
  }
  for (const LoadSample& sample : in.output.samples) {
    std::uint32_t resource = sample.resource;
    if (resource >= count) resource = resource == count ? in.costs.sm(rank) : in.costs.hbm(rank);
    if (shown[resource] < count) result.utilisation.push_back({Seconds(sample.time), shown[resource], sample.load});
  }
}

/// Ops that take no time stand where the last of their predecessors ended.
void add_trace(const ReportInput& in, Simulation& result) {
  const auto ops = in.schedule.ops();
  Trace& trace = result.trace;
  trace.ops.resize(ops.size());
  result.transfer_starts.resize(ops.size());
  std::array<std::size_t, kNumStreams> next{};
  std::array<double, kNumStreams> reached{};
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const auto s = static_cast<std::size_t>(ops[i].stream);
    if (in.works[ops[i].work.index].kind != WorkClass::none) {
      const WatchedOp& op = in.output.watched[s][next[s]++];
      trace.ops[i] = {Seconds(op.start), Seconds(op.end)};
      result.transfer_starts[i] = Seconds(op.begin);
    } else {
      double time = reached[s];
      for (OpRef ref : in.schedule.after(ops[i])) time = std::max(time, trace.ops[ref.index()].end.base());
      trace.ops[i] = {Seconds(time), Seconds(time)};
      result.transfer_starts[i] = Seconds(time);
    }
    reached[s] = trace.ops[i].end.base();
  }
}

}  // namespace

Simulation report(const ReportInput& in) {
  Simulation result;
  result.step = Seconds(in.output.step);
  result.last_rank = in.output.last_rank;
  result.events = in.output.events;
  result.ops = static_cast<std::int64_t>(in.program.num_ops());
  result.breakdown = Attribution(in).run();
  result.streams = stream_times(in);
  const auto counts = work_counts(in);
  for (std::size_t w = 0; w < counts.size(); ++w) {
    for (std::size_t r = 0; r < kNumRoles; ++r)
      result.role_busy[r] += static_cast<double>(counts[w]) * in.demands[w].busy[r];
  }
  add_resources(in, resource_seconds(in, counts), result);
  if (in.options.with_trace) add_trace(in, result);
  return result;
}

}  // namespace zeroplan
