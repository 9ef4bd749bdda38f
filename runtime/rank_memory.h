#pragma once
// One rank's memory: an arena for each memory that its schedule uses, with every buffer at the address that lay_out()
// gave it, and a file for what lives on disk.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/lower.h"
#include "models/schedule.h"
#include "runtime/arena_memory.h"
#include "runtime/disk.h"

namespace zeroplan {

struct MemoryOptions {
  std::string nvme_directory;  // needed by plans that keep states on disk
  DiskEngine disk_engine = DiskEngine::automatic;
  bool poison = false;                 // fills dead buffers with NaN patterns: finds use after Free
  bool pin = false;                    // locks the pinned arena in RAM
  DiskFile::MakeBackend disk_backend;  // for tests: who carries transfers out, instead of disk_engine
};

class RankMemory {
 public:
  /// Lays the arenas out as the planner does (on micro-steps folded), so that planned bytes are those it reported.
  /// `flat` is lower(model, plan, Folding::none). Throws InputError when the plan needs a disk and none is given;
  /// DeviceError when memory or disk space cannot be had.
  RankMemory(const ModelSpec& model, const Plan& plan, const Schedule& flat, int rank, const MemoryOptions& options);

  /// The bytes of a buffer in device, pinned or host memory. std::logic_error for one on disk.
  std::span<std::byte> bytes(BufferId buffer) const;
  /// The number of a buffer on disk, for disk().
  int disk_buffer(BufferId buffer) const;
  DiskFile& disk() const;
  bool has_disk() const { return disk_ != nullptr; }

  /// Alloc and Free of step buffers; resident ones are born with the object. born() counts what is used.
  void born(BufferId buffer);
  void dead(BufferId buffer);

  /// Bytes of the layout, and the highest end of a buffer that was handed out.
  std::int64_t planned(Memory memory) const;
  std::int64_t used(Memory memory) const;
  /// What the system refused (huge pages, pinning, O_DIRECT), for people.
  std::vector<std::string> notes() const;

 private:
  const ArenaMemory& arena(Memory memory) const { return arenas_[static_cast<std::size_t>(memory)]; }
  ArenaMemory& arena(Memory memory) { return arenas_[static_cast<std::size_t>(memory)]; }
  void place(const ModelSpec& model, const Plan& plan);
  void make_arenas(int rank, const MemoryOptions& options);
  void make_disk(int rank, const MemoryOptions& options);

  const Schedule& flat_;
  bool poison_;
  std::vector<std::int64_t> offset_;  // by flat buffer
  std::array<std::int64_t, kNumMemories> planned_{};
  std::array<ArenaMemory, kNumMemories> arenas_;
  std::unique_ptr<DiskFile> disk_;
  std::vector<int> disk_buffer_;  // by flat buffer; -1: not on disk
  std::int64_t disk_used_ = 0;
};

}  // namespace zeroplan
