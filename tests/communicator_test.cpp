// Collectives between threads: bits against a naive loop, channels side by side, and every way in which a job ends.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "models/error.h"
#include "runtime/collective_sums.h"
#include "runtime/thread_communicator.h"
#include "tests/catch.h"
#include "tests/communicator_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;
using namespace std::chrono_literals;

namespace {

using Worlds = std::vector<std::unique_ptr<World>>;

/// Runs `body` once for each rank, on a thread of its own that owns its World. Returns the DeviceErrors by rank ("" for
/// none); any other exception ends the test program.
std::vector<std::string> on_every_rank(Worlds worlds, const std::function<void(World&)>& body) {
  std::vector<std::string> errors(worlds.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < worlds.size(); ++rank) {
    threads.emplace_back([&, rank, world = std::move(worlds[rank])] {
      try {
        body(*world);
      } catch (const DeviceError& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::vector<int> all_ranks(const World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::unique_ptr<Communicator> of_all(World& world, int channel = 0) {
  return world.communicator(all_ranks(world), channel);
}

template <std::size_t N>
TensorView view(std::array<float, N>& values, std::size_t count = N) {
  return {values.data(), static_cast<std::int64_t>(count), DType::fp32};
}

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TEST_CASE("thread collectives have the naive loop's bits on random calls") {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const Scenario scenario = random_scenario(static_cast<unsigned>(ranks), ranks, 12, 9000);
    std::mutex mutex;
    std::string wrong;
    std::int64_t balance = 0;
    const auto errors = on_every_rank(make_thread_worlds(ranks), [&](World& world) {
      std::int64_t own = 0;
      const std::string difference = run_scenario(world, scenario, own);
      const std::lock_guard lock(mutex);
      wrong += difference;
      balance += own;
    });
    CHECK(errors == std::vector<std::string>(static_cast<std::size_t>(ranks)));
    CHECK(wrong == "");
    CHECK(balance == 0);  // every byte sent was received
  }
}

TEST_CASE("sums round once, in rank order, and have one NaN") {
  const auto sum = [](std::vector<Bf16> values) {
    std::vector<const void*> sources;
    for (const Bf16& value : values) sources.push_back(&value);
    Bf16 result;
    void* const target[] = {&result};
    sum_in_order(sources, target, 1, DType::bf16);
    return result.bits;
  };
  const Bf16 big = narrow<Bf16>(256.0f), one = narrow<Bf16>(1.0f), nan = {0xffa5};
  // Rounded after each step, 256 + 1 stays 256.
  CHECK(sum({big, one, one}) == narrow<Bf16>(258.0f).bits);
  CHECK(sum({nan, one}) == 0x7fc0);
  CHECK(sum({Bf16{0x8000}, Bf16{0x8000}}) == 0x8000);  // -0 + -0
  const float order[] = {0x1p24f, 1.0f, 1.0f, -0x1p24f};
  float result = -1;
  const void* const sources[] = {&order[0], &order[1], &order[2], &order[3]};
  void* const target[] = {&result};
  sum_in_order(sources, target, 1, DType::fp32);
  CHECK(result == 0.0f);
}

TEST_CASE("every 16-bit number is summed to the same bits by all instruction sets") {
  // All pairs would take long: every value beside a few, and random fp32.
  std::mt19937 random(7);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    constexpr std::int64_t kCount = 65536 + 13;
    std::vector<std::uint32_t> a(kCount), b(kCount), c(kCount), fast(kCount), portable(kCount);
    for (std::int64_t i = 0; i < kCount; ++i) {
      const auto at = static_cast<std::size_t>(i);
      a[at] = static_cast<std::uint32_t>(dtype == DType::fp32 ? random() : 2 * i | (2 * i + 1) << 16);
      b[at] = static_cast<std::uint32_t>(random());
      c[at] = static_cast<std::uint32_t>(random());
    }
    const std::int64_t count = dtype == DType::fp32 ? kCount : 2 * kCount;
    const void* const sources[] = {a.data(), b.data(), c.data()};
    void* const to_fast[] = {fast.data()};
    void* const to_portable[] = {portable.data()};
    for (const std::size_t ranks : {1u, 2u, 3u}) {
      sum_in_order(std::span(sources).first(ranks), to_fast, count, dtype);
      sum_in_order(std::span(sources).first(ranks), to_portable, count, dtype, SumPath::portable);
      CHECK(fast == portable);
    }
  }
}

TEST_CASE("all_reduce and reduce_scatter form the same sums") {
  constexpr std::int64_t kShard = 5000;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    RandomCall call{RandomCall::Kind::reduce_scatter, dtype, kShard, false, 13};
    const auto errors = on_every_rank(make_thread_worlds(3), [&](World& world) {
      const auto communicator = of_all(world);
      const ByteVector shard = run_call(*communicator, call);
      ByteVector whole = input_of(call, world.rank(), 3 * kShard);
      communicator->all_reduce({whole.data(), 3 * kShard, dtype});
      if (!std::equal(shard.begin(), shard.end(),
                      whole.data() + shard.size() * static_cast<std::size_t>(world.rank()))) {
        throw DeviceError("other bits");
      }
    });
    CHECK(errors == std::vector<std::string>(3));
  }
}

TEST_CASE("channels of one rank run side by side") {
  constexpr int kChannels = 3, kCalls = 300;
  std::atomic<int> wrong = 0;
  const auto errors = on_every_rank(make_thread_worlds(4), [&](World& world) {
    std::vector<std::unique_ptr<Communicator>> communicators;
    for (int channel = 0; channel < kChannels; ++channel) communicators.push_back(of_all(world, channel));
    std::vector<std::thread> threads;
    for (int channel = 0; channel < kChannels; ++channel) {
      threads.emplace_back([&, channel] {
        for (int call = 0; call < kCalls; ++call) {
          std::array<float, 8> values;
          values.fill(static_cast<float>(world.rank() + channel + call));
          communicators[static_cast<std::size_t>(channel)]->all_reduce(view(values));
          const float expected = static_cast<float>(4 * (channel + call) + 6);
          if (values !=
              std::array<float, 8>{expected, expected, expected, expected, expected, expected, expected, expected})
            ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  CHECK(errors == std::vector<std::string>(4));
  CHECK(wrong == 0);
}

TEST_CASE("every rank gets everybody's text, and the time at which the last came") {
  std::atomic<int> wrong = 0;
  std::array<Communicator::Clock::time_point, 3> begins;
  const auto errors = on_every_rank(make_thread_worlds(3), [&](World& world) {
    for (int i = 0; i < 200; ++i) {
      const std::string mark = std::to_string(i) + "/";
      const auto texts = world.exchange(mark + std::to_string(world.rank()));
      if (texts != std::vector<std::string>{mark + "0", mark + "1", mark + "2"}) ++wrong;
    }
    const auto communicator = of_all(world);
    if (world.rank() == 1) std::this_thread::sleep_for(50ms);
    begins[static_cast<std::size_t>(world.rank())] = Communicator::Clock::now();
    std::array<float, 3> values{};
    const auto came = communicator->all_reduce(view(values));
    if (came > Communicator::Clock::now() || came < std::ranges::max(begins)) ++wrong;
  });
  CHECK(errors == std::vector<std::string>(3));
  CHECK(wrong == 0);
}

TEST_CASE("arguments that cannot be right are refused before anybody waits") {
  const Worlds worlds = make_thread_worlds(1);
  World& world = *worlds[0];
  const auto communicator = of_all(world);
  std::array<float, 8> values{};
  std::array<std::int32_t, 2> integers{};
  CHECK_THROWS_AS(communicator->all_gather(view(values, 2), view(values, 3)), std::logic_error);
  CHECK_THROWS_AS(communicator->all_gather({values.data() + 1, 4, DType::fp32}, view(values, 4)), std::logic_error);
  CHECK_THROWS_AS(communicator->all_reduce({integers.data(), 2, DType::i32}), std::logic_error);
  CHECK_THROWS_AS(communicator->all_reduce({nullptr, 2, DType::fp32}), std::logic_error);
  CHECK_THROWS_AS(communicator->all_reduce({values.data(), -1, DType::fp32}), std::logic_error);
  CHECK_THROWS_AS(world.communicator(std::vector<int>{0, 1}, 0), std::logic_error);
  CHECK_THROWS_AS(world.communicator(std::vector<int>{}, 0), std::logic_error);
  CHECK_THROWS_AS(make_thread_worlds(0), std::logic_error);
  communicator->all_reduce(view(values));
}

TEST_CASE("calls that differ end the job and are named with their ranks") {
  struct Case {
    std::function<void(Communicator&)> call;
    std::string text;
  };
  std::array<float, 8> a{}, b{}, c{};
  const std::vector<Case> cases = {
      {[&](Communicator& it) { it.reduce_scatter(view(b, 4), view(c, 2)); },
       "rank 1 called reduce_scatter of 2 x fp32"},
      {[&](Communicator& it) { it.all_reduce(view(b, 5)); }, "rank 1 called all_reduce of 5 x fp32"},
      {[&](Communicator& it) {
         it.all_reduce({b.data(), 4, DType::bf16});
       },
       "rank 1 called all_reduce of 4 x bf16"},
  };
  for (const Case& other : cases) {
    const auto errors = on_every_rank(make_thread_worlds(2), [&](World& world) {
      const auto communicator = of_all(world, 7);
      if (world.rank() == 1) other.call(*communicator);
      communicator->all_reduce(view(a, 4));
    });
    for (const std::string& error : errors) {
      CHECK_THAT(error, HasText(other.text + " where rank 0 called all_reduce of 4 x fp32"));
      CHECK_THAT(error, HasText("channel 7"));
    }
  }
  const auto errors = on_every_rank(make_thread_worlds(2), [&](World& world) {
    if (world.rank() == 0) world.exchange("");
    of_all(world);
  });
  for (const auto& error : errors)
    CHECK_THAT(error, HasText("rank 1 called communicator where rank 0 called exchange"));
}

TEST_CASE("groups on which the ranks disagree are named on every rank") {
  const auto errors = on_every_rank(make_thread_worlds(3), [&](World& world) {
    const std::vector<int> pair{0, 1}, all{0, 1, 2};
    world.communicator(world.rank() == 0 ? pair : all, 0);
  });
  for (const std::string& error : errors) CHECK_THAT(error, HasText("where rank 1 made a group of ranks 0, 1 and 2"));
}

TEST_CASE("an abort ends waiting and later calls, and names the rank and its reason") {
  const double seconds = seconds_of([] {  // the limit of a wait is 60
    const auto errors = on_every_rank(make_thread_worlds(4), [](World& world) {
      const auto first = of_all(world, 0), second = of_all(world, 1);
      std::array<float, 4> values{};
      if (world.rank() == 3) {
        std::this_thread::sleep_for(20ms);
        world.abort("disk full");
      } else if (world.rank() == 2) {
        world.exchange("waits as well");
      } else {
        (world.rank() == 0 ? first : second)->all_reduce(view(values));
      }
      first->all_reduce(view(values));
    });
    for (const std::string& error : errors) CHECK_THAT(error, HasText("rank 3 aborted: disk full"));
  });
  CHECK(seconds < 40);
}

TEST_CASE("a rank that leaves ends the calls that need it, and no others") {
  std::atomic<bool> pair_done = false;
  const auto errors = on_every_rank(make_thread_worlds(3), [&](World& world) {
    const std::vector<int> pair{0, 1}, alone{2};
    auto communicator = world.communicator(world.rank() == 2 ? alone : pair, 0);
    std::array<float, 4> values{};
    if (world.rank() == 2) return;  // needs nobody, and nobody needs it
    for (int i = 0; i < 50; ++i) communicator->all_reduce(view(values));
    pair_done = true;
    if (world.rank() == 1) return;
    communicator->all_reduce(view(values));
  });
  CHECK(pair_done);
  CHECK_THAT(errors[0], HasText("rank 1 left while rank 0 waited in all_reduce of 4 x fp32"));
  CHECK(errors[1] == "");
  CHECK(errors[2] == "");
}

TEST_CASE("a call that waits too long names who is missing") {
  std::atomic<bool> gave_up = false;
  const auto errors = on_every_rank(make_thread_worlds(4, 2s), [&](World& world) {
    const auto communicator = of_all(world);
    std::array<float, 4> values{};
    if (world.rank() % 2 == 1) gave_up.wait(false);  // the others call, and nobody comes
    try {
      communicator->all_reduce(view(values));
    } catch (const DeviceError&) {
      gave_up = true;
      gave_up.notify_all();
      throw;
    }
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, HasText("waited 2 s in all_reduce of 4 x fp32"));
    CHECK_THAT(error, HasText("for ranks 1 and 3"));
  }
}

TEST_CASE("memory is not read after its call failed") {
  // Ranks abort at random moments while others copy out of their tensors, which are freed at once: for the sanitizers.
  for (unsigned seed = 0; seed < 20; ++seed) {
    const auto errors = on_every_rank(make_thread_worlds(4), [&](World& world) {
      const auto communicator = of_all(world);
      std::mt19937 random(seed * 4 + static_cast<unsigned>(world.rank()));
      const int calls = 5 + static_cast<int>(random() % 40);
      for (int i = 0; i < calls; ++i) {
        std::vector<float> values(3000, 1.0f);
        communicator->all_reduce({values.data(), 3000, DType::fp32});
      }
      if (random() % 2) world.abort("enough");
      throw DeviceError("done");
    });
    for (const std::string& error : errors) CHECK(error != "");
  }
}
