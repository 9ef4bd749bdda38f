#include "runtime/arena_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "models/error.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#endif
#endif
#ifndef ASAN_POISON_MEMORY_REGION
#define ASAN_POISON_MEMORY_REGION(data, size) (static_cast<void>(data), static_cast<void>(size))
#define ASAN_UNPOISON_MEMORY_REGION(data, size) (static_cast<void>(data), static_cast<void>(size))
#endif

namespace zeroplan {
namespace {

constexpr std::byte kCanary{0xa5};
constexpr std::byte kPoison{0xff};
constexpr std::size_t kHugePage = std::size_t{2} << 20;  // x86-64 and most arm64 kernels; elsewhere a mere alignment
constexpr std::size_t kHugePagesFrom = 2 * kHugePage;

std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::string limit_text() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "RLIMIT_MEMLOCK is unlimited";
  return fmt::format("RLIMIT_MEMLOCK is {} bytes", limit.rlim_cur);
}

std::string gib_text(std::int64_t bytes) { return format_gib(Bytes(static_cast<double>(bytes))); }

// Both look at bytes that AddressSanitizer holds for poisoned.
#define ZEROPLAN_SEES_POISON __attribute__((no_sanitize("address")))

// Other threads may write meanwhile: an atomic addition of zero changes nothing.
ZEROPLAN_SEES_POISON void touch_pages(std::byte* begin, std::size_t size, std::size_t page) {
  for (std::size_t at = 0; at < size; at += page)
    __atomic_fetch_add(reinterpret_cast<unsigned char*>(begin + at), 0, __ATOMIC_RELAXED);
}

// The first byte that is no canary, or the end.
ZEROPLAN_SEES_POISON std::size_t first_overwritten(std::span<const std::byte> slack) {
  const std::byte* data = slack.data();
  std::size_t at = 0;
  while (at < slack.size() && data[at] == kCanary) ++at;
  return at;
}

}  // namespace

ArenaMemory::ArenaMemory(Bytes size, ArenaOptions options) : name_(options.name) {
  const auto alignment = static_cast<std::size_t>(options.alignment);
  if (size < Bytes{} || size.base() > 0x1p52 ||
      size.base() != static_cast<double>(static_cast<std::int64_t>(size.base())))
    throw std::logic_error(fmt::format("{}: an arena of {} bytes", name_, size.base()));
  if (options.alignment < 8 || (alignment & (alignment - 1)) != 0 || alignment > page_size())
    throw std::logic_error(fmt::format("{}: alignment {}", name_, options.alignment));
  size_ = static_cast<std::int64_t>(size.base());
  if (size_ == 0) return;
  place(options);
}

// [guard | slack, arena, slack | guard]: the whole is reserved first, then the middle is opened, which is when a system
// that counts its promises refuses.
void ArenaMemory::place(const ArenaOptions& options) {
  const std::size_t page = page_size(), alignment = static_cast<std::size_t>(options.alignment);
  const auto count = static_cast<std::size_t>(size_);
  const bool huge = options.huge_pages && count >= kHugePagesFrom;
  writable_size_ = round_up(count, page);
  mapped_ = writable_size_ + 2 * page + (huge ? kHugePage : 0);
  const auto refuse = [&](const char* call) {
    const int code = errno;
    release();
    throw DeviceError(
        fmt::format("{}: {} of {} bytes ({}): {}", name_, call, count, gib_text(size_), std::strerror(code)));
  };
  void* mapping = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) refuse("mmap");
  mapping_ = static_cast<std::byte*>(mapping);
  const auto first = reinterpret_cast<std::uintptr_t>(mapping_) + page;
  writable_ = mapping_ + page + ((huge ? round_up(first, kHugePage) : first) - first);
  if (mprotect(writable_, writable_size_, PROT_READ | PROT_WRITE) != 0) refuse("mprotect");
  if (huge && madvise(writable_, writable_size_, MADV_HUGEPAGE) != 0)
    notes_.push_back(fmt::format("{}: no huge pages: {}", name_, std::strerror(errno)));
  data_ = writable_ + (writable_size_ - count) / alignment * alignment;
  std::ranges::fill(slack_before(), kCanary);
  std::ranges::fill(slack_behind(), kCanary);
  ASAN_POISON_MEMORY_REGION(writable_, writable_size_);
}

ArenaMemory::~ArenaMemory() { release(); }

void ArenaMemory::release() noexcept {
  if (mapping_ == nullptr) return;
  if (writable_ != nullptr) ASAN_UNPOISON_MEMORY_REGION(writable_, writable_size_);
  munmap(mapping_, mapped_);
  mapping_ = writable_ = data_ = nullptr;
}

ArenaMemory::ArenaMemory(ArenaMemory&& other) noexcept { *this = std::move(other); }

ArenaMemory& ArenaMemory::operator=(ArenaMemory&& other) noexcept {
  if (this == &other) return *this;
  release();
  name_ = std::move(other.name_);
  mapping_ = std::exchange(other.mapping_, nullptr);
  writable_ = std::exchange(other.writable_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  mapped_ = std::exchange(other.mapped_, 0);
  writable_size_ = std::exchange(other.writable_size_, 0);
  size_ = std::exchange(other.size_, 0);
  used_ = other.used_.exchange(0);
  pinned_ = std::exchange(other.pinned_, false);
  notes_ = std::move(other.notes_);
  return *this;
}

std::span<std::byte> ArenaMemory::bytes(std::int64_t offset, std::int64_t count) const {
  if (offset < 0 || count < 0 || count > size_ || offset > size_ - count)
    throw std::logic_error(
        fmt::format("{}: {} bytes from byte {} on, of an arena of {} bytes", name_, count, offset, size_));
  return all().subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(count));
}

void ArenaMemory::touch() {
  if (data_ == nullptr) return;
#ifdef MADV_POPULATE_WRITE
  if (madvise(writable_, writable_size_, MADV_POPULATE_WRITE) == 0) return;
  // Linux before 5.14 does not know the advice.
  if (errno != EINVAL)
    throw DeviceError(fmt::format("{}: {} bytes ({}) cannot be made resident: {}", name_, size_, gib_text(size_),
                                  std::strerror(errno)));
#endif
  touch_pages(writable_, writable_size_, page_size());
}

bool ArenaMemory::pin() {
  if (data_ == nullptr || pinned_) return true;
  pinned_ = mlock(writable_, writable_size_) == 0;
  if (!pinned_)
    notes_.push_back(fmt::format("{}: pinning {} bytes ({}) was refused: {} ({}); it stays pageable", name_, size_,
                                 gib_text(size_), std::strerror(errno), limit_text()));
  return pinned_;
}

void ArenaMemory::mark_used(std::int64_t offset, std::int64_t count) {
  const std::span<std::byte> range = bytes(offset, count);
  ASAN_UNPOISON_MEMORY_REGION(range.data(), range.size());
  const std::int64_t end = offset + count;
  std::int64_t seen = used_.load(std::memory_order_relaxed);
  while (seen < end && !used_.compare_exchange_weak(seen, end, std::memory_order_relaxed)) {
  }
}

void ArenaMemory::retire(std::int64_t offset, std::int64_t count) {
  const std::span<std::byte> range = bytes(offset, count);
  ASAN_POISON_MEMORY_REGION(range.data(), range.size());
}

void ArenaMemory::poison(std::int64_t offset, std::int64_t count) {
  const std::span<std::byte> range = bytes(offset, count);
  ASAN_UNPOISON_MEMORY_REGION(range.data(), range.size());
  std::ranges::fill(range, kPoison);
  ASAN_POISON_MEMORY_REGION(range.data(), range.size());
}

std::span<std::byte> ArenaMemory::slack_before() const { return {writable_, data_}; }

std::span<std::byte> ArenaMemory::slack_behind() const { return {data_ + size_, writable_ + writable_size_}; }

void ArenaMemory::check_guards() const {
  if (data_ == nullptr) return;
  const auto check = [&](std::span<const std::byte> slack, const char* side) {
    const std::size_t at = first_overwritten(slack);
    if (at < slack.size())
      throw std::logic_error(
          fmt::format("{}: somebody wrote {} the arena, at byte {} of it", name_, side, slack.data() + at - data_));
  };
  check(slack_before(), "before");
  check(slack_behind(), "behind");
}

}  // namespace zeroplan
