// Every way in which a job of processes ends, or does not form: all ranks hear the same reason, in time.

#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <array>
#include <thread>

#include "models/error.h"
#include "runtime/frames.h"
#include "tests/process_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

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

/// A connection with the store, once it listens.
Connected connect_soon(int port) {
  Connected connected = connect_tcp("127.0.0.1", port, Clock::now() + kFarLimit, -1);
  while (!connected.socket.is_open()) {
    std::this_thread::sleep_for(5ms);
    connected = connect_tcp("127.0.0.1", port, Clock::now() + kFarLimit, -1);
  }
  return connected;
}

}  // namespace

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
    CHECK(outcome.seconds < kNotByLimit);
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
        [](ProcessWorldOptions& options) { options.silence_limit = 2s; }, {static_cast<std::size_t>(victim)});
    check_all(outcome, "has been silent", {static_cast<std::size_t>(victim)});
    check_all(outcome, victim == 0 ? "rank 0, which serves" : "rank 1 has", {static_cast<std::size_t>(victim)});
    CHECK(outcome.seconds < kNotByLimit);
  }
}

TEST_CASE("a cut connection ends the job everywhere and is named") {
  const ReservedPort port;
  const Outcome outcome = on_every_process(
      3,
      [&](World& world) -> std::string {
        const auto communicator = of_all(world);
        std::array<float, 4> values{};
        communicator->all_reduce(view(values));
        if (world.rank() == 1) cut_links(port.number());
        reduce_for_ever(*communicator);
        return "";
      },
      [&](ProcessWorldOptions& options) {
        options.transport = Transport::tcp;
        options.store_port = port.number();
      });
  check_all(outcome, "lost its connection to rank");
  check_all(outcome, outcome.texts[0]);  // one reason
}

TEST_CASE("an abort ends waiting and later calls of all processes") {
  // Often: the abort, and the end of the process that aborted, reach the others by two ways.
  for (int round = 0; round < 12; ++round) {
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
  const auto short_wait = [](ProcessWorldOptions& options) { options.wait_limit = 2s; };
  // Some ranks call, the others not before those have given up.
  const auto late = [](Gate& gave_up, bool calls, const std::function<std::string()>& call) {
    if (!calls) gave_up.wait();
    try {
      return call();
    } catch (...) {
      gave_up.open();
      throw;
    }
  };
  Gate collective_failed, text_failed;
  const Outcome collective = on_every_process(
      4,
      [&](World& world) {
        const auto communicator = of_all(world);
        return late(collective_failed, world.rank() % 2 == 0, [&]() -> std::string {
          reduce_for_ever(*communicator);
          return "";
        });
      },
      short_wait);
  check_all(collective,
            "waited 2 s in all_reduce of 4 x fp32 (channel 0 of ranks 0, 1, 2 and 3, call 0) for ranks 1 and 3");
  const Outcome text = on_every_process(
      3, [&](World& world) { return late(text_failed, world.rank() == 1, [&] { return world.exchange("")[0]; }); },
      short_wait);
  check_all(text, "rank 1 waited 2 s in exchange (all ranks, call 0) for ranks 0 and 2");
}

TEST_CASE("what came while a process was stopped is no time-out") {
  Gate calls;
  const Outcome outcome = on_every_process(
      2,
      [&](World& world) -> std::string {
        const auto communicator = of_all(world);
        const pid_t other = std::stoi(world.exchange(std::to_string(getpid()))[0]);
        std::array<float, 4> values{};
        if (world.rank() == 0) calls.open();
        if (world.rank() == 1) {
          calls.wait();
          wait_until_asleep(other);  // in the call
          kill(other, SIGSTOP);
        }
        communicator->all_reduce(view(values));  // rank 0 has sent all that rank 1 needs
        if (world.rank() == 1) {
          std::this_thread::sleep_for(2500ms);
          kill(other, SIGCONT);
        }
        return world.exchange("done")[0];
      },
      [](ProcessWorldOptions& options) { options.wait_limit = 2s; });
  check_all(outcome, "done");
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
  const ReservedPort port;
  const Options adjust = [&](ProcessWorldOptions& options) {
    options.size = 3;
    options.store_port = port.number();
    options.connect_limit = 3s;
  };
  Child browser = start([&] {
    const Connected connected = connect_soon(port.number());
    std::string request = "GET / HTTP/1.1\r\n\r\n";
    iovec part{request.data(), request.size()};
    send_some(connected.socket.value(), {&part, 1});
    wait_for(connected.socket.value(), POLLIN, -1, Clock::now() + kFarLimit);
    const IoResult result = receive_some(connected.socket.value(), request.data(), request.size());
    return std::string(result.state == IoResult::State::closed ? "turned away" : "served");
  });
  const Outcome outcome = on_every_process(
      2, [](World&) -> std::string { return "formed"; }, adjust);
  std::vector<Child> browsers;
  browsers.push_back(std::move(browser));
  CHECK(finish(browsers, kFarLimit));
  CHECK(browsers[0].text == "turned away");
  check_all(outcome, "rank 2 did not come within 3 s; a process on 127.0.0.1 came that does not speak our protocol");
}

TEST_CASE("another protocol version, a taken port and a store that is not there are named") {
  const ReservedPort port;
  const Outcome version = on_every_process(
      2, [](World&) -> std::string { return "formed"; },
      [&](ProcessWorldOptions& options) {
        options.store_port = port.number();
        if (options.rank == 0) return;
        const Connected connected = connect_soon(port.number());
        std::string hello = encode_frame(FrameType::hello);
        hello[4] = 9;  // the version
        iovec part{hello.data(), hello.size()};
        send_some(connected.socket.value(), {&part, 1});
        wait_for(connected.socket.value(), POLLIN, -1, Clock::now() + kFarLimit);
        std::string answer(1000, ' ');
        answer.resize(receive_some(connected.socket.value(), answer.data(), answer.size()).bytes);
        FrameReader reader(answer.size());
        reader.append(answer);
        throw DeviceError(BodyReader(reader.next().value().body).text());
      });
  check_all(version, fmt::format("speaks version 9 of the protocol, rank 0 version {}", kWireVersion));

  const FileDescriptor taken = listen_tcp(0, "127.0.0.1");
  ProcessWorldOptions options;
  options.store_port = port_of(taken.value());
  CHECK_THROWS_WITH(make_process_world(options),
                    HasText("rank 0's store: cannot listen on port") && HasText("Address already in use"));
  options.store_port = port.number();
  options.size = 2;
  options.rank = 1;
  options.connect_limit = 200ms;
  CHECK_THROWS_WITH(make_process_world(options), HasText("rank 1 did not reach rank 0's store at 127.0.0.1"));
}
