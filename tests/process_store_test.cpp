// The store's messages, and what it takes from strangers.

#include "runtime/process_store.h"

#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>

#include <fstream>

#include "tests/child_process.h"
#include "tests/process_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

/// A store in a process of its own, and three ranks' connections with it, in their order.
class StoreOfThree {
 public:
  StoreOfThree() {
    FileDescriptor listener = listen_tcp(0, "127.0.0.1");
    const int port = port_of(listener.value());
    children_.push_back(start([&]() -> std::string {
      const ProcessStore store(std::move(listener), {3, "key", kFarLimit, kFarLimit, kFarLimit});
      return "";
    }));
    listener.close();
    for (int rank = 0; rank < 3; ++rank) {
      ranks_.push_back(connect_tcp("127.0.0.1", port, Clock::now() + kFarLimit, -1).socket);
      REQUIRE(ranks_.back().is_open());
      send(rank, FrameType::hello, encode_hello({"key", 3, rank, {"h", "", 1}}));
    }
    for (int rank = 0; rank < 3; ++rank) REQUIRE(wait_for(socket(rank), POLLIN, -1, Clock::now() + kFarLimit));
  }
  ~StoreOfThree() {
    ranks_.clear();
    finish(children_, kFarLimit);
  }

  void send(int rank, FrameType type, const std::string& body = {}) {
    std::string bytes = encode_frame(type, body);
    iovec part{bytes.data(), bytes.size()};
    CHECK(send_some(socket(rank), {&part, 1}).bytes == bytes.size());
  }
  void send_text(int rank) {
    send(rank, FrameType::exchange, BodyWriter().number(static_cast<int>(CallKind::exchange)).text("").body());
  }
  void send(int rank, FrameType type, const char* text) { send(rank, type, BodyWriter().text(text).body()); }
  void cut(int rank) { ranks_[static_cast<std::size_t>(rank)].close(); }
  /// Nothing is read until go_on(): then all that has come is read in one turn, rank 0's first.
  void stop() {
    wait_until_asleep(children_[0].pid);  // not in the middle of a turn
    kill(children_[0].pid, SIGSTOP);
    REQUIRE(waitpid(children_[0].pid, nullptr, WUNTRACED) == children_[0].pid);
  }
  void go_on() { kill(children_[0].pid, SIGCONT); }
  /// The messages that have come to this rank, at least one of them a failure if its connection does not end before.
  std::vector<Frame> told(int rank) {
    FrameReader reader(kLongestText);
    std::vector<Frame> frames;
    const auto is_failure = [](const Frame& frame) { return frame.type == FrameType::failure; };
    while (std::none_of(frames.begin(), frames.end(), is_failure)) {
      if (!wait_for(socket(rank), POLLIN, -1, Clock::now() + kFarLimit)) break;
      std::array<char, 4096> buffer;
      const IoResult result = receive_some(socket(rank), buffer.data(), buffer.size());
      if (result.state == IoResult::State::closed) break;
      reader.append({buffer.data(), result.bytes});
      while (auto frame = reader.next()) frames.push_back(*frame);
    }
    return frames;
  }
  std::string verdict(int rank) { return BodyReader(told(rank).back().body).text(); }

 private:
  int socket(int rank) const { return ranks_[static_cast<std::size_t>(rank)].value(); }
  std::vector<Child> children_;
  std::vector<FileDescriptor> ranks_;
};

}  // namespace

TEST_CASE("frames survive any cut, and what is no frame is told apart") {
  const std::string bytes = encode_frame(FrameType::exchange, BodyWriter().number(-5).text("abc").text("").body()) +
                            encode_frame(FrameType::beat);
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    FrameReader reader(1000);
    std::vector<Frame> frames;
    for (const std::string& part : {bytes.substr(0, cut), bytes.substr(cut)}) {
      reader.append(part);
      while (auto frame = reader.next()) frames.push_back(*frame);
    }
    REQUIRE(frames.size() == 2);
    BodyReader body(frames[0].body);
    CHECK(body.number() == -5);
    CHECK(body.text() == "abc");
    CHECK(body.text() == "");
    CHECK(body.complete());
    CHECK(frames[1].type == FrameType::beat);
  }
  const auto fault_of = [](std::string text) {
    FrameReader reader(10);
    reader.append(text);
    CHECK_FALSE(reader.next());
    return reader.fault();
  };
  CHECK(fault_of("G") == FrameReader::Fault::foreign);
  CHECK(fault_of(encode_frame(FrameType::beat, "12345678901")) == FrameReader::Fault::too_long);
  CHECK(fault_of(encode_frame(FrameType::beat).substr(0, 15)) == FrameReader::Fault::none);
  BodyReader truncated(std::string_view("\5\0\0\0\0\0\0\0ab", 10));
  CHECK(truncated.text() == "");
  CHECK_FALSE(truncated.complete());
}

TEST_CASE("the store survives whatever is sent to it") {
  FileDescriptor listener = listen_tcp(0, "127.0.0.1");
  const int port = port_of(listener.value());
  const ProcessStore store(std::move(listener), {3, "key", 300ms, 300ms, 300ms});
  std::mt19937 random(3);
  const std::string hello = encode_frame(FrameType::hello, encode_hello({"key", 3, 1, {"h", "", 1}}));
  for (int i = 0; i < 300; ++i) {
    Connected connected = connect_tcp("127.0.0.1", port, Clock::now() + 1s, -1);
    REQUIRE(connected.socket.is_open());
    std::string bytes = i % 3 == 0 ? std::string() : hello;
    for (int frame = 0; frame < 3; ++frame) {
      bytes +=
          encode_frame(static_cast<FrameType>(random() % 8), std::string(random() % 40, static_cast<char>(random())));
    }
    if (i % 2 == 0) bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    iovec part{bytes.data(), random() % bytes.size() + 1};
    send_some(connected.socket.value(), {&part, 1});
    if (i % 5 == 0) wait_for(connected.socket.value(), POLLIN, -1, Clock::now() + 2ms);
  }
}

TEST_CASE("of all that the store has read the cause is told, not what follows from it, in whichever order it reads") {
  using Send = std::function<void(StoreOfThree&)>;
  const Send abort = [](StoreOfThree& it) { it.send(2, FrameType::failure, "rank 2 aborted: disk full"); };
  const Send goodbye = [](StoreOfThree& it) { it.send(2, FrameType::goodbye); };
  const Send cut_off = [](StoreOfThree& it) { it.cut(2); };  // it has not read its welcome: a reset
  const Send symptom = [](StoreOfThree& it) { it.send(1, FrameType::symptom, "rank 1 lost its connection to rank 2"); };
  const Send wait = [](StoreOfThree& it) { it.send_text(0); };
  const Send peer_leaves = [](StoreOfThree& it) { it.send(1, FrameType::goodbye); };
  const Send peer_dies = [](StoreOfThree& it) { it.cut(1); };
  struct Case {
    std::vector<Send> sent;
    std::string told;
  };
  const std::vector<Case> cases = {
      {{abort, symptom}, "rank 2 aborted: disk full"},
      {{abort, goodbye, symptom}, "rank 2 aborted: disk full"},
      {{abort, goodbye, cut_off, symptom}, "rank 2 aborted: disk full"},
      {{wait, abort, peer_leaves}, "rank 2 aborted: disk full"},
      {{abort, peer_dies}, "rank 2 aborted: disk full"},
      {{cut_off, symptom}, "rank 2 ended without leaving"},
      {{wait, cut_off, symptom, peer_leaves}, "rank 2 ended without leaving"},
      {{symptom}, "rank 1 lost its connection to rank 2"},
      {{wait, peer_leaves}, "rank 1 left while rank 0 waited in exchange"},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(i);
    StoreOfThree store;
    store.stop();
    for (const Send& send : cases[i].sent) send(store);
    store.go_on();
    CHECK_THAT(store.verdict(0), HasText(cases[i].told));
  }
}

TEST_CASE("a failed job has no more exchanges, though the last text comes after the failure") {
  StoreOfThree store;
  store.stop();
  store.send_text(0);
  store.send_text(1);
  store.send(2, FrameType::failure, "rank 2 aborted: disk full");
  store.send_text(2);
  store.go_on();
  std::vector<Frame> told = store.told(0);
  store.send(0, FrameType::goodbye);  // answered by the end of the connection, after whatever was sent before
  for (Frame& frame : store.told(0)) told.push_back(std::move(frame));
  CHECK(BodyReader(told.back().body).text() == "rank 2 aborted: disk full");
  for (const Frame& frame : told) CHECK(frame.type != FrameType::texts);
}

TEST_CASE("a connection does not meet itself where nobody listens") {
  const std::string told = in_child([]() -> std::string {
    if (!enter_namespaces(CLONE_NEWNET)) return "not allowed";
    const FileDescriptor any(socket(AF_INET, SOCK_DGRAM, 0));
    ifreq loopback{};
    loopback.ifr_name[0] = 'l';
    loopback.ifr_name[1] = 'o';
    loopback.ifr_flags = IFF_UP;
    // Two ports alone are given to sockets that ask for none: one in two connections to the first meets itself.
    std::ofstream range("/proc/sys/net/ipv4/ip_local_port_range");
    if (ioctl(any.value(), SIOCSIFFLAGS, &loopback) != 0 || !(range << "40000 40001" << std::flush))
      return "not allowed";
    for (int i = 0; i < 100; ++i) {
      const Connected connected = connect_tcp("127.0.0.1", 40000, Clock::now() + 1s, -1);
      if (connected.socket.is_open()) return "met itself";
      if (connected.error != "Connection refused" && connected.error != "Cannot assign requested address")
        return connected.error;
    }
    return "refused";
  });
  if (told == "not allowed") {
    WARN("no network namespaces here: skipped");
    return;
  }
  CHECK(told == "refused");
}
