#pragma once

#include <span>
#include <vector>

#include "models/host_kernels.h"

namespace zeroplan {

/// One shape of a kernel: how often each term occurs, and the seconds that it took.
struct HostSample {
  HostCounts counts;
  double seconds = 0;
};

/// Times of the terms, none negative, that make the sum of squared relative errors least. Exact: every subset of terms
/// is tried, so there may be 6 terms at most. Throws std::logic_error without samples.
std::vector<double> fit_terms(std::span<const HostSample> samples);

/// The middle value; of an even number the lower one. Throws std::logic_error without values.
double median_of(std::vector<double> values);

}  // namespace zeroplan
