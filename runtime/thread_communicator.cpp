#include "runtime/thread_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "runtime/collective_sums.h"
#include "runtime/thread_group.h"

namespace zeroplan {
namespace {

std::byte* at_byte(void* data, std::int64_t offset) { return static_cast<std::byte*>(data) + offset; }
const std::byte* at_byte(const void* data, std::int64_t offset) { return static_cast<const std::byte*>(data) + offset; }

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadJob> job, std::shared_ptr<ThreadGroup> group, int rank)
      : job_(std::move(job)),
        group_(std::move(group)),
        rank_(rank),
        sources_(group_->size()),
        targets_(group_->size()) {}
  ~ThreadCommunicator() override { group_->leave(rank_); }
  ThreadCommunicator(const ThreadCommunicator&) = delete;
  ThreadCommunicator& operator=(const ThreadCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  std::int64_t bytes_sent() const override { return bytes_sent_; }
  std::int64_t bytes_received() const override { return bytes_received_; }

  Clock::time_point all_gather(TensorView shard, TensorView full) override {
    const CollectiveCall call = check_all_gather(shard, full, rank_, size());
    const Clock::time_point came = group_->meet(rank_, {call, shard.data, full.data});
    const std::int64_t bytes = shard.count * size_of(shard.dtype);
    // Each begins with its own part, so that members read from different peers at a time.
    for (int step = 0; bytes > 0 && step < size(); ++step) {
      const int peer = (rank_ + step) % size();
      const void* source = group_->entry(peer).input;
      std::byte* target = at_byte(full.data, peer * bytes);
      if (target != source) std::memcpy(target, source, static_cast<std::size_t>(bytes));
    }
    group_->part();
    count_bytes((size() - 1) * bytes, (size() - 1) * bytes);
    return came;
  }

  Clock::time_point reduce_scatter(TensorView full, TensorView shard) override {
    const CollectiveCall call = check_reduce_scatter(full, shard, rank_, size());
    const Clock::time_point came = group_->meet(rank_, {call, full.data, shard.data});
    const std::int64_t bytes = shard.count * size_of(shard.dtype);
    if (bytes > 0) {
      targets_[0] = shard.data;
      sum_part(rank_ * bytes, shard.count, shard.dtype, 1);
    }
    group_->part();
    count_bytes((size() - 1) * bytes, (size() - 1) * bytes);
    return came;
  }

  /// Every member sums one part and writes it to all tensors: nobody else touches that part.
  Clock::time_point all_reduce(TensorView tensor) override {
    const CollectiveCall call = check_all_reduce(tensor);
    const Clock::time_point came = group_->meet(rank_, {call, tensor.data, tensor.data});
    const ElementRange part = part_of(tensor.count, rank_, size());
    const std::int64_t width = size_of(tensor.dtype);
    if (part.end > part.begin) {
      for (int peer = 0; peer < size(); ++peer) {
        targets_[static_cast<std::size_t>(peer)] = at_byte(group_->entry(peer).output, part.begin * width);
      }
      sum_part(part.begin * width, part.end - part.begin, tensor.dtype, targets_.size());
    }
    group_->part();
    // Own part: read from and written to every peer. Other parts: read and written by their members.
    const std::int64_t own = (part.end - part.begin) * width, others = tensor.count * width - own;
    count_bytes(others + (size() - 1) * own, others + (size() - 1) * own);
    return came;
  }

 private:
  /// The first `targets` of targets_ get the sum over all inputs from byte `offset` on.
  void sum_part(std::int64_t offset, std::int64_t count, DType dtype, std::size_t targets) {
    for (int peer = 0; peer < size(); ++peer) {
      sources_[static_cast<std::size_t>(peer)] = at_byte(group_->entry(peer).input, offset);
    }
    sum_in_order(sources_, std::span(targets_).first(targets), count, dtype);
  }
  void count_bytes(std::int64_t sent, std::int64_t received) {
    bytes_sent_ += sent;
    bytes_received_ += received;
  }

  std::shared_ptr<ThreadJob> job_;  // the group refers to it
  std::shared_ptr<ThreadGroup> group_;
  int rank_;
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
  std::int64_t bytes_sent_ = 0, bytes_received_ = 0;
};

class ThreadWorld final : public World {
 public:
  ThreadWorld(std::shared_ptr<ThreadJob> job, std::shared_ptr<ThreadGroup> everybody, int rank)
      : job_(std::move(job)), everybody_(std::move(everybody)), rank_(rank) {}
  ~ThreadWorld() override { everybody_->leave(rank_); }
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return job_->ranks(); }

  std::unique_ptr<Communicator> communicator(std::span<const int> members, int channel) override {
    check_members(members, channel, rank_, size());
    check_groups(meet_with(CallKind::communicator, encode_group(members, channel)));
    const std::string name = fmt::format("channel {} of {}", channel, name_ranks(members));
    const auto index = std::find(members.begin(), members.end(), rank_) - members.begin();
    return std::make_unique<ThreadCommunicator>(job_, job_->join(creations_++, members, name), static_cast<int>(index));
  }

  std::vector<std::string> exchange(const std::string& text) override { return meet_with(CallKind::exchange, text); }

  void abort(const std::string& reason) noexcept override {
    try {
      job_->fail(fmt::format("rank {} aborted: {}", rank_, reason));
    } catch (const std::exception&) {
      // No memory for the reason: the others end when this rank leaves.
    }
  }

 private:
  std::vector<std::string> meet_with(CallKind kind, const std::string& text) {
    std::vector<std::string> texts(static_cast<std::size_t>(size()));
    everybody_->meet(rank_, {{kind, DType::u8, 0}, &text, nullptr});
    std::exception_ptr error;
    try {
      for (int peer = 0; peer < size(); ++peer) {
        texts[static_cast<std::size_t>(peer)] = *static_cast<const std::string*>(everybody_->entry(peer).input);
      }
    } catch (const std::bad_alloc&) {
      error = std::current_exception();
    }
    everybody_->part();
    if (error) std::rethrow_exception(error);
    return texts;
  }

  std::shared_ptr<ThreadJob> job_;
  std::shared_ptr<ThreadGroup> everybody_;
  int rank_;
  std::int64_t creations_ = 0;  // equal on all ranks: communicator() is collective
};

}  // namespace

std::vector<std::unique_ptr<World>> make_thread_worlds(int ranks, std::chrono::milliseconds wait_limit) {
  if (ranks < 1) throw std::logic_error(fmt::format("make_thread_worlds: {} ranks", ranks));
  const auto job = std::make_shared<ThreadJob>(ranks, wait_limit);
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  const std::shared_ptr<ThreadGroup> everybody = job->join(-1, all, "all ranks");
  for (int rank = 1; rank < ranks; ++rank) job->join(-1, all, {});
  std::vector<std::unique_ptr<World>> worlds;
  for (int rank = 0; rank < ranks; ++rank) worlds.push_back(std::make_unique<ThreadWorld>(job, everybody, rank));
  return worlds;
}

}  // namespace zeroplan
