#include "runtime/peer_links.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <list>
#include <thread>

#include "models/error.h"

namespace zeroplan {

using namespace std::chrono_literals;

namespace {

/// What the connecting side says first.
struct LinkHello {
  std::uint32_t magic = kWireMagic;
  std::uint32_t version = kWireVersion;
  std::int64_t creation = 0;
  std::int32_t rank = 0, to = 0;
  std::array<char, 8> secret{};
};
static_assert(sizeof(LinkHello) == 32);

/// The first half of the token names sockets, which others on the host can see; the second half does not show.
std::string local_name(const ProcessJob& job, int rank) {
  std::string name = "zeroplan-";
  for (const char byte : job.token().substr(0, 8)) name += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return name + fmt::format("-{}", rank);
}

LinkHello hello_of(const ProcessJob& job, std::int64_t creation, int from, int to) {
  LinkHello hello;
  hello.creation = creation;
  hello.rank = from;
  hello.to = to;
  std::memcpy(hello.secret.data(), job.token().data() + 8, hello.secret.size());
  return hello;
}

bool shares_host(const ProcessJob& job, int rank) {
  return job.options().transport == ProcessWorldOptions::Transport::automatic &&
         job.peer(rank).host == job.peer(job.rank()).host;
}

void check_time(ProcessJob& job, Deadline deadline, int rank) {
  if (job.failed()) job.throw_failure();
  if (std::chrono::steady_clock::now() < deadline) return;
  job.report_symptom(fmt::format("rank {} could not connect to rank {} in time", job.rank(), rank));
}

PeerLink connect_to(ProcessJob& job, int rank, std::int64_t creation, Deadline deadline) {
  PeerLink link{rank, FileDescriptor(), false, {}};
  const PeerInfo& peer = job.peer(rank);
  Connected connected;
  while (!connected.socket.is_open()) {
    check_time(job, deadline, rank);
    // A host that only looks the same (containers) has no such socket: TCP then.
    if (shares_host(job, rank)) connected = connect_local(local_name(job, rank));
    link.shared = connected.socket.is_open();
    if (!link.shared) connected = connect_tcp(peer.address, peer.port, deadline, job.failure_event());
    if (!connected.socket.is_open()) std::this_thread::sleep_for(20ms);
  }
  link.socket = std::move(connected.socket);
  LinkHello hello = hello_of(job, creation, job.rank(), rank);
  iovec part{&hello, sizeof(hello)};
  // 32 bytes into the empty buffer of a fresh socket: all or, when the peer is gone, nothing.
  const IoResult result = send_some(link.socket.value(), {&part, 1});
  if (result.bytes != sizeof(hello)) report_lost(job, rank, "connecting", result.error);
  return link;
}

/// A connection that has not said yet who it is.
struct Caller {
  FileDescriptor socket;
  bool local = false;
  LinkHello hello;
  std::size_t got = 0;

  /// True when the hello is complete. Closes the socket at the end of file.
  bool read() {
    while (got < sizeof(hello)) {
      const IoResult result = receive_some(socket.value(), reinterpret_cast<char*>(&hello) + got, sizeof(hello) - got);
      if (result.state == IoResult::State::closed) socket.close();
      if (result.state != IoResult::State::moved) return false;
      got += result.bytes;
    }
    return true;
  }
};

/// Waits for the links of `expected` ranks, all higher than this one.
std::vector<PeerLink> accept_from(ProcessJob& job, const PeerListener& listener, std::vector<int> expected,
                                  std::int64_t creation, Deadline deadline) {
  std::vector<PeerLink> links;
  std::list<Caller> callers;
  while (!expected.empty()) {
    check_time(job, deadline, expected.front());
    for (const int socket : {listener.tcp(), listener.local()}) {
      if (socket < 0) continue;
      FileDescriptor accepted = accept_one(socket);
      if (accepted.is_open()) callers.push_back({std::move(accepted), socket == listener.local(), {}, 0});
    }
    for (Caller& caller : callers) {
      if (!caller.read()) continue;
      const LinkHello wanted = hello_of(job, creation, caller.hello.rank, job.rank());
      const auto found = std::find(expected.begin(), expected.end(), caller.hello.rank);
      if (found != expected.end() && std::memcmp(&wanted, &caller.hello, sizeof(wanted)) == 0) {
        links.push_back({*found, std::move(caller.socket), caller.local, {}});
        expected.erase(found);
      }
      caller.socket.close();  // a stranger
    }
    callers.remove_if([](const Caller& caller) { return !caller.socket.is_open(); });
    if (expected.empty()) break;
    std::vector<pollfd> fds{
        {job.failure_event(), POLLIN, 0}, {listener.tcp(), POLLIN, 0}, {listener.local(), POLLIN, 0}};
    for (const Caller& caller : callers) fds.push_back({caller.socket.value(), POLLIN, 0});
    (void)poll(fds.data(), fds.size(), poll_time(deadline));
  }
  return links;
}

}  // namespace

void PeerListener::listen_locally(const ProcessJob& job) { local_ = listen_local(local_name(job, job.rank())); }

std::vector<PeerLink> connect_peers(ProcessJob& job, const PeerListener& listener, std::span<const int> members,
                                    std::int64_t creation, Deadline deadline) {
  std::vector<PeerLink> links;
  std::vector<int> higher;
  for (const int rank : members) {
    if (rank < job.rank()) links.push_back(connect_to(job, rank, creation, deadline));
    if (rank > job.rank()) higher.push_back(rank);
  }
  for (PeerLink& link : accept_from(job, listener, higher, creation, deadline)) links.push_back(std::move(link));
  std::sort(links.begin(), links.end(), [](const PeerLink& a, const PeerLink& b) { return a.rank < b.rank; });
  return links;
}

SharedRegion exchange_regions(ProcessJob& job, std::span<PeerLink> links, std::int64_t bytes, Deadline deadline) {
  if (std::none_of(links.begin(), links.end(), [](const PeerLink& link) { return link.shared; })) return {};
  SharedRegion own = SharedRegion::create(bytes);
  for (const PeerLink& link : links) {
    if (link.shared) send_descriptor(link.socket.value(), own.descriptor());
  }
  for (PeerLink& link : links) {
    if (!link.shared) continue;
    const FileDescriptor descriptor = receive_descriptor(link.socket.value(), job.failure_event(), deadline);
    if (!descriptor.is_open()) {
      check_time(job, deadline, link.rank);
      report_lost(job, link.rank, "connecting", 0);
    }
    link.region = SharedRegion::attach(descriptor, bytes);
  }
  return own;
}

void report_lost(ProcessJob& job, int rank, const std::string& doing, int error) {
  // A killed rank's connections end all at once: the store says which rank it was, the same to everybody.
  constexpr auto kStoreLimit = 1000ms;
  if (job.wait_failed(kStoreLimit)) job.throw_failure();
  job.report_symptom(
      fmt::format("rank {} lost its connection to rank {} in {}: {}", job.rank(), rank, doing, error_text(error)));
}

}  // namespace zeroplan
