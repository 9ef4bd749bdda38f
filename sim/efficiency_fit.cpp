#include "sim/efficiency_fit.h"

#include <Eigen/Dense>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <stdexcept>
#include <utility>

#include "sim/kernel_shapes.h"

namespace zeroplan {

namespace {

constexpr double kSoftScale = 0.05;  // residuals of log(time) beyond 5 % count linearly

using Residuals = std::function<Eigen::VectorXd(const Eigen::VectorXd&)>;

/// Residuals scaled so that their squares sum to the soft-L1 cost.
Eigen::VectorXd softened(const Eigen::VectorXd& plain) {
  return plain.unaryExpr([](double r) {
    const double z = (r / kSoftScale) * (r / kSoftScale);
    return std::copysign(kSoftScale * std::sqrt(2 * (std::sqrt(1 + z) - 1)), r);
  });
}

/// Levenberg-Marquardt with box bounds and forward differences. Small problems only: a few parameters.
Eigen::VectorXd minimise(const Residuals& residuals, Eigen::VectorXd x, const Eigen::VectorXd& low,
                         const Eigen::VectorXd& high) {
  constexpr int kIterations = 200;
  double damping = 1e-2;
  Eigen::VectorXd r = softened(residuals(x));
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    Eigen::MatrixXd jacobian(r.size(), x.size());
    for (Eigen::Index i = 0; i < x.size(); ++i) {
      Eigen::VectorXd moved = x;
      const double step = 1e-6 * std::max(std::abs(x[i]), 1e-3);
      moved[i] += step;
      jacobian.col(i) = (softened(residuals(moved)) - r) / step;
    }
    Eigen::MatrixXd normal = jacobian.transpose() * jacobian;
    const Eigen::VectorXd gradient = jacobian.transpose() * r;
    const Eigen::VectorXd diagonal = normal.diagonal();
    normal.diagonal() += damping * diagonal + Eigen::VectorXd::Constant(x.size(), 1e-12);
    const Eigen::VectorXd next = (x - normal.ldlt().solve(gradient)).cwiseMax(low).cwiseMin(high);
    const Eigen::VectorXd next_r = softened(residuals(next));
    if (next_r.squaredNorm() < r.squaredNorm()) {
      const bool converged = r.squaredNorm() - next_r.squaredNorm() < 1e-12 * r.squaredNorm();
      x = next;
      r = next_r;
      damping = std::max(damping / 3, 1e-9);
      if (converged) break;
    } else {
      damping *= 4;
      if (damping > 1e9) break;
    }
  }
  return x;
}

FitQuality quality_of(std::vector<double> errors) {
  FitQuality quality;
  if (errors.empty()) return quality;
  for (double& error : errors) error = std::abs(error);
  std::sort(errors.begin(), errors.end());
  quality.rows = static_cast<int>(errors.size());
  for (const double error : errors) quality.mean += error / quality.rows;
  quality.p90 = errors[static_cast<std::size_t>(0.9 * static_cast<double>(errors.size() - 1) + 0.5)];
  quality.max = errors.back();
  return quality;
}

double flops_of(const GemmMeasurement& row) {
  return 2 * static_cast<double>(row.groups) * row.rows * row.columns * row.inner;
}

double measured_seconds(const GemmMeasurement& row) { return flops_of(row) / (row.efficiency * row.peak.base()); }

double shape_factor(const GemmShapeCurve& curve, const GemmMeasurement& row) {
  const double utilisation = tile_utilisation(static_cast<double>(row.groups), row.rows, row.columns, row.num_sms);
  return (1 + curve.k_ramp / row.inner) / std::pow(utilisation, curve.tile_exponent) *
         (row.fp32_output ? 1 + curve.fp32_penalty : 1);
}

double predicted_seconds(const GemmShapeCurve& curve, const GemmMeasurement& row) {
  const double groups = static_cast<double>(row.groups);
  const double ceiling = curve.ceiling * (row.grouped ? curve.grouped_factor : 1);
  const double math = flops_of(row) / (row.peak.base() * ceiling) * shape_factor(curve, row);
  const double output_bytes = (row.fp32_output ? 4.0 : 2.0) * (row.accumulate ? 2 : 1);
  const double traffic =
      groups * (2 * (row.rows * row.inner + row.columns * row.inner) + row.rows * row.columns * output_bytes);
  return std::max(math, traffic / (row.memory_bandwidth.base() * curve.memory_fraction)) + curve.start.base();
}

GemmShapeCurve from_parameters(const Eigen::VectorXd& x) {
  GemmShapeCurve curve;
  curve.ceiling = x[0];
  curve.k_ramp = x[1];
  curve.tile_exponent = x[2];
  curve.fp32_penalty = x[3];
  curve.memory_fraction = x[4];
  curve.start = Seconds(x[5] * 1e-6);
  return curve;
}

GemmShapeCurve fit_plain(std::span<const GemmMeasurement> rows) {
  const Residuals residuals = [rows](const Eigen::VectorXd& x) {
    const GemmShapeCurve curve = from_parameters(x);
    Eigen::VectorXd out(static_cast<Eigen::Index>(rows.size()));
    for (std::size_t i = 0; i < rows.size(); ++i)
      out[static_cast<Eigen::Index>(i)] = std::log(predicted_seconds(curve, rows[i]) / measured_seconds(rows[i]));
    return out;
  };
  // ceiling, k ramp, tile exponent, fp32 penalty, memory fraction, start in us
  const Eigen::VectorXd start{{0.78, 150, 0.6, 0.03, 0.8, 2}};
  const Eigen::VectorXd low{{0.2, 0, 0, 0, 0.3, 0}};
  const Eigen::VectorXd high{{1, 3000, 1.5, 0.5, 1, 30}};
  return from_parameters(minimise(residuals, start, low, high));
}

std::vector<double> errors_of(const GemmShapeCurve& curve, std::span<const GemmMeasurement> rows) {
  std::vector<double> errors;
  for (const GemmMeasurement& row : rows) errors.push_back(predicted_seconds(curve, row) / measured_seconds(row) - 1);
  return errors;
}

/// The factor on one rate that centres the log errors; a few fixed-point steps, as memory-bound rows do not move.
double centred(double value, const std::function<std::vector<double>(double)>& errors_at) {
  constexpr int kSteps = 50;
  for (int step = 0; step < kSteps; ++step) {
    double mean_log = 0;
    const std::vector<double> errors = errors_at(value);
    for (const double error : errors) mean_log += std::log1p(error) / static_cast<double>(errors.size());
    value *= std::exp(mean_log);
  }
  return value;
}

std::vector<GemmMeasurement> select(std::span<const GemmMeasurement> rows, bool grouped) {
  std::vector<GemmMeasurement> chosen;
  for (const GemmMeasurement& row : rows) {
    if (!(row.efficiency > 0 && row.efficiency <= 1))
      throw std::logic_error("matmul row with efficiency outside (0, 1]");
    if (row.grouped == grouped) chosen.push_back(row);
  }
  return chosen;
}

// --- attention ----------------------------------------------------------------------------------

double predicted_seconds(double efficiency, double block_path, const AttentionMeasurement& row) {
  const AttentionWork work = attention_work(row.batch, row.heads, row.seq, row.qk_dim + row.v_dim, row.seq, true);
  const double flops =
      (work.flops + block_path * row.num_sms * work.tile_flops) * (row.backward ? kAttentionBackwardFlops : 1);
  return flops / (efficiency * row.peak.base());
}

struct FittedAttention {
  double efficiency = 0, block_path = 0;
  FitQuality quality;
};

FittedAttention fit_direction(const std::vector<AttentionMeasurement>& rows) {
  const auto log_errors = [&rows](const Eigen::VectorXd& x) {
    Eigen::VectorXd out(static_cast<Eigen::Index>(rows.size()));
    for (std::size_t i = 0; i < rows.size(); ++i)
      out[static_cast<Eigen::Index>(i)] =
          std::log(predicted_seconds(x[0], x[1], rows[i]) / (rows[i].counted / rows[i].achieved).base());
    return out;
  };
  const Eigen::VectorXd x =
      minimise(log_errors, Eigen::VectorXd{{0.6, 1}}, Eigen::VectorXd{{0.05, 0}}, Eigen::VectorXd{{1, 9}});
  FittedAttention fitted{x[0], x[1], {}};
  std::vector<double> errors;
  for (const double log_error : log_errors(x)) errors.push_back(std::expm1(log_error));
  fitted.quality = quality_of(std::move(errors));
  return fitted;
}

}  // namespace

GemmShapeCurve fit_gemm_curve(std::string arch, std::span<const GemmMeasurement> rows, std::string source) {
  const std::vector<GemmMeasurement> plain = select(rows, false);
  const std::vector<GemmMeasurement> grouped = select(rows, true);
  GemmShapeCurve curve = fit_plain(plain);
  curve.arch = std::move(arch);
  curve.source = std::move(source);
  curve.quality = quality_of(errors_of(curve, plain));
  if (!grouped.empty()) {
    curve.grouped_factor = centred(1, [&](double factor) {
      curve.grouped_factor = factor;
      return errors_of(curve, grouped);
    });
    curve.grouped_quality = quality_of(errors_of(curve, grouped));
  }
  return curve;
}

FitQuality transfer_quality(const GemmShapeCurve& curve, std::span<const GemmMeasurement> rows) {
  const std::vector<GemmMeasurement> plain = select(rows, false);
  GemmShapeCurve moved = curve;
  moved.start = Seconds();  // it belongs to how the rows were timed
  moved.ceiling = centred(curve.ceiling, [&](double ceiling) {
    moved.ceiling = ceiling;
    return errors_of(moved, plain);
  });
  return quality_of(errors_of(moved, plain));
}

namespace {

/// Predicts the rows of each fold by a fit to all others. `fold_of` gives every row's fold.
template <class Fold>
FitQuality cross_validated_over(const std::vector<GemmMeasurement>& rows, const std::vector<Fold>& fold_of) {
  std::vector<double> errors;
  for (const Fold& fold : std::set<Fold>(fold_of.begin(), fold_of.end())) {
    std::vector<GemmMeasurement> fitted_on, held_out;
    for (std::size_t i = 0; i < rows.size(); ++i) (fold_of[i] == fold ? held_out : fitted_on).push_back(rows[i]);
    const std::vector<double> fold_errors = errors_of(fit_plain(fitted_on), held_out);
    errors.insert(errors.end(), fold_errors.begin(), fold_errors.end());
  }
  return quality_of(std::move(errors));
}

}  // namespace

FitQuality cross_validated(std::span<const GemmMeasurement> rows) {
  constexpr std::size_t kFolds = 5;
  const std::vector<GemmMeasurement> plain = select(rows, false);
  std::vector<std::size_t> folds;
  for (std::size_t i = 0; i < plain.size(); ++i) folds.push_back(i % kFolds);
  return cross_validated_over(plain, folds);
}

FitQuality cross_validated_by_role(std::span<const GemmMeasurement> rows) {
  const std::vector<GemmMeasurement> plain = select(rows, false);
  std::vector<std::string> roles;
  for (const GemmMeasurement& row : plain) roles.push_back(row.role);
  return cross_validated_over(plain, roles);
}

double converted_engine_fraction(const GemmShapeCurve& reference, const GemmShapeCurve& curve,
                                 std::span<const GemmMeasurement> rows) {
  constexpr double kLarge = 4096;
  double log_ratio = 0, count = 0;
  for (const GemmMeasurement& row : rows) {
    if (row.fp32_output || std::min({row.rows, row.columns, row.inner}) < kLarge) continue;
    log_ratio += std::log(shape_factor(curve, row) / shape_factor(reference, row));
    ++count;
  }
  if (count == 0) throw std::logic_error("no large matmul to convert the engine's fraction with");
  return reference.engine_fraction * std::exp(log_ratio / count);
}

AttentionCurve fit_attention_curve(std::string arch, std::span<const AttentionMeasurement> rows, std::string source) {
  std::vector<AttentionMeasurement> forward, backward;
  for (const AttentionMeasurement& row : rows) (row.backward ? backward : forward).push_back(row);
  const FittedAttention f = fit_direction(forward);
  const FittedAttention b = fit_direction(backward);
  AttentionCurve curve;
  curve.arch = std::move(arch);
  curve.forward = f.efficiency;
  curve.backward = b.efficiency;
  curve.block_path_forward = f.block_path;
  curve.block_path_backward = b.block_path;
  curve.quality_forward = f.quality;
  curve.quality_backward = b.quality;
  curve.source = std::move(source);
  return curve;
}

}  // namespace zeroplan
