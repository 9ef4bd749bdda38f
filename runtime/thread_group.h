#pragma once
// The rendezvous behind thread_communicator.h: a group of ranks of one process, and the job's first failure.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/collective_call.h"

namespace zeroplan {

class ThreadGroup;

/// What the ranks of one process share: the first failure, and all groups, to wake their waiters.
class ThreadJob {
 public:
  ThreadJob(int ranks, std::chrono::milliseconds wait_limit) : ranks_(ranks), wait_limit_(wait_limit) {}

  int ranks() const { return ranks_; }
  std::chrono::milliseconds wait_limit() const { return wait_limit_; }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// The first call decides the reason; wakes everybody. No group's lock may be held.
  void fail(const std::string& reason);
  [[noreturn]] void throw_failure() const;

  /// The group that the `creation`-th call of World::communicator makes for these members, the same for all of them.
  std::shared_ptr<ThreadGroup> join(std::int64_t creation, std::span<const int> members, std::string name);

 private:
  struct Joined {
    std::int64_t creation;
    std::vector<int> members;
    std::size_t joined;  // when all have, the entry goes
    std::shared_ptr<ThreadGroup> group;
  };

  const int ranks_;
  const std::chrono::milliseconds wait_limit_;
  std::atomic<bool> failed_ = false;
  mutable std::mutex mutex_;  // never held while a group's is taken
  std::string reason_;
  std::vector<std::weak_ptr<ThreadGroup>> groups_;
  std::vector<Joined> joining_;
};

/// Members meet with what they bring, read each other's entries, and part. Nobody parts before all have read, so a
/// member's memory stays valid while others use it, whatever happens to the job meanwhile.
class ThreadGroup {
 public:
  using Clock = Communicator::Clock;
  struct Entry {
    CollectiveCall call;
    const void* input = nullptr;
    void* output = nullptr;
  };

  ThreadGroup(ThreadJob& job, std::vector<int> members, std::string name);

  int size() const { return static_cast<int>(members_.size()); }
  /// Waits for all members and returns when the last came. Throws DeviceError, and no member reads, when the job fails,
  /// a member makes another call, has left, or does not come in time.
  Clock::time_point meet(int member, Entry entry);
  /// Between meet() and part().
  const Entry& entry(int member) const { return entries_[static_cast<std::size_t>(member)]; }
  /// Waits until all members have read.
  void part() noexcept;
  /// `member` calls no more.
  void leave(int member) noexcept;
  void wake() noexcept;

 private:
  enum class State : std::uint8_t { away, here, left };

  void wait_for_all(std::unique_lock<std::mutex>& lock, int member);
  void check_calls(std::unique_lock<std::mutex>& lock, int member);
  std::vector<int> ranks_in(State state) const;
  [[noreturn]] void break_up(std::unique_lock<std::mutex>& lock, std::string reason);

  ThreadJob& job_;
  const std::vector<int> members_;
  const std::string name_;
  std::vector<Entry> entries_;

  std::mutex mutex_;  // guards all below; entries_ belong to their members until all are here
  std::condition_variable changed_;
  std::vector<State> states_;
  int here_ = 0, reading_ = 0;
  std::int64_t meetings_ = 0;  // completed
  std::string broken_;         // why no meeting can complete any more
  Clock::time_point last_came_;
};

}  // namespace zeroplan
