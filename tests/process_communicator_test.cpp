// Collectives between forked processes: bits against the naive loop over shared memory and over TCP, and every way in
// which a job ends. Each case has its own port; children die with the test.

#include "runtime/process_communicator.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include "models/error.h"
#include "runtime/frames.h"
#include "runtime/process_store.h"
#include "runtime/sockets.h"
#include "tests/catch.h"
#include "tests/communicator_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Transport = ProcessWorldOptions::Transport;

namespace {

int free_port() { return port_of(listen_tcp(0, "127.0.0.1").value()); }

/// Runs in a child; its text comes back to the parent.
using Body = std::function<std::string(World&)>;
using Options = std::function<void(ProcessWorldOptions&)>;

struct Child {
  pid_t pid = -1;
  FileDescriptor pipe;
  std::string text;
};

Child start(const std::function<std::string()>& run) {
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

/// Reads until every child's pipe ended or the time is up; then kills and reaps what is left. True if nothing was left.
bool finish(std::vector<Child>& children, std::chrono::milliseconds limit, std::vector<std::size_t> may_hang = {}) {
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

/// One process for each rank. Limits are short; `adjust` may change them.
Outcome on_every_process(int ranks, const Body& body, const Options& adjust = {},
                         std::vector<std::size_t> may_hang = {}) {
  const auto begin = Clock::now();
  const int port = free_port();
  std::vector<Child> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(start([&] {
      ProcessWorldOptions options;
      options.rank = rank;
      options.size = ranks;
      options.store_port = port;
      options.wait_limit = 5s;
      options.connect_limit = 5s;
      options.silence_limit = 3s;
      if (adjust) adjust(options);
      return body(*make_process_world(options));
    }));
  }
  Outcome outcome;
  outcome.ended = finish(children, 15s, std::move(may_hang));
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const Child& child : children) outcome.texts.push_back(child.text);
  return outcome;
}

std::vector<std::string> nothing(int ranks) { return std::vector<std::string>(static_cast<std::size_t>(ranks)); }

std::unique_ptr<Communicator> of_all(World& world, int channel = 0) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.communicator(ranks, channel);
}

template <std::size_t N>
TensorView view(std::array<float, N>& values) {
  return {values.data(), static_cast<std::int64_t>(N), DType::fp32};
}

void reduce_for_ever(Communicator& communicator) {
  std::array<float, 4> values{};
  while (true) communicator.all_reduce(view(values));
}

/// Ends this process's connections other than those with the store, as a broken network would.
void cut_links(int store_port) {
  for (int fd = 3; fd < 256; ++fd) {
    sockaddr_in address{};
    socklen_t length = sizeof(address);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) continue;
    if (address.sin_family == AF_INET && ntohs(address.sin_port) != store_port && port_of(fd) != store_port) {
      shutdown(fd, SHUT_RDWR);
    }
  }
}

void check_all(const Outcome& outcome, const std::string& text, std::vector<std::size_t> except = {}) {
  CHECK(outcome.ended);
  for (std::size_t rank = 0; rank < outcome.texts.size(); ++rank) {
    if (std::count(except.begin(), except.end(), rank) != 0) continue;
    CAPTURE(rank);
    CHECK_THAT(outcome.texts[rank], HasText(text));
  }
}

}  // namespace

TEST_CASE("process collectives have the naive loop's bits on random calls") {
  for (const Transport transport : {Transport::automatic, Transport::tcp}) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      if (transport == Transport::tcp && ranks % 2 == 0) continue;
      const Scenario scenario = random_scenario(static_cast<unsigned>(ranks), ranks, 12, 9000);
      const Outcome outcome = on_every_process(
          ranks,
          [&](World& world) {
            std::int64_t balance = 0;
            const std::string difference = run_scenario(world, scenario, balance);
            std::int64_t total = 0;
            for (const std::string& text : world.exchange(std::to_string(balance))) total += std::stoll(text);
            return total == 0 ? difference : difference + " bytes were lost";
          },
          [&](ProcessWorldOptions& options) { options.transport = transport; });
      CAPTURE(ranks, static_cast<int>(transport));
      CHECK(outcome.ended);
      CHECK(outcome.texts == nothing(ranks));
    }
  }
}

TEST_CASE("tensors of many pieces have the naive loop's bits") {
  for (const Transport transport : {Transport::automatic, Transport::tcp}) {
    const Outcome outcome = on_every_process(
        3,
        [](World& world) {
          const auto communicator = of_all(world);
          using Kind = RandomCall::Kind;
          const RandomCall calls[] = {{Kind::all_gather, DType::bf16, 700'001, true, 1},
                                      {Kind::reduce_scatter, DType::bf16, 400'003, false, 2},
                                      {Kind::all_reduce, DType::fp16, 900'001, false, 3},
                                      {Kind::all_reduce, DType::fp32, 8191, false, 5},
                                      {Kind::all_reduce, DType::fp32, 8193, false, 6}};
          std::string wrong;
          for (const RandomCall& call : calls) {
            if (run_call(*communicator, call) != naive_result(call, 3, world.rank())) {
              wrong += "count " + std::to_string(call.count) + " ";
            }
          }
          return wrong;
        },
        [&](ProcessWorldOptions& options) { options.transport = transport; });
    CHECK(outcome.ended);
    CHECK(outcome.texts == nothing(3));
  }
}

TEST_CASE("thousands of small calls, and channels side by side") {
  const Outcome outcome = on_every_process(3, [](World& world) {
    constexpr int kCalls = 1000;
    std::array<std::unique_ptr<Communicator>, 3> communicators;
    for (int channel = 0; channel < 3; ++channel) {
      communicators[static_cast<std::size_t>(channel)] = of_all(world, channel);
    }
    std::array<int, 3> wrong{};
    std::vector<std::thread> threads;
    for (std::size_t channel = 0; channel < 3; ++channel) {
      threads.emplace_back([&, channel] {
        for (int call = 0; call < kCalls; ++call) {
          std::array<float, 2> values;
          values.fill(static_cast<float>(world.rank() + call));
          communicators[channel]->all_reduce(view(values));
          wrong[channel] += values[0] != static_cast<float>(3 * call + 3) || values[1] != values[0];
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return wrong == std::array<int, 3>{} ? "" : "wrong sums";
  });
  CHECK(outcome.ended);
  CHECK(outcome.texts == nothing(3));
}

TEST_CASE("every process gets everybody's text, and the time at which the last came") {
  const Outcome outcome = on_every_process(
      3,
      [](World& world) -> std::string {
        for (int i = 0; i < 100; ++i) {
          const std::string mark(static_cast<std::size_t>(i * i * 20), 'x');
          const auto texts = world.exchange(mark + std::to_string(world.rank()));
          if (texts != std::vector<std::string>{mark + "0", mark + "1", mark + "2"}) return "wrong texts";
        }
        const auto communicator = of_all(world);
        const auto begin = Clock::now();
        if (world.rank() == 1) std::this_thread::sleep_for(50ms);
        std::array<float, 3> values{};
        const auto came = communicator->all_reduce(view(values));
        const bool right = came <= Clock::now() && (world.rank() == 1 || came >= begin + 30ms);
        return right ? "" : "wrong time";
      },
      [](ProcessWorldOptions& options) { options.store_address = "::1"; });
  CHECK(outcome.ended);
  CHECK(outcome.texts == nothing(3));
}

TEST_CASE("signals do not disturb") {
  const Outcome outcome = on_every_process(
      3,
      [](World& world) {
        struct sigaction action {};
        action.sa_handler = [](int) {};  // and no SA_RESTART: system calls end with EINTR
        sigaction(SIGALRM, &action, nullptr);
        const itimerval often{{0, 500}, {0, 500}};
        setitimer(ITIMER_REAL, &often, nullptr);
        std::string wrong;
        for (unsigned seed = 0; seed < 3; ++seed) {
          std::int64_t balance = 0;
          wrong += run_scenario(world, random_scenario(seed, 3, 10, 20000), balance);
          world.exchange("");
        }
        return wrong;
      },
      [](ProcessWorldOptions& options) { options.transport = Transport::tcp; });
  CHECK(outcome.ended);
  CHECK(outcome.texts == nothing(3));
}

TEST_CASE("a killed process ends the job everywhere and is named") {
  for (const int victim : {0, 2}) {
    const Outcome outcome = on_every_process(4, [&](World& world) -> std::string {
      const auto communicator = of_all(world);
      const std::vector<int> others = victim == 0 ? std::vector<int>{1, 2, 3} : std::vector<int>{0, 1, 3};
      if (world.rank() == victim) {
        world.communicator(std::vector<int>{victim}, 1);
        std::this_thread::sleep_for(50ms);
        raise(SIGKILL);
      }
      // Rank 1 needs the victim; another waits in a text; the rest are busy among themselves.
      const auto rest = world.communicator(others, 1);
      if (world.rank() == 1) reduce_for_ever(*communicator);
      if (world.rank() == 3) world.exchange("");
      reduce_for_ever(*rest);
      return "";
    });
    check_all(outcome, victim == 0 ? "rank 0, which serves the store at 127.0.0.1" : "rank 2 ended without leaving",
              {static_cast<std::size_t>(victim)});
    CHECK(outcome.seconds < 8);
  }
}

TEST_CASE("a stopped process ends the job everywhere and is named") {
  for (const int victim : {0, 1}) {
    const Outcome outcome = on_every_process(
        3,
        [&](World& world) -> std::string {
          const auto communicator = of_all(world);
          if (world.rank() == victim) raise(SIGSTOP);
          reduce_for_ever(*communicator);
          return "";
        },
        [](ProcessWorldOptions& options) { options.silence_limit = 1s; }, {static_cast<std::size_t>(victim)});
    check_all(outcome, "has been silent", {static_cast<std::size_t>(victim)});
    check_all(outcome, victim == 0 ? "rank 0, which serves" : "rank 1 has", {static_cast<std::size_t>(victim)});
    CHECK(outcome.seconds < 8);
  }
}

TEST_CASE("a cut connection ends the job everywhere and is named") {
  const int port = free_port();
  const Outcome outcome = on_every_process(
      3,
      [&](World& world) -> std::string {
        const auto communicator = of_all(world);
        std::array<float, 4> values{};
        communicator->all_reduce(view(values));
        if (world.rank() == 1) cut_links(port);
        reduce_for_ever(*communicator);
        return "";
      },
      [&](ProcessWorldOptions& options) {
        options.transport = Transport::tcp;
        options.store_port = port;
      });
  check_all(outcome, "lost its connection to rank");
  check_all(outcome, outcome.texts[0]);  // one reason
}

TEST_CASE("an abort ends waiting and later calls of all processes") {
  const Outcome outcome = on_every_process(3, [](World& world) -> std::string {
    const auto communicator = of_all(world);
    if (world.rank() == 2) {
      std::this_thread::sleep_for(20ms);
      world.abort("disk full");
    }
    if (world.rank() == 1) world.exchange("waits");
    reduce_for_ever(*communicator);
    return "";
  });
  check_all(outcome, "rank 2 aborted: disk full");
}

TEST_CASE("a process that leaves ends the calls that need it, and no others") {
  const Outcome outcome = on_every_process(3, [](World& world) -> std::string {
    const std::vector<int> pair{1, 2}, alone{0};
    const auto communicator = world.communicator(world.rank() == 0 ? alone : pair, 0);
    if (world.rank() == 0) return "left early, but serves the store";
    std::array<float, 4> values{};
    for (int i = 0; i < 50; ++i) communicator->all_reduce(view(values));
    if (world.rank() == 2) return "done";
    communicator->all_reduce(view(values));
    return "";
  });
  CHECK(outcome.ended);
  CHECK(outcome.texts[0] == "left early, but serves the store");
  CHECK_THAT(outcome.texts[1], HasText("rank 2 left while rank 1 waited in all_reduce of 4 x fp32"));
  CHECK(outcome.texts[2] == "done");
  const Outcome exchange = on_every_process(3, [](World& world) -> std::string {
    if (world.rank() == 1) return "rank 1 left";
    return world.exchange("")[0];
  });
  check_all(exchange, "rank 1 left");
}

TEST_CASE("a call that waits too long names the processes that are missing") {
  const auto short_wait = [](ProcessWorldOptions& options) { options.wait_limit = 200ms; };
  const Outcome collective = on_every_process(
      4,
      [](World& world) -> std::string {
        const auto communicator = of_all(world);
        if (world.rank() % 2 == 1) std::this_thread::sleep_for(600ms);
        reduce_for_ever(*communicator);
        return "";
      },
      short_wait);
  check_all(collective,
            "waited 0.2 s in all_reduce of 4 x fp32 (channel 0 of ranks 0, 1, 2 and 3, call 0) for ranks 1 and 3");
  const Outcome text = on_every_process(
      3,
      [](World& world) -> std::string {
        if (world.rank() != 1) std::this_thread::sleep_for(600ms);
        return world.exchange("")[0];
      },
      short_wait);
  check_all(text, "rank 1 waited 0.2 s in exchange (all ranks, call 0) for ranks 0 and 2");
}

TEST_CASE("processes whose calls differ are named with both calls") {
  for (const Transport transport : {Transport::automatic, Transport::tcp}) {
    const auto adjust = [&](ProcessWorldOptions& options) { options.transport = transport; };
    const Outcome collective = on_every_process(
        3,
        [](World& world) -> std::string {
          const auto communicator = of_all(world, 7);
          std::array<float, 4> values{};
          std::array<float, 12> gathered{};
          if (world.rank() == 1) communicator->all_gather(view(values), view(gathered));
          reduce_for_ever(*communicator);
          return "";
        },
        adjust);
    check_all(collective, "called all_gather of 4 x fp32");
    check_all(collective, "called all_reduce of 4 x fp32");
    check_all(collective, "channel 7");
  }
  const Outcome text = on_every_process(2, [](World& world) -> std::string {
    if (world.rank() == 0) return world.exchange("")[0];
    of_all(world);
    return "";
  });
  check_all(text, "rank 1 called communicator where rank 0 called exchange");
}

TEST_CASE("a job whose ranks do not fit together does not form, and every rank hears why") {
  const Body nobody_runs = [](World&) -> std::string { return "formed"; };
  const Outcome size = on_every_process(3, nobody_runs, [](ProcessWorldOptions& options) {
    if (options.rank == 2) options.size = 4;
  });
  check_all(size, "is of 4 ranks, rank 0 of 3: wrong world size");
  const Outcome twice = on_every_process(3, nobody_runs, [](ProcessWorldOptions& options) {
    if (options.rank == 2) options.rank = 1;
  });
  check_all(twice, "two processes are rank 1");
  const Outcome key = on_every_process(3, nobody_runs, [](ProcessWorldOptions& options) {
    if (options.rank == 2) options.job_key = "plan 5";
  });
  check_all(key, "key \"plan 5\", this job's is \"zeroplan\"");
}

TEST_CASE("who speaks something else is turned away; a missing rank's error tells of it") {
  const int port = free_port();
  const Options adjust = [&](ProcessWorldOptions& options) {
    options.size = 3;
    options.store_port = port;
    options.connect_limit = 700ms;
  };
  Child browser = start([&] {
    Connected connected;
    while (!connected.socket.is_open()) connected = connect_tcp("127.0.0.1", port, Clock::now() + 1s, -1);
    std::string request = "GET / HTTP/1.1\r\n\r\n";
    iovec part{request.data(), request.size()};
    send_some(connected.socket.value(), {&part, 1});
    wait_for(connected.socket.value(), POLLIN, -1, Clock::now() + 5s);
    const IoResult result = receive_some(connected.socket.value(), request.data(), request.size());
    return std::string(result.state == IoResult::State::closed ? "turned away" : "served");
  });
  const Outcome outcome = on_every_process(
      2, [](World&) -> std::string { return "formed"; }, adjust);
  std::vector<Child> browsers;
  browsers.push_back(std::move(browser));
  CHECK(finish(browsers, 5s));
  CHECK(browsers[0].text == "turned away");
  check_all(outcome, "rank 2 did not come within 0.7 s; a process on 127.0.0.1 came that does not speak our protocol");
}

TEST_CASE("another protocol version, a taken port and a store that is not there are named") {
  const int port = free_port();
  const Outcome version = on_every_process(
      2, [](World&) -> std::string { return "formed"; },
      [&](ProcessWorldOptions& options) {
        options.store_port = port;
        if (options.rank == 0) return;
        Connected connected;
        while (!connected.socket.is_open()) connected = connect_tcp("127.0.0.1", port, Clock::now() + 1s, -1);
        std::string hello = encode_frame(FrameType::hello);
        hello[4] = 9;  // the version
        iovec part{hello.data(), hello.size()};
        send_some(connected.socket.value(), {&part, 1});
        wait_for(connected.socket.value(), POLLIN, -1, Clock::now() + 5s);
        std::string answer(1000, ' ');
        answer.resize(receive_some(connected.socket.value(), answer.data(), answer.size()).bytes);
        FrameReader reader(answer.size());
        reader.append(answer);
        throw DeviceError(BodyReader(reader.next().value().body).text());
      });
  check_all(version, "speaks version 9 of the protocol, rank 0 version 1");

  const FileDescriptor taken = listen_tcp(0, "127.0.0.1");
  ProcessWorldOptions options;
  options.store_port = port_of(taken.value());
  CHECK_THROWS_WITH(make_process_world(options),
                    HasText("rank 0's store: cannot listen on port") && HasText("Address already in use"));
  options.store_port = free_port();
  options.size = 2;
  options.rank = 1;
  options.connect_limit = 200ms;
  CHECK_THROWS_WITH(make_process_world(options), HasText("rank 1 did not reach rank 0's store at 127.0.0.1"));
}

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

TEST_CASE("the store listens on the port after MASTER_PORT") {
  RankEnvironment environment;
  environment.rank = 1;
  environment.size = 4;
  environment.master_address = "node03";
  environment.master_port = 1234;
  const ProcessWorldOptions options = process_world_options(environment);
  CHECK(options.rank == 1);
  CHECK(options.size == 4);
  CHECK(options.store_address == "node03");
  CHECK(options.store_port == 1235);
  environment.master_port = 65535;
  CHECK_THROWS_AS(process_world_options(environment), InputError);
}
