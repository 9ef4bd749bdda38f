#include "runtime/thread_group.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"

namespace zeroplan {

void ThreadJob::fail(const std::string& reason) {
  std::vector<std::shared_ptr<ThreadGroup>> groups;
  {
    const std::lock_guard lock(mutex_);
    if (failed()) return;
    reason_ = reason;
    for (const auto& group : groups_) groups.push_back(group.lock());
    failed_.store(true, std::memory_order_release);
  }
  for (const auto& group : groups) {
    if (group) group->wake();
  }
}

void ThreadJob::throw_failure() const {
  const std::lock_guard lock(mutex_);
  throw DeviceError(reason_);
}

std::shared_ptr<ThreadGroup> ThreadJob::join(std::int64_t creation, std::span<const int> members, std::string name) {
  const std::lock_guard lock(mutex_);
  auto found = std::find_if(joining_.begin(), joining_.end(), [&](const Joined& entry) {
    return entry.creation == creation &&
           std::equal(members.begin(), members.end(), entry.members.begin(), entry.members.end());
  });
  if (found == joining_.end()) {
    std::vector<int> all(members.begin(), members.end());
    auto group = std::make_shared<ThreadGroup>(*this, all, std::move(name));
    std::erase_if(groups_, [](const auto& old) { return old.expired(); });
    groups_.push_back(group);
    found = joining_.insert(joining_.end(), {creation, std::move(all), 0, std::move(group)});
  }
  std::shared_ptr<ThreadGroup> group = found->group;
  if (++found->joined == members.size()) joining_.erase(found);
  return group;
}

ThreadGroup::ThreadGroup(ThreadJob& job, std::vector<int> members, std::string name)
    : job_(job),
      members_(std::move(members)),
      name_(std::move(name)),
      entries_(members_.size()),
      states_(members_.size(), State::away) {}

ThreadGroup::Clock::time_point ThreadGroup::meet(int member, Entry entry) {
  std::unique_lock lock(mutex_);
  if (!broken_.empty()) break_up(lock, broken_);
  if (job_.failed()) job_.throw_failure();
  entries_[static_cast<std::size_t>(member)] = entry;
  check_calls(lock, member);
  states_[static_cast<std::size_t>(member)] = State::here;
  if (++here_ < size()) {
    wait_for_all(lock, member);
    return last_came_;
  }
  here_ = 0;
  reading_ = size();
  std::replace(states_.begin(), states_.end(), State::here, State::away);
  const Clock::time_point came = last_came_ = Clock::now();
  ++meetings_;
  lock.unlock();
  changed_.notify_all();
  return came;
}

void ThreadGroup::wait_for_all(std::unique_lock<std::mutex>& lock, int member) {
  const Clock::time_point begin = Clock::now();
  const std::int64_t meeting = meetings_;
  const int rank = members_[static_cast<std::size_t>(member)];
  const CollectiveCall call = entries_[static_cast<std::size_t>(member)].call;
  while (meetings_ == meeting) {
    // Under the lock: who fails here leaves the group broken, so that no late member reads what this one took back.
    if (!broken_.empty()) break_up(lock, broken_);
    if (job_.failed()) job_.throw_failure();
    if (const std::vector<int> left = ranks_in(State::left); !left.empty()) {
      break_up(lock, fmt::format("{} left while rank {} waited in {} ({}, call {})", name_ranks(left), rank,
                                 describe(call), name_, meeting));
    }
    if (Clock::now() >= begin + job_.wait_limit()) {
      break_up(lock, fmt::format("rank {} waited {:.3g} s in {} ({}, call {}) for {}", rank,
                                 std::chrono::duration<double>(job_.wait_limit()).count(), describe(call), name_,
                                 meeting, name_ranks(ranks_in(State::away))));
    }
    changed_.wait_until(lock, begin + job_.wait_limit());
  }
}

void ThreadGroup::check_calls(std::unique_lock<std::mutex>& lock, int member) {
  const CollectiveCall& call = entries_[static_cast<std::size_t>(member)].call;
  for (std::size_t other = 0; other < members_.size(); ++other) {
    if (states_[other] != State::here || entries_[other].call == call) continue;
    break_up(lock, describe_mismatch(members_[static_cast<std::size_t>(member)], call, members_[other],
                                     entries_[other].call, fmt::format("{}, call {}", name_, meetings_)));
  }
}

std::vector<int> ThreadGroup::ranks_in(State state) const {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (states_[i] == state) ranks.push_back(members_[i]);
  }
  return ranks;
}

void ThreadGroup::break_up(std::unique_lock<std::mutex>& lock, std::string reason) {
  broken_ = reason;
  lock.unlock();
  job_.fail(reason);
  job_.throw_failure();
}

void ThreadGroup::part() noexcept {
  std::unique_lock lock(mutex_);
  if (--reading_ == 0) {
    lock.unlock();
    changed_.notify_all();
    return;
  }
  // No limit: the others only copy memory.
  changed_.wait(lock, [&] { return reading_ == 0; });
}

void ThreadGroup::leave(int member) noexcept {
  {
    const std::lock_guard lock(mutex_);
    states_[static_cast<std::size_t>(member)] = State::left;
  }
  changed_.notify_all();
}

void ThreadGroup::wake() noexcept {
  { const std::lock_guard lock(mutex_); }
  changed_.notify_all();
}

}  // namespace zeroplan
