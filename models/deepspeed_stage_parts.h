#pragma once
// What the engines of DeepSpeed's stages share.

#include <memory>
#include <span>
#include <vector>

#include "models/deepspeed_engine.h"

namespace zeroplan {

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) { return (value + divisor - 1) / divisor; }

/// Stages 1 and 2 lay all trainable parameters end to end, padded to 2 elements a rank (nccl_start_alignment_factor).
struct ZeroLayout {
  std::vector<std::int64_t> start;  // by parameter; -1: frozen
  std::int64_t elements = 0;        // trainable
  std::int64_t padded = 0;
  std::int64_t partition = 0;  // padded / ranks
  /// Elements of the parameter that lie in the rank's partition.
  std::int64_t owned(std::size_t parameter, std::int64_t elements_of, int rank) const;
};
ZeroLayout zero_layout(const EagerStep& step, int ranks, bool round_robin);

/// Stage 3: parameters of a rank's sub-groups, by running total of their shards.
std::vector<std::int64_t> sub_groups(const EagerStep& step, int ranks, std::int64_t sub_group_size);

/// A stage without hooks on modules: does nothing at them.
class DeepSpeedStage : public EngineHooks {
 public:
  DeepSpeedStage(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);
  void begin(const MicroStep& now) override { now_ = now; }
  void forward_pre(int) override {}
  void forward_post(int) override {}
  void backward_pre(int) override {}
  void backward_post(int) override {}
  void forward_end() override {}

 protected:
  std::int64_t elements(std::size_t parameter) const { return step_.parameters[parameter].elements; }
  bool trainable(std::size_t parameter) const { return step_.parameters[parameter].trainable; }
  std::size_t num_parameters() const { return step_.parameters.size(); }
  std::int64_t bytes(std::int64_t count) const { return count * weight_size_; }  // in the model's type
  static std::int64_t fp32(std::int64_t count) { return 4 * count; }

  TapeId weights(std::int64_t size) { return resident(size, BufferRole::weights, Owner::parameters); }
  TapeId resident(std::int64_t size, BufferRole role, Owner owner, Pool pool = Pool::compute);
  TapeId staging(std::int64_t size, BufferRole role, Pool pool = Pool::compute);
  /// A buffer that is made and dropped at once.
  void transient(std::int64_t size, BufferRole role, Stream stream, Pool pool = Pool::compute);
  void collective(Stream stream, CollectiveKind kind, Group group, std::int64_t count, std::int64_t padded, DType type,
                  std::initializer_list<TapeOperand> operands = {});
  /// One number of all ranks of the group, which the host waits for.
  void agree(DType type, Group group = Group::all);
  /// Adam over so many elements, on the GPU or by the host's cores. With torch_adam the square roots of all second
  /// moments live meanwhile (torch 2.11, optim/adam.py, _multi_tensor_adam): one tensor of `count` elements, or
  /// `tensors`.
  void adam(std::int64_t count, bool on_host, std::span<const std::int64_t> tensors = {});
  /// The whole model as loaded: one buffer a parameter.
  std::vector<TapeId> load_model();
  void drop(std::vector<TapeId>& buffers);
  /// Of what offload_optimizer copies up and down; without pin_memory such a copy holds the host up.
  Memory offload_memory() const { return job_.config.offload_optimizer.pin_memory ? Memory::pinned : Memory::dram; }
  /// Copies to or from that memory.
  void offload_copy(Stream stream, bool up, std::int64_t size, std::initializer_list<TapeOperand> operands = {});
  int block_of(std::size_t parameter) const { return blocks_[parameter]; }

  const EagerStep& step_;
  DeepSpeedJob job_;
  EngineTape& tape_;
  DType type_;           // of weights and compute
  DType communication_;  // of reductions
  std::int64_t weight_size_;
  MicroStep now_;
  bool moments_made_ = false;

 private:
  std::vector<int> blocks_;
};

std::unique_ptr<EngineHooks> make_stage0(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);
std::unique_ptr<EngineHooks> make_bf16_optimizer(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);
std::unique_ptr<EngineHooks> make_stage12(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);
std::unique_ptr<EngineHooks> make_stage3(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);

/// Stage 1 in bf16 with fp32 accumulation that is not offloaded to the CPU is another optimizer.
bool uses_bf16_optimizer(const DeepSpeedConfig& config);

}  // namespace zeroplan
