// ZeRO++ in a step: a second copy of the weights inside a group of ranks (hpZ), gathers of 8-bit values (qwZ),
// gradients that cross as 4-bit values (qgZ). Kernels and messages are those of models/deepspeed_gathers.cpp and
// models/deepspeed_quantized_reduce.cpp; kernels stream through memory at the rate of the others of the step.

#include <algorithm>

#include "sim/engine_time_parts.h"

namespace zeroplan {
namespace {

constexpr double kMicrosecond = 1e-6;
/// An fp32 scale for about so many 8-bit values (CUDAQuantizer.target_group_size).
constexpr double kScaleBytes = 4, kQuantizedGroup = 8000;
/// Bytes a value that quantizing to 8 bits reads and writes, and the way back: one fp16 value, one byte.
constexpr double kQuantizeBytes = 3;
/// To 4 bits and back: fp16 and half a byte. Summed over a node: half a byte of each part, half a byte of the sum.
constexpr double kExchangedBytes = 2.5, kExchangedValue = 0.5;
/// One of the additions of nodes' parts, and the division: two fp16 values read, one written.
constexpr double kSumBytes = 6;
/// Ops that qwZ adds for each matrix of a gather: put together and cast, quantize, a second gather, dequantize and
/// cast. On one H200 they took 5.8 to 10.9 ms a layer of seven in forward (docs/measurements/h200, rows 10 and 11
/// beside 7).
constexpr double kQuantizeOps = 4;
/// PyTorch calls for a matrix under qgZ, before the additions: quantize, four exchanges, sum, dequantize.
constexpr double kExchangeCalls = 7;

/// fp16 is what the quantizers know; other types are cast.
double cast_bytes(DType type) { return type == DType::fp16 ? 0 : size_of(DType::fp16) + size_of(type); }

/// Vectors, and what two hops cannot cut, are reduce-scattered alone (coalesced_collectives.py).
bool is_exchanged(const TensorSpec& tensor, int ranks) {
  return tensor.shape.size() > 1 && tensor.elements() / tensor.copies % (2 * std::int64_t{ranks}) == 0;
}

template <class Visit>
void visit_reduced(const BlockKind& kind, Visit visit) {
  for (const TensorSpec& tensor : kind.tensors)
    if (tensor.trainable && !tensor.tied) visit(tensor);
}

}  // namespace

Seconds EngineTimeContext::following(CollectiveKind kind, double bytes, RankGroup ranks) const {
  return queued_ && ranks.ranks > 1 ? queued_->cost(kind, Bytes(bytes), ranks).alone() * run.collective_scale
                                    : Seconds();
}

Seconds EngineTimeContext::gather_among(double parameters, RankGroup ranks) const {
  if (!run.quantized_weights) return collective(CollectiveKind::all_gather, parameters * size_of(run.type), ranks);
  if (ranks.ranks == 1) return {};
  // A rank's part is put together, cast and quantized before it goes out.
  const double bytes = 2 * size_of(run.type) + cast_bytes(run.type) + kQuantizeBytes;
  const double scales = parameters * kScaleBytes / kQuantizedGroup / messages();
  return Bytes(bytes * parameters / ranks.ranks) / rates.streaming +
         collective(CollectiveKind::all_gather, parameters, ranks) +
         following(CollectiveKind::all_gather, scales, ranks) * messages();
}

Seconds EngineTimeContext::gather_secondary(double parameters) const {
  return gather_among(parameters, group(run.hpz_ranks));
}

Seconds EngineTimeContext::keep_secondary(double parameters) const {
  return Bytes(2 * size_of(run.type) * parameters / run.hpz_ranks) / rates.streaming;
}

Seconds EngineTimeContext::dequantize(double parameters) const {
  if (!run.quantized_weights || run.ranks == 1) return {};
  return Bytes((kQuantizeBytes + cast_bytes(run.type)) * parameters) / rates.streaming;
}

bool EngineTimeContext::exchanges() const { return run.quantized_gradients && run.ranks > ranks_per_node_; }

/// Values, then their scales. Inside a node pairs cross its links as the graph has them; between nodes each NIC carries
/// what it would of a ring.
Seconds EngineTimeContext::exchange(double values, double scales, RankGroup ranks) const {
  if (!collectives_) return {};
  const Seconds ring = collectives_->cost(CollectiveKind::reduce_scatter, Bytes(values), ranks).alone();
  const Seconds beyond = ranks.nodes == 1 ? beyond_ring_ * Bytes(values) : Seconds();
  return (ring + beyond) * run.collective_scale +
         following(CollectiveKind::reduce_scatter, scales * kScaleBytes, ranks);
}

/// Over the node, then between ranks of the same place in all nodes; each rank is left with its part of the mean.
Seconds EngineTimeContext::exchange_matrix(double elements, double scales) const {
  const int inside = ranks_per_node_, nodes = run.ranks / inside;
  const double held = elements / inside;
  const double additions = (nodes + 1) * kSumBytes * held / nodes;
  const double bytes = kExchangedBytes * (elements + held) + kExchangedValue * (elements + held) + additions;
  return Bytes(bytes) / rates.streaming + exchange(kExchangedValue * elements, scales, {inside, 1, inside}) +
         exchange(kExchangedValue * held, scales / inside, {nodes, nodes, 1});
}

Seconds EngineTimeContext::reduce_exchanged(const BlockKind& kind) const {
  Seconds time;
  visit_reduced(kind, [&](const TensorSpec& tensor) {
    const auto copies = static_cast<double>(tensor.copies);
    const double elements = static_cast<double>(tensor.elements()) / copies;
    if (is_exchanged(tensor, run.ranks)) {
      const std::int64_t scales = std::max({tensor.shape[0], tensor.shape[1], std::int64_t{run.ranks}});
      time += exchange_matrix(elements, static_cast<double>(scales)) * copies;
    } else {
      time += following(CollectiveKind::reduce_scatter, elements * size_of(run.reduction), group(run.ranks)) * copies;
    }
  });
  return time;
}

Seconds EngineTimeContext::quantize_launches(const BlockKind& kind) const {
  if (!run.quantized_weights || run.ranks == 1) return {};
  double matrices = 0;
  for (const TensorSpec& tensor : kind.tensors) {
    const bool gathered =
        tensor.shape.size() > 1 && !tensor.tied && tensor.elements() / tensor.copies > run.persistence;
    if (gathered) matrices += static_cast<double>(tensor.copies);
  }
  return Seconds(fit[TimeFit::host_op_deepspeed] * fit[TimeFit::host_stage3] * kMicrosecond * kQuantizeOps * matrices);
}

Seconds EngineTimeContext::exchange_launches(const BlockKind& kind) const {
  const double calls = kExchangeCalls + run.ranks / ranks_per_node_ + 1;
  double matrices = 0;
  visit_reduced(kind, [&](const TensorSpec& tensor) {
    if (is_exchanged(tensor, run.ranks)) matrices += static_cast<double>(tensor.copies);
  });
  return Seconds(fit[TimeFit::host_op] * kMicrosecond * calls * matrices);
}

}  // namespace zeroplan
