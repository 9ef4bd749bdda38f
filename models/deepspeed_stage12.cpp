// Stages 1 and 2: DeepSpeedZeroOptimizer. Weights whole on every rank, master and states sharded; gradients are
// all-reduced bucket by bucket, of which a rank keeps what touches its partition.

#include <algorithm>
#include <vector>

#include "models/deepspeed_stage_parts.h"

namespace zeroplan {
namespace {

class Stage12 final : public DeepSpeedStage {
 public:
  Stage12(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);
  void initialize() override;
  void begin(const MicroStep& now) override;
  void gradient(int parameter, TapeId storage) override;
  void backward_end() override;
  void update() override;

 private:
  struct Pending {
    std::size_t parameter = 0;
    TapeId storage = kNoBuffer;  // its own; kNoBuffer: copied into the bucket
  };
  bool reduces_in_backward() const { return job_.config.stage == 2 || (overlap_ && now_.last); }
  std::int64_t owned(std::size_t parameter) const { return layout_.owned(parameter, elements(parameter), job_.rank); }
  std::int64_t bucket_elements() const { return job_.config.reduce_bucket; }
  void open_buckets();
  void collect(std::size_t parameter, TapeId storage);
  void reduce_bucket();
  int owners_in_bucket() const;
  void all_reduce();
  bool sums_compactly() const { return fp32_sum_ && contiguous_; }
  void make_sum();
  void add_to_sum(DType reduced);
  void keep(const Pending& item);
  void keep_contiguous(const Pending& item);
  void offload(const Pending& item);
  void close_backward();
  void overflow_check_and_norm();
  void make_moments();

  ZeroLayout layout_;
  bool offload_, overlap_, contiguous_, fp32_sum_;
  Stream reduce_stream_;
  Pool reduce_pool_;
  std::vector<std::size_t> touching_;  // parameters of which the rank owns a part
  std::int64_t touching_elements_ = 0, largest_slice_ = 0;

  std::vector<TapeId> buckets_;
  bool buckets_open_ = false;
  std::vector<Pending> pending_;
  std::int64_t pending_elements_ = 0;
  std::vector<TapeId> gradients_;       // by parameter: waiting for the boundary (stage 1), or owned
  std::vector<TapeId> previous_;        // foreign gradients of the reduction before (no bucket, side stream)
  TapeId owned_gradients_ = kNoBuffer;  // grads_in_partition of this backward
  TapeId accumulated_ = kNoBuffer;      // of the backwards before
  TapeId sum_ = kNoBuffer;              // fp32 accumulation at stage 2
};

Stage12::Stage12(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape)
    : DeepSpeedStage(step, job, tape),
      layout_(zero_layout(step, job.ranks, job.config.round_robin)),
      offload_(job.config.optimizer_on_host()),
      overlap_(job.config.overlap_comm),
      contiguous_(job.config.contiguous_gradients || offload_),
      fp32_sum_(job.config.stage == 2 && !offload_ && type_ != DType::fp32 && job.config.grad_accum == DType::fp32),
      reduce_stream_(overlap_ ? Stream::reduce : Stream::compute),
      reduce_pool_(overlap_ ? Pool::reduce : Pool::compute),
      gradients_(step.parameters.size(), kNoBuffer) {
  for (std::size_t p = 0; p < num_parameters(); ++p) {
    if (owned(p) == 0) continue;
    touching_.push_back(p);
    touching_elements_ += elements(p);
    largest_slice_ = std::max(largest_slice_, owned(p));
  }
}

void Stage12::initialize() {
  std::vector<TapeId> loaded = load_model();
  if (!job_.flattens_on_host) weights(bytes(layout_.padded));
  std::int64_t largest = 0;
  for (std::size_t p = 0; p < num_parameters(); ++p) {
    if (!trainable(p)) continue;
    tape_.free(loaded[p]);
    largest = std::max(largest, elements(p));
  }
  if (job_.flattens_on_host) weights(bytes(layout_.padded));
  if (offload_) {
    resident(bytes(largest), BufferRole::gradient_staging, Owner::buffers);  // temp_grad_buffer_for_gpu_offload
    return;
  }
  const TapeId clone = staging(bytes(layout_.partition), BufferRole::weight_staging);
  resident(fp32(layout_.partition), BufferRole::master, Owner::optimizer);
  tape_.free(clone);
  tape_.free(staging(fp32(layout_.partition), BufferRole::gradient_staging));  // the zero gradient
}

void Stage12::begin(const MicroStep& now) {
  DeepSpeedStage::begin(now);
  pending_.clear();
  pending_elements_ = 0;
}

/// Full size even if the model is smaller; two of them when reductions overlap.
void Stage12::open_buckets() {
  if (buckets_open_) return;
  buckets_open_ = true;
  if (!contiguous_) return;
  const DType type = job_.config.stage == 1 ? job_.config.grad_accum.value_or(type_) : type_;
  for (int i = 0; i < (overlap_ ? 2 : 1); ++i) {
    buckets_.push_back(staging(bucket_elements() * size_of(type), BufferRole::gradient_staging));
  }
}

void Stage12::gradient(int parameter, TapeId storage) {
  const auto p = static_cast<std::size_t>(parameter);
  open_buckets();
  if (reduces_in_backward()) {
    if (gradients_[p] != kNoBuffer && job_.config.stage == 1) {  // summed by autograd over the micro-steps before
      tape_.pass(Stream::compute, 3 * bytes(elements(p)), {{storage, Access::read}});
      tape_.free(storage);
      storage = gradients_[p];
      gradients_[p] = kNoBuffer;
    }
    collect(p, storage);
  } else if (gradients_[p] == kNoBuffer) {
    gradients_[p] = storage;
  } else {
    tape_.pass(Stream::compute, 3 * bytes(elements(p)), {{storage, Access::read}, {gradients_[p], Access::read_write}});
    tape_.free(storage);
  }
}

void Stage12::collect(std::size_t parameter, TapeId storage) {
  if (pending_elements_ + elements(parameter) > bucket_elements()) reduce_bucket();
  if (contiguous_ && elements(parameter) <= bucket_elements()) {
    tape_.pass(Stream::compute, 2 * bytes(elements(parameter)),
               {{storage, Access::read}, {buckets_.front(), Access::write}});
    tape_.free(storage);
    storage = kNoBuffer;
  }
  pending_.push_back({parameter, storage});
  pending_elements_ += elements(parameter);
}

/// Slices of one owner that follow each other count once.
int Stage12::owners_in_bucket() const {
  int slices = 0;
  std::int64_t before = -1;
  for (const Pending& item : pending_) {
    const std::int64_t begin = layout_.start[item.parameter], end = begin + elements(item.parameter);
    for (std::int64_t owner = begin / layout_.partition; owner <= (end - 1) / layout_.partition; ++owner) {
      if (owner != before) ++slices;
      before = owner;
    }
  }
  return slices;
}

/// Several slices or tensors are put together in a copy first, one is reduced where it lies.
void Stage12::all_reduce() {
  const bool copies = contiguous_ ? job_.config.reduce_scatter && owners_in_bucket() > 1 : pending_.size() > 1;
  const TapeId source = pending_.front().storage != kNoBuffer ? pending_.front().storage : buckets_.front();
  TapeId buffer = source;
  if (overlap_) {  // compute waits for the reduction before this one
    tape_.wait(Stream::compute, Stream::reduce);
    tape_.wait(Stream::reduce, Stream::compute);
  }
  if (sums_compactly()) make_sum();
  const TapeId copy =
      copies ? staging(bytes(pending_elements_), BufferRole::gradient_staging, reduce_pool_) : kNoBuffer;
  if (copies) {
    tape_.pass(reduce_stream_, 2 * bytes(pending_elements_), {{source, Access::read}, {copy, Access::write}});
    buffer = copy;
  }
  TapeId cast = kNoBuffer;
  if (communication_ != type_) {
    const std::int64_t size = pending_elements_ * size_of(communication_);
    cast = staging(size, BufferRole::gradient_staging, reduce_pool_);
    tape_.pass(reduce_stream_, bytes(pending_elements_) + size, {{buffer, Access::read}, {cast, Access::write}});
    buffer = cast;
  }
  collective(reduce_stream_, CollectiveKind::all_reduce, Group::all, pending_elements_, pending_elements_,
             communication_, {{buffer, Access::read_write}});
  if (sums_compactly()) add_to_sum(cast != kNoBuffer ? communication_ : type_);
  if (buffer != source) {
    tape_.pass(reduce_stream_, 2 * bytes(pending_elements_), {{buffer, Access::read}, {source, Access::write}});
  }
  tape_.free(cast);
  tape_.free(copy);
}

/// Made when the first owned slice is looked up: before the reduction's own buffers.
void Stage12::make_sum() {
  const bool owns = std::ranges::any_of(pending_, [&](const Pending& item) { return owned(item.parameter) > 0; });
  if (!owns || sum_ != kNoBuffer) return;
  sum_ = resident(fp32(layout_.partition), BufferRole::gradient_shard, Owner::gradients, reduce_pool_);
}

/// Each owned slice goes through an fp32 copy of itself, while the reduced bucket is still there.
void Stage12::add_to_sum(DType reduced) {
  for (const Pending& item : pending_) {
    const std::int64_t slice = owned(item.parameter);
    if (slice == 0) continue;
    const TapeId cast =
        reduced == DType::fp32 ? kNoBuffer : staging(fp32(slice), BufferRole::gradient_staging, reduce_pool_);
    if (cast != kNoBuffer) tape_.pass(reduce_stream_, slice * (size_of(reduced) + 4), {{cast, Access::write}});
    tape_.pass(reduce_stream_, 3 * fp32(slice), {{cast, Access::read}, {sum_, Access::read_write}});
    tape_.free(cast);
  }
}

void Stage12::reduce_bucket() {
  if (pending_.empty()) return;
  all_reduce();
  if (overlap_ && !contiguous_) drop(previous_);
  for (const Pending& item : pending_) keep(item);
  pending_.clear();
  pending_elements_ = 0;
  if (buckets_.size() > 1) std::swap(buckets_[0], buckets_[1]);
}

/// What a rank does with a reduced gradient: it keeps those that touch its partition.
void Stage12::keep(const Pending& item) {
  if (contiguous_) {
    keep_contiguous(item);
  } else if (owned(item.parameter) > 0) {
    TapeId& kept = gradients_[item.parameter];
    if (kept == kNoBuffer) {
      kept = item.storage;
    } else {  // of the micro-steps before
      tape_.pass(reduce_stream_, 3 * bytes(elements(item.parameter)),
                 {{item.storage, Access::read}, {kept, Access::read_write}});
      tape_.free(item.storage);
    }
  } else if (overlap_) {
    previous_.push_back(item.storage);
  } else {
    tape_.free(item.storage);
  }
}

void Stage12::keep_contiguous(const Pending& item) {
  if (owned(item.parameter) > 0) {
    if (offload_) {
      offload(item);
    } else if (!fp32_sum_) {
      if (owned_gradients_ == kNoBuffer) {
        owned_gradients_ =
            resident(bytes(touching_elements_), BufferRole::gradient_shard, Owner::gradients, reduce_pool_);
      }
      tape_.pass(reduce_stream_, 2 * bytes(elements(item.parameter)), {{owned_gradients_, Access::write}});
    }
  }
  tape_.free(item.storage);
}

/// An owned slice goes to the host: accumulated there in the model's type, at the boundary normed and cast to fp32.
void Stage12::offload(const Pending& item) {
  const std::int64_t slice = owned(item.parameter);
  if (job_.accumulation > 1) {
    const std::int64_t whole = bytes(elements(item.parameter));
    if (now_.micro > 0) {
      const TapeId back = staging(whole, BufferRole::gradient_staging);
      offload_copy(reduce_stream_, true, whole, {{back, Access::write}});
      tape_.free(back);
    }
    if (!now_.last) offload_copy(reduce_stream_, false, whole);
  }
  if (!now_.last) return;
  transient(8 * slice, BufferRole::norm, reduce_stream_);
  const TapeId cast = staging(fp32(slice), BufferRole::gradient_staging);
  tape_.pass(reduce_stream_, bytes(slice) + fp32(slice), {{cast, Access::write}});
  offload_copy(reduce_stream_, false, fp32(slice), {{cast, Access::read}});
  tape_.free(cast);
}

void Stage12::backward_end() {
  if (!reduces_in_backward()) {
    if (!now_.last) return;
    for (std::size_t p = 0; p < num_parameters(); ++p) {  // stage 1: all of them now, in forward order
      if (gradients_[p] == kNoBuffer) continue;
      const TapeId storage = gradients_[p];
      gradients_[p] = kNoBuffer;
      collect(p, storage);
    }
  }
  reduce_bucket();
  close_backward();
}

/// The epilogue waits for the device and drops the buckets.
void Stage12::close_backward() {
  tape_.host_waits(reduce_stream_);
  drop(previous_);
  drop(buckets_);
  buckets_open_ = false;
  if (owned_gradients_ == kNoBuffer) return;
  if (accumulated_ == kNoBuffer) {
    accumulated_ = owned_gradients_;
  } else {
    tape_.pass(Stream::compute, 3 * bytes(touching_elements_),
               {{owned_gradients_, Access::read}, {accumulated_, Access::read_write}});
    tape_.free(owned_gradients_);
  }
  owned_gradients_ = kNoBuffer;
}

void Stage12::overflow_check_and_norm() {
  const bool checks = type_ == DType::fp16 || (type_ == DType::bf16 && job_.config.check_grad_overflow);
  if (checks) agree(DType::u8);
  if (!offload_) transient(8 * largest_slice_, BufferRole::norm, Stream::compute);
  agree(DType::fp32);
}

void Stage12::make_moments() {
  if (moments_made_) return;
  for (int i = 0; i < 2; ++i) resident(fp32(layout_.partition), BufferRole::moments, Owner::optimizer);
  moments_made_ = true;
}

void Stage12::update() {
  overflow_check_and_norm();
  if (offload_) {
    adam(layout_.partition, true);
    offload_copy(Stream::h2d, true, bytes(layout_.partition));
    tape_.wait(Stream::compute, Stream::h2d);
  } else if (fp32_sum_) {
    make_moments();
    adam(layout_.partition, false);
    tape_.free(sum_);
    sum_ = kNoBuffer;
  } else {
    const TapeId flat = staging(bytes(layout_.partition), BufferRole::gradient_staging);
    tape_.pass(Stream::compute, 2 * bytes(layout_.partition), {{flat, Access::write}});
    TapeId cast = flat;
    if (type_ != DType::fp32) {
      cast = staging(fp32(layout_.partition), BufferRole::gradient_staging);
      tape_.pass(Stream::compute, bytes(layout_.partition) + fp32(layout_.partition),
                 {{flat, Access::read}, {cast, Access::write}});
      tape_.free(flat);
    }
    tape_.free(accumulated_);
    accumulated_ = kNoBuffer;
    for (TapeId& gradient : gradients_) {
      tape_.free(gradient);
      gradient = kNoBuffer;
    }
    make_moments();
    adam(layout_.partition, false);
    tape_.free(cast);
  }
  collective(Stream::compute, CollectiveKind::all_gather, Group::all, layout_.elements, layout_.padded, type_);
}

}  // namespace

std::unique_ptr<EngineHooks> make_stage12(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape) {
  return std::make_unique<Stage12>(step, job, tape);
}

}  // namespace zeroplan
