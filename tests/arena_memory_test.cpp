#include "runtime/arena_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "models/error.h"
#include "runtime/numeric.h"
#include "tests/catch.h"
#include "tests/child_process.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace zeroplan {
namespace {

using tests::HasText;
using tests::in_child;

const std::string kSurvived = "survived";

// Writes one byte in a process of its own.
std::string poke(std::byte* address) {
  return in_child([&] {
    *const_cast<volatile std::byte*>(address) = std::byte{1};
    return kSurvived;
  });
}

std::int64_t resident_bytes(const ArenaMemory& arena) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(arena.data()) / page * page;
  const auto end =
      (reinterpret_cast<std::uintptr_t>(arena.data()) + static_cast<std::uintptr_t>(arena.size()) + page - 1) / page *
      page;
  std::vector<unsigned char> pages((end - begin) / page);
  REQUIRE(mincore(reinterpret_cast<void*>(begin), end - begin, pages.data()) == 0);
  std::int64_t resident = 0;
  for (const unsigned char p : pages) resident += (p & 1) != 0 ? static_cast<std::int64_t>(page) : 0;
  return resident;
}

TEST_CASE("An arena has exactly its size, zeros and its alignment") {
  for (const std::int64_t size : {std::int64_t{256}, std::int64_t{4096}, std::int64_t{12'800}, std::int64_t{5} << 20,
                                  (std::int64_t{9} << 20) + 256}) {
    for (const std::int64_t alignment : {std::int64_t{8}, std::int64_t{256}, std::int64_t{4096}}) {
      ArenaMemory arena(Bytes(static_cast<double>(size)), {"test", alignment, true});
      CHECK(arena.size() == size);
      CHECK(reinterpret_cast<std::uintptr_t>(arena.data()) % static_cast<std::uintptr_t>(alignment) == 0);
      arena.mark_used(0, size);
      bool zeros = true;
      for (const std::byte b : arena.all()) zeros = zeros && b == std::byte{};
      CHECK(zeros);
      arena.check_guards();
    }
  }
}

TEST_CASE("The bytes beside an arena fault") {
  ArenaMemory arena(Bytes(12'800), {"test", 256, false});  // not a whole number of pages
  arena.mark_used(0, arena.size());
  CHECK(poke(arena.data() + arena.size() - 1) == kSurvived);
  CHECK(poke(arena.data() + arena.size()) != kSurvived);
  CHECK(poke(arena.data() - 4096) != kSurvived);
  ArenaMemory pages(Bytes(8192), {"test", 4096, false});
  pages.mark_used(0, pages.size());
  CHECK(poke(pages.data()) == kSurvived);
  CHECK(poke(pages.data() - 1) != kSurvived);
  CHECK(poke(pages.data() + pages.size()) != kSurvived);
  ArenaMemory huge(Bytes(10 << 20), {"test", 256, true});
  huge.mark_used(0, huge.size());
  CHECK(poke(huge.data()) == kSurvived);
  CHECK(poke(huge.data() - 1) != kSurvived);
  CHECK(poke(huge.data() + huge.size()) != kSurvived);
}

#if !defined(__SANITIZE_ADDRESS__)  // it forbids the write itself
TEST_CASE("What is written between an arena and its guard pages is found") {
  ArenaMemory behind(Bytes(5000), {"host arena", 4096, false});
  std::byte& after = behind.data()[behind.size()];
  const std::byte before = after;
  after = std::byte{7};
  CHECK_THROWS_WITH(behind.check_guards(), HasText("host arena") && HasText("behind") && HasText("byte 5000"));
  after = before;
  behind.check_guards();
  ArenaMemory in_front(Bytes(512), {"host arena", 256, false});
  in_front.data()[-1] = std::byte{7};
  CHECK_THROWS_AS(in_front.check_guards(), std::logic_error);
  CHECK_THROWS_WITH(in_front.check_guards(), HasText("before") && HasText("byte -1 "));
}
#else
TEST_CASE("AddressSanitizer finds a use outside of live buffers") {
  ArenaMemory arena(Bytes(4096));
  CHECK(poke(arena.data()) != kSurvived);  // never handed out
  arena.mark_used(256, 512);
  CHECK(poke(arena.data() + 256) == kSurvived);
  CHECK(poke(arena.data() + 767) == kSurvived);
  CHECK(poke(arena.data() + 768) != kSurvived);
  CHECK(poke(arena.data() + 255) != kSurvived);
  arena.retire(256, 512);
  CHECK(poke(arena.data() + 256) != kSurvived);
  arena.mark_used(512, 256);
  CHECK(poke(arena.data() + 512) == kSurvived);
  arena.poison(512, 256);
  CHECK(poke(arena.data() + 512) != kSurvived);
}

TEST_CASE("AddressSanitizer forgets an arena that is gone") {
  std::byte* data = nullptr;
  {
    ArenaMemory arena(Bytes(64 << 10));
    data = arena.data();
    CHECK(__asan_address_is_poisoned(data) != 0);
  }
  CHECK(__asan_address_is_poisoned(data) == 0);
}
#endif

TEST_CASE("used() is the highest end of what was handed out, also from many threads") {
  ArenaMemory arena(Bytes(1 << 20));
  CHECK(arena.used() == 0);
  arena.mark_used(4096, 256);
  CHECK(arena.used() == 4352);
  arena.mark_used(0, 256);
  arena.retire(4096, 256);
  CHECK(arena.used() == 4352);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) arena.mark_used(256 * (4 * i + t), 256);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(arena.used() == 256 * 4000);
  arena.mark_used(arena.size() - 256, 256);
  CHECK(arena.used() == arena.size());
}

TEST_CASE("A poisoned buffer holds NaN in every float type and nothing else changes") {
  ArenaMemory arena(Bytes(4096));
  arena.mark_used(0, 4096);
  arena.poison(256, 512);
  arena.mark_used(256, 512);  // to look at it
  std::uint16_t half = 0;
  float single = 0;
  std::int32_t integer = 0;
  for (std::int64_t at = 256; at < 768; at += 4) {
    std::memcpy(&half, arena.data() + at, 2);
    std::memcpy(&single, arena.data() + at, 4);
    std::memcpy(&integer, arena.data() + at, 4);
    CHECK((half & 0x7c00) == 0x7c00);  // fp16: exponent of ones ...
    CHECK((half & 0x7f80) == 0x7f80);  // bf16
    CHECK((half & 0x007f) != 0);       // ... and a mantissa that is not zero
    CHECK(std::isnan(single));
    CHECK(integer == -1);
  }
  CHECK(arena.data()[255] == std::byte{});
  CHECK(arena.data()[768] == std::byte{});
}

TEST_CASE("A range outside of the arena is our bug") {
  ArenaMemory arena(Bytes(1024), {"rank 3, pinned", 256, false});
  CHECK(arena.bytes(256, 768).data() == arena.data() + 256);
  CHECK(arena.bytes(1024, 0).empty());
  for (const auto& [offset, count] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 1025}, {1024, 1}, {-1, 1}, {0, -1}, {1, INT64_MAX}, {INT64_MAX, 1}, {INT64_MIN, 1}}) {
    CHECK_THROWS_AS(arena.bytes(offset, count), std::logic_error);
    CHECK_THROWS_AS(arena.mark_used(offset, count), std::logic_error);
    CHECK_THROWS_AS(arena.retire(offset, count), std::logic_error);
    CHECK_THROWS_AS(arena.poison(offset, count), std::logic_error);
  }
  CHECK(arena.used() == 0);
  CHECK_THROWS_WITH(arena.bytes(512, 1024), HasText("rank 3, pinned") && HasText("1024 bytes from byte 512 on") &&
                                                HasText("arena of 1024 bytes"));
  CHECK_THROWS_AS(ArenaMemory(Bytes(-1)), std::logic_error);
  CHECK_THROWS_AS(ArenaMemory(Bytes(0.5)), std::logic_error);
  CHECK_THROWS_AS(ArenaMemory(Bytes(std::nan(""))), std::logic_error);
  CHECK_THROWS_AS(ArenaMemory(Bytes(256), {"test", 3, false}), std::logic_error);
}

TEST_CASE("Memory that the system has not got is a device error with the bytes asked") {
  CHECK_THROWS_AS(ArenaMemory(Bytes(0x1p50)), DeviceError);
  CHECK_THROWS_WITH(ArenaMemory(Bytes(0x1p50), {"rank 1, hbm", 256, true}),
                    HasText("rank 1, hbm") && HasText("1125899906842624 bytes") && HasText("Cannot allocate memory"));
}

TEST_CASE("An empty arena works like any other") {
  ArenaMemory arena;
  CHECK(arena.size() == 0);
  CHECK(arena.bytes(0, 0).empty());
  CHECK_THROWS_AS(arena.bytes(0, 1), std::logic_error);
  arena.touch();
  CHECK(arena.pin());
  arena.check_guards();
  CHECK(ArenaMemory(Bytes(0)).size() == 0);
}

TEST_CASE("Arenas move and leave an empty one behind") {
  ArenaMemory a(Bytes(8192), {"a", 256, false});
  a.mark_used(0, 4096);
  std::byte* data = a.data();
  data[17] = std::byte{42};
  ArenaMemory b(std::move(a));
  CHECK(b.data() == data);
  CHECK(b.used() == 4096);
  CHECK(a.size() == 0);
  CHECK(a.data() == nullptr);
  CHECK(a.used() == 0);
  ArenaMemory c(Bytes(256));
  c = std::move(b);
  CHECK(c.data()[17] == std::byte{42});
  c.check_guards();
  ArenaMemory& self = c;
  c = std::move(self);
  CHECK(c.size() == 8192);
}

TEST_CASE("touch() makes every page resident and changes nothing") {
  ArenaMemory arena(Bytes(8 << 20));
  arena.mark_used(0, arena.size());
  CHECK(resident_bytes(arena) < arena.size());
  arena.data()[5000] = std::byte{9};
  arena.touch();
  CHECK(resident_bytes(arena) >= arena.size());
  CHECK(arena.data()[5000] == std::byte{9});
  CHECK(arena.data()[5001] == std::byte{});
}

TEST_CASE("Pinning is refused with a reason, and the memory still works") {
  const std::string refused = in_child([] {
    rlimit limit{64 << 10, 64 << 10};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return std::string("no limit");
    tests::become_nobody();
    ArenaMemory arena(Bytes(1 << 20), {"rank 0, pinned", 4096, false});
    const bool pinned = arena.pin();
    arena.mark_used(0, 4096);
    arena.data()[0] = std::byte{1};
    return std::string(pinned || arena.pinned() ? "pinned" : arena.notes().empty() ? "silent" : arena.notes().front());
  });
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  WARN("sanitizers replace mlock by nothing: its refusal is not tested here");
#else
  CHECK_THAT(refused,
             HasText("rank 0, pinned") && HasText("1048576 bytes") && HasText("RLIMIT_MEMLOCK is 65536 bytes"));
#endif
  ArenaMemory small(Bytes(8192), {"test", 4096, false});
  CHECK(small.pin() == small.notes().empty());
}

}  // namespace
}  // namespace zeroplan
