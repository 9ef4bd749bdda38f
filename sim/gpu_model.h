#pragma once
// Times of single kernels on one GPU, from its datasheet, its best sustained matmul rate and the fitted shape curves.

#include <cstdint>
#include <string>
#include <vector>

#include "models/assumption.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/units.h"
#include "sim/efficiency_tables.h"

namespace zeroplan {

/// What a kernel asks of its GPU. `sm_time` and `hbm_time` are the times that the whole of the SMs, or the whole of the
/// memory bandwidth, would be busy if that alone were the limit: a kernel that shares neither takes alone().
struct KernelCost {
  Seconds latency;  // launch and drain; shares nothing
  Seconds sm_time;
  Seconds hbm_time;
  Seconds alone() const { return latency + (sm_time > hbm_time ? sm_time : hbm_time); }
  friend bool operator==(const KernelCost&, const KernelCost&) = default;
};

/// What a matmul does with its result.
enum class GemmOutput : std::uint8_t {
  same,             // written in the type of the inputs
  fp32,             // written in fp32 (weight gradients)
  accumulate,       // added to a result of the inputs' type
  accumulate_fp32,  // added to an fp32 result
};

/// Which attention kernel runs. `best` is what our runtime uses on the GPU: cuDNN from Ampere on.
enum class AttentionKernel : std::uint8_t {
  best,
  flash_2,  // FlashAttention 2 and PyTorch's SDPA
  unfused,  // scores in memory: GPUs before Ampere, and `best` there
};

/// Pure and cheap: no query allocates. Sources: step-time.md section 2 and the fits (docs/cost-model.md).
class GpuModel {
 public:
  explicit GpuModel(const GpuSpec& gpu, const EfficiencyTables& tables = builtin_efficiency_tables());

  /// Whether matmuls of the type run on this GPU: a rate for it is known. Queries with another type throw
  /// std::logic_error, so callers ask first and refuse the plan.
  bool supports(DType type) const;

  /// [m, k] x [k, n]. Time = 2mnk / rate x (1 + k_ramp / k) / u^e, bounded by bytes / (fraction x W); u is the tile
  /// utilisation of the last wave. Sizes are taken to be multiples of 8: others run several times slower.
  KernelCost gemm(std::int64_t m, std::int64_t n, std::int64_t k, DType type,
                  GemmOutput output = GemmOutput::same) const;
  /// `groups` equal products in one kernel (experts): the tiles of all groups share the waves.
  KernelCost grouped_gemm(std::int64_t groups, std::int64_t m, std::int64_t n, std::int64_t k, DType type,
                          GemmOutput output = GemmOutput::same) const;

  /// Fused attention over `batch` sequences of `seq_len` tokens; `type` is bf16 or fp16.
  KernelCost attention_forward(const AttentionShape& shape, std::int64_t batch, std::int64_t seq_len, DType type,
                               AttentionKernel kernel = AttentionKernel::best) const;
  KernelCost attention_backward(const AttentionShape& shape, std::int64_t batch, std::int64_t seq_len, DType type,
                                AttentionKernel kernel = AttentionKernel::best) const;

  /// A kernel that streams: bytes read plus bytes written over 0.90 of the spec bandwidth.
  KernelCost memory_bound(Bytes traffic) const;
  /// One fused AdamW pass that reads and writes `traffic` in all (28 bytes a parameter with fp32 states, bf16 gradient
  /// and output), at 0.69 of the spec bandwidth.
  KernelCost adam(Bytes traffic) const;

  /// Sustained matmul rate of the engine in that type at a large shape: the curve's engine fraction x the measured
  /// rate.
  FlopsPerSecond matmul_rate(DType type) const;
  /// Sustained 16-bit matmul over the dense peak: measured, or of the GPU's kind.
  double sustained_share() const { return sustained_; }
  /// From one kernel to the next on a full stream.
  Seconds launch_latency() const;
  /// Where rates and curves came from, for the report.
  std::vector<Assumption> assumptions() const;

 private:
  FlopsPerSecond peak(DType type) const;
  KernelCost attention(const AttentionShape& shape, std::int64_t batch, std::int64_t seq_len, DType type,
                       AttentionKernel kernel, bool backward) const;
  AttentionKernel resolve(AttentionKernel kernel) const;

  FlopsPerSecond peak_bf16_, peak_fp16_, peak_fp32_;  // 0: not supported
  BytesPerSecond memory_bandwidth_;
  double num_sms_ = 0;
  double sustained_ = 0;  // of the dense 16-bit peak
  bool sustained_measured_ = false;
  bool sms_assumed_ = false;
  bool has_flash_ = false;  // tensor cores and shared memory that flash kernels need
  bool hopper_or_later_ = false;
  GemmShapeCurve gemm_curve_;
  Seconds gemm_latency_;
  double gemm_memory_fraction_ = 0;  // of the spec bandwidth
  AttentionCurve attention_curve_;
  double attention_scale_ = 1;  // sustained rate over that of the curve's GPU
  std::string name_, arch_, sustained_source_;
  FlopsPerSecond measured_;
};

/// Throws InputError, worded for --precision, when GpuModel does not support the type on this GPU.
void require_matmuls(const GpuSpec& gpu, DType type);

}  // namespace zeroplan
