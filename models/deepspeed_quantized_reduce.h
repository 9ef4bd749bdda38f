#pragma once
// ZeRO++'s gradients (qgZ) between several nodes: 4-bit values in two hops, parameter by parameter.

#include <array>
#include <vector>

#include "models/deepspeed_stage_parts.h"

namespace zeroplan {

/// DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py (all_to_all_quant_reduce) and
/// csrc/quantization/pt_binding.cpp.
class QuantizedReduction {
 public:
  QuantizedReduction(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape, Stream stream, Pool pool);
  /// Whether gradients cross quantized: with more than one node.
  static bool applies(const DeepSpeedJob& job);
  /// Reduces the parameters of a bucket; what is returned lives until their partitions are added.
  std::vector<TapeId> reduce(const std::vector<std::size_t>& parameters);

 private:
  /// The function's local variables: each is bound again while its last value is still there.
  enum Local : std::uint8_t {
    sent,
    sent_scales,
    received,
    received_scales,
    reduced,
    reduced_scales,
    crossed,
    crossed_scales,
    whole,
    kLocals
  };
  bool quantizes(std::size_t parameter) const;
  TapeId scatter_alone(std::size_t parameter);
  TapeId reduce_quantized(std::size_t parameter);
  TapeId staging(std::int64_t bytes);
  void bind(Local first, std::int64_t values, std::int64_t scales);
  void rebind(Local local, TapeId buffer);
  TapeId at(Local local) const { return locals_[local]; }
  void exchange(Group group, Local from, Local to, std::int64_t bytes, std::int64_t scales);
  TapeId averaged(std::int64_t elements);

  const EagerStep& step_;
  const DeepSpeedJob& job_;
  EngineTape& tape_;
  Stream stream_;
  Pool pool_;
  DType communication_;
  int inside_, nodes_;
  std::array<TapeId, kLocals> locals_;
};

}  // namespace zeroplan
