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

}  // namespace

std::uint32_t FairSharing::add_resource(double capacity) {
  if (!(capacity > 0) || capacity == kUnlimited) throw std::logic_error("sharing: a capacity must be positive and finite");
  resources_.emplace_back().capacity = capacity;
  return static_cast<std::uint32_t>(resources_.size() - 1);
}

std::uint32_t FairSharing::add_flow() {
  flows_.emplace_back();
  return static_cast<std::uint32_t>(flows_.size() - 1);
}

void FairSharing::start(std::uint32_t index, std::span<const Use> uses) {
  Flow& flow = flows_[index];
  flow.uses.assign(uses.begin(), uses.end());
  flow.active = true;
  for (const Use& use : uses) {
    if (!(use.amount > 0) || use.amount == kUnlimited) throw std::logic_error("sharing: an amount must be positive and finite");
    SharedResource& resource = resources_[use.resource];
    resource.users.push_back({index, use.amount});
    if (!resource.dirty) dirty_.push_back(use.resource);
    resource.dirty = true;
  }
}

void FairSharing::stop(std::uint32_t index) {
  Flow& flow = flows_[index];
  for (const Use& use : flow.uses) {
    SharedResource& resource = resources_[use.resource];
    const auto at = std::ranges::find(resource.users, index, &User::flow);
    resource.users.erase(at);
    if (!resource.dirty) dirty_.push_back(use.resource);
    resource.dirty = true;
  }
  flow.active = false;
  flow.rate = 0;
}

double FairSharing::load(std::uint32_t index) const {
  const SharedResource& resource = resources_[index];
  double used = 0;
  for (const User& user : resource.users) used += user.amount * flows_[user.flow].rate;
  return used / resource.capacity;
}

/// Everything that hangs together with a changed resource: resources by flows, flows by resources.
void FairSharing::collect() {
  component_.clear();
  open_flows_.clear();
  for (std::uint32_t index : dirty_) {
    SharedResource& resource = resources_[index];
    resource.dirty = false;
    if (!resource.users.empty() && !resource.seen) {
      resource.seen = true;
      component_.push_back(index);
    }
  }
  dirty_.clear();
  for (std::size_t k = 0; k < component_.size(); ++k) {
    SharedResource& resource = resources_[component_[k]];
    resource.left = resource.capacity;
    resource.waiting = static_cast<std::uint32_t>(resource.users.size());
    resource.share = resource.left / resource.waiting;
    for (const User& user : resource.users) {
      Flow& flow = flows_[user.flow];
      if (flow.seen) continue;
      flow.seen = true;
      open_flows_.push_back(user.flow);
      for (const Use& use : flow.uses) {
        if (resources_[use.resource].seen) continue;
        resources_[use.resource].seen = true;
        component_.push_back(use.resource);
      }
    }
  }
}

/// Each flow names the resource whose even share would hold it back most; of equals the one of lowest index.
void FairSharing::vote() {
  for (std::uint32_t index : open_flows_) {
    Flow& flow = flows_[index];
    flow.voted_rate = kUnlimited;
    for (const Use& use : flow.uses) {
      const double rate = resources_[use.resource].share / use.amount;
      if (rate < flow.voted_rate || (rate == flow.voted_rate && use.resource < flow.vote)) {
        flow.voted_rate = rate;
        flow.vote = use.resource;
      }
    }
    ++resources_[flow.vote].votes;
  }
}

void FairSharing::fix(Flow& flow, double rate) {
  flow.rate = rate;
  for (const Use& use : flow.uses) {
    SharedResource& resource = resources_[use.resource];
    resource.left -= use.amount * rate;
    --resource.waiting;
  }
}

/// Where all waiting users of a resource named it, they get even shares of it: it is the bottleneck of each. Whoever used
/// it and was fixed before used less. Fixed flows leave every other resource at least the even share there was, so shares
/// never fall. False when no resource has all votes.
bool FairSharing::fix_agreed() {
  round_.clear();
  for (std::uint32_t index : open_flows_) {
    const SharedResource& resource = resources_[flows_[index].vote];
    if (resource.votes == resource.waiting) round_.push_back(index);
  }
  for (std::uint32_t index : open_flows_) resources_[flows_[index].vote].votes = 0;
  if (round_.empty()) return false;
  for (std::uint32_t index : round_) {
    fix(flows_[index], flows_[index].voted_rate);
    flows_[index].seen = false;
  }
  if (round_.size() == open_flows_.size()) {
    open_flows_.clear();
    return true;
  }
  for (std::uint32_t index : round_) {
    for (const Use& use : flows_[index].uses) {
      SharedResource& resource = resources_[use.resource];
      if (resource.waiting > 0) resource.share = std::max(resource.share, resource.left / resource.waiting);
    }
  }
  std::erase_if(open_flows_, [&](std::uint32_t index) { return !flows_[index].seen; });
  return true;
}

/// The even level at which the waiting users fill what is left, if each takes no more than its other limits let it.
double FairSharing::level(const SharedResource& resource, std::uint32_t index) {
  wants_.clear();
  for (const User& user : resource.users) {
    const Flow& flow = flows_[user.flow];
    if (!flow.seen) continue;
    double rate = kUnlimited;
    for (const Use& use : flow.uses) {
      if (use.resource != index) rate = std::min(rate, resources_[use.resource].share / use.amount);
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

/// Flows that hold each other back in a circle (each is the largest user of what the other lacks): levels of all resources
/// in turn until nothing moves; then all are scaled to what the fullest resource allows, which takes rounding away.
void FairSharing::settle_rest() {
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    double moved = 0;
    for (std::uint32_t index : component_) {
      SharedResource& resource = resources_[index];
      if (resource.waiting == 0) continue;
      const double share = level(resource, index);
      if (share != resource.share) {
        moved = std::max(moved, share == kUnlimited || resource.share == kUnlimited ? 1 : std::abs(share / resource.share - 1));
      }
      resource.share = share;
    }
    if (moved <= kSettled) break;
  }
  vote();
  double over = 1;
  for (std::uint32_t index : component_) {
    const SharedResource& resource = resources_[index];
    if (resource.waiting == 0) continue;
    double used = 0;
    for (const User& user : resource.users) {
      if (flows_[user.flow].seen) used += user.amount * flows_[user.flow].voted_rate;
    }
    if (resource.left > 0) over = std::max(over, used / resource.left);
  }
  for (std::uint32_t index : open_flows_) {
    Flow& flow = flows_[index];
    resources_[flow.vote].votes = 0;
    fix(flow, flow.voted_rate / over);
    flow.seen = false;
  }
  open_flows_.clear();
}

std::span<const FairSharing::Change> FairSharing::solve() {
  changes_.clear();
  if (dirty_.empty()) return changes_;
  collect();
  all_flows_.assign(open_flows_.begin(), open_flows_.end());
  for (std::uint32_t index : all_flows_) flows_[index].before = flows_[index].rate;
  while (!open_flows_.empty()) {
    vote();
    if (!fix_agreed()) settle_rest();
  }
  for (std::uint32_t index : component_) resources_[index].seen = false;
  for (std::uint32_t index : all_flows_) {
    const Flow& flow = flows_[index];
    if (flow.rate != flow.before) changes_.push_back({index, flow.before, flow.rate});
  }
  return changes_;
}

}  // namespace zeroplan
