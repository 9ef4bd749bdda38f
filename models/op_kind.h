#pragma once

#include <cstdint>
#include <string_view>

#include "models/model_spec.h"
#include "models/schedule.h"

namespace zeroplan {

/// What an op is to people who compare prediction and measurement: ops of one kind cost alike.
enum class OpKind : std::uint8_t {
  matmul,  // linears and the loss head's products
  attention,
  norm,
  rotary,
  activation,
  embedding,
  loss,  // cross-entropy and its gradient
  sum,   // residual sums, gradients of two consumers, accumulation over micro-steps
  routing,
  gradient_norm,
  clear,
  adam,
  all_gather,
  reduce_scatter,
  all_reduce,
  h2d,
  d2h,
  nvme_read,
  nvme_write,
  bookkeeping,  // Alloc, Free and Join: predicted to take no time
};
inline constexpr int kNumOpKinds = 20;
/// "matmul", "all-gather", "NVMe read", "Adam".
std::string_view to_string(OpKind kind);

/// Throws std::logic_error on a graph op that `model` does not have.
OpKind op_kind(const Work& work, const ModelSpec& model);

}  // namespace zeroplan
