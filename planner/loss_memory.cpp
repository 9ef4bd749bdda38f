#include "planner/loss_memory.h"

#include <map>

namespace zeroplan {

Bytes logits_bytes(std::int64_t tokens, std::int64_t vocabulary, DType type) {
  return Bytes(static_cast<double>(tokens) * static_cast<double>(vocabulary) * size_of(type));
}

LossBlocks loss_blocks(const EagerStep& step, TokenShape tokens, std::int64_t vocabulary) {
  LossBlocks best;
  const auto full =
      static_cast<std::int64_t>(logits_bytes(tokens.batch * tokens.seq_len, vocabulary, DType::fp32).base());
  best.block = Bytes(static_cast<double>(full));
  if (vocabulary == 0) return best;
  constexpr std::int64_t kRounding = 512;
  const auto alike = [](std::int64_t bytes, std::int64_t size) { return bytes >= size && bytes <= size + kRounding; };
  std::map<std::int32_t, bool> alive;  // storage: it is fp32
  int fp32 = 0, half = 0;
  bool backward = false;
  for (const EagerEvent& event : step.events) {
    if (event.kind == EagerEventKind::forward_end) backward = true;
    if (event.kind == EagerEventKind::alloc && (alike(event.bytes, full) || alike(event.bytes, full / 2))) {
      const bool wide = alike(event.bytes, full);
      alive[event.id] = wide;
      (wide ? fp32 : half) += 1;
    } else if (event.kind == EagerEventKind::free) {
      const auto found = alive.find(event.id);
      if (found == alive.end()) continue;
      (found->second ? fp32 : half) -= 1;
      alive.erase(found);
    }
    const Bytes held = best.block * (fp32 + half / 2.0);
    if (held > best.held) best.fp32 = fp32, best.half = half, best.held = held, best.in_backward = backward;
  }
  return best;
}

}  // namespace zeroplan
