#include "sim/gpu_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "models/error.h"
#include "sim/kernel_shapes.h"

namespace zeroplan {

namespace {

/// Spec memory bandwidth that bounds matmuls of thin shapes where the curve was not timed on the device (step-time.md
/// section 2).
constexpr double kGemmMemoryFraction = 0.85;

// Measured on one H200, 2026-11-30: docs/measurements/h200 (tests/tools/gpu_sweep.cu); every other GPU is taken to be
// alike.
/// Spec memory bandwidth that streaming kernels reach, and their start and drain in a graph: one line through cold
/// reads (0.955), copies (0.847) and additions (0.901) of 1 MiB to 4 GiB, 3.2 % mean error (memory.csv).
constexpr double kStreamMemoryFraction = 0.90;
constexpr Seconds kStreamStart = 1.8_us;
/// The same for fused AdamW, 28 bytes a parameter in eight streams: 2.0 % mean error (memory.csv).
constexpr double kAdamMemoryFraction = 0.69;
constexpr Seconds kAdamStart = 2.5_us;
/// What a kernel launched on a full stream waits more than one in a graph: median of six kernels, 0.80 to 1.02 us
/// (launch.csv, "full queue" less "graph replay").
constexpr Seconds kStreamLaunch = 0.9_us;
/// From one empty kernel that fills the SMs to the next on a full stream (launch.csv: 2.03 us with 1056 blocks; 1.37
/// with one block, 2.2 with a copy of 64 KiB). For kernels whose start and drain were not measured.
constexpr Seconds kLaunchSpacing = 2.0_us;
/// FlashAttention 2 and SDPA, fraction of the dense peak on the causal half: step-time.md section 2.
constexpr double kFlash2Ampere = 0.547;
constexpr double kFlash2Hopper = 0.48;
/// Unfused attention: rate on the full count, and bytes of score traffic a score forward (5 passes over 16-bit scores);
/// the backward moves 1.3 times as much. step-time.md section 2 (V100).
constexpr double kUnfusedEfficiency = 0.32;
constexpr double kScoreBytes = 10;
constexpr double kScoreBackward = 1.3;
/// SMs of a GPU whose count is not in the catalog: they only shape the last wave. B200's.
constexpr double kAssumedSms = 148;

int compute_major(const GpuSpec& gpu) {
  const auto dot = gpu.compute_capability.find('.');
  if (dot == std::string::npos || dot == 0 || gpu.compute_capability[0] < '0' || gpu.compute_capability[0] > '9')
    return 0;
  int major = 0;
  for (std::size_t i = 0; i < dot; ++i) major = 10 * major + (gpu.compute_capability[i] - '0');
  return major;
}

/// GeForce names are "RTX-" and a number; A6000, 6000-Ada and PRO are professional cards.
bool is_geforce(std::string_view name) {
  return name.starts_with("RTX-") && name.size() > 4 && name[4] >= '2' && name[4] <= '5';
}

std::string sustained_key(const GpuSpec& gpu) {
  if (gpu.vendor != "NVIDIA") return gpu.vendor;
  if (is_geforce(gpu.name)) return "NVIDIA GeForce";
  const std::string& capability = gpu.compute_capability;
  if (capability == "8.6" || capability == "8.9") return "NVIDIA professional 8.x";
  if (capability.starts_with("12.")) return "NVIDIA professional 12.x";
  if (gpu.arch.starts_with("Blackwell")) return "NVIDIA Blackwell";
  return "NVIDIA " + gpu.arch;
}

const SustainedFraction& sustained_fraction(const GpuSpec& gpu, const EfficiencyTables& tables) {
  for (const std::string& key : {sustained_key(gpu), gpu.vendor, std::string("NVIDIA")}) {
    const auto found = std::ranges::find(tables.sustained, key, &SustainedFraction::key);
    if (found != tables.sustained.end()) return *found;
  }
  throw std::logic_error("no sustained matmul fraction for NVIDIA in the tables");
}

/// The curve of the architecture; data-centre Blackwell has its own, everything else takes Ampere's.
template <class Curve>
const Curve& curve_for(const std::vector<Curve>& curves, std::string_view arch) {
  const auto found = std::ranges::find(curves, arch, &Curve::arch);
  if (found != curves.end()) return *found;
  const auto ampere = std::ranges::find(curves, "Ampere", &Curve::arch);
  if (ampere == curves.end()) throw std::logic_error("no Ampere curve in the tables");
  return *ampere;
}

std::string_view curve_arch(const GpuSpec& gpu, int major) {
  if (gpu.vendor != "NVIDIA") return "Ampere";
  return major == 10 ? "Blackwell" : major == 9 ? "Hopper" : "Ampere";
}

double output_bytes(GemmOutput output, DType type) {
  switch (output) {
    case GemmOutput::same:
      return size_of(type);
    case GemmOutput::fp32:
      return 4;
    case GemmOutput::accumulate:
      return 2 * size_of(type);
    case GemmOutput::accumulate_fp32:
      return 8;
  }
  return 0;
}

bool is_fp32(GemmOutput output) { return output == GemmOutput::fp32 || output == GemmOutput::accumulate_fp32; }

}  // namespace

GpuModel::GpuModel(const GpuSpec& gpu, const EfficiencyTables& tables)
    : peak_bf16_(gpu.peak_bf16.value_or(FlopsPerSecond())),
      peak_fp16_(gpu.peak_fp16.value_or(FlopsPerSecond())),
      peak_fp32_(gpu.peak_fp32.value_or(FlopsPerSecond())),
      memory_bandwidth_(gpu.memory_bandwidth),
      num_sms_(static_cast<double>(gpu.num_sms.value_or(0))),
      name_(gpu.name),
      arch_(gpu.arch),
      measured_(gpu.measured_matmul.value_or(FlopsPerSecond())) {
  const int major = compute_major(gpu);
  sms_assumed_ = num_sms_ <= 0;
  if (sms_assumed_) num_sms_ = kAssumedSms;
  has_flash_ = gpu.vendor != "NVIDIA" || major >= 8;
  hopper_or_later_ = gpu.vendor == "NVIDIA" && (major == 9 || major == 10);
  const FlopsPerSecond dense = peak_bf16_ > peak_fp16_ ? peak_bf16_ : peak_fp16_;
  sustained_measured_ = measured_ > FlopsPerSecond() && dense > FlopsPerSecond();
  if (sustained_measured_) {
    sustained_ = measured_ / dense;
  } else {
    const SustainedFraction& fraction = sustained_fraction(gpu, tables);
    sustained_ = fraction.fraction;
    sustained_source_ = fraction.source;
  }
  gemm_curve_ = curve_for(tables.gemm, curve_arch(gpu, major));
  attention_curve_ = curve_for(tables.attention, curve_arch(gpu, major));
  if (gemm_curve_.timed_on_device) {
    gemm_latency_ = kStreamLaunch + gemm_curve_.start;
    gemm_memory_fraction_ = gemm_curve_.memory_fraction;
  } else {
    gemm_latency_ = kLaunchSpacing;
    gemm_memory_fraction_ = kGemmMemoryFraction;
  }
  attention_scale_ = std::min(1.0, sustained_) / attention_curve_.sustained;
}

FlopsPerSecond GpuModel::peak(DType type) const {
  switch (type) {
    case DType::bf16:
      return peak_bf16_;
    case DType::fp16:
      return peak_fp16_;
    case DType::fp32:
      return peak_fp32_;
    case DType::u8:
    case DType::i32:
    case DType::i64:
      return {};
  }
  return {};
}

bool GpuModel::supports(DType type) const { return peak(type) > FlopsPerSecond(); }

FlopsPerSecond GpuModel::matmul_rate(DType type) const {
  const FlopsPerSecond dense = peak(type);
  if (!(dense > FlopsPerSecond())) throw std::logic_error("GpuModel: no matmul rate for this type; ask supports()");
  return dense * (gemm_curve_.engine_fraction * sustained_);
}

KernelCost GpuModel::gemm(std::int64_t m, std::int64_t n, std::int64_t k, DType type, GemmOutput output) const {
  return grouped_gemm(1, m, n, k, type, output);
}

KernelCost GpuModel::grouped_gemm(std::int64_t groups, std::int64_t m, std::int64_t n, std::int64_t k, DType type,
                                  GemmOutput output) const {
  if (groups <= 0 || m <= 0 || n <= 0 || k <= 0) return {};
  const double g = static_cast<double>(groups);
  const double rows = static_cast<double>(m), columns = static_cast<double>(n), inner = static_cast<double>(k);
  const double utilisation = tile_utilisation(g, rows, columns, num_sms_);
  const double shape = (1 + gemm_curve_.k_ramp / inner) / std::pow(utilisation, gemm_curve_.tile_exponent) *
                       (is_fp32(output) ? 1 + gemm_curve_.fp32_penalty : 1) /
                       (groups > 1 ? gemm_curve_.grouped_factor : 1);
  const Flops flops(2 * g * rows * columns * inner);
  const Bytes traffic(g * (size_of(type) * inner * (rows + columns) + rows * columns * output_bytes(output, type)));
  return {gemm_latency_, flops / matmul_rate(type) * shape, traffic / (memory_bandwidth_ * gemm_memory_fraction_)};
}

AttentionKernel GpuModel::resolve(AttentionKernel kernel) const {
  return has_flash_ ? kernel : AttentionKernel::unfused;
}

KernelCost GpuModel::attention_forward(const AttentionShape& shape, std::int64_t batch, std::int64_t seq_len,
                                       DType type, AttentionKernel kernel) const {
  return attention(shape, batch, seq_len, type, resolve(kernel), false);
}

KernelCost GpuModel::attention_backward(const AttentionShape& shape, std::int64_t batch, std::int64_t seq_len,
                                        DType type, AttentionKernel kernel) const {
  return attention(shape, batch, seq_len, type, resolve(kernel), true);
}

KernelCost GpuModel::attention(const AttentionShape& shape, std::int64_t batch, std::int64_t seq_len, DType type,
                               AttentionKernel kernel, bool backward) const {
  if (batch <= 0 || seq_len <= 0 || shape.heads <= 0) return {};
  const FlopsPerSecond dense = peak(type);
  if (!(dense > FlopsPerSecond())) throw std::logic_error("GpuModel: no attention rate for this type; ask supports()");
  const double seq = static_cast<double>(seq_len), sequences = static_cast<double>(batch);
  const double heads = static_cast<double>(shape.heads), kv_heads = static_cast<double>(shape.kv_heads);
  const double dims = static_cast<double>(shape.qk_dim + shape.v_dim);
  // q, k, v in and out once; the backward reads them, the output and its gradient, and writes three gradients.
  const double streamed = sequences * seq * size_of(type) * (heads + kv_heads) * dims * (backward ? 2 : 1);
  const double passes = backward ? kAttentionBackwardFlops : 1;
  if (kernel == AttentionKernel::unfused) {
    const double scores = sequences * heads * seq * seq;
    const Bytes traffic(streamed + scores * kScoreBytes * (backward ? kScoreBackward : 1));
    return {kLaunchSpacing, Flops(2 * scores * dims * passes) / (dense * kUnfusedEfficiency),
            traffic / (memory_bandwidth_ * kStreamMemoryFraction)};
  }
  const double window = static_cast<double>(shape.window);
  const bool windowed = shape.window > 0 && window < seq;
  const double keys = windowed ? std::min(seq, window + kAttentionTile) : seq;
  const AttentionWork work =
      attention_work(sequences, heads, seq, dims, keys, shape.causal && !shape.cross && !windowed);
  // A card that sustains more or less of its peak than the measured one does so in attention too.
  double efficiency = (backward ? attention_curve_.backward : attention_curve_.forward) * attention_scale_;
  double block_path = backward ? attention_curve_.block_path_backward : attention_curve_.block_path_forward;
  if (kernel == AttentionKernel::flash_2) {
    efficiency = hopper_or_later_ ? kFlash2Hopper : kFlash2Ampere;  // of H100's and A100's peak
    block_path = 0;  // those fractions were fitted to whole steps, tails included
  }
  const double head_dim = std::min(1.0, dims / (2 * 128));
  if (attention_curve_.head_dim_exponent > 0) efficiency *= std::pow(head_dim, attention_curve_.head_dim_exponent);
  const Flops flops((work.flops + block_path * num_sms_ * work.tile_flops) * passes);
  return {kLaunchSpacing, flops / (dense * efficiency), Bytes(streamed) / (memory_bandwidth_ * kStreamMemoryFraction)};
}

KernelCost GpuModel::memory_bound(Bytes traffic) const {
  return {kStreamLaunch + kStreamStart, Seconds(), traffic / (memory_bandwidth_ * kStreamMemoryFraction)};
}

KernelCost GpuModel::adam(Bytes traffic) const {
  if (!(traffic > Bytes())) return {};
  return {kStreamLaunch + kAdamStart, Seconds(), traffic / (memory_bandwidth_ * kAdamMemoryFraction)};
}

Seconds GpuModel::launch_latency() const { return kLaunchSpacing; }

std::vector<Assumption> GpuModel::assumptions() const {
  std::vector<Assumption> list;
  const auto add = [&list](std::string what, std::string value, std::string source) {
    list.push_back({std::move(what), std::move(value), std::move(source)});
  };
  if (sustained_measured_) {
    add(name_ + " sustained matmul", fmt::format("{:.4g} TFLOPS", measured_.base() / 1e12), "measured, 16-bit");
  } else {
    add(name_ + " sustained matmul", fmt::format("{:.3g} of the dense peak", sustained_), sustained_source_);
  }
  add("matmuls of the engine", fmt::format("{:.2f} of the sustained rate", gemm_curve_.engine_fraction),
      gemm_curve_.timed_on_device
          ? "0.88 as on earlier GPUs (docs/cost-model.md: A100, H200, llmq on H100), less what that charged "
            "to the Ampere curve's shapes"
          : "docs/cost-model.md: A100 0.87, H200 0.89, llmq on H100 0.89");
  add("matmul shape curve", gemm_curve_.arch, gemm_curve_.source);
  if (has_flash_) {
    add("attention",
        fmt::format("{} curve: {:.2f} forward, {:.2f} backward of the peak at long sequences", attention_curve_.arch,
                    attention_curve_.forward * attention_scale_, attention_curve_.backward * attention_scale_),
        attention_curve_.source);
  } else {
    add("attention", "unfused, scores in memory", name_ + " has no fused attention kernel");
  }
  const std::string sweep = "measured on an H200, 2026-11-30 (docs/measurements/h200)";
  add("streaming kernels", fmt::format("{:.2f} of the memory bandwidth", kStreamMemoryFraction), sweep);
  add("fused AdamW", fmt::format("{:.2f} of the memory bandwidth", kAdamMemoryFraction), sweep);
  add("kernel launch",
      fmt::format("{:.1f} us a matmul, {:.1f} us a streaming kernel, {:.1f} us others", gemm_latency_.base() * 1e6,
                  (kStreamLaunch + kStreamStart).base() * 1e6, kLaunchSpacing.base() * 1e6),
      sweep + "; queue full, no graph");
  if (sms_assumed_) add(name_ + " SMs", fmt::format("{:.0f}", kAssumedSms), "not in the catalog: B200's count");
  return list;
}

void require_matmuls(const GpuSpec& gpu, DType type) {
  if (GpuModel(gpu).supports(type)) return;
  std::vector<std::string_view> known;
  for (const DType other : {DType::bf16, DType::fp16, DType::fp32})
    if (GpuModel(gpu).supports(other)) known.push_back(to_string(other));
  throw InputError(fmt::format("--precision {}{}: expected {}: {} has no {} matmul rate", to_string(type),
                               type == DType::bf16 ? " (the default)" : "",
                               known.empty() ? "a GPU with a matmul rate" : fmt::format("{}", fmt::join(known, " or ")),
                               gpu.name, to_string(type)));
}

}  // namespace zeroplan
