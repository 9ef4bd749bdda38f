#include "runtime/peer_group.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "models/error.h"

namespace zeroplan {

PeerGroup::PeerGroup(std::shared_ptr<ProcessJob> job, std::vector<PeerLink> links, SharedRegion own,
                     std::vector<int> members, int channel)
    : job_(std::move(job)), own_(std::move(own)), members_(std::move(members)), channel_(channel) {
  index_ = static_cast<int>(std::find(members_.begin(), members_.end(), rank()) - members_.begin());
  for (PeerLink& link : links) peers_.push_back({std::move(link), {}, {}, {}, nullptr, 0, 0, 0, 0, nullptr, nullptr});
  reset_round();
}

PeerGroup::~PeerGroup() {
  // In a failed job nobody leaves of its own accord: the store says why the links end, and a message of leaving that
  // came before its verdict would become the verdict.
  if (job_->failed()) return;
  for (Peer& peer : peers_) {
    Message leave{};
    leave.magic = kWireMagic;
    leave.type = Message::Type::leave;
    iovec part{&leave, sizeof(leave)};
    // A peer that is gone does not need it, and one whose buffer is full sees the connection end.
    (void)send_some(peer.link.socket.value(), {&part, 1});
  }
}

void PeerGroup::begin(const CollectiveCall& call) {
  if (job_->failed()) job_->throw_failure();
  call_ = call;
  first_round_ = true;
  begun_ = came_ = Clock::now();
}

void PeerGroup::reset_round() {
  for (Peer& peer : peers_) {
    peer.out = {};
    peer.payload = nullptr;
    peer.target = nullptr;
    peer.sent = peer.got = peer.expected = 0;
  }
}

void PeerGroup::send_to_all(const std::byte* data, std::int64_t bytes) {
  std::byte* half = own_.data() + rounds_ % 2 * kHalf;
  if (own_.data() != nullptr && bytes > 0) std::memcpy(half, data, static_cast<std::size_t>(bytes));
  for (Peer& peer : peers_) {
    peer.out.bytes = bytes;
    peer.payload = const_cast<std::byte*>(data);
  }
}

void PeerGroup::send_to(int member, const std::byte* data, std::int64_t bytes) {
  Peer& to = peer(member);
  to.out.bytes = bytes;
  to.payload = const_cast<std::byte*>(data);
  if (!to.link.shared || bytes == 0) return;
  to.out.offset = member * slot();
  std::memcpy(own_.data() + rounds_ % 2 * kHalf + to.out.offset, data, static_cast<std::size_t>(bytes));
}

void PeerGroup::receive_from(int member, std::int64_t bytes, std::byte* target) {
  Peer& from = peer(member);
  from.expected = bytes;
  from.target = target;
  if (from.link.shared || target != nullptr) return;
  if (static_cast<std::int64_t>(from.buffer.size()) < bytes) from.buffer.resize(static_cast<std::size_t>(bytes));
  from.target = from.buffer.data();
}

void PeerGroup::exchange() {
  for (Peer& peer : peers_) {
    peer.out = {kWireMagic,      Message::Type::data,
                call_.kind,      call_.dtype,
                channel_,        0,
                calls_,          rounds_,
                call_.count,     peer.out.bytes,
                peer.out.offset, begun_.time_since_epoch().count()};
    bytes_sent_ += peer.out.bytes;
  }
  // What was written to the region is there before the message that names it: a system call lies between.
  try {
    run_round();
  } catch (const DeviceError& error) {
    if (job_->failed()) throw;
    job_->report(fmt::format("rank {} in {} ({}): {}", rank(), describe(call_), where(), error.what()));
  }
  for (Peer& peer : peers_) bytes_received_ += peer.expected;
  reset_round();
  ++rounds_;
  if (first_round_) ++calls_;
  first_round_ = false;
}

void PeerGroup::run_round() {
  const Clock::time_point deadline = Clock::now() + job_->options().wait_limit;
  while (true) {
    bool pending = false;
    for (Peer& peer : peers_) {
      if (send_pending(peer)) try_send(peer);
      if (receive_pending(peer)) try_receive(peer);
      pending = pending || send_pending(peer) || receive_pending(peer);
    }
    if (!pending) return;
    wait(deadline);
  }
}

/// Until a pending link can move. Throws when the job fails or the time is up.
void PeerGroup::wait(Clock::time_point deadline) {
  std::vector<pollfd> fds{{job_->failure_event(), POLLIN, 0}};
  std::vector<int> missing;
  for (const Peer& peer : peers_) {
    const bool out = send_pending(peer), in = receive_pending(peer);
    if (!out && !in) continue;  // a peer that is through may leave
    fds.push_back({peer.link.socket.value(), static_cast<short>((out ? POLLOUT : 0) | (in ? POLLIN : 0)), 0});
    missing.push_back(peer.link.rank);
  }
  const int ready = poll(fds.data(), fds.size(), poll_time(deadline));
  if (ready < 0 && errno != EINTR) throw DeviceError("poll failed: " + error_text(errno));
  if (fds[0].revents != 0) job_->throw_failure();
  // What came while this process did not run is no time-out.
  if (ready > 0 || Clock::now() < deadline) return;
  const double limit = std::chrono::duration<double>(job_->options().wait_limit).count();
  job_->report_symptom(fmt::format("rank {} waited {:.3g} s in {} ({}) for {}", rank(), limit, describe(call_), where(),
                                   name_ranks(missing)));
}

bool PeerGroup::send_pending(const Peer& peer) const {
  const std::int64_t message = static_cast<std::int64_t>(sizeof(Message)) + (peer.link.shared ? 0 : peer.out.bytes);
  return peer.sent < message;
}

bool PeerGroup::receive_pending(const Peer& peer) const {
  const std::int64_t message = static_cast<std::int64_t>(sizeof(Message)) + (peer.link.shared ? 0 : peer.expected);
  return peer.got < message;
}

void PeerGroup::try_send(Peer& peer) {
  constexpr auto kHeader = static_cast<std::int64_t>(sizeof(Message));
  while (send_pending(peer)) {
    const std::int64_t header = std::min(peer.sent, kHeader), data = peer.sent - header;
    std::array<iovec, 2> parts{
        iovec{reinterpret_cast<char*>(&peer.out) + header, static_cast<std::size_t>(kHeader - header)},
        iovec{peer.payload + data, peer.link.shared ? 0 : static_cast<std::size_t>(peer.out.bytes - data)}};
    const IoResult result = send_some(peer.link.socket.value(), parts);
    if (result.state == IoResult::State::would_block) return;
    if (result.state == IoResult::State::closed) {
      // Its last words may say why: read them first.
      peer.sent = kHeader + peer.out.bytes;
      if (receive_pending(peer)) return;
      lost(peer, result);
    }
    peer.sent += static_cast<std::int64_t>(result.bytes);
  }
}

void PeerGroup::try_receive(Peer& peer) {
  constexpr auto kHeader = static_cast<std::int64_t>(sizeof(Message));
  while (receive_pending(peer)) {
    const bool header = peer.got < kHeader;
    std::byte* target = header ? reinterpret_cast<std::byte*>(&peer.in) + peer.got : peer.target + peer.got - kHeader;
    const std::int64_t bytes = header ? kHeader - peer.got : kHeader + peer.expected - peer.got;
    const IoResult result = receive_some(peer.link.socket.value(), target, static_cast<std::size_t>(bytes));
    if (result.state == IoResult::State::would_block) return;
    if (result.state == IoResult::State::closed) lost(peer, result);
    peer.got += static_cast<std::int64_t>(result.bytes);
    if (header && peer.got == kHeader) take(peer);
  }
}

void PeerGroup::lost(const Peer& peer, const IoResult& result) {
  report_lost(*job_, peer.link.rank, fmt::format("{} ({})", describe(call_), where()), result.error);
}

/// A peer's message is complete.
void PeerGroup::take(Peer& peer) {
  check(peer);
  peer.received = peer.target;
  if (peer.link.shared) peer.received = peer.link.region.data() + rounds_ % 2 * kHalf + peer.in.offset;
  if (!first_round_) return;
  // One host has one clock; another host's message is taken as sent when it came.
  const Clock::time_point now = Clock::now();
  const Clock::time_point begun{Clock::duration(peer.in.begun)};
  came_ = std::max(came_, peer.link.shared ? std::min(begun, now) : now);
}

void PeerGroup::check(const Peer& peer) {
  const Message& in = peer.in;
  const int other = peer.link.rank;
  if (in.magic != kWireMagic) job_->report(fmt::format("rank {} sent rank {} what is no message", other, rank()));
  if (in.type == Message::Type::leave) {
    job_->report_symptom(
        fmt::format("rank {} left while rank {} waited in {} ({})", other, rank(), describe(call_), where()));
  }
  const CollectiveCall call{in.kind, in.dtype, in.count};
  if (in.call != calls_ || !(call == call_)) {
    job_->report(describe_mismatch(other, call, rank(), call_, where()));
  }
  if (in.channel == channel_ && in.round == rounds_ && in.bytes == peer.expected && in.offset >= 0 &&
      in.offset + in.bytes <= kHalf) {
    return;
  }
  job_->report(fmt::format("ranks {} and {} cut {} differently ({}): other builds of zeroplan?", other, rank(),
                           describe(call_), where()));
}

std::string PeerGroup::where() const {
  return fmt::format("channel {} of {}, call {}", channel_, name_ranks(members_), calls_);
}

}  // namespace zeroplan
