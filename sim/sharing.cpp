#include "sim/sharing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace zeroplan {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();
/// Sweeps of the iteration for flows that limit each other in a circle, and the change at which it has settled.
constexpr int kMostSweeps = 2000;
constexpr double kSettled = 1e-15;
/// Uses of one resource that differ by less are even: sums in another order.
constexpr double kEqual = 1e-12;

}  // namespace

std::uint32_t FairSharing::add_resource(double capacity) {
  if (!(capacity > 0) || capacity == kUnlimited)
    throw std::logic_error("sharing: a capacity must be positive and finite");
  resources_.emplace_back().capacity = capacity;
  return static_cast<std::uint32_t>(resources_.size() - 1);
}

std::uint32_t FairSharing::add_flow() {
  flows_.emplace_back();
  return static_cast<std::uint32_t>(flows_.size() - 1);
}

void FairSharing::start(std::uint32_t index, std::span<const Use> uses) {
  Flow& flow = flows_[index];
  flow.uses.clear();
  for (const Use& use : uses) {
    if (!(use.amount > 0) || use.amount == kUnlimited)
      throw std::logic_error("sharing: an amount must be positive and finite");
    resources_[use.resource].users.push_back({index, use.amount});
    flow.uses.push_back({use.resource, use.amount, 1 / use.amount});
  }
  if (!std::ranges::is_sorted(flow.uses, {}, &FlowUse::resource)) std::ranges::sort(flow.uses, {}, &FlowUse::resource);
  flow.active = true;
  flow.fresh = true;
  fresh_.push_back(index);
}

void FairSharing::stop(std::uint32_t index) {
  Flow& flow = flows_[index];
  if (!flow.fresh) --resources_[flow.vote].held;
  for (const FlowUse& use : flow.uses) {
    SharedResource& resource = resources_[use.resource];
    const auto at = std::ranges::find(resource.users, index, &User::flow);
    resource.users.erase(at);
    if (flow.fresh || resource.held == 0 || resource.dirty) continue;  // nobody waits for what it leaves
    resource.dirty = true;
    dirty_.push_back(use.resource);
  }
  if (flow.fresh) std::erase(fresh_, index);
  flow.active = flow.fresh = false;
  flow.rate = 0;
}

double FairSharing::load(std::uint32_t index) const {
  const SharedResource& resource = resources_[index];
  double used = 0;
  for (const User& user : resource.users) used += user.amount * flows_[user.flow].rate;
  return used / resource.capacity;
}

/// The rate of this flow is to be worked out anew.
void FairSharing::reopen(std::uint32_t index) {
  Flow& flow = flows_[index];
  if (!flow.changing) {
    flow.changing = true;
    flow.before = flow.rate;
    flows_of_component_.push_back(index);
    if (!flow.fresh) --resources_[flow.vote].held;
    flow.fresh = false;
  }
  flow.open = true;
}

/// Flows that are held by a resource share what others leave of it.
void FairSharing::release_holders(std::uint32_t index) {
  if (resources_[index].held == 0) return;
  for (const User& user : resources_[index].users) {
    const Flow& flow = flows_[user.flow];
    if (!flow.changing && !flow.fresh && flow.vote == index) reopen(user.flow);
  }
}

/// The resources that changing flows use, and the flows that these hold in turn.
void FairSharing::reach() {
  for (; reached_ < flows_of_component_.size(); ++reached_) {
    for (const FlowUse& use : flows_[flows_of_component_[reached_]].uses) {
      if (resources_[use.resource].seen) continue;
      resources_[use.resource].seen = true;
      component_.push_back(use.resource);
      release_holders(use.resource);
    }
  }
}

void FairSharing::begin() {
  component_.clear();
  flows_of_component_.clear();
  reached_ = 0;
  for (std::uint32_t index : dirty_) {
    resources_[index].dirty = false;
    release_holders(index);
  }
  dirty_.clear();
  for (std::uint32_t index : fresh_) reopen(index);
  fresh_.clear();
  reach();
}

/// Flows that stay as they are keep what they have; the others share the rest.
void FairSharing::prepare(SharedResource& resource) {
  double kept = 0, most = 0;
  resource.waiting = resource.votes = 0;
  for (const User& user : resource.users) {
    const Flow& flow = flows_[user.flow];
    if (flow.open) {
      ++resource.waiting;
      continue;
    }
    const double use = user.amount * flow.rate;
    kept += use;
    most = std::max(most, use);
  }
  resource.most_kept = most;
  resource.left = resource.capacity - kept;
  resource.share = resource.left / resource.waiting;
}

/// Each flow names the resource whose even share would hold it back most; of equals the one of lowest index. Without
/// branches: which one it is cannot be guessed.
void FairSharing::vote(Flow& flow) {
  double least = kUnlimited;
  std::uint32_t named = 0;
  for (const FlowUse& use : flow.uses) {
    const double rate = resources_[use.resource].share * use.per_amount;
    const bool less = rate < least;
    least = less ? rate : least;
    named = less ? use.resource : named;
  }
  flow.voted_rate = least;
  flow.vote = named;
  ++resources_[named].votes;
}

void FairSharing::fix(Flow& flow, double rate) {
  flow.rate = rate;
  flow.open = false;
  --num_open_;
  for (const FlowUse& use : flow.uses) {
    SharedResource& resource = resources_[use.resource];
    resource.left -= use.amount * rate;
    --resource.waiting;
    if (resource.touched) continue;
    resource.touched = true;
    touched_.push_back(use.resource);
  }
}

void FairSharing::queue_if_agreed(std::uint32_t index) {
  SharedResource& resource = resources_[index];
  if (resource.queued || resource.waiting == 0 || resource.votes != resource.waiting) return;
  resource.queued = true;
  agreed_.push_back(index);
}

/// All waiting users of this resource named it: they get even shares of it, and it is the bottleneck of each. Whoever
/// used it and was fixed before uses less. Fixed flows leave every other resource at least the even share that there
/// was, so shares never fall, and no other resource that is queued is touched.
void FairSharing::fill(std::uint32_t index) {
  SharedResource& resource = resources_[index];
  resource.queued = false;
  resource.votes = 0;
  touched_.clear();
  moved_.clear();
  for (const User& user : resource.users) {
    Flow& flow = flows_[user.flow];
    if (flow.open) fix(flow, flow.voted_rate);
  }
  for (std::uint32_t other : touched_) raise_share(other);
  for (std::uint32_t other : touched_) revote(other);
  for (std::uint32_t other : touched_) queue_if_agreed(other);
  for (std::uint32_t other : moved_) queue_if_agreed(other);
}

void FairSharing::raise_share(std::uint32_t index) {
  SharedResource& resource = resources_[index];
  resource.touched = false;
  if (resource.waiting == 0) return;
  const double share = resource.left / resource.waiting;
  resource.raised = share > resource.share;
  if (resource.raised) resource.share = share;
}

/// A share that rose may no longer be the least of those who named it.
void FairSharing::revote(std::uint32_t index) {
  SharedResource& resource = resources_[index];
  if (resource.waiting == 0 || !resource.raised) return;
  for (const User& user : resource.users) {
    Flow& flow = flows_[user.flow];
    if (!flow.open || flow.vote != index) continue;
    --resource.votes;
    vote(flow);
    if (flow.vote != index) moved_.push_back(flow.vote);
  }
}

/// The even level at which the waiting users fill what is left, if each takes no more than its other limits let it.
double FairSharing::level(const SharedResource& resource, std::uint32_t index) {
  wants_.clear();
  for (const User& user : resource.users) {
    const Flow& flow = flows_[user.flow];
    if (!flow.open) continue;
    double rate = kUnlimited;
    for (const FlowUse& use : flow.uses) {
      if (use.resource != index) rate = std::min(rate, resources_[use.resource].share * use.per_amount);
    }
    wants_.push_back(user.amount * rate);
  }
  std::ranges::sort(wants_);
  double left = resource.left;
  std::size_t waiting = wants_.size();
  for (double want : wants_) {
    const double even = left / static_cast<double>(waiting);
    if (want >= even) return even;
    left -= want;
    --waiting;
  }
  return kUnlimited;
}

/// Flows that hold each other back in a circle (each is the largest user of what the other lacks): levels of all
/// resources in turn until nothing moves; then all are scaled to what the fullest resource allows, which takes rounding
/// away.
void FairSharing::settle_rest() {
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    double moved = 0;
    for (std::uint32_t index : component_) {
      SharedResource& resource = resources_[index];
      if (resource.waiting == 0) continue;
      const double share = level(resource, index);
      if (share != resource.share) {
        moved = std::max(
            moved, share == kUnlimited || resource.share == kUnlimited ? 1 : std::abs(share / resource.share - 1));
      }
      resource.share = share;
    }
    if (moved <= kSettled) break;
  }
  double over = 1;
  for (std::uint32_t index : flows_of_component_) {
    Flow& flow = flows_[index];
    if (flow.open) vote(flow);
  }
  for (std::uint32_t index : component_) {
    SharedResource& resource = resources_[index];
    resource.votes = 0;
    double used = 0;
    for (const User& user : resource.users) {
      if (flows_[user.flow].open) used += user.amount * flows_[user.flow].voted_rate;
    }
    if (used > 0) over = std::max(over, used / std::max(resource.left, 0.0));
  }
  for (std::uint32_t index : flows_of_component_) {
    Flow& flow = flows_[index];
    if (flow.open) fix(flow, flow.voted_rate / over);
  }
  for (std::uint32_t index : touched_) resources_[index].touched = false;
}

void FairSharing::fill_all() {
  num_open_ = flows_of_component_.size();
  for (std::uint32_t index : component_) prepare(resources_[index]);
  for (std::uint32_t index : flows_of_component_) vote(flows_[index]);
  for (std::uint32_t index : component_) queue_if_agreed(index);
  while (!agreed_.empty()) {
    const std::uint32_t index = agreed_.back();
    agreed_.pop_back();
    fill(index);
  }
  if (num_open_ > 0) settle_rest();
}

/// A bottleneck gives nobody more than those whom it holds. Who was left out and has more now is to be worked out with
/// them.
bool FairSharing::find_overtaken() {
  const std::size_t before = flows_of_component_.size();
  for (std::uint32_t index : component_) {
    if (resources_[index].most_kept == 0) continue;
    bool held = false;
    double level = 0;
    for (const User& user : resources_[index].users) {
      const Flow& flow = flows_[user.flow];
      if (!flow.changing || flow.vote != index) continue;
      held = true;
      level = std::max(level, user.amount * flow.rate);
    }
    if (!held || resources_[index].most_kept <= level * (1 + kEqual)) continue;
    for (const User& user : resources_[index].users) {
      if (!flows_[user.flow].changing && user.amount * flows_[user.flow].rate > level * (1 + kEqual)) reopen(user.flow);
    }
  }
  return flows_of_component_.size() > before;
}

std::span<const FairSharing::Change> FairSharing::solve() {
  changes_.clear();
  if (dirty_.empty() && fresh_.empty()) return changes_;
  begin();
  for (;;) {
    fill_all();
    if (!find_overtaken()) break;
    for (std::uint32_t index : flows_of_component_) flows_[index].open = true;
    reach();
  }
  for (std::uint32_t index : component_) {
    resources_[index].seen = false;
    resources_[index].votes = 0;
  }
  for (std::uint32_t index : flows_of_component_) {
    Flow& flow = flows_[index];
    flow.changing = false;
    ++resources_[flow.vote].held;
    if (flow.rate != flow.before) changes_.push_back({index, flow.before, flow.rate});
  }
  return changes_;
}

}  // namespace zeroplan
