#include "runtime/kernels/scratch.h"

#include <array>
#include <memory>
#include <new>

namespace zeroplan {
namespace {

constexpr std::align_val_t kScratchAlignment{64};

struct Release {
  void operator()(std::byte* data) const { ::operator delete(data, kScratchAlignment); }
};
struct Block {
  std::unique_ptr<std::byte, Release> data;
  std::size_t size = 0;
};

}  // namespace

void* scratch_bytes(ScratchSlot slot, std::size_t bytes) {
  thread_local std::array<Block, static_cast<std::size_t>(ScratchSlot::count_)> blocks;
  Block& block = blocks[static_cast<std::size_t>(slot)];
  if (block.size < bytes) {
    block.data.reset();
    block.size = 0;
    block.data.reset(static_cast<std::byte*>(::operator new(bytes, kScratchAlignment)));
    block.size = bytes;
  }
  return block.data.get();
}

}  // namespace zeroplan
