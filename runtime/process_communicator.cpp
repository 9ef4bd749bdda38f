#include "runtime/process_communicator.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "models/error.h"
#include "runtime/collective_sums.h"
#include "runtime/peer_group.h"

namespace zeroplan {
namespace {

/// Up to here an all_reduce is one round in which everybody sums everything, instead of two.
constexpr std::int64_t kSmallReduce = 32 * 1024;

std::byte* bytes_at(TensorView tensor, std::int64_t element) {
  return static_cast<std::byte*>(tensor.data) + element * size_of(tensor.dtype);
}

/// The offsets 0, step, 2 step, ... below `count`; 0 alone for nothing: a call of no elements is a round all the same.
template <class Body>
void for_pieces(std::int64_t count, std::int64_t step, Body body) {
  std::int64_t begin = 0;
  do {
    body(begin, std::min(step, count - begin));
    begin += step;
  } while (begin < count);
}

class ProcessCommunicator final : public Communicator {
 public:
  explicit ProcessCommunicator(std::unique_ptr<PeerGroup> group) : group_(std::move(group)) {}

  int rank() const override { return group_->index(); }
  int size() const override { return group_->size(); }
  std::int64_t bytes_sent() const override { return group_->bytes_sent(); }
  std::int64_t bytes_received() const override { return group_->bytes_received(); }

  Clock::time_point all_gather(TensorView shard, TensorView full) override {
    group_->begin(check_all_gather(shard, full, rank(), size()));
    const std::int64_t width = size_of(shard.dtype);
    for_pieces(shard.count, PeerGroup::kHalf / width, [&](std::int64_t begin, std::int64_t count) {
      group_->send_to_all(bytes_at(shard, begin), count * width);
      gather([&](int peer) { return bytes_at(full, peer * shard.count + begin); }, [&](int) { return count * width; });
    });
    std::byte* own = bytes_at(full, rank() * shard.count);
    if (shard.count > 0 && own != shard.data) {
      std::memcpy(own, shard.data, static_cast<std::size_t>(shard.count * width));
    }
    return group_->came();
  }

  Clock::time_point reduce_scatter(TensorView full, TensorView shard) override {
    group_->begin(check_reduce_scatter(full, shard, rank(), size()));
    const std::int64_t width = size_of(shard.dtype);
    for_pieces(shard.count, group_->slot() / width, [&](std::int64_t begin, std::int64_t count) {
      for_peers([&](int peer) {
        group_->send_to(peer, bytes_at(full, peer * shard.count + begin), count * width);
        group_->receive_from(peer, count * width);
      });
      group_->exchange();
      sum(bytes_at(full, rank() * shard.count + begin), bytes_at(shard, begin), count, shard.dtype);
    });
    return group_->came();
  }

  Clock::time_point all_reduce(TensorView tensor) override {
    group_->begin(check_all_reduce(tensor));
    const std::int64_t width = size_of(tensor.dtype), bytes = tensor.count * width;
    if (bytes <= kSmallReduce) {
      group_->send_to_all(bytes_at(tensor, 0), bytes);
      for_peers([&](int peer) { group_->receive_from(peer, bytes); });
      group_->exchange();
      sum(bytes_at(tensor, 0), bytes_at(tensor, 0), tensor.count, tensor.dtype);
    } else {
      for_pieces(tensor.count, group_->slot() / width * size(), [&](std::int64_t begin, std::int64_t count) {
        reduce_piece({bytes_at(tensor, begin), count, tensor.dtype});
      });
    }
    return group_->came();
  }

 private:
  /// Two rounds: every member sums a part and sends it to all.
  void reduce_piece(TensorView piece) {
    const std::int64_t width = size_of(piece.dtype);
    const auto part = [&](int peer) { return part_of(piece.count, peer, size()); };
    const auto bytes = [&](int peer) { return (part(peer).end - part(peer).begin) * width; };
    for_peers([&](int peer) {
      group_->send_to(peer, bytes_at(piece, part(peer).begin), bytes(peer));
      group_->receive_from(peer, bytes(rank()));
    });
    group_->exchange();
    std::byte* own = bytes_at(piece, part(rank()).begin);
    sum(own, own, bytes(rank()) / width, piece.dtype);
    group_->send_to_all(own, bytes(rank()));
    gather([&](int peer) { return bytes_at(piece, part(peer).begin); }, bytes);
  }

  /// The round in which the peers' data comes to its place.
  template <class Place, class Size>
  void gather(Place place, Size bytes) {
    for_peers([&](int peer) { group_->receive_from(peer, bytes(peer), place(peer)); });
    group_->exchange();
    for_peers([&](int peer) {
      const std::byte* from = group_->received(peer);
      if (bytes(peer) > 0 && from != place(peer)) {
        std::memcpy(place(peer), from, static_cast<std::size_t>(bytes(peer)));
      }
    });
  }

  /// The sum of what came in this round and `own`.
  void sum(const std::byte* own, std::byte* target, std::int64_t count, DType dtype) {
    if (count == 0) return;
    sources_.clear();
    for (int peer = 0; peer < size(); ++peer) sources_.push_back(peer == rank() ? own : group_->received(peer));
    void* const targets[] = {target};
    sum_in_order(sources_, targets, count, dtype);
  }

  template <class Body>
  void for_peers(Body body) {
    for (int step = 1; step < size(); ++step) body((rank() + step) % size());
  }

  std::unique_ptr<PeerGroup> group_;
  std::vector<const void*> sources_;
};

/// Equal for processes that can reach each other's Unix sockets: the running kernel, the host's name, the network
/// namespace. A wrong guess costs speed only.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, HOST_NAME_MAX + 1> name{};
  (void)gethostname(name.data(), name.size() - 1);
  std::array<char, 64> network{};
  (void)!readlink("/proc/self/ns/net", network.data(), network.size() - 1);
  return fmt::format("{}/{}/{}", boot, name.data(), network.data());
}

class ProcessWorld final : public World {
 public:
  explicit ProcessWorld(const ProcessWorldOptions& options)
      : job_(std::make_shared<ProcessJob>(options, [&] {
          listener_.listen(loopback_of(options.store_address));
          return PeerInfo{options.host.empty() ? host_identity() : options.host, "", port_of(listener_.tcp())};
        })) {
    if (options.transport == ProcessWorldOptions::Transport::automatic) listener_.listen_locally(*job_);
  }

  int rank() const override { return job_->rank(); }
  int size() const override { return job_->size(); }

  std::unique_ptr<Communicator> communicator(std::span<const int> members, int channel) override {
    check_members(members, channel, rank(), size());
    check_groups(job_->exchange(CallKind::communicator, encode_group(members, channel)));
    const std::int64_t creation = creations_++;
    try {
      const Deadline deadline = std::chrono::steady_clock::now() + job_->options().wait_limit;
      std::vector<PeerLink> links = connect_peers(*job_, listener_, members, creation, deadline);
      SharedRegion own = exchange_regions(*job_, links, 2 * PeerGroup::kHalf, deadline);
      return std::make_unique<ProcessCommunicator>(std::make_unique<PeerGroup>(
          job_, std::move(links), std::move(own), std::vector<int>(members.begin(), members.end()), channel));
    } catch (const DeviceError& error) {
      if (job_->failed()) throw;
      job_->report(fmt::format("rank {} could not connect channel {}: {}", rank(), channel, error.what()));
    }
  }

  std::vector<std::string> exchange(const std::string& text) override {
    return job_->exchange(CallKind::exchange, text);
  }
  void abort(const std::string& reason) noexcept override { job_->abort(reason); }

 private:
  PeerListener listener_;
  std::shared_ptr<ProcessJob> job_;
  std::int64_t creations_ = 0;  // equal on all ranks: communicator() is collective
};

}  // namespace

ProcessWorldOptions process_world_options(const RankEnvironment& environment) {
  ProcessWorldOptions options;
  options.rank = environment.rank;
  options.size = environment.size;
  options.store_address = environment.master_address;
  options.store_port = environment.master_port + 1;
  if (options.store_port > 65535) {
    throw InputError(
        fmt::format("MASTER_PORT: expected at most 65534, found {}: our store listens on the port after it",
                    environment.master_port));
  }
  return options;
}

std::unique_ptr<World> make_process_world(const ProcessWorldOptions& options) {
  return std::make_unique<ProcessWorld>(options);
}

}  // namespace zeroplan
