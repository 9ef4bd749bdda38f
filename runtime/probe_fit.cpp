#include "runtime/probe_fit.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace zeroplan {
namespace {

constexpr std::size_t kMostTerms = 6;

/// Solves a x = b by elimination with pivoting; empty when a is singular.
std::vector<double> solved(std::vector<std::vector<double>> a, std::vector<double> b) {
  constexpr double kSingular = 1e-12;  // of the columns' norms, which are 1
  const std::size_t n = b.size();
  for (std::size_t column = 0; column < n; ++column) {
    std::size_t pivot = column;
    for (std::size_t row = column + 1; row < n; ++row) {
      if (std::abs(a[row][column]) > std::abs(a[pivot][column])) pivot = row;
    }
    if (std::abs(a[pivot][column]) < kSingular) return {};
    std::swap(a[pivot], a[column]);
    std::swap(b[pivot], b[column]);
    for (std::size_t row = column + 1; row < n; ++row) {
      const double factor = a[row][column] / a[column][column];
      for (std::size_t k = column; k < n; ++k) a[row][k] -= factor * a[column][k];
      b[row] -= factor * b[column];
    }
  }
  for (std::size_t row = n; row-- > 0;) {
    for (std::size_t k = row + 1; k < n; ++k) b[row] -= a[row][k] * b[k];
    b[row] /= a[row][row];
  }
  return b;
}

/// Rows divided by the measured time, columns by their norms: the system is well scaled.
struct Scaled {
  std::vector<std::vector<double>> rows;
  std::vector<double> norms;
};

Scaled scaled(std::span<const HostSample> samples) {
  Scaled s;
  s.norms.assign(samples[0].counts.size(), 0);
  for (const HostSample& sample : samples) {
    std::vector<double>& row = s.rows.emplace_back();
    for (std::size_t i = 0; i < sample.counts.size(); ++i) {
      row.push_back(sample.counts[i] / sample.seconds);
      s.norms[i] += row.back() * row.back();
    }
  }
  for (double& norm : s.norms) norm = std::sqrt(norm);
  for (auto& row : s.rows) {
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = s.norms[i] > 0 ? row[i] / s.norms[i] : 0;
  }
  return s;
}

/// Least squares of the chosen columns to 1; empty when singular or negative.
std::vector<double> fit_subset(const Scaled& s, unsigned chosen) {
  std::vector<std::size_t> columns;
  for (std::size_t i = 0; i < s.norms.size(); ++i) {
    if ((chosen >> i & 1) != 0) columns.push_back(i);
  }
  const std::size_t n = columns.size();
  std::vector<std::vector<double>> a(n, std::vector<double>(n));
  std::vector<double> b(n);
  for (const auto& row : s.rows) {
    for (std::size_t i = 0; i < n; ++i) {
      b[i] += row[columns[i]];
      for (std::size_t k = 0; k < n; ++k) a[i][k] += row[columns[i]] * row[columns[k]];
    }
  }
  const std::vector<double> part = solved(std::move(a), std::move(b));
  if (part.empty() || std::ranges::any_of(part, [](double x) { return x < 0; })) return {};
  std::vector<double> whole(s.norms.size());
  for (std::size_t i = 0; i < n; ++i) whole[columns[i]] = part[i];
  return whole;
}

double squared_error(const Scaled& s, const std::vector<double>& x) {
  double sum = 0;
  for (const auto& row : s.rows) {
    double value = 0;
    for (std::size_t i = 0; i < x.size(); ++i) value += row[i] * x[i];
    sum += (value - 1) * (value - 1);
  }
  return sum;
}

}  // namespace

std::vector<double> fit_terms(std::span<const HostSample> samples) {
  if (samples.empty() || samples[0].counts.size() > kMostTerms) throw std::logic_error("fit_terms: nothing to fit");
  const Scaled s = scaled(samples);
  std::vector<double> best(s.norms.size());
  double least = squared_error(s, best);
  for (unsigned chosen = 1; chosen < 1u << s.norms.size(); ++chosen) {
    const std::vector<double> x = fit_subset(s, chosen);
    if (x.empty()) continue;
    if (const double error = squared_error(s, x); error < least) {
      least = error;
      best = x;
    }
  }
  for (std::size_t i = 0; i < best.size(); ++i) best[i] = s.norms[i] > 0 ? best[i] / s.norms[i] : 0;
  return best;
}

double median_of(std::vector<double> values) {
  if (values.empty()) throw std::logic_error("median_of: no values");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace zeroplan
