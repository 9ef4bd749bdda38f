#include "models/state_regimes.h"

#include <array>

namespace zeroplan {

std::span<const StateRegime> state_regimes() {
  static constexpr std::array<StateRegime, 6> kRegimes{{
      {8, "16-bit weights 2, gradients 2, Adam 4", "bf16 throughout: no fp32 copy, sums lose small updates"},
      {12, "16-bit weights 2, gradients 2, Adam 8", "bf16 weights with fp32 Adam states"},
      {16, "16-bit weights 2, gradients 2, fp32 master 4, Adam 8 (or all of it in fp32)",
       "mixed precision; ZeRO's paper, FSDP with fp32 parameters"},
      {18, "as 16, with gradients summed in fp32", "accumulation, DeepSpeed's offload to the host"},
      {20, "as 16, with an fp32 copy of the gradients in the step", "DeepSpeed at stage 3 while Adam runs"},
      // Gradients, their flat copy and that in fp32 are there at once (deepspeed.md 4.6, 5.7).
      {22, "as 20, with a flat 16-bit copy of the gradients beside it", "DeepSpeed at stage 2 and 3, at its highest"},
  }};
  return kRegimes;
}

Bytes state_bytes(const ModelSpec& model, const StateRegime& regime) {
  const std::int64_t trained = model.trainable_parameters(), frozen = model.parameters() - trained;
  return Bytes(regime.bytes * static_cast<double>(trained)) + bytes_of(frozen, DType::bf16);
}

}  // namespace zeroplan
