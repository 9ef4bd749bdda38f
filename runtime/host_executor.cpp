#include "runtime/host_executor.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>

#include "models/error.h"
#include "runtime/exact_sum.h"
#include "runtime/op_binding.h"
#include "runtime/rank_states.h"
#include "runtime/stream_threads.h"

namespace zeroplan {
namespace {

constexpr int kExportChannel = 1000;  // schedules use the first 3 x kNumStreams

// Shard groups are neighbours; a replica group holds the ranks with the same place in theirs.
std::vector<int> group_members(Group group, const Plan& plan, int rank) {
  std::vector<int> result;
  for (int r = 0; r < plan.ranks; ++r) {
    const bool in = group == Group::all || (group == Group::shard ? r / plan.shard_ranks == rank / plan.shard_ranks
                                                                  : r % plan.shard_ranks == rank % plan.shard_ranks);
    if (in) result.push_back(r);
  }
  return result;
}

/// The communicators that a schedule's collectives need, one for each group and stream.
class Groups {
 public:
  Groups(const Schedule& schedule, const Plan& plan, World& world) {
    std::set<std::pair<Group, Stream>> used;
    for (const Op& op : schedule.ops()) {
      if (const auto* c = std::get_if<Collective>(&schedule.work(op))) used.insert({c->group, op.stream});
    }
    for (const auto& key : used) {
      const int channel = static_cast<int>(key.first) * kNumStreams + static_cast<int>(key.second);
      made_[key] = world.communicator(group_members(key.first, plan, world.rank()), channel);
    }
  }
  Communicator* find(Group group, Stream stream) const {
    const auto it = made_.find({group, stream});
    return it == made_.end() ? nullptr : it->second.get();
  }
  template <class Count>
  std::int64_t total(Count count) const {
    std::int64_t sum = 0;
    for (const auto& [key, c] : made_) sum += count(*c);
    return sum;
  }

 private:
  std::map<std::pair<Group, Stream>, std::unique_ptr<Communicator>> made_;
};

}  // namespace

struct HostExecutor::State {
  State(const ModelSpec& m, const Plan& p, World& w, const HostOptions& options)
      : model(m),
        plan(p),
        world(w),
        constants(model_constants(m)),
        schedule(lower(m, p, Folding::none)),
        memory(m, p, schedule, w.rank(), options.memory),
        rotary(rotary_table(m, constants, p.seq_len)),
        compute_pool(options.compute_threads),
        host_pool(options.host_threads),
        groups(schedule, p, w),
        context{model,  constants, plan,         schedule,  memory,
                rotary, w.rank(),  compute_pool, host_pool, [this](Group g, Stream s) { return groups.find(g, s); },
                input,  output},
        actions(bind_ops(context)),
        states(context),
        threads(schedule, actions, [this](const std::string& what) { world.abort(what); }) {
    const auto buffers = schedule.buffers();
    for (std::uint32_t i = 0; i < buffers.size(); ++i) {
      if (buffers[i].role == BufferRole::gradient && buffers[i].lifetime == Lifetime::resident) {
        resident_gradients.push_back({i});
      }
      if (buffers[i].role == BufferRole::norm && buffers[i].memory == Memory::hbm && !norm) norm = BufferId{i};
    }
  }

  const ModelSpec& model;
  const Plan plan;
  World& world;
  const ModelConstants constants;
  const Schedule schedule;
  RankMemory memory;
  const RotaryTable rotary;
  ThreadPool compute_pool, host_pool;
  Groups groups;
  StepInput input;
  StepOutput output;
  RankContext context;
  std::vector<Action> actions;
  RankStates states;
  std::vector<BufferId> resident_gradients;
  std::optional<BufferId> norm;  // the global one, on the device
  std::unique_ptr<Communicator> export_group;
  std::int64_t sent = 0, received = 0;
  StreamThreads threads;  // last: its threads use the rest
};

HostExecutor::HostExecutor(const ModelSpec& model, const Plan& plan, World& world, const HostOptions& options) {
  if (world.size() != plan.ranks) {
    throw InputError("plan: ranks: expected the " + std::to_string(world.size()) + " ranks of this job, found " +
                     std::to_string(plan.ranks));
  }
  check_positions(model, plan.seq_len);
  state_ = std::make_unique<State>(model, plan, world, options);
}
HostExecutor::~HostExecutor() = default;

StepOutput HostExecutor::step(const StepInput& input) {
  State& s = *state_;
  const auto ids = static_cast<std::size_t>(s.plan.accumulation * s.plan.micro_step().tokens());
  if (input.inputs.size() != ids || input.targets.size() != ids) {
    throw std::logic_error("executor: a step needs the ids of all its micro-steps");
  }
  s.input = input;
  s.output = StepOutput{std::vector<double>(static_cast<std::size_t>(s.plan.accumulation)), 0, false};
  // Sums in place leave other ranks' parts unspecified, the gaps between tensors with them.
  for (const BufferId gradient : s.resident_gradients) clear_padding(s.context, gradient);
  const auto sent = s.groups.total([](const Communicator& c) { return c.bytes_sent(); });
  const auto received = s.groups.total([](const Communicator& c) { return c.bytes_received(); });
  s.threads.run();
  s.sent = s.groups.total([](const Communicator& c) { return c.bytes_sent(); }) - sent;
  s.received = s.groups.total([](const Communicator& c) { return c.bytes_received(); }) - received;
  if (s.norm) {
    const auto bytes = s.memory.bytes(*s.norm);
    const std::span<const float, ExactSum::kDigits> digits(reinterpret_cast<const float*>(bytes.data()),
                                                           ExactSum::kDigits);
    s.output.gradient_norm = std::sqrt(ExactSum::from_digits(digits).value()) / input.loss_scale;
    s.output.skipped = !std::isfinite(s.output.gradient_norm);
  }
  return s.output;
}

const StepTimes& HostExecutor::times() const { return state_->threads.times(); }
double HostExecutor::step_seconds() const { return state_->threads.seconds(); }
void HostExecutor::load_states(const std::function<void(const FlatRange&, const StateSpans&)>& fill) {
  state_->states.load(fill);
}
void HostExecutor::save_states(const std::function<void(const FlatRange&, const StateSpans&)>& use) {
  state_->states.save(use);
}
void HostExecutor::gather_weights(int block, std::vector<std::byte>& weights) {
  State& s = *state_;
  if (s.export_group == nullptr && s.plan.shard_ranks > 1) {
    s.export_group = s.world.communicator(group_members(Group::shard, s.plan, s.world.rank()), kExportChannel);
  }
  s.states.gather(block, weights, s.export_group.get());
}
const Schedule& HostExecutor::schedule() const { return state_->schedule; }
const RankMemory& HostExecutor::memory() const { return state_->memory; }
std::int64_t HostExecutor::bytes_sent() const { return state_->sent; }
std::int64_t HostExecutor::bytes_received() const { return state_->received; }
std::vector<std::string> HostExecutor::notes() const { return state_->memory.notes(); }
const std::vector<Assumption>& HostExecutor::assumptions() const { return state_->constants.assumptions; }

}  // namespace zeroplan
