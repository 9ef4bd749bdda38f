// Collectives between forked processes: bits against the naive loop over shared memory, over TCP and over both.

#include "runtime/process_communicator.h"

#include <signal.h>
#include <sys/time.h>

#include <array>
#include <thread>

#include "models/error.h"
#include "tests/process_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;

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
  bool ip6 = true;
  try {
    listen_tcp(0, "::1");
  } catch (const DeviceError&) {
    ip6 = false;
    WARN("no IPv6 here: 127.0.0.1 instead of ::1");
  }
  const Outcome outcome = on_every_process(
      3,
      [](World& world) -> std::string {
        for (int i = 0; i < 100; ++i) {
          const std::string mark(static_cast<std::size_t>(i * i * 20), 'x');
          const auto texts = world.exchange(mark + std::to_string(world.rank()));
          if (texts != std::vector<std::string>{mark + "0", mark + "1", mark + "2"}) return "wrong texts";
        }
        const auto communicator = of_all(world);
        if (world.rank() == 1) std::this_thread::sleep_for(50ms);
        const auto begin = Clock::now();
        std::array<float, 3> values{};
        const auto came = communicator->all_reduce(view(values));
        bool right = came <= Clock::now();
        // One host has one clock.
        for (const std::string& theirs : world.exchange(std::to_string(begin.time_since_epoch().count())))
          right = right && came.time_since_epoch().count() >= std::stoll(theirs);
        return right ? "" : "wrong time";
      },
      [&](ProcessWorldOptions& options) {
        if (ip6) options.store_address = "::1";
      });
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

TEST_CASE("groups over several hosts share memory inside a host and use TCP between hosts") {
  for (const int ranks : {4, 5}) {
    const Scenario scenario = random_scenario(static_cast<unsigned>(40 + ranks), ranks, 6, 90'000);
    const Outcome outcome = on_every_process(
        ranks,
        [&](World& world) {
          std::int64_t balance = 0;
          return run_scenario(world, scenario, balance);
        },
        [&](ProcessWorldOptions& options) { options.host = options.rank % 2 == 0 ? "even" : "odd"; });
    CAPTURE(ranks);
    CHECK(outcome.ended);
    CHECK(outcome.texts == nothing(ranks));
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
