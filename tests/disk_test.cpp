#include "runtime/disk.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "models/error.h"
#include "runtime/disk_queue.h"
#include "tests/disk_support.h"

namespace zeroplan {
namespace {

using tests::Data;
using tests::engines;
using tests::Fault;
using tests::faulty;
using tests::HasText;
using tests::kSizes;
using tests::options_in;
using tests::Player;
using tests::random_data;
using tests::TemporaryDirectory;

TEST_CASE("Random reads and writes from two threads agree with a model in memory") {
  const TemporaryDirectory directory;
  unsigned seed = 1;
  for (const DiskEngine engine : engines()) {
    for (const bool direct : {true, false}) {
      for (const auto& [depth, block] : std::vector<std::pair<int, double>>{{1, 4096}, {3, 8192}, {32, 65'536}}) {
        DiskOptions options = options_in(directory);
        options.engine = engine;
        options.direct = direct;
        options.queue_depth = depth;
        options.block = Bytes(block);
        DiskFile file(options, kSizes);
        CHECK(file.engine() == engine);
        // Neighbours in the file belong to different threads.
        Player even(file, kSizes, 0, 2, seed++), odd(file, kSizes, 1, 2, seed++);
        int wrong_even = -1, wrong_odd = -1;
        std::thread other([&] { wrong_odd = odd.play(60); });
        wrong_even = even.play(60);
        other.join();
        INFO(to_string(engine) << " direct " << direct << " depth " << depth << " block " << block);
        CHECK(wrong_even == 0);
        CHECK(wrong_odd == 0);
      }
    }
  }
}

TEST_CASE("What is read while something else is written is right, with registered memory") {
  const TemporaryDirectory directory;
  for (const DiskEngine engine : engines()) {
    ArenaMemory arena(Bytes(8 << 20), {"pinned", 4096, true});
    arena.mark_used(0, arena.size());
    arena.touch();
    DiskOptions options = options_in(directory);
    options.engine = engine;
    options.block = 64_KiB;
    options.fixed_memory = {arena.bytes(2 << 20, 6 << 20), arena.bytes(0, 2 << 20)};  // a transfer may lie in both
    constexpr std::int64_t kSize = (2 << 20) + 256;
    const std::vector<std::int64_t> sizes(4, kSize);
    DiskFile file(options, sizes);
    std::mt19937 random(7);
    const Data first = random_data(random, kSize), second = random_data(random, kSize);
    file.write(0, 0, first);
    const std::span<std::byte> out = arena.bytes((1 << 20) + 256, kSize), in = arena.bytes(5 << 20, kSize);
    std::ranges::copy(second, out.begin());
    std::atomic<int> wrong = 0;
    std::thread writer([&] {
      for (int i = 0; i < 12; ++i) file.write(1 + i % 3, 0, out);
    });
    for (int i = 0; i < 12; ++i) {
      std::ranges::fill(in, std::byte{});
      file.read(0, 0, in);
      if (!std::ranges::equal(in, first)) ++wrong;
    }
    writer.join();
    for (int b = 1; b < 4; ++b) {
      file.read(b, 0, in);
      if (!std::ranges::equal(in, second)) ++wrong;
    }
    CHECK(wrong == 0);
    CHECK(file.bytes_written() == 13 * kSize);
    CHECK(file.bytes_read() == 15 * kSize);
  }
}

TEST_CASE("Several parts move in one call, and threads that share a direction take turns") {
  const TemporaryDirectory directory;
  for (const DiskEngine engine : engines()) {
    DiskOptions options = options_in(directory);
    options.engine = engine;
    options.block = 16_KiB;
    const std::vector<std::int64_t> sizes{40'960, 50'000, 100, 0, 30'000, 30'000, 30'000, 30'000};
    DiskFile file(options, sizes);
    std::mt19937 random(3);
    const Data a = random_data(random, 40'960), b = random_data(random, 50'000), c = random_data(random, 100);
    const std::vector<DiskPart<const std::byte>> written{{0, 0, a}, {1, 0, b}, {2, 0, c}, {3, 0, {}}};
    file.write(written);
    Data x(40'960), y(50'000 - 8192), z(100);
    const std::vector<DiskPart<std::byte>> asked{{2, 0, z}, {0, 0, x}, {1, 8192, y}};
    file.read(asked);
    CHECK(x == a);
    CHECK(std::equal(y.begin(), y.end(), b.begin() + 8192));
    CHECK(z == c);
    file.read(std::span<const DiskPart<std::byte>>{});

    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 10; ++i) {
          const Data out(30'000, static_cast<std::byte>(16 * t + i));
          Data in(30'000);
          file.write(4 + t, 0, out);
          file.read(4 + t, 0, in);
          if (in != out) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE("A file starts with zeros; planned bytes and padding are told apart") {
  const TemporaryDirectory directory;
  DiskFile file(options_in(directory), kSizes);
  const std::int64_t planned = std::accumulate(kSizes.begin(), kSizes.end(), std::int64_t{0});
  CHECK(file.planned_bytes() == planned);
  CHECK((file.planned_bytes() + file.padding_bytes()) % kDiskAlignment == 0);
  CHECK(file.padding_bytes() == 3840 + 2400 + 4095 + 1792 + 4095 + 1 + 3072 + 3584);
  Data data(100'000, std::byte{1});
  file.read(3, 0, data);
  CHECK(std::ranges::all_of(data, [](std::byte b) { return b == std::byte{}; }));
  CHECK(file.bytes_read() == 100'000);
  CHECK(file.bytes_written() == 0);
  DiskFile empty(options_in(directory), {});
  CHECK(empty.planned_bytes() == 0);
  CHECK(empty.padding_bytes() == 0);
}

TEST_CASE("Ranges that leave a buffer are our bug") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{10'000, 4096};
  DiskFile file(options_in(directory), sizes);
  Data data(20'000);
  const auto part = [&](std::size_t size) { return std::span(data).first(size); };
  CHECK_THROWS_AS(file.write(0, 0, part(10'001)), std::logic_error);
  CHECK_THROWS_AS(file.read(0, 8192, part(1809)), std::logic_error);
  CHECK_THROWS_AS(file.read(0, -4096, part(10)), std::logic_error);
  CHECK_THROWS_AS(file.read(0, INT64_MAX, part(10)), std::logic_error);
  CHECK_THROWS_AS(file.read(2, 0, part(1)), std::logic_error);
  CHECK_THROWS_AS(file.read(-1, 0, part(1)), std::logic_error);
  const std::vector<DiskPart<const std::byte>> second_is_bad{{0, 0, part(4096)}, {1, 0, part(4097)}};
  CHECK_THROWS_AS(file.write(second_is_bad), std::logic_error);
  CHECK(file.bytes_written() == 0);  // nothing of it
  const std::vector<std::int64_t> negative{-1}, huge{INT64_MAX / 2, INT64_MAX / 2};
  CHECK_THROWS_AS(DiskFile(options_in(directory), negative), std::logic_error);
  CHECK_THROWS_AS(DiskFile(options_in(directory), huge), std::logic_error);
}

// --- injected faults ---------------------------------------------------------------------------------

TEST_CASE("Short transfers, EAGAIN and EINTR at random are mended") {
  const TemporaryDirectory directory;
  for (const bool direct : {true, false}) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      DiskOptions options = options_in(directory);
      options.direct = direct;
      options.block = 32_KiB;
      options.queue_depth = 4;
      const auto faults = std::make_shared<std::atomic<int>>(0);
      DiskFile file(options, kSizes, faulty([=](int n) -> std::optional<Fault> {
                      std::mt19937 random(seed * 100'000 + static_cast<unsigned>(n));
                      const unsigned die = random() % 8;
                      if (die > 2) return std::nullopt;
                      ++*faults;
                      if (die == 0) return Fault{Fault::Kind::error, EAGAIN, 0};
                      if (die == 1) return Fault{Fault::Kind::error, EINTR, 0};
                      // Direct I/O moves whole disk blocks of 512 bytes, the page cache any number.
                      const auto bytes =
                          static_cast<std::int64_t>(direct ? 512 * (1 + random() % 40) : 1 + random() % 20'000);
                      return Fault{Fault::Kind::shorter, 0, bytes};
                    }));
      Player player(file, kSizes, 0, 1, seed);
      CHECK(player.play(60) == 0);
      CHECK(*faults > 10);
    }
  }
}

TEST_CASE("An error that stays is named, nothing is left in flight, and the file works on") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{400'000, 4096};
  for (const auto& [fault, text] : std::vector<std::pair<Fault, std::string>>{
           {{Fault::Kind::error, EIO, 0}, "Input/output error"},
           {{Fault::Kind::error, ENOSPC, 0}, "No space left on device"},
           {{Fault::Kind::nothing, 0, 0}, "nothing was written"},
           {{Fault::Kind::too_much, 0, 0}, "more than asked"},
           {{Fault::Kind::error, EAGAIN, 0}, "no progress in 6 attempts: Resource temporarily unavailable"},
           {{Fault::Kind::error, EINTR, 0}, "no progress in 6 attempts: Interrupted system call"}}) {
    DiskOptions options = options_in(directory);
    options.block = 32_KiB;
    options.queue_depth = 5;
    options.stall_retries = 5;
    const auto broken = std::make_shared<std::atomic<bool>>(true);
    // From the fourth request on: the blocks before it are good.
    DiskFile file(options, sizes, faulty([=, f = fault](int n) -> std::optional<Fault> {
                    return *broken && n == 3 ? std::optional(f) : *broken && n > 6 ? std::optional(f) : std::nullopt;
                  }));
    const Data data(400'000, std::byte{5});
    if (fault.code == EAGAIN || fault.code == EINTR) {
      CHECK_THROWS_AS(file.write(0, 0, data), DeviceError);
      CHECK_THROWS_WITH(file.write(0, 0, data), HasText(text) && HasText(file.path()));
    } else {
      CHECK_THROWS_WITH(file.write(0, 0, data), HasText(text) && HasText(file.path()) &&
                                                    HasText("writing 32768 bytes") && HasText("at offset 98304"));
      CHECK_THROWS_AS(file.write(0, 0, data), DeviceError);
    }
    CHECK(file.bytes_written() == 0);
    *broken = false;
    file.write(0, 0, data);
    Data back(400'000);
    file.read(0, 0, back);
    CHECK(back == data);
  }
}

TEST_CASE("A read past a cut file is an error, not old data") {
  const TemporaryDirectory directory;
  for (const DiskEngine engine : engines()) {
    DiskOptions options = options_in(directory);
    options.engine = engine;
    options.keep = true;
    const std::vector<std::int64_t> sizes{100'000};
    DiskFile file(options, sizes);
    std::filesystem::resize_file(file.path(), 49'152);
    Data data(100'000);
    CHECK_THROWS_AS(file.read(0, 0, data), DeviceError);
    CHECK_THROWS_WITH(file.read(0, 0, data), HasText(file.path()) && HasText("the file ends here"));
    // A write behind the cut would make zeros of what lay between.
    const std::string cut = file.path() + ": the file ends at byte 49152 of 102401: somebody cut it";
    CHECK_THROWS_WITH(file.write(0, 65'536, std::span<const std::byte>(data).first(4096)), HasText(cut));
    Data front(4096);
    CHECK_THROWS_WITH(file.read(0, 0, front), HasText(cut));
    CHECK(std::filesystem::file_size(file.path()) == 49'152);
  }
}

TEST_CASE("A cut shows though the file's last buffer is written at that moment") {
  const TemporaryDirectory directory;
  DiskOptions options = options_in(directory);
  options.keep = true;
  const std::vector<std::int64_t> sizes{8192, 8192};
  std::string path;
  DiskFile file(options, sizes, faulty([&](int) -> std::optional<Fault> {
                  if (!path.empty()) std::filesystem::resize_file(path, 4096);  // after the file was looked at
                  return std::nullopt;
                }));
  Data data(8192, std::byte{1});
  file.write(0, 0, data);
  path = file.path();
  file.write(1, 0, data);
  path.clear();
  CHECK_THROWS_WITH(file.read(0, 0, data), HasText("the file ends at byte 16384 of 16385: somebody cut it"));
  CHECK_THROWS_AS(file.write(0, 0, data), DeviceError);
}

TEST_CASE("A backend that fails itself ends its direction for good, and says so") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{8192};
  DiskFile file(options_in(directory), sizes, faulty([](int n) -> std::optional<Fault> {
                  return n == 1 ? std::optional(Fault{Fault::Kind::throws, 0, 0}) : std::nullopt;
                }));
  Data data(8192);
  file.write(0, 0, data);
  CHECK_THROWS_AS(file.write(0, 0, data), DeviceError);
  CHECK_THROWS_WITH(file.write(0, 0, data), HasText(file.path()) && HasText("unusable since the ring broke"));
  file.read(0, 0, data);
}

}  // namespace
}  // namespace zeroplan
