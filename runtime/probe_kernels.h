#pragma once
// The kernels that `zeroplan probe` times, each on several shapes, in one thread.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/host_kernels.h"

namespace zeroplan {

/// One kernel on one shape. run() may be called any number of times, from one thread.
struct ProbeSample {
  std::string kernel;  // a name of host_kernel_forms()
  DType type = DType::bf16;
  HostCounts counts;
  std::function<void()> run;
};

/// All samples of one element type: bf16, fp16, fp32, or u8 for what works on bytes ("copy", "clear"). `host` says how
/// counts are made: tile, near_memory. The samples own what they work on, about 200 MB while they live.
std::vector<ProbeSample> probe_samples(DType type, const HostKernels& host);

}  // namespace zeroplan
