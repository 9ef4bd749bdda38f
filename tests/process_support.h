#pragma once
// Runs a body once for each rank in a forked process and collects what the bodies say. Each job has its own port;
// children die with the test.

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "runtime/process_communicator.h"
#include "runtime/sockets.h"
#include "tests/catch.h"
#include "tests/communicator_support.h"

namespace zeroplan::tests {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Transport = ProcessWorldOptions::Transport;

/// Tests of a job's end show that it does not come by a limit, which is far off: a busy machine takes its time.
constexpr auto kFarLimit = 60s;
constexpr double kNotByLimit = 40;  // seconds

/// A port that nobody listens on. As long as this lives the system gives it to nobody else, here or in another program;
/// who asks for it by number gets it.
class ReservedPort {
 public:
  ReservedPort() {
    sockaddr_in6 all{};
    all.sin6_family = AF_INET6;
    sockaddr_in all4{};  // where there is no IPv6
    all4.sin_family = AF_INET;
    REQUIRE((take(reinterpret_cast<const sockaddr*>(&all), sizeof(all)) ||
             take(reinterpret_cast<const sockaddr*>(&all4), sizeof(all4))));
  }
  int number() const { return port_of(socket_.value()); }

 private:
  bool take(const sockaddr* address, socklen_t size) {
    const int yes = 1, no = 0;
    socket_ = FileDescriptor(socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    setsockopt(socket_.value(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    setsockopt(socket_.value(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
    return bind(socket_.value(), address, size) == 0;
  }
  FileDescriptor socket_;
};

/// Something that processes started after it wait for until one of them says that it is so.
class Gate {
 public:
  void open() { event_.signal(); }
  void wait() const { wait_for(event_.value(), POLLIN, -1, Clock::now() + kFarLimit); }

 private:
  StickyEvent event_;
};

/// Runs in a child; its text comes back to the parent.
using Body = std::function<std::string(World&)>;
using Options = std::function<void(ProcessWorldOptions&)>;

struct Child {
  pid_t pid = -1;
  FileDescriptor pipe;
  std::string text;
};

inline Child start(const std::function<std::string()>& run) {
  std::array<int, 2> ends{};
  REQUIRE(pipe2(ends.data(), O_CLOEXEC) == 0);
  Child child{fork(), FileDescriptor(ends[0]), {}};
  FileDescriptor write_end(ends[1]);
  if (child.pid != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::string text;
  try {
    text = run();
  } catch (const std::exception& error) {
    text = error.what();
  }
  (void)!write(write_end.value(), text.data(), text.size());
  _exit(0);
}

/// Until every thread of the process waits for something.
inline void wait_until_asleep(pid_t pid) {
  const std::filesystem::path tasks = "/proc/" + std::to_string(pid) + "/task";
  const auto asleep = [](const std::filesystem::directory_entry& task) {
    std::ifstream stat(task.path() / "stat");
    const std::string text((std::istreambuf_iterator<char>(stat)), {});
    return text.find(") S ") != std::string::npos;
  };
  while (!std::all_of(std::filesystem::directory_iterator(tasks), {}, asleep)) std::this_thread::sleep_for(1ms);
}

/// Reads until every child's pipe ended or the time is up; then kills and reaps what is left. True if nothing was left.
inline bool finish(std::vector<Child>& children, std::chrono::milliseconds limit,
                   std::vector<std::size_t> may_hang = {}) {
  const Deadline deadline = Clock::now() + limit;
  bool all_ended = true;
  for (std::size_t i = 0; i < children.size(); ++i) {
    Child& child = children[i];
    if (std::count(may_hang.begin(), may_hang.end(), i) != 0) continue;
    std::array<char, 4096> buffer;
    ssize_t got = -1;
    while (wait_for(child.pipe.value(), POLLIN, -1, deadline)) {
      got = read(child.pipe.value(), buffer.data(), buffer.size());
      if (got <= 0) break;
      child.text.append(buffer.data(), static_cast<std::size_t>(got));
    }
    all_ended = all_ended && got == 0;
  }
  for (const Child& child : children) {
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
  }
  return all_ended;
}

struct Outcome {
  std::vector<std::string> texts;  // what bodies returned or threw
  bool ended = false;              // all in time
  double seconds = 0;
};

/// One process for each rank. Limits are those of a hang; `adjust` may change them.
inline Outcome on_every_process(int ranks, const Body& body, const Options& adjust = {},
                                std::vector<std::size_t> may_hang = {}) {
  const auto begin = Clock::now();
  const ReservedPort port;
  std::vector<Child> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(start([&] {
      ProcessWorldOptions options;
      options.rank = rank;
      options.size = ranks;
      options.store_port = port.number();
      options.wait_limit = kFarLimit;
      options.connect_limit = kFarLimit;
      options.silence_limit = kFarLimit / 2;
      if (adjust) adjust(options);
      return body(*make_process_world(options));
    }));
  }
  Outcome outcome;
  outcome.ended = finish(children, 2 * kFarLimit, std::move(may_hang));
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const Child& child : children) outcome.texts.push_back(child.text);
  return outcome;
}

inline std::vector<std::string> nothing(int ranks) { return std::vector<std::string>(static_cast<std::size_t>(ranks)); }

inline std::unique_ptr<Communicator> of_all(World& world, int channel = 0) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.communicator(ranks, channel);
}

template <std::size_t N>
TensorView view(std::array<float, N>& values) {
  return {values.data(), static_cast<std::int64_t>(N), DType::fp32};
}

inline void reduce_for_ever(Communicator& communicator) {
  std::array<float, 4> values{};
  while (true) communicator.all_reduce(view(values));
}

inline void check_all(const Outcome& outcome, const std::string& text, std::vector<std::size_t> except = {}) {
  CHECK(outcome.ended);
  for (std::size_t rank = 0; rank < outcome.texts.size(); ++rank) {
    if (std::count(except.begin(), except.end(), rank) != 0) continue;
    CAPTURE(rank);
    CHECK_THAT(outcome.texts[rank], HasText(text));
  }
}

}  // namespace zeroplan::tests
