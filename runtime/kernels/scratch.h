#pragma once
// Working memory of the calling thread, kept between calls.

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeroplan {

/// Who uses it: two users that are active at once in one thread have different slots.
enum class ScratchSlot : std::uint8_t {
  gemm_a,
  gemm_b,
  gemm_c,
  scores,
  score_gradients,
  rows,
  key_gradient,
  value_gradient,
  order,
  count_,
};

/// At least `bytes` bytes, aligned to 64, contents undefined; valid until the thread asks for the same slot again.
void* scratch_bytes(ScratchSlot slot, std::size_t bytes);

template <class W>
std::span<W> scratch(ScratchSlot slot, std::int64_t count) {
  const auto size = static_cast<std::size_t>(count);
  return {static_cast<W*>(scratch_bytes(slot, size * sizeof(W))), size};
}

}  // namespace zeroplan
