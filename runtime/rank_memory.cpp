#include "runtime/rank_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "models/arena.h"
#include "models/error.h"

namespace zeroplan {
namespace {

/// The ops of a schedule in the order in which they run, repeated blocks written out.
std::vector<std::uint32_t> unfolded(const Schedule& schedule) {
  std::vector<std::uint32_t> order;
  const auto repeats = schedule.repeats();
  // Recursion over nested blocks, as Repeat describes them.
  const auto walk = [&](auto&& self, std::uint32_t begin, std::uint32_t end, std::size_t first) -> std::size_t {
    std::size_t r = first;
    for (std::uint32_t i = begin; i < end;) {
      if (r < repeats.size() && repeats[r].begin == i && repeats[r].end <= end) {
        std::size_t after = r + 1;
        for (std::int64_t k = 0; k < repeats[r].count; ++k) after = self(self, repeats[r].begin, repeats[r].end, r + 1);
        i = repeats[r].end;
        r = after;
      } else {
        order.push_back(i++);
      }
    }
    return r;
  };
  walk(walk, 0, static_cast<std::uint32_t>(schedule.ops().size()), 0);
  return order;
}

/// By flat buffer, the buffer of `folded` that stands for it: their ops have the same operands in the same order.
std::vector<std::uint32_t> folded_buffers(const Schedule& flat, const Schedule& folded) {
  std::vector<std::uint32_t> of(flat.buffers().size(), 0xffffffff);
  const auto order = unfolded(folded);
  if (order.size() != flat.ops().size()) throw std::logic_error("rank memory: folded and flat schedule differ");
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto a = flat.operands(flat.ops()[i]);
    const auto b = folded.operands(folded.ops()[order[i]]);
    if (a.size() != b.size()) throw std::logic_error("rank memory: folded and flat operands differ");
    for (std::size_t k = 0; k < a.size(); ++k) of[a[k].buffer.index] = b[k].buffer.index;
  }
  return of;
}

}  // namespace

RankMemory::RankMemory(const ModelSpec& model, const Plan& plan, const Schedule& flat, int rank,
                       const MemoryOptions& options)
    : flat_(flat), poison_(options.poison) {
  place(model, plan);
  make_arenas(rank, options);
  make_disk(rank, options);
  for (std::uint32_t i = 0; i < flat.buffers().size(); ++i) {
    if (flat.buffers()[i].lifetime == Lifetime::resident) born({i});
  }
}

void RankMemory::place(const ModelSpec& model, const Plan& plan) {
  const Schedule folded = lower(model, plan, Folding::micro_steps);
  const auto stands_for = folded_buffers(flat_, folded);
  offset_.assign(flat_.buffers().size(), -1);
  for (int m = 0; m < kNumMemories; ++m) {
    const ArenaLayout layout = lay_out(folded, static_cast<Memory>(m));
    planned_[static_cast<std::size_t>(m)] = static_cast<std::int64_t>(layout.size.base());
    for (std::size_t i = 0; i < offset_.size(); ++i) {
      // A buffer that no op touches (a state of a block that is never updated) has its place too: same index in both.
      const std::size_t twin = stands_for[i] == 0xffffffff ? i : stands_for[i];
      if (static_cast<int>(flat_.buffers()[i].memory) == m) offset_[i] = layout.offset.at(twin);
    }
  }
}

void RankMemory::make_arenas(int rank, const MemoryOptions& options) {
  for (const Memory memory : {Memory::hbm, Memory::pinned, Memory::dram}) {
    const std::int64_t size = planned(memory);
    if (size == 0) continue;
    ArenaOptions arena_options;
    arena_options.name = fmt::format("rank {}, {}", rank, to_string(memory));
    // Direct transfers want memory at the disk's own alignment; copies through other memory are slower.
    if (memory == Memory::pinned && planned(Memory::nvme) > 0) arena_options.alignment = kDiskAlignment;
    arena(memory) = ArenaMemory(Bytes(static_cast<double>(size)), arena_options);
    if (memory == Memory::pinned && options.pin) {
      arena(memory).pin();
    } else {
      arena(memory).touch();
    }
  }
}

void RankMemory::make_disk(int rank, const MemoryOptions& options) {
  disk_buffer_.assign(flat_.buffers().size(), -1);
  if (planned(Memory::nvme) == 0) return;
  if (options.nvme_directory.empty()) {
    throw InputError("the plan keeps states on NVMe: expected a directory for them (--nvme-dir DIR), found none");
  }
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < flat_.buffers().size(); ++i) {
    const Buffer& buffer = flat_.buffers()[i];
    if (buffer.memory != Memory::nvme) continue;
    if (buffer.lifetime != Lifetime::resident) throw std::logic_error("rank memory: a step buffer on disk");
    disk_buffer_[i] = static_cast<int>(sizes.size());
    sizes.push_back(static_cast<std::int64_t>(buffer.size.base()));
  }
  DiskOptions disk;
  disk.directory = options.nvme_directory;
  disk.rank = rank;
  disk.engine = options.disk_engine;
  disk.fixed_memory = {arena(Memory::pinned).all()};
  disk_ = options.disk_backend ? std::make_unique<DiskFile>(disk, sizes, options.disk_backend)
                               : std::make_unique<DiskFile>(disk, sizes);
}

std::span<std::byte> RankMemory::bytes(BufferId buffer) const {
  const Buffer& b = flat_.buffer(buffer);
  return arena(b.memory).bytes(offset_[buffer.index], static_cast<std::int64_t>(b.size.base()));
}

int RankMemory::disk_buffer(BufferId buffer) const {
  const int number = disk_buffer_.at(buffer.index);
  if (number < 0) throw std::logic_error("rank memory: a buffer that is not on disk");
  return number;
}

DiskFile& RankMemory::disk() const {
  if (disk_ == nullptr) throw std::logic_error("rank memory: no disk");
  return *disk_;
}

void RankMemory::born(BufferId buffer) {
  const Buffer& b = flat_.buffer(buffer);
  const auto size = static_cast<std::int64_t>(b.size.base());
  const std::int64_t offset = offset_[buffer.index];
  if (b.memory == Memory::nvme) {
    disk_used_ = std::max(disk_used_, offset + size);
  } else {
    arena(b.memory).mark_used(offset, size);
  }
}

void RankMemory::dead(BufferId buffer) {
  const Buffer& b = flat_.buffer(buffer);
  const auto size = static_cast<std::int64_t>(b.size.base());
  if (poison_) {
    arena(b.memory).poison(offset_[buffer.index], size);
  } else {
    arena(b.memory).retire(offset_[buffer.index], size);
  }
}

std::int64_t RankMemory::planned(Memory memory) const { return planned_[static_cast<std::size_t>(memory)]; }

std::int64_t RankMemory::used(Memory memory) const {
  return memory == Memory::nvme ? disk_used_ : arena(memory).used();
}

std::vector<std::string> RankMemory::notes() const {
  std::vector<std::string> all;
  for (const ArenaMemory& a : arenas_) all.insert(all.end(), a.notes().begin(), a.notes().end());
  if (disk_ != nullptr) all.insert(all.end(), disk_->notes().begin(), disk_->notes().end());
  return all;
}

}  // namespace zeroplan
