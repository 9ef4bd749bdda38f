#include "runtime/disk.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "models/error.h"
#include "runtime/arena_memory.h"
#include "runtime/disk_queue.h"
#include "tests/catch.h"
#include "tests/child_process.h"

namespace zeroplan {
namespace {

using tests::HasText;
using tests::in_child;
using tests::TemporaryDirectory;
using Data = std::vector<std::byte>;

DiskOptions options_in(const TemporaryDirectory& directory) {
  DiskOptions options;
  options.directory = directory.path();
  return options;
}

Data random_data(std::mt19937& random, std::size_t size) {
  Data data(size);
  for (std::byte& b : data) b = static_cast<std::byte>(random());
  return data;
}

std::string all_notes(const DiskFile& file) {
  std::string text;
  for (const std::string& note : file.notes()) text += note + "\n";
  return text;
}

bool uring_here() {
  static const bool here = [] {
    const TemporaryDirectory directory;
    const std::vector<std::int64_t> sizes{4096};
    return DiskFile(options_in(directory), sizes).engine() == DiskEngine::uring;
  }();
  if (!here) WARN("io_uring is not available here: its part of the test is skipped");
  return here;
}

std::vector<DiskEngine> engines() {
  return uring_here() ? std::vector{DiskEngine::uring, DiskEngine::threads} : std::vector{DiskEngine::threads};
}

// --- against a model ---------------------------------------------------------------------------------

// Reads and writes random parts of its own buffers and compares with what it wrote.
class Player {
 public:
  Player(DiskFile& file, std::vector<std::int64_t> sizes, int first, int step, unsigned seed)
      : file_(file), random_(seed), memory_(Bytes(1 << 20), {"player", 256, false}) {
    memory_.mark_used(0, memory_.size());
    for (int b = first; b < static_cast<int>(sizes.size()); b += step)
      model_[b] = Data(static_cast<std::size_t>(sizes[static_cast<std::size_t>(b)]));
  }

  // Number of differences.
  int play(int rounds) {
    int wrong = 0;
    for (int i = 0; i < rounds; ++i) {
      auto it = std::next(model_.begin(), draw(static_cast<std::int64_t>(model_.size()) - 1));
      auto& [buffer, data] = *it;
      const auto size = static_cast<std::int64_t>(data.size());
      const std::int64_t step = draw(2) == 0 ? 1 : kDiskAlignment;  // a part may begin and end anywhere
      const std::int64_t begin = draw(size / step) * step;
      const std::int64_t end = draw(1) == 0 ? size : begin + draw((size - begin) / step) * step;
      if (draw(1) == 0)
        write(buffer, data, begin, end);
      else
        wrong += read(buffer, data, begin, end);
    }
    for (auto& [buffer, data] : model_) wrong += read(buffer, data, 0, static_cast<std::int64_t>(data.size()));
    return wrong;
  }

 private:
  std::int64_t draw(std::int64_t most) { return std::uniform_int_distribution<std::int64_t>(0, most)(random_); }

  // Buffers in arenas lie at multiples of 256; other memory is allowed too.
  std::span<std::byte> memory(std::int64_t size) {
    const std::int64_t step = draw(3) == 0 ? 1 : 256;
    return memory_.bytes(draw((memory_.size() - size) / step) * step, size);
  }

  void write(int buffer, Data& data, std::int64_t begin, std::int64_t end) {
    const std::span<std::byte> from = memory(end - begin);
    const auto salt = static_cast<unsigned>(random_());
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>((salt >> (i % 24)) + i);
    std::ranges::copy(from, data.begin() + begin);
    file_.write(buffer, begin, from);
  }

  int read(int buffer, const Data& data, std::int64_t begin, std::int64_t end) {
    const std::span<std::byte> to = memory(end - begin);
    std::ranges::fill(to, std::byte{0xee});
    file_.read(buffer, begin, to);
    return std::equal(to.begin(), to.end(), data.begin() + begin) ? 0 : 1;
  }

  DiskFile& file_;
  std::mt19937 random_;
  ArenaMemory memory_;
  std::map<int, Data> model_;
};

const std::vector<std::int64_t> kSizes{4096, 256, 0, 100'000, 8192, 1, 256 * 1001, 4097, 65'536, 4095, 300'032, 512};

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

struct Fault {
  enum class Kind { shorter, nothing, error, too_much, throws } kind = Kind::error;
  int code = 0;            // errno of an error
  std::int64_t bytes = 0;  // that a shorter transfer moves
};

// Threads with faults: `plan(n)` says what happens to the n-th request of this direction.
class FaultyBackend final : public DiskBackend {
 public:
  using Plan = std::function<std::optional<Fault>(int)>;
  FaultyBackend(const DiskTarget& target, Plan plan) : real_(make_thread_backend(target)), plan_(std::move(plan)) {}

  void submit(const DiskRequest& request) override {
    const std::optional<Fault> fault = plan_(count_++);
    if (!fault) return forward(request);
    switch (fault->kind) {
      case Fault::Kind::shorter: {
        DiskRequest less = request;
        less.size = std::min(request.size, fault->bytes);
        return forward(less);
      }
      case Fault::Kind::nothing:
        return made_up_.push_back({request.slot, 0});
      case Fault::Kind::error:
        return made_up_.push_back({request.slot, -fault->code});
      case Fault::Kind::too_much:
        return made_up_.push_back({request.slot, request.size + 1});
      case Fault::Kind::throws:
        throw DeviceError("the ring broke");
    }
  }

  void wait(std::vector<DiskCompletion>& done) override {
    done.insert(done.end(), made_up_.begin(), made_up_.end());
    const bool some = !made_up_.empty();
    made_up_.clear();
    if (some) return;
    const std::size_t before = done.size();
    real_->wait(done);
    in_flight_ -= static_cast<int>(done.size() - before);
  }

  ~FaultyBackend() override {
    if (in_flight_ != 0) std::terminate();  // an error must not leave anything in flight
  }

 private:
  void forward(const DiskRequest& request) {
    ++in_flight_;
    real_->submit(request);
  }
  std::unique_ptr<DiskBackend> real_;
  Plan plan_;
  std::vector<DiskCompletion> made_up_;
  int count_ = 0, in_flight_ = 0;
};

DiskFile::MakeBackend faulty(FaultyBackend::Plan plan) {
  return [plan = std::move(plan)](const DiskTarget& target) { return std::make_unique<FaultyBackend>(target, plan); };
}

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
  }
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

// --- the system refuses ------------------------------------------------------------------------------

TEST_CASE("Directories that are missing, no directory or read-only are the user's error") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{4096};
  DiskOptions options = options_in(directory);
  options.directory = directory.path() + "/missing";
  CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  CHECK_THROWS_WITH(DiskFile(options, sizes), HasText("/missing") && HasText("No such file or directory"));
  options.directory = directory.path() + "/file";
  std::ofstream(options.directory) << "text";
  CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  CHECK_THROWS_WITH(DiskFile(options, sizes), HasText("/file") && HasText("expected a directory"));
  std::filesystem::create_directory(directory.path() + "/locked");
  std::filesystem::permissions(directory.path() + "/locked", std::filesystem::perms{0555});
  const std::string denied = in_child([&] {
    tests::become_nobody();
    options.directory = directory.path() + "/locked";
    try {
      DiskFile file(options, sizes);
    } catch (const InputError& e) {
      return std::string("InputError ") + e.what();
    }
    return std::string("no error");
  });
  CHECK_THAT(denied, HasText("InputError") && HasText("/locked") && HasText("Permission denied"));
}

TEST_CASE("Impossible options are the user's error") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{4096};
  for (const int depth : {0, -1, 5000}) {
    DiskOptions options = options_in(directory);
    options.queue_depth = depth;
    CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  }
  for (const Bytes block : {0_B, 4095_B, 4097_B, 2_GiB, Bytes(4096.5), Bytes(-4096)}) {
    DiskOptions options = options_in(directory);
    options.block = block;
    CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  }
}

// What a DiskFile of this size says in a file system made for it, or "not allowed".
std::string on_new_disk(const std::string& directory, const char* type, const char* facts, std::int64_t size) {
  return in_child([&]() -> std::string {
    if (unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount(type, directory.c_str(), type, 0, facts) != 0)
      return "not allowed";
    DiskOptions options;
    options.directory = directory;
    const std::vector<std::int64_t> sizes{size};
    DiskFile file(options, sizes);
    const Data data(static_cast<std::size_t>(size), std::byte{3});
    Data back(data.size());
    file.write(0, 0, data);
    file.read(0, 0, back);
    return (back == data ? "works\n" : "differs\n") + all_notes(file);
  });
}

TEST_CASE("A disk that is too small is a device error with path, bytes asked and bytes free") {
  const TemporaryDirectory directory;
  const std::string fits = on_new_disk(directory.path(), "tmpfs", "size=2m", 1'000'000);
  if (fits == "not allowed") {
    WARN("no right to mount a small file system: skipped");
    return;
  }
  CHECK_THAT(fits, HasText("works"));
  CHECK_THAT(on_new_disk(directory.path(), "tmpfs", "size=2m", 3'000'000),
             HasText(directory.path() + "/zeroplan-rank0-") && HasText("3002368 bytes") &&
                 HasText("No space left on device") && HasText("2097152 bytes (") && HasText("free"));
}

TEST_CASE("Where there is no direct I/O the page cache serves, and a note says so") {
  const TemporaryDirectory directory;
  const std::string told = on_new_disk(directory.path(), "ramfs", "", 1'000'001);
  if (told == "not allowed") {
    WARN("no right to mount a file system without direct I/O: skipped");
    return;
  }
  CHECK_THAT(told, HasText("works") && HasText(directory.path()) && HasText("through the page cache"));
}

TEST_CASE("A limit of the file size is told before and while writing") {
  const TemporaryDirectory directory;
  for (const DiskEngine engine : engines()) {
    const auto limited = [&](rlim_t before, rlim_t after) {
      return in_child([&] {
        std::signal(SIGXFSZ, SIG_IGN);
        rlimit limit{before, RLIM_INFINITY};
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return std::string("no limit");
        DiskOptions options = options_in(directory);
        options.engine = engine;
        options.block = 64_KiB;
        const std::vector<std::int64_t> sizes{1'000'000};
        DiskFile file(options, sizes);
        limit.rlim_cur = after;
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return std::string("no limit");
        const Data data(1'000'000);
        file.write(0, 0, data);
        return std::string("written");
      });
    };
    CHECK(limited(RLIM_INFINITY, RLIM_INFINITY) == "written");
    CHECK_THAT(limited(500'000, 500'000), HasText("1003520 bytes") && HasText("RLIMIT_FSIZE) is 500000 bytes"));
    // Inside a block: the kernel first moves less, then nothing.
    CHECK_THAT(limited(RLIM_INFINITY, 500'000), HasText("zeroplan-rank0-") && HasText("File too large"));
  }
}

TEST_CASE("Where memory cannot be registered the transfers work without, and a note says so") {
  if (!uring_here()) return;
  const TemporaryDirectory directory;
  const std::string told = in_child([&] {
    rlimit limit{64 << 10, 64 << 10};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return std::string("no limit");
    tests::become_nobody();
    Data data(1 << 20, std::byte{3}), back(1 << 20);
    DiskOptions options = options_in(directory);
    options.engine = DiskEngine::uring;
    options.fixed_memory = {data};
    const std::vector<std::int64_t> sizes{1 << 20};
    DiskFile file(options, sizes);
    file.write(0, 0, data);
    file.read(0, 0, back);
    return (back == data ? "works\n" : "differs\n") + all_notes(file);
  });
  CHECK_THAT(told, HasText("works\n") && HasText("not registered") && HasText("RLIMIT_MEMLOCK"));
  CHECK(told.find("not registered") == told.rfind("not registered"));  // once for both directions
}

// From here on io_uring_setup returns `code`.
void forbid_uring(int code) {
  sock_filter steps[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(code)),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{static_cast<unsigned short>(std::size(steps)), steps};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw std::runtime_error("no seccomp");
}

TEST_CASE("Where io_uring is forbidden or unknown threads do the work, unless it was asked for by name") {
  if (!uring_here()) return;
  const TemporaryDirectory directory;
  for (const auto& [code, text] : std::map<int, std::string>{{EPERM, "Operation not permitted"},
                                                             {ENOSYS, "Function not implemented"},
                                                             {ENOMEM, "Cannot allocate memory"}}) {
    for (const DiskEngine engine : {DiskEngine::automatic, DiskEngine::uring}) {
      const std::string told = in_child([&, c = code] {
        forbid_uring(c);
        DiskOptions options = options_in(directory);
        options.engine = engine;
        const std::vector<std::int64_t> sizes{100'000};
        DiskFile file(options, sizes);
        Player player(file, sizes, 0, 1, 5);
        const int wrong = player.play(5);
        return std::string(to_string(file.engine())) + " " + std::to_string(wrong) + "\n" + all_notes(file);
      });
      if (engine == DiskEngine::automatic) {
        CHECK_THAT(told, HasText("threads 0\n") && HasText(text) && HasText("threads read and write instead"));
      } else {
        CHECK_THAT(told, HasText("io_uring_setup: " + text) && HasText("zeroplan-rank0-"));
      }
    }
  }
}

// --- processes and names -----------------------------------------------------------------------------

TEST_CASE("Two processes in one directory do not meet, and neither leaves a file behind") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{300'000};
  const auto play = [&](unsigned seed) {
    DiskFile file(options_in(directory), sizes);
    Player player(file, sizes, 0, 1, seed);
    return player.play(30);
  };
  const std::string result = in_child([&] {
    const pid_t second = fork();
    const int wrong = play(second == 0 ? 1 : 2);
    if (second == 0) _exit(wrong == 0 ? 0 : 1);
    int status = 0;
    waitpid(second, &status, 0);
    return std::to_string(wrong) + " " + std::to_string(status);
  });
  CHECK(result == "0 0");
  CHECK(directory.entries() == 0);
}

TEST_CASE("A killed process leaves no file behind") {
  const TemporaryDirectory directory;
  const std::string killed = in_child([&] {
    const std::vector<std::int64_t> sizes{300'000};
    DiskFile file(options_in(directory), sizes);
    file.write(0, 0, Data(300'000));
    std::raise(SIGKILL);
    return std::string();
  });
  CHECK(killed == "signal 9");
  CHECK(directory.entries() == 0);
}

TEST_CASE("A kept file stays with its contents, and is locked as long as it is in use") {
  const TemporaryDirectory directory;
  DiskOptions options = options_in(directory);
  options.keep = true;
  options.rank = 7;
  const std::vector<std::int64_t> sizes{5000, 300};
  std::string path;
  const auto lock = [&] {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    REQUIRE(descriptor >= 0);
    const bool locked = flock(descriptor, LOCK_EX | LOCK_NB) == 0;
    close(descriptor);
    return locked;
  };
  {
    DiskFile file(options, sizes);
    path = file.path();
    CHECK_THAT(path, HasText(directory.path() + "/zeroplan-rank7-"));
    file.write(0, 0, Data(5000, std::byte{'a'}));
    file.write(1, 0, Data(300, std::byte{'b'}));
    CHECK_FALSE(lock());
    DiskFile other(options, sizes);
    CHECK(other.path() != path);
  }
  CHECK(lock());
  CHECK(directory.entries() == 2);
  std::ifstream in(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  REQUIRE(text.size() == 12'288);
  CHECK(text.substr(0, 5000) == std::string(5000, 'a'));
  CHECK(text.substr(5000, 3192) == std::string(3192, '\0'));
  CHECK(text.substr(8192, 300) == std::string(300, 'b'));
}

TEST_CASE("A file that could not be made whole leaves no name, kept or not") {
  const TemporaryDirectory directory;
  for (const bool keep : {false, true}) {
    DiskOptions options = options_in(directory);
    options.keep = keep;
    const std::vector<std::int64_t> sizes{std::int64_t{1} << 60};
    CHECK_THROWS_AS(DiskFile(options, sizes), DeviceError);
    CHECK(directory.entries() == 0);
  }
}

}  // namespace
}  // namespace zeroplan
