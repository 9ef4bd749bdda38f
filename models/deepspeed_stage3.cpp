// Stage 3: DeepSpeedZeroOptimizer_Stage3. Every parameter is sharded by itself; gradients are reduce-scattered bucket
// by bucket into one flat buffer of the rank's share; the update runs sub-group by sub-group.

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "models/deepspeed_fetch.h"
#include "models/deepspeed_quantized_reduce.h"
#include "models/deepspeed_stage_parts.h"
#include "models/error.h"

namespace zeroplan {
namespace {

/// Elements of which the norm of an offloaded gradient is taken at once.
constexpr std::int64_t kNormPiece = 250'000'000;

class Stage3 final : public DeepSpeedStage {
 public:
  Stage3(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);
  void initialize() override;
  void begin(const MicroStep& now) override;
  void forward_pre(int module) override { fetcher_.fetch(module, true); }
  void forward_post(int module) override { fetcher_.release(module, true); }
  void backward_pre(int module) override { fetcher_.fetch(module, false); }
  void backward_post(int module) override { fetcher_.release(module, false); }
  void gradient(int parameter, TapeId storage) override;
  void hold(int parameter, int number) override { fetcher_.hold(parameter, number); }
  void let_go(int number) override { fetcher_.let_go(number); }
  void backward_end() override;
  void update() override;

 private:
  struct Pending {
    std::size_t parameter = 0;
    TapeId storage = kNoBuffer;  // its own; kNoBuffer: copied into the bucket
  };
  std::int64_t shard(std::size_t parameter) const { return ceil_div(elements(parameter), job_.shard_ranks()); }
  void load_and_shard();
  void make_masters();
  void reduce_bucket();
  void reduce_between_groups();
  std::vector<TapeId> scatter_bucket(TapeId cast);
  std::vector<TapeId> all_reduce_bucket(TapeId cast);
  TapeId reduced_in_place(TapeId cast) const;
  void cast_partitions(std::vector<TapeId>& made);
  std::vector<std::size_t> in_order() const;
  TapeId interleave();
  void offload_partition(const Pending& item);
  bool stays_until_step(std::int64_t count) const;
  void make_moments(std::size_t group);
  void check_swap_buffers() const;
  bool swaps(std::int64_t count) const;
  void disk(std::int64_t size, bool reads);
  void swap_in(std::size_t group);
  void swap_out(std::size_t group);
  void update_offloaded(std::size_t group);
  void update_sub_group(std::size_t group);

  ParameterFetcher fetcher_;
  QuantizedReduction quantized_;
  bool quantizes_;  // gradients, between nodes
  bool offload_, contiguous_;
  Group group_;     // that shards
  DType sum_type_;  // of the accumulated gradients
  Stream reduce_stream_;
  Pool reduce_pool_;
  std::int64_t owned_ = 0, largest_shard_ = 0;  // elements of trainable shards
  std::vector<std::int64_t> groups_;            // sub-groups
  TapeId bucket_ = kNoBuffer;                   // for good
  std::vector<Pending> pending_;
  std::int64_t pending_elements_ = 0;
  std::vector<TapeId> small_gradients_;  // fp32, too small for NVMe
};

Stage3::Stage3(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape)
    : DeepSpeedStage(step, job, tape),
      fetcher_(step_, job_, tape_),
      quantized_(step_, job_, tape_, job.config.overlap_comm ? Stream::reduce : Stream::compute,
                 job.config.overlap_comm ? Pool::reduce : Pool::compute),
      quantizes_(QuantizedReduction::applies(job)),
      offload_(job.config.optimizer_on_host()),
      contiguous_(job.config.contiguous_gradients),
      group_(job.config.mics() ? Group::shard : Group::all),
      sum_type_(job.config.grad_accum.value_or(type_)),
      reduce_stream_(job.config.overlap_comm ? Stream::reduce : Stream::compute),
      reduce_pool_(job.config.overlap_comm ? Pool::reduce : Pool::compute),
      groups_(sub_groups(step, job.shard_ranks(), job.config.sub_group)) {
  for (std::size_t p = 0; p < num_parameters(); ++p) {
    if (!trainable(p)) continue;
    owned_ += shard(p);
    largest_shard_ = std::max(largest_shard_, shard(p));
  }
  check_swap_buffers();
}

/// A sub-group takes four buffers, one read ahead four more, one written behind three (deepspeed.md section 7).
void Stage3::check_swap_buffers() const {
  const DeepspeedOffload& offload = job_.config.offload_optimizer;
  if (!job_.config.optimizer_on_nvme() || offload.buffer_count <= 0) return;  // 0: DeepSpeed's own 4
  const bool pipelined = (offload.pipeline_read || offload.pipeline_write) && groups_.size() > 1;
  const std::int64_t needed = 4 + (pipelined ? 4 : 0) + (pipelined && offload.pipeline_write ? 3 : 0);
  if (offload.buffer_count >= needed) return;
  throw InputError(
      fmt::format("deepspeed: offload_optimizer.buffer_count: expected at least {}, got {}: DeepSpeed stops "
                  "with \"ran out of swap buffers\"",
                  needed, offload.buffer_count));
}

void Stage3::initialize() {
  load_and_shard();
  if (!offload_) make_masters();
  if (contiguous_) {
    bucket_ =
        resident(job_.config.reduce_bucket * size_of(communication_), BufferRole::gradient_staging, Owner::buffers);
  }
  if (!offload_) resident(owned_ * size_of(sum_type_), BufferRole::gradient_shard, Owner::gradients);
  for (std::size_t p = 0; p < num_parameters(); ++p) {  // hooks are set on gathered parameters
    if (trainable(p)) fetcher_.visit(p);
  }
}

/// Without zero.Init the whole model lies on the GPU first. Unless parameters live on the host, trainable shards go
/// through the host into one flat buffer, and the cache is emptied on the way.
void Stage3::load_and_shard() {
  const bool on_host = job_.config.parameters_on_host();
  std::vector<TapeId> loaded;
  if (!job_.zero_init) loaded = load_model();
  std::vector<TapeId> shards(num_parameters(), kNoBuffer);
  for (std::size_t p = 0; p < num_parameters(); ++p) {
    fetcher_.make_secondary(p);
    if (!on_host) shards[p] = resident(bytes(shard(p)), BufferRole::weight_shard, Owner::parameters);
    if (!loaded.empty()) tape_.free(loaded[p]);
  }
  if (on_host) return;
  for (std::size_t p = 0; p < num_parameters(); ++p) {
    if (trainable(p)) tape_.free(shards[p]);
  }
  tape_.empty_cache();
  resident(bytes(owned_), BufferRole::weight_shard, Owner::parameters);
}

/// A sub-group's fp32 copy is made twice; the first one lives until the next sub-group. Then zero gradients, in one
/// buffer for the largest.
void Stage3::make_masters() {
  TapeId converted = kNoBuffer;
  for (const std::int64_t count : groups_) {
    const TapeId next = staging(fp32(count), BufferRole::master);
    tape_.free(converted);
    converted = next;
    resident(fp32(count), BufferRole::master, Owner::optimizer);
  }
  tape_.free(converted);
  if (groups_.empty()) return;
  tape_.free(staging(fp32(*std::max_element(groups_.begin(), groups_.end())), BufferRole::gradient_staging));
}

void Stage3::begin(const MicroStep& now) {
  DeepSpeedStage::begin(now);
  fetcher_.begin_micro_step();
}

void Stage3::gradient(int parameter, TapeId storage) {
  const auto p = static_cast<std::size_t>(parameter);
  const std::int64_t bucket = job_.config.reduce_bucket;
  if (pending_elements_ + elements(p) > bucket && pending_elements_ > 0) reduce_bucket();
  if (contiguous_ && pending_elements_ + elements(p) <= bucket) {
    tape_.wait(reduce_stream_, Stream::compute);
    tape_.pass(reduce_stream_, 2 * bytes(elements(p)), {{storage, Access::read}, {bucket_, Access::write}});
    tape_.record_stream(storage, reduce_stream_);
    tape_.free(storage);
    storage = kNoBuffer;
  }
  pending_.push_back({p, storage});
  pending_elements_ += elements(p);
}

/// The reduce-scatter's input: each parameter padded and cut by ranks, unless it is one that needs neither.
TapeId Stage3::interleave() {
  if (pending_.size() == 1 && elements(pending_.front().parameter) % job_.shard_ranks() == 0) return kNoBuffer;
  std::int64_t padded = 0;
  for (const Pending& item : pending_) padded += shard(item.parameter) * job_.shard_ranks();
  const TapeId copy = staging(padded * size_of(communication_), BufferRole::gradient_staging, reduce_pool_);
  tape_.pass(reduce_stream_, 2 * padded * size_of(communication_), {{bucket_, Access::read}, {copy, Access::write}});
  return copy;
}

/// What of it is alive while the partitions are added.
std::vector<TapeId> Stage3::scatter_bucket(TapeId cast) {
  std::int64_t padded = 0;
  for (const Pending& item : pending_) padded += shard(item.parameter) * job_.shard_ranks();
  const TapeId copy = interleave();
  collective(reduce_stream_, CollectiveKind::reduce_scatter, group_, pending_elements_, padded, communication_,
             {{copy != kNoBuffer ? copy : reduced_in_place(cast), Access::read_write}});
  return {copy};
}

/// In place; then multiplied by gradient_predivide_factor, 1, into a copy, and in the type of the sums in another.
std::vector<TapeId> Stage3::all_reduce_bucket(TapeId cast) {
  const TapeId input = reduced_in_place(cast);
  collective(reduce_stream_, CollectiveKind::all_reduce, group_, pending_elements_, pending_elements_, communication_,
             {{input, Access::read_write}});
  const std::int64_t size = pending_elements_ * size_of(communication_);
  const TapeId scaled = staging(size, BufferRole::gradient_staging, reduce_pool_);
  tape_.pass(reduce_stream_, 2 * size, {{input, Access::read}, {scaled, Access::write}});
  if (communication_ == sum_type_) return {scaled};
  const std::int64_t cast_size = pending_elements_ * size_of(sum_type_);
  const TapeId sums = staging(cast_size, BufferRole::gradient_staging, reduce_pool_);
  tape_.pass(reduce_stream_, size + cast_size, {{scaled, Access::read}, {sums, Access::write}});
  tape_.free(scaled);
  return {sums};
}

TapeId Stage3::reduced_in_place(TapeId cast) const {
  if (cast != kNoBuffer) return cast;
  return pending_.front().storage != kNoBuffer ? pending_.front().storage : bucket_;
}

/// After a reduce-scatter: partitions in the type of the sums, each a tensor of its own; nothing when they have it.
void Stage3::cast_partitions(std::vector<TapeId>& made) {
  if (communication_ == sum_type_) return;
  for (const Pending& item : pending_) {
    const std::int64_t count = shard(item.parameter);
    made.push_back(staging(count * size_of(sum_type_), BufferRole::gradient_staging, reduce_pool_));
    tape_.pass(reduce_stream_, count * (size_of(communication_) + size_of(sum_type_)), {{made.back(), Access::write}});
  }
}

/// The bucket's parameters by their numbers, as they are reduced.
std::vector<std::size_t> Stage3::in_order() const {
  std::vector<std::size_t> parameters;
  for (const Pending& item : pending_) parameters.push_back(item.parameter);
  std::sort(parameters.begin(), parameters.end());
  return parameters;
}

void Stage3::reduce_bucket() {
  if (pending_.empty()) return;
  TapeId cast = kNoBuffer;  // the bucket has the communication's type already
  if (communication_ != type_ && pending_.front().storage != kNoBuffer) {
    cast = staging(pending_elements_ * size_of(communication_), BufferRole::gradient_staging, reduce_pool_);
    tape_.pass(reduce_stream_, pending_elements_ * (weight_size_ + size_of(communication_)),
               {{bucket_, Access::read}, {cast, Access::write}});
  }
  // Otherwise the bucket is all-reduced in place; what does not lie in it is reduce-scattered whatever the key says.
  const bool scatters = job_.config.reduce_scatter || !contiguous_ || pending_elements_ > job_.config.reduce_bucket;
  std::vector<TapeId> made = !scatters    ? all_reduce_bucket(cast)
                             : quantizes_ ? quantized_.reduce(in_order())
                                          : scatter_bucket(cast);
  if (scatters) cast_partitions(made);
  for (const Pending& item : pending_) {
    if (offload_) {
      offload_partition(item);
    } else {  // into the flat gradient buffer, added to it after the first micro-step
      tape_.pass(reduce_stream_, shard(item.parameter) * (size_of(communication_) + 2 * size_of(sum_type_)));
    }
    tape_.record_stream(item.storage, reduce_stream_);
    tape_.free(item.storage);
  }
  if (now_.last && job_.replicas() > 1) reduce_between_groups();
  drop(made);
  tape_.free(cast);
  pending_.clear();
  pending_elements_ = 0;
}

/// MiCS, at the boundary: the bucket's part of the flat gradient buffer, scaled and all-reduced with the ranks that own
/// the same part in other groups; one group call, in place.
void Stage3::reduce_between_groups() {
  std::int64_t count = 0;
  for (const Pending& item : pending_) count += shard(item.parameter);
  tape_.pass(reduce_stream_, 2 * count * size_of(sum_type_));
  collective(reduce_stream_, CollectiveKind::all_reduce, Group::replica, count, count, sum_type_);
}

/// A partition travels to the host and, for the fp32 value at the boundary, back again.
void Stage3::offload_partition(const Pending& item) {
  const std::int64_t count = shard(item.parameter);
  const std::int64_t size = count * size_of(sum_type_);
  offload_copy(reduce_stream_, false, size);
  const TapeId back = staging(size, BufferRole::gradient_staging, reduce_pool_);
  offload_copy(reduce_stream_, true, size, {{back, Access::write}});
  if (now_.last) {
    transient(8 * std::min(count, kNormPiece), BufferRole::norm, reduce_stream_, reduce_pool_);
    const bool casts = sum_type_ != DType::fp32;
    const TapeId cast = casts ? staging(fp32(count), BufferRole::gradient_staging, reduce_pool_) : back;
    if (casts)
      tape_.pass(reduce_stream_, count * (size_of(sum_type_) + 4), {{back, Access::read}, {cast, Access::write}});
    if (stays_until_step(count)) {
      small_gradients_.push_back(cast);
      if (!casts) return;
    } else {
      offload_copy(reduce_stream_, false, fp32(count), {{cast, Access::read}});
      tape_.host_waits(reduce_stream_);  // this copy blocks
      if (casts) tape_.free(cast);
      if (job_.config.optimizer_on_nvme()) disk(fp32(count), false);  // waits for nothing before the step
    }
  }
  tape_.free(back);
}

void Stage3::backward_end() {
  reduce_bucket();
  tape_.host_waits(reduce_stream_);
  fetcher_.end_backward();
}

/// A sub-group's, in its first update, when its gradients are fp32 already.
void Stage3::make_moments(std::size_t group) {
  if (moments_made_) return;
  for (int i = 0; i < 2; ++i) resident(fp32(groups_[group]), BufferRole::moments, Owner::optimizer);
  moments_made_ = group + 1 == groups_.size();
}

/// With NVMe, gradients that are too small to be worth a transfer wait on the GPU (deepspeed.md section 7).
bool Stage3::stays_until_step(std::int64_t count) const {
  return job_.config.optimizer_on_nvme() && fp32(count) < std::max<std::int64_t>(1 << 20, job_.config.aio_block_bytes);
}

/// A sub-group that is too small to be worth a transfer stays in memory.
bool Stage3::swaps(std::int64_t count) const { return job_.config.optimizer_on_nvme() && !stays_until_step(count); }

void Stage3::disk(std::int64_t size, bool reads) {
  const auto amount = Bytes(static_cast<double>(size));
  if (reads) {
    tape_.work(Stream::nvme_read, Copy{Memory::nvme, Memory::pinned, amount});
  } else {
    tape_.work(Stream::nvme_write, Copy{Memory::pinned, Memory::nvme, amount});
  }
}

/// Master, moments and gradients of sub-group `group` come from NVMe. pipeline_read has asked for them one sub-group
/// before, and asks for the next.
void Stage3::swap_in(std::size_t group) {
  const auto read = [&](std::size_t g) { disk(4 * fp32(groups_[g]), true); };
  if (!swaps(groups_[group])) return;
  const bool ahead = job_.config.offload_optimizer.pipeline_read;
  if (!ahead || group == 0 || !swaps(groups_[group - 1])) read(group);
  tape_.host_waits(Stream::nvme_read);
  if (ahead && group + 1 < groups_.size() && swaps(groups_[group + 1])) read(group + 1);
}

/// Master and moments go back. With pipeline_write they are waited for when the next sub-group's go.
void Stage3::swap_out(std::size_t group) {
  if (!swaps(groups_[group])) return;
  const bool behind = job_.config.offload_optimizer.pipeline_write;
  if (behind) tape_.host_waits(Stream::nvme_write);
  disk(3 * fp32(groups_[group]), false);
  if (!behind || group + 1 == groups_.size()) tape_.host_waits(Stream::nvme_write);
}

/// Adam on the host.
void Stage3::update_offloaded(std::size_t group) {
  const std::int64_t count = groups_[group];
  swap_in(group);
  adam(count, true);
  swap_out(group);
  if (job_.config.parameters_on_nvme()) {
    disk(bytes(count), false);
  } else if (!job_.config.parameters_on_host()) {
    tape_.work(Stream::h2d, Copy{Memory::dram, Memory::hbm, Bytes(static_cast<double>(bytes(count)))});
    tape_.host_waits(Stream::h2d);
  }
}

void Stage3::update_sub_group(std::size_t group) {
  if (offload_) {
    update_offloaded(group);
    return;
  }
  const std::int64_t count = groups_[group];
  const TapeId flat = staging(count * size_of(sum_type_), BufferRole::gradient_staging);
  tape_.pass(Stream::compute, 2 * count * size_of(sum_type_), {{flat, Access::write}});
  TapeId gradient = flat;
  if (sum_type_ != DType::fp32) {
    gradient = staging(fp32(count), BufferRole::gradient_staging);
    tape_.pass(Stream::compute, count * (size_of(sum_type_) + 4), {{flat, Access::read}, {gradient, Access::write}});
    tape_.free(flat);
  }
  make_moments(group);
  adam(count, false);
  tape_.pass(Stream::compute, fp32(count) + bytes(count));  // master to shards
  tape_.free(gradient);
}

void Stage3::update() {
  fetcher_.release_all();
  if (type_ == DType::fp16) {  // isinf and isnan maps over the whole gradient buffer
    if (!offload_) transient(3 * owned_, BufferRole::norm, Stream::compute);
    agree(DType::u8, group_);
  }
  if (!offload_) {
    transient(8 * largest_shard_, BufferRole::norm, Stream::compute);
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) agree(DType::fp32, group_);
  if (job_.config.optimizer_on_nvme()) tape_.host_waits(Stream::nvme_write);  // gradients written in backward
  for (std::size_t i = 0; i < groups_.size(); ++i) update_sub_group(i);
  drop(small_gradients_);
  fetcher_.drop_secondary_shards();
  fetcher_.gather_persistent();
}

}  // namespace

std::unique_ptr<EngineHooks> make_stage3(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape) {
  return std::make_unique<Stage3>(step, job, tape);
}

}  // namespace zeroplan
