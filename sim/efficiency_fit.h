#pragma once
// Least-squares fits of the efficiency curves to measured rows. Used by tests/tools/fit_efficiency.cpp, which writes
// models/catalog/fits; predictions never fit anything.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sim/efficiency_tables.h"

namespace zeroplan {

/// One measured matmul: `groups` products [rows, inner] x [inner, columns].
struct GemmMeasurement {
  std::string gpu;
  std::string role;  // "qkv", "down", "head": folds of cross_validated_by_role
  std::int64_t groups = 1;
  double rows = 0, columns = 0, inner = 0;
  bool fp32_output = false;
  bool accumulate = false;
  bool grouped = false;   // one kernel over equal experts
  double efficiency = 0;  // achieved over `peak`
  FlopsPerSecond peak;
  int num_sms = 0;
  BytesPerSecond memory_bandwidth;
};

/// One measured fused attention call.
struct AttentionMeasurement {
  std::string gpu;
  double batch = 1, seq = 0, heads = 0, qk_dim = 0, v_dim = 0;
  bool backward = false;
  int num_sms = 0;
  Flops counted;  // the FLOPs of the rate below
  FlopsPerSecond achieved;
  FlopsPerSecond peak;
};

/// Fits ceiling, k_ramp, tile_exponent, fp32_penalty, memory_fraction and start to the plain rows, then grouped_factor
/// to the grouped ones. Rows with an efficiency above 1 are refused: std::logic_error. Robust (soft L1 at 5 %)
/// Levenberg-Marquardt on log(time); deterministic.
GemmShapeCurve fit_gemm_curve(std::string arch, std::span<const GemmMeasurement> rows, std::string source);

/// The same rows predicted with another curve after fitting only the ceiling: how well a shape curve transfers.
FitQuality transfer_quality(const GemmShapeCurve& curve, std::span<const GemmMeasurement> rows);

/// Cross-validated quality: every fifth row is predicted by a fit to the other four fifths.
FitQuality cross_validated(std::span<const GemmMeasurement> rows);
/// The rows of each role are predicted by a fit to those of all other roles.
FitQuality cross_validated_by_role(std::span<const GemmMeasurement> rows);

/// Engine fraction to use with `curve` where `reference`'s is known: the large 16-bit products among `rows` (every
/// size at least 4096, as in the steps that the reference was taken from) take the same time on geometric average.
double converted_engine_fraction(const GemmShapeCurve& reference, const GemmShapeCurve& curve,
                                 std::span<const GemmMeasurement> rows);

/// Fits the efficiency and the block path of each direction. All rows are causal and bf16.
AttentionCurve fit_attention_curve(std::string arch, std::span<const AttentionMeasurement> rows, std::string source);

}  // namespace zeroplan
