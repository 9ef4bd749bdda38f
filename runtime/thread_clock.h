#pragma once
// The clock of one thread, by which kernels are timed.

#include <functional>

namespace zeroplan {

/// Processor time of this thread so far.
double thread_seconds();

/// Seconds of one run in this thread's processor time: what other programs take of the machine is not counted. As many
/// runs as make `least_seconds`, at least one, after one that warms up.
double time_of(const std::function<void()>& run, double least_seconds);

}  // namespace zeroplan
