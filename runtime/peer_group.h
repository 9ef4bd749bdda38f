#pragma once
// Rounds between the members of a group of processes. In a round every member sends a message to every other one and
// waits for theirs: 64 bytes over the link's socket that name the call, and data, which follows over TCP, or which lies
// in the sender's region when they share memory.
//
// A region has two halves, used in turn. Nobody acknowledges: who has everybody's message of round n knows that all
// have read what came in round n - 1, so the half of that round is free for round n + 1.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/peer_links.h"

namespace zeroplan {

class PeerGroup {
 public:
  using Clock = Communicator::Clock;

  /// Bytes of one half: large enough that a round's fixed cost is small, small enough to stay in a shared cache.
  static constexpr std::int64_t kHalf = std::int64_t{1} << 20;

  PeerGroup(std::shared_ptr<ProcessJob> job, std::vector<PeerLink> links, SharedRegion own, std::vector<int> members,
            int channel);
  ~PeerGroup();
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  int index() const { return index_; }
  /// The most bytes for one member in a round, a multiple of 32 elements; send_to_all() takes kHalf.
  std::int64_t slot() const { return kHalf / size() / 128 * 128; }

  void begin(const CollectiveCall& call);
  // What this member sends and expects in the next round; what is not said is nothing. `data` must stay until the round
  // is over. Over TCP the data goes to `target`, or to a buffer of this group for nullptr.
  void send_to_all(const std::byte* data, std::int64_t bytes);
  void send_to(int member, const std::byte* data, std::int64_t bytes);
  void receive_from(int member, std::int64_t bytes, std::byte* target = nullptr);
  /// The round. Throws DeviceError that ends the job.
  void exchange();
  /// What came from a member, until the next round.
  const std::byte* received(int member) const { return peer(member).received; }

  /// When the last member had begun this call.
  Clock::time_point came() const { return came_; }
  std::int64_t bytes_sent() const { return bytes_sent_; }
  std::int64_t bytes_received() const { return bytes_received_; }

 private:
  struct Message {
    std::uint32_t magic;
    enum class Type : std::uint16_t { data = 1, leave = 2 } type;
    CallKind kind;
    DType dtype;
    std::int32_t channel, padding;
    std::int64_t call, round, count, bytes, offset;
    std::int64_t begun;  // steady clock: comparable on one host
  };
  static_assert(sizeof(Message) == 64);

  struct Peer {
    PeerLink link;
    std::vector<std::byte> buffer;  // for what comes over TCP without a target
    Message out, in;
    std::byte* payload;                       // sent after `out` over TCP
    std::int64_t sent, got, expected, bytes;  // of messages with their data; of data
    std::byte* target;
    const std::byte* received = nullptr;
  };

  Peer& peer(int member) { return peers_[static_cast<std::size_t>(member < index_ ? member : member - 1)]; }
  const Peer& peer(int member) const { return const_cast<PeerGroup*>(this)->peer(member); }
  void reset_round();
  void run_round();
  void wait(Clock::time_point deadline);
  bool send_pending(const Peer& peer) const;
  bool receive_pending(const Peer& peer) const;
  void try_send(Peer& peer);
  void try_receive(Peer& peer);
  void check(const Peer& peer);
  void take(Peer& peer);
  [[noreturn]] void lost(const Peer& peer, const IoResult& result);
  std::string where() const;
  int rank() const { return job_->rank(); }

  std::shared_ptr<ProcessJob> job_;
  SharedRegion own_;
  const std::vector<int> members_;
  const int channel_;
  int index_ = 0;
  std::vector<Peer> peers_;  // in the order of members_, without this one
  CollectiveCall call_;
  std::int64_t calls_ = 0, rounds_ = 0;
  bool first_round_ = false;
  Clock::time_point begun_, came_;
  std::int64_t bytes_sent_ = 0, bytes_received_ = 0;
};

}  // namespace zeroplan
