#include "planner/deepspeed_estimator.h"

#include <algorithm>

namespace zeroplan {

EstimatorBytes deepspeed_zero2_estimate(const EstimatorQuestion& q, EstimatorForm form) {
  const auto all = static_cast<double>(q.parameters);
  const double ranks = static_cast<double>(q.gpus_per_node) * q.nodes;
  if (q.offload_optimizer) return {Bytes(2 * all), Bytes(all * std::max(4 * ranks, 16.0) * q.buffer_factor)};
  const bool before = form == EstimatorForm::before_2024;
  const double whole = before ? 4 : 2, shared = before ? 16 : 18;  // bytes of each parameter, of each owned one
  return {Bytes(whole * all + shared * all / ranks), Bytes(4 * all * q.gpus_per_node * q.buffer_factor)};
}

EstimatorBytes deepspeed_zero3_estimate(const EstimatorQuestion& q) {
  const auto all = static_cast<double>(q.parameters);
  const double ranks = static_cast<double>(q.gpus_per_node) * q.nodes, gpus = q.gpus_per_node;
  const double layer = 4 * static_cast<double>(q.largest_module);  // 16-bit weights and gradients of one module
  if (!q.offload_optimizer) {
    const double loading = q.zero_init ? static_cast<double>(q.largest_module) : all;
    return {Bytes(layer + 18 * all / ranks), Bytes(4 * loading * gpus * q.buffer_factor)};
  }
  const double states = (q.offload_parameters ? 18.0 : 16.0) / q.nodes;  // bytes of each parameter on a node
  const double host = q.zero_init ? states : std::max(4 * gpus, states);
  return {Bytes(layer + (q.offload_parameters ? 0 : 2 * all / ranks)), Bytes(all * host * q.buffer_factor)};
}

}  // namespace zeroplan
