// Stage 0 (the flat FP16_Optimizer, or the plain optimizer in fp32) and BF16_Optimizer, which stage 1 becomes with fp32
// accumulation: full gradients a rank, reduced at the accumulation boundary.

#include <algorithm>
#include <vector>

#include "models/deepspeed_stage_parts.h"

namespace zeroplan {
namespace {

/// The engine reduces in groups that close when they exceed this (a constant of DeepSpeed's, not reduce_bucket_size).
constexpr std::int64_t kReduceGroup = 500'000'000;

/// Gradients as autograd leaves them, accumulated in place.
class FullGradients : public DeepSpeedStage {
 public:
  using DeepSpeedStage::DeepSpeedStage;
  void gradient(int parameter, TapeId storage) override {
    if (gradients_.empty()) gradients_.assign(num_parameters(), kNoBuffer);
    TapeId& kept = gradients_[static_cast<std::size_t>(parameter)];
    if (kept == kNoBuffer) {
      kept = storage;
      return;
    }
    tape_.pass(Stream::compute, 3 * bytes(elements(static_cast<std::size_t>(parameter))),
               {{storage, Access::read}, {kept, Access::read_write}});
    tape_.free(storage);
  }

 protected:
  void drop_gradients() { drop(gradients_); }
  std::vector<TapeId> gradients_;
};

class Stage0 final : public FullGradients {
 public:
  using FullGradients::FullGradients;
  void initialize() override {
    std::vector<TapeId> loaded = load_model();
    for (std::size_t p = 0; p < num_parameters(); ++p) trainable_ += trainable(p) ? elements(p) : 0;
    if (type_ == DType::fp32) return;
    std::vector<TapeId> clones;
    for (std::size_t p = 0; p < num_parameters(); ++p) {
      if (trainable(p)) clones.push_back(staging(bytes(elements(p)), BufferRole::weight_staging));
    }
    weights(bytes(trainable_));
    for (std::size_t p = 0; p < num_parameters(); ++p) {
      if (trainable(p)) tape_.free(loaded[p]);
    }
    drop(clones);
    const TapeId copy = staging(bytes(trainable_), BufferRole::weight_staging);
    resident(fp32(trainable_), BufferRole::master, Owner::optimizer);
    tape_.free(copy);
    // A dummy step makes Adam's states at once.
    const TapeId zeros = staging(fp32(trainable_), BufferRole::gradient_staging);
    make_moments();
    tape_.free(zeros);
  }
  void backward_end() override {
    if (now_.last) reduce();
  }
  void update() override {
    if (type_ == DType::fp32) {
      agree(DType::fp32);
      make_moments();
      std::vector<std::int64_t> tensors;
      for (std::size_t p = 0; p < num_parameters(); ++p) {
        if (trainable(p)) tensors.push_back(elements(p));
      }
      adam(trainable_, false, tensors);
      drop_gradients();
      return;
    }
    cast_and_step();
  }

 private:
  void make_moments() {
    if (moments_made_) return;
    moments_made_ = true;
    for (int i = 0; i < 2; ++i) {
      if (type_ != DType::fp32) {
        resident(fp32(trainable_), BufferRole::moments, Owner::optimizer);
        continue;
      }
      for (std::size_t p = 0; p < num_parameters(); ++p) {
        if (trainable(p)) resident(fp32(elements(p)), BufferRole::moments, Owner::optimizer);
      }
    }
  }

  /// Gradients are put together group by group; a group of one is reduced in place.
  void reduce() {
    std::int64_t size = 0;
    int count = 0;
    for (std::size_t p = 0; p < num_parameters(); ++p) {
      if (!trainable(p)) continue;
      size += elements(p);
      ++count;
      if (size > kReduceGroup) close_group(size, count);
    }
    if (count > 0) close_group(size, count);
  }
  void close_group(std::int64_t& size, int& count) {
    TapeId copy = kNoBuffer;
    if (count > 1) {
      copy = staging(bytes(size), BufferRole::gradient_staging);
      tape_.pass(Stream::compute, 2 * bytes(size), {{copy, Access::write}});
    }
    const TapeId cast =
        communication_ == type_ ? kNoBuffer : staging(size * size_of(communication_), BufferRole::gradient_staging);
    collective(Stream::compute, CollectiveKind::all_reduce, Group::all, size, size, communication_,
               {{cast == kNoBuffer ? copy : cast, Access::read_write}});
    tape_.pass(Stream::compute, 2 * bytes(size));
    tape_.free(cast);
    tape_.free(copy);
    size = 0;
    count = 0;
  }

  /// Every gradient is cast to fp32, then all are put together, with both and the 16-bit gradients alive.
  void cast_and_step() {
    if (type_ == DType::fp16) {  // the overflow scan, one gradient at a time
      for (std::size_t p = 0; p < num_parameters(); ++p) {
        if (trainable(p)) transient(fp32(elements(p)), BufferRole::norm, Stream::compute);
      }
      agree(DType::u8);
    }
    std::vector<TapeId> casts;
    for (std::size_t p = 0; p < num_parameters(); ++p) {
      if (!trainable(p)) continue;
      casts.push_back(staging(fp32(elements(p)), BufferRole::gradient_staging));
      tape_.pass(Stream::compute, 6 * elements(p), {{casts.back(), Access::write}});
    }
    const TapeId flat = staging(fp32(trainable_), BufferRole::gradient_staging);
    tape_.pass(Stream::compute, 2 * fp32(trainable_), {{flat, Access::write}});
    drop(casts);
    drop_gradients();
    tape_.pass(Stream::compute, fp32(trainable_), {{flat, Access::read}});  // the norm
    adam(trainable_, false);
    tape_.pass(Stream::compute, 6 * trainable_);  // master to weights
    tape_.free(flat);
  }

  std::int64_t trainable_ = 0;
};

/// Full fp32 gradients that stay allocated, one all-reduce of all of them, sharded master and states.
class Bf16Optimizer final : public FullGradients {
 public:
  using FullGradients::FullGradients;
  void initialize() override {
    layout_ = zero_layout(step_, job_.ranks, job_.config.round_robin);
    std::vector<TapeId> loaded = load_model();
    weights(bytes(layout_.padded));
    for (std::size_t p = 0; p < num_parameters(); ++p) {
      if (trainable(p)) tape_.free(loaded[p]);
    }
    resident(fp32(layout_.partition), BufferRole::master, Owner::optimizer);
    resident(fp32(layout_.padded), BufferRole::gradient_shard, Owner::gradients);
  }
  void gradient(int parameter, TapeId storage) override {
    FullGradients::gradient(parameter, storage);
    tape_.pass(Stream::compute, 10 * elements(static_cast<std::size_t>(parameter)));  // added to the fp32 buffer
  }
  void backward_end() override {
    if (!now_.last) return;
    const TapeId cast = staging(bytes(layout_.padded), BufferRole::gradient_staging);
    tape_.pass(Stream::compute, 6 * layout_.padded, {{cast, Access::write}});
    collective(Stream::compute, CollectiveKind::all_reduce, Group::all, layout_.elements, layout_.padded, type_,
               {{cast, Access::read_write}});
    tape_.pass(Stream::compute, 6 * layout_.padded, {{cast, Access::read}});
    tape_.free(cast);
  }
  void update() override {
    agree(DType::fp32);
    if (!moments_made_) {
      for (int i = 0; i < 2; ++i) resident(fp32(layout_.partition), BufferRole::moments, Owner::optimizer);
      moments_made_ = true;
    }
    adam(layout_.partition, false);
    collective(Stream::compute, CollectiveKind::all_gather, Group::all, layout_.elements, layout_.padded, type_);
    tape_.pass(Stream::compute, fp32(layout_.padded));  // clears the fp32 gradients
    drop_gradients();
  }

 private:
  ZeroLayout layout_;
};

}  // namespace

std::unique_ptr<EngineHooks> make_stage0(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape) {
  return std::make_unique<Stage0>(step, job, tape);
}

std::unique_ptr<EngineHooks> make_bf16_optimizer(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape) {
  return std::make_unique<Bf16Optimizer>(step, job, tape);
}

}  // namespace zeroplan
