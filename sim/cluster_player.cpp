#include "sim/cluster_player.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

namespace zeroplan {
namespace {

/// Kernels keep at least this part of the SMs, however many channels collectives have.
constexpr double kLeastSms = 0.1;
/// The same of memory bandwidth; RankCosts keeps what transfers take below 1 minus this.
constexpr double kLeastHbm = 0.1;

}  // namespace

PlayerOutput ClusterPlayer::play(const PlayerInput& input) {
  start(input);
  while (advance(std::numeric_limits<std::int64_t>::max())) {
  }
  return finish();
}

void ClusterPlayer::start(const PlayerInput& input) {
  in_ = input;
  reset();
  start_streams();
  settle();
}

bool ClusterPlayer::advance(std::int64_t events) {
  const std::int64_t begin = out_.events;
  while (!queue_.empty() && out_.events - begin < events) {
    now_ = queue_.next_time();
    do {
      handle(queue_.pop());
    } while (!queue_.empty() && queue_.next_time() == now_);
    settle();
  }
  return !queue_.empty();
}

PlayerOutput ClusterPlayer::finish() {
  check_done();
  return std::move(out_);
}

bool ClusterPlayer::leads_here(const TimedProgram& program, const std::array<std::uint32_t, kNumStreams>& same) const {
  return std::ranges::all_of(ranks_, [&](const RankState& state) {
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      const std::uint32_t done = state.done[s];
      if (done < same[s]) continue;
      const bool not_begun = state.stage[s] == Stage::blocked || state.stage[s] == Stage::ended;
      if (done > same[s] || !not_begun) return false;
      const auto ops = program.stream(s);
      if (done < ops.size() && unmet(state, program, ops[done]) == nullptr) return false;
    }
    return true;
  });
}

void ClusterPlayer::retarget(const PlayerInput& input) {
  in_ = input;
  for (std::uint32_t s = 0; s < kStreams; ++s) out_.watched[s].resize(in_.program->stream(s).size());
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
    RankState& state = ranks_[rank];
    state.waiters = {};
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      if (state.stage[s] == Stage::blocked || state.stage[s] == Stage::ended) {
        block(rank, s);
        continue;
      }
      const std::uint32_t work = in_.program->stream(s)[state.done[s]].work;
      running_[rank * kStreams + s].work = work;
      const PlayedWork& played = in_.works[work];
      if (played.kind == WorkClass::collective) running_[collective_slot(rank, s, played.group)].work = work;
    }
  }
}

void ClusterPlayer::reset() {
  out_ = {};
  now_ = 0;
  num_ranks_ = static_cast<std::uint32_t>(in_.num_nodes * in_.gpus_per_node);
  watched_ = static_cast<std::uint32_t>(in_.watched_rank);
  queue_.clear();
  sharing_ = {};
  const auto resources = static_cast<std::size_t>(in_.num_nodes) * in_.num_resources;
  for (std::size_t i = 0; i < resources; ++i) sharing_.add_resource(1);
  gpu_sharing_ = {};
  gpu_sharing_.add_resource(1), gpu_sharing_.add_resource(1);
  for (std::uint32_t s = 0; s < kStreams; ++s) gpu_sharing_.add_flow();
  ranks_.assign(num_ranks_, {});
  running_.assign(static_cast<std::size_t>(num_ranks_) * kStreams, {});
  add_collective_slots();
  for (std::size_t i = 0; i < running_.size(); ++i) sharing_.add_flow();
  dirty_ranks_.clear();
  last_load_.assign(in_.num_resources + 2, 0);
  held_ = held_since_ = 0;
  for (std::size_t s = 0; s < kStreams; ++s) out_.watched[s].resize(in_.program->stream(s).size());
}

void ClusterPlayer::add_collective_slots() {
  collective_slots_ = {};
  slot_stream_.clear(), slot_kind_.clear(), slot_group_.clear();
  for (std::uint32_t s = 0; s < kStreams; ++s) {
    for (const TimedOp& op : in_.program->stream(s)) {
      const PlayedWork& work = in_.works[op.work];
      CollectiveSlots& slots = collective_slots_[s][work.group];
      if (work.kind != WorkClass::collective || slots.used) continue;
      slots = {static_cast<std::uint32_t>(running_.size()), true};
      const auto count = static_cast<std::uint32_t>(in_.groups[work.group]->ranks.size());
      running_.resize(running_.size() + count);
      for (std::uint32_t id = 0; id < count; ++id) {
        slot_stream_.push_back(s), slot_kind_.push_back(work.group), slot_group_.push_back(id);
      }
    }
  }
}

std::uint32_t ClusterPlayer::collective_slot(std::uint32_t rank, std::uint32_t stream, std::uint8_t group) const {
  return collective_slots_[stream][group].first + in_.groups[group]->group_of[rank];
}
const RankGroups& ClusterPlayer::groups_of(std::uint32_t slot) const {
  return *in_.groups[slot_kind_[slot - num_ranks_ * kStreams]];
}
std::uint32_t ClusterPlayer::group_id(std::uint32_t slot) const { return slot_group_[slot - num_ranks_ * kStreams]; }

void ClusterPlayer::start_streams() {
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
    for (std::uint32_t s = 0; s < kStreams; ++s) try_start(rank, s);
  }
}

void ClusterPlayer::push(std::uint32_t slot, double time) { queue_.push({time, slot, ++running_[slot].stamp}); }

// --- ops ---------------------------------------------------------------------------------------------

void ClusterPlayer::handle(Event event) {
  const std::uint32_t slot = event.id;
  if (event.stamp != running_[slot].stamp) return;  // its end has moved
  ++out_.events;
  if (slot >= num_ranks_ * kStreams) {
    const std::uint32_t first = groups_of(slot).ranks[group_id(slot)].front();
    const std::uint32_t stream = slot_stream_[slot - num_ranks_ * kStreams];
    if (ranks_[first].stage[stream] == Stage::latency) {
      start_collective(slot);
    } else {
      sharing_.stop(slot);
      finish_collective(slot);
    }
    return;
  }
  const std::uint32_t rank = slot / kStreams, stream = slot % kStreams;
  switch (ranks_[rank].stage[stream]) {
    case Stage::kernel:
      ranks_[rank].kernels &= static_cast<std::uint8_t>(~(1u << stream));
      if (ranks_[rank].kernels != 0) mark(rank);
      return finish(rank, stream);
    case Stage::latency:
      return start_transfer(slot, rank);
    case Stage::transfer:
      sharing_.stop(slot);
      if (in_.works[running_[slot].work].take.hbm_time > 0) mark(rank);
      return finish(rank, stream);
    case Stage::ended:
    case Stage::blocked:
    case Stage::waiting:
      throw std::logic_error("simulate: an event of a stream that has nothing under way");
  }
}

void ClusterPlayer::finish(std::uint32_t rank, std::uint32_t stream) {
  RankState& state = ranks_[rank];
  const std::uint32_t count = ++state.done[stream];
  if (rank == watched_) out_.watched[stream][count - 1].end = now_;
  if (now_ > out_.step) {
    out_.step = now_;
    out_.last_rank = static_cast<int>(rank);
  }
  unsigned mask = state.waiters[stream];
  while (mask != 0) {
    const auto other = static_cast<std::uint32_t>(std::countr_zero(mask));
    mask &= mask - 1;
    if (state.need[other] > count) continue;
    state.waiters[stream] &= static_cast<std::uint8_t>(~(1u << other));
    try_start(rank, other);
  }
  try_start(rank, stream);
}

const Wait* ClusterPlayer::unmet(const RankState& state, const TimedProgram& program, const TimedOp& op) {
  for (const Wait& wait : program.waits(op)) {
    if (state.done[wait.stream()] < wait.count()) return &wait;
  }
  return nullptr;
}

/// Whether a stream has nothing to start; notes what it waits for.
bool ClusterPlayer::block(std::uint32_t rank, std::uint32_t stream) {
  RankState& state = ranks_[rank];
  const auto ops = in_.program->stream(stream);
  state.stage[stream] = Stage::ended;
  if (state.done[stream] == ops.size()) return true;
  const Wait* wait = unmet(state, *in_.program, ops[state.done[stream]]);
  if (wait == nullptr) return false;
  state.waiters[wait->stream()] |= static_cast<std::uint8_t>(1u << stream);
  state.need[stream] = wait->count();
  state.stage[stream] = Stage::blocked;
  return true;
}

void ClusterPlayer::try_start(std::uint32_t rank, std::uint32_t stream) {
  if (block(rank, stream)) return;
  start_op(rank, stream, in_.program->stream(stream)[ranks_[rank].done[stream]]);
}

void ClusterPlayer::start_op(std::uint32_t rank, std::uint32_t stream, const TimedOp& op) {
  const PlayedWork& work = in_.works[op.work];
  if (rank == watched_) {
    WatchedOp& watched = out_.watched[stream][ranks_[rank].done[stream]];
    watched.start = watched.begin = now_;
  }
  const std::uint32_t slot = rank * kStreams + stream;
  running_[slot].work = op.work;
  if (work.kind == WorkClass::kernel) return start_kernel(rank, stream, work);
  if (work.kind == WorkClass::collective) return arrive(rank, stream, work);
  if (!(work.latency > 0)) return start_transfer(slot, rank);
  ranks_[rank].stage[stream] = Stage::latency;
  push(slot, now_ + work.latency);
}

void ClusterPlayer::start_transfer(std::uint32_t slot, std::uint32_t rank) {
  ranks_[rank].stage[slot % kStreams] = Stage::transfer;
  Running& running = running_[slot];
  running.left = 1;
  running.updated = now_;
  const auto node = rank / static_cast<std::uint32_t>(in_.gpus_per_node);
  const auto& local = in_.works[running.work].uses[rank % static_cast<std::uint32_t>(in_.gpus_per_node)];
  uses_.assign(local.begin(), local.end());
  for (Use& use : uses_) use.resource += node * in_.num_resources;
  sharing_.start(slot, uses_);
}

// --- collectives -------------------------------------------------------------------------------------

void ClusterPlayer::arrive(std::uint32_t rank, std::uint32_t stream, const PlayedWork& work) {
  ranks_[rank].stage[stream] = Stage::waiting;
  if (work.take.sms > 0) mark(rank);  // its blocks spin on their SMs
  const std::uint32_t slot = collective_slot(rank, stream, work.group);
  Running& running = running_[slot];
  const auto& members = groups_of(slot).ranks[group_id(slot)];
  running.work = running_[rank * kStreams + stream].work;
  if (++running.arrived < members.size()) return;
  running.arrived = 0;
  for (std::uint32_t member : members) ranks_[member].stage[stream] = Stage::latency;
  if (groups_of(slot).group_of[watched_] == group_id(slot)) {
    out_.watched[stream][ranks_[watched_].done[stream]].begin = now_;
  }
  push(slot, now_ + work.latency);
}

void ClusterPlayer::start_collective(std::uint32_t slot) {
  const PlayedWork& work = in_.works[running_[slot].work];
  const std::uint32_t id = group_id(slot);
  uses_.clear();
  for (const auto& part : groups_of(slot).parts[id]) {
    for (const Use& use : work.uses[part.shape])
      uses_.push_back({use.resource + part.node * in_.num_resources, use.amount});
  }
  if (uses_.empty()) return finish_collective(slot);
  running_[slot].left = 1;
  running_[slot].updated = now_;
  const std::uint32_t stream = slot_stream_[slot - num_ranks_ * kStreams];
  for (std::uint32_t member : groups_of(slot).ranks[id]) ranks_[member].stage[stream] = Stage::transfer;
  sharing_.start(slot, uses_);
}

void ClusterPlayer::finish_collective(std::uint32_t slot) {
  const std::uint32_t stream = slot_stream_[slot - num_ranks_ * kStreams];
  mark_group(slot);
  for (std::uint32_t member : groups_of(slot).ranks[group_id(slot)]) {
    ++out_.events;
    finish(member, stream);
  }
}

// --- rates -------------------------------------------------------------------------------------------

void ClusterPlayer::mark(std::uint32_t rank) {
  if (ranks_[rank].dirty) return;
  ranks_[rank].dirty = true;
  dirty_ranks_.push_back(rank);
}

void ClusterPlayer::mark_group(std::uint32_t slot) {
  for (std::uint32_t member : groups_of(slot).ranks[group_id(slot)]) mark(member);
}

/// Once all that happens now has happened: new rates, and new ends where they changed.
void ClusterPlayer::settle() {
  for (const FairSharing::Change& change : sharing_.solve()) apply(change);
  for (std::uint32_t rank : dirty_ranks_) refresh(rank);
  dirty_ranks_.clear();
  if (in_.sample) sample();
}

void ClusterPlayer::apply(const FairSharing::Change& change) {
  if (!sharing_.active(change.flow)) return;
  ++out_.events;
  Running& running = running_[change.flow];
  running.left = std::max(0.0, running.left - (now_ - running.updated) * change.before);
  running.updated = now_;
  push(change.flow, now_ + running.left / change.now);
  if (!(in_.works[running.work].take.hbm_time > 0)) return;
  if (change.flow < num_ranks_ * kStreams) {
    mark(change.flow / kStreams);
  } else {
    mark_group(change.flow);
  }
}

/// What the ops on a rank's other streams take from its kernels.
void ClusterPlayer::take_of_transfers(std::uint32_t rank, double& sms, double& hbm) const {
  const RankState& state = ranks_[rank];
  for (std::uint32_t s = 0; s < kStreams; ++s) {
    const Stage stage = state.stage[s];
    if (stage != Stage::waiting && stage != Stage::latency && stage != Stage::transfer) continue;
    const PlayedWork& work = in_.works[running_[rank * kStreams + s].work];
    sms += work.take.sms;
    if (stage != Stage::transfer) continue;
    const std::uint32_t flow =
        work.kind == WorkClass::collective ? collective_slot(rank, s, work.group) : rank * kStreams + s;
    hbm += work.take.hbm_time * sharing_.rate(flow);
  }
}

void ClusterPlayer::refresh(std::uint32_t rank) {
  RankState& state = ranks_[rank];
  state.dirty = false;
  double sms = 0, hbm = 0;
  take_of_transfers(rank, sms, hbm);
  sms = std::min(sms, 1 - kLeastSms);
  if (rank == watched_) {
    out_.sm_held += held_ * (now_ - held_since_);
    held_ = sms;
    held_since_ = now_;
  }
  state.slow_sm = 1 / (1 - sms);
  state.slow_hbm = 1 / std::max(1 - hbm, kLeastHbm);
  if (state.kernels == 0) return;
  if (!std::has_single_bit(state.kernels)) return share_kernels(rank);
  const std::uint32_t slot = rank * kStreams + static_cast<std::uint32_t>(std::countr_zero(state.kernels));
  const PlayedWork& work = in_.works[running_[slot].work];
  set_kernel(slot, std::max(work.sm * state.slow_sm, work.hbm * state.slow_hbm));
}

/// Several streams of one GPU run kernels: fair shares of what transfers leave.
void ClusterPlayer::share_kernels(std::uint32_t rank) {
  const RankState& state = ranks_[rank];
  for (std::uint32_t s = 0; s < kStreams; ++s) {
    if ((state.kernels >> s & 1) == 0) continue;
    const PlayedWork& work = in_.works[running_[rank * kStreams + s].work];
    uses_.clear();
    if (work.sm > 0) uses_.push_back({0, work.sm * state.slow_sm});
    if (work.hbm > 0) uses_.push_back({1, work.hbm * state.slow_hbm});
    if (uses_.empty()) continue;
    gpu_sharing_.start(s, uses_);
  }
  gpu_sharing_.solve();
  for (std::uint32_t s = 0; s < kStreams; ++s) {
    if ((state.kernels >> s & 1) == 0) continue;
    const bool active = gpu_sharing_.active(s);
    const double rate = gpu_sharing_.rate(s);
    if (active) gpu_sharing_.stop(s);
    set_kernel(rank * kStreams + s, active ? 1 / rate : 0);
  }
}

void ClusterPlayer::start_kernel(std::uint32_t rank, std::uint32_t stream, const PlayedWork& work) {
  RankState& state = ranks_[rank];
  Running& running = running_[rank * kStreams + stream];
  running.start = now_;
  running.updated = now_ + work.latency;
  running.left = 1;
  running.full = -1;
  state.stage[stream] = Stage::kernel;
  state.kernels |= static_cast<std::uint8_t>(1u << stream);
  if (state.dirty || !std::has_single_bit(state.kernels)) return mark(rank);
  set_kernel(rank * kStreams + stream, std::max(work.sm * state.slow_sm, work.hbm * state.slow_hbm));
}

void ClusterPlayer::set_kernel(std::uint32_t slot, double full) {
  Running& running = running_[slot];
  if (full == running.full) return;
  if (now_ > running.updated) {
    running.left = std::max(0.0, running.left - (now_ - running.updated) / running.full);
    running.updated = now_;
  }
  running.full = full;
  // Undisturbed it ends exactly when estimate() says.
  const double end = running.left == 1 ? running.start + (in_.works[running.work].latency + full)
                                       : running.updated + running.left * full;
  push(slot, std::max(now_, end));
}

// --- what is reported --------------------------------------------------------------------------------

void ClusterPlayer::add_sample(std::uint32_t resource, double load) {
  if (load == last_load_[resource]) return;
  last_load_[resource] = load;
  out_.samples.push_back({now_, load, resource});
}

void ClusterPlayer::sample() {
  const std::uint32_t node = watched_ / static_cast<std::uint32_t>(in_.gpus_per_node);
  for (std::uint32_t i = 0; i < in_.num_resources; ++i) add_sample(i, sharing_.load(node * in_.num_resources + i));
  double sms = 0, hbm = 0;
  take_of_transfers(watched_, sms, hbm);
  sms = std::min(sms, 1 - kLeastSms);
  for (std::uint32_t s = 0; s < kStreams; ++s) {
    if ((ranks_[watched_].kernels >> s & 1) == 0) continue;
    const Running& running = running_[watched_ * kStreams + s];
    if (!(running.full > 0)) continue;
    sms += in_.works[running.work].sm / running.full;
    hbm += in_.works[running.work].hbm / running.full;
  }
  add_sample(in_.num_resources, sms);
  add_sample(in_.num_resources + 1, hbm);
}

void ClusterPlayer::check_done() {
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      const std::size_t size = in_.program->stream(s).size();
      if (ranks_[rank].done[s] == size) continue;
      throw std::logic_error(fmt::format("simulate: rank {} waits for ever on stream {}, after {} of {} ops", rank,
                                         to_string(static_cast<Stream>(s)), ranks_[rank].done[s], size));
    }
  }
}

}  // namespace zeroplan
