#pragma once
// Small tables of fitted and measured efficiencies that turn a datasheet into times. They are data: JSON under
// models/catalog/fits, written by tests/tools/fit_efficiency.cpp from measured rows, each with its source.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/units.h"

namespace zeroplan {

/// How far a fit is from the rows it was made from: |predicted / measured - 1|.
struct FitQuality {
  int rows = 0;
  double mean = 0;  // MAPE, a fraction
  double p90 = 0;
  double max = 0;
};

/// How the time of a matmul depends on its shape, apart from the GPU's sustained rate (plus `start`):
///   2mnk / ceiling x (1 + k_ramp / k) / utilisation^tile_exponent x (1 + fp32_penalty with an fp32 output)
/// `utilisation` is the useful part of the tiles in the last wave (step-time.md section 2).
struct GemmShapeCurve {
  std::string arch;    // "Ampere"
  double ceiling = 0;  // of the dense peak, on the fitted rows; compared with matmul rates, not used for times
  /// A tuned engine's rate of a matmul with a shape factor of 1, over the sustained rate of one benchmark. It belongs
  /// to the curve: a steeper one charges more of the same time to the shape.
  double engine_fraction = 0;
  double k_ramp = 0;  // elements of k
  double tile_exponent = 0;
  double fp32_penalty = 0;     // fraction of the time
  double memory_fraction = 0;  // of the spec memory bandwidth that bounds thin shapes
  double grouped_factor = 1;   // rate of one grouped kernel over equal experts against a plain matmul
  Seconds start;               // fixed time of a matmul in a graph: start, fill, drain
  /// Rows of tests/tools/gpu_sweep.cu, timed on the device: start and memory_fraction then hold as absolute times.
  bool timed_on_device = false;
  FitQuality quality;
  FitQuality grouped_quality;
  std::string source;
};

/// Fused attention: time = (executed FLOPs + block_path x SMs x FLOPs of one query tile) / (efficiency x peak).
/// A causal mask leaves about half of the full count, plus the whole tiles on the diagonal; the backward does 2.5 times
/// the forward's. The second term is the tail: one tile of queries runs through all its keys on one SM, so short
/// sequences and few heads leave SMs idle. One mechanism for the ramps over sequence length and over heads.
struct AttentionCurve {
  std::string arch;
  double forward = 0;  // efficiency without a tail, fraction of the dense peak
  double backward = 0;
  double block_path_forward = 0;  // query tiles that the last SM works through alone
  double block_path_backward = 0;
  double head_dim_exponent = 0;  // rate x (d / 128)^exponent for d < 128
  double sustained = 1;          // sustained matmul rate over the peak on the measured GPU: others scale with theirs
  FitQuality quality_forward;
  FitQuality quality_backward;
  std::string source;
};

/// Sustained 16-bit matmul over the dense peak, for GPUs without a measurement of their own.
struct SustainedFraction {
  std::string key;  // "NVIDIA Ampere", "NVIDIA GeForce", "NVIDIA", "AMD"
  double fraction = 0;
  std::string source;
};

struct EfficiencyTables {
  std::vector<GemmShapeCurve> gemm;
  std::vector<AttentionCurve> attention;
  std::vector<SustainedFraction> sustained;
};

/// Reads the three files of models/catalog/fits. Throws InputError with file and line on unknown or missing keys and
/// on values outside (0, 10] for rates.
EfficiencyTables read_efficiency_tables(std::string_view gemm_json, std::string_view attention_json,
                                        std::string_view sustained_json);

/// The JSON text of the fits, as read_efficiency_tables reads it. Deterministic.
std::string write_gemm_curves(std::span<const GemmShapeCurve> curves);
std::string write_attention_curves(std::span<const AttentionCurve> curves);

/// The tables of the embedded catalog, read once (thread-safe, immutable afterwards).
const EfficiencyTables& builtin_efficiency_tables();

}  // namespace zeroplan
