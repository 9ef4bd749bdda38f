#pragma once
// AdamW on the host, one pass over memory: gradient in, master and moments updated, 16-bit weights out. Scalar, AVX2
// and AVX-512 paths give the same bits: same order of operations, fused multiply-add everywhere, exact square root and
// divide.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "models/units.h"
#include "runtime/thread_pool.h"

namespace zeroplan {

struct AdamSettings {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.01;
};

/// One step, all in fp32 (equations of Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2, in PyTorch's order):
///   g = gradient x gradient_scale;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
///   p = p (1 - lr wd) - lr / (1 - beta1^step) x m / (sqrt(v) / sqrt(1 - beta2^step) + epsilon)
struct AdamScalars {
  float gradient_scale = 1;  // clip factor / loss scale
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  float decay = 1;               // 1 - learning rate x weight decay
  float step_size = 0;           // learning rate / (1 - beta1^step)
  float inverse_correction = 1;  // 1 / sqrt(1 - beta2^step)
  float epsilon = 0;
};
/// `step` counts from 1. Computed in fp64, rounded once.
AdamScalars adam_scalars(const AdamSettings& settings, std::int64_t step, double gradient_scale);

/// The states of a range of parameters. All arrays have the same count; pointers need only their element's alignment.
struct AdamRange {
  std::int64_t count = 0;
  const void* gradient = nullptr;  // gradient_type: bf16, fp16 or fp32
  DType gradient_type = DType::bf16;
  /// The fp32 master; fp32 weights are their own master. Null with a split master.
  float* master = nullptr;
  /// Split master, 16 bits a parameter less: master bits = (weights << 16) + remainder; weights round half up. Needs
  /// bf16 weights.
  std::int16_t* remainder = nullptr;
  void* first_moment = nullptr;  // moment_type: fp32 or bf16 (rounded to nearest even)
  void* second_moment = nullptr;
  DType moment_type = DType::fp32;
  void* weights = nullptr;  // 16-bit weights out (and in, with a split master); null with fp32 weights
  DType weights_type = DType::bf16;
};

enum class AdamPath : std::uint8_t { scalar, avx2, avx512 };
std::string_view to_string(AdamPath path);
/// Paths that this machine can run; the last one is what adam_step takes by itself.
std::vector<AdamPath> adam_paths();

/// Not-a-number in, or infinity minus infinity on the way, gives the quiet NaN 0x7fc00000 (0x7fc0, 0x7e00) in what it
/// touches, the same bits on every path; infinite gradients give NaN weights. The caller skips such steps (loss
/// scaling). Bits do not depend on the pool. Throws std::logic_error for types outside the lists above or a missing
/// array.
void adam_step(const AdamScalars& scalars, const AdamRange& range, ThreadPool& pool);
/// The same on one path, for tests and benchmarks. Throws std::logic_error if the machine cannot run it.
void adam_step(const AdamScalars& scalars, const AdamRange& range, ThreadPool& pool, AdamPath path);

/// Master of fp32 values: bf16 weights rounded half up and the remainder. NaN becomes 0x7fc0 and 0.
void split_master(std::span<const float> master, std::span<std::uint16_t> weights, std::span<std::int16_t> remainder);
/// The inverse; exact for every value that is not NaN.
void join_master(std::span<const std::uint16_t> weights, std::span<const std::int16_t> remainder,
                 std::span<float> master);

}  // namespace zeroplan
