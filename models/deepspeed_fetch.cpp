#include "models/deepspeed_fetch.h"

#include <algorithm>
#include <stdexcept>

namespace zeroplan {

ParameterFetcher::ParameterFetcher(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape)
    : step_(step),
      job_(job),
      tape_(tape),
      stream_(job.config.overlap_comm ? Stream::gather : Stream::compute),
      pool_(job.config.overlap_comm ? Pool::gather : Pool::compute),
      weight_size_(size_of(job.config.precision)),
      shard_ranks_(job.shard_ranks()),
      quantizes_(job.config.quantized_weights && !job.config.mics()),
      holds_weights_(job.config.mics() && !job.zero_init) {
  std::int64_t persistent = 0;
  for (const EagerParameter& parameter : step.parameters) {
    Parameter& p = parameters_.emplace_back();
    p.elements = parameter.elements;
    p.shard = ceil_div(parameter.elements, shard_ranks_);
    p.trainable = parameter.trainable;
    p.persistent =
        p.elements <= job.config.param_persistence && persistent + p.elements <= job.config.model_persistence;
    if (p.persistent) persistent += p.elements;
  }
  bool backward = false;
  for (const EagerEvent& event : step.events) {
    backward = backward || event.kind == EagerEventKind::forward_end;
    if (backward && event.kind == EagerEventKind::forward_pre) runs_again_.insert(event.id);
  }
}

void ParameterFetcher::begin_micro_step() {
  available_ = 0;
  position_ = 0;
  ++forwards_;
  recording_ = forwards_ == 1;
  if (forwards_ == 2) {
    trace_ = recorded_;
    for (std::size_t i = 0; i < trace_.size(); ++i) {
      for (const int p : own(trace_[i])) queue_.emplace_back(p, static_cast<int>(i));
    }
  }
  queue_head_ = 0;
  for (Parameter& p : parameters_) p.last_use = -1;
}

// --- gathers ---------------------------------------------------------------------------------------------------------

/// With hpZ a parameter that has a secondary shard is gathered inside its small group; with MiCS every one.
Group ParameterFetcher::group_of(const Parameter& parameter) const {
  if (job_.config.mics()) return Group::shard;
  return parameter.secondary == kNoBuffer ? Group::all : Group::shard;
}

std::int64_t ParameterFetcher::gathered_bytes(const Parameter& parameter) const {
  return parameter.shard * shard_ranks_ * weight_size_;
}

void ParameterFetcher::gather(const std::vector<std::size_t>& wanted) {
  for (const Group group : {Group::shard, Group::all}) {
    std::vector<std::size_t> of_group;
    for (const std::size_t p : wanted) {
      const Parameter& parameter = parameters_[p];
      if (parameter.state == State::sharded && group_of(parameter) == group) of_group.push_back(p);
    }
    if (job_.config.sequential_gathers()) {
      for (const std::size_t p : of_group) start_flight({p});
    } else if (!of_group.empty()) {
      start_flight(of_group);
    }
  }
}

/// A shard that lies on the host gets a buffer on the GPU.
TapeId ParameterFetcher::bring_up_shard(const Parameter& parameter, Stream stream, Pool pool) {
  const std::int64_t size = parameter.shard * weight_size_;
  const auto bytes = Bytes(static_cast<double>(size));
  const TapeId up =
      tape_.alloc({size, pool, BufferRole::weight_staging, Owner::buffers, static_cast<std::int16_t>(tape_.block())});
  if (job_.config.parameters_on_nvme()) {
    tape_.work(Stream::nvme_read, Copy{Memory::nvme, Memory::pinned, bytes});
    tape_.host_waits(Stream::nvme_read);
  }
  // The flat buffer of what is trained is pinned whatever pin_memory says.
  const bool pinned = parameter.trainable || job_.config.offload_param.pin_memory;
  tape_.work(stream, Copy{pinned ? Memory::pinned : Memory::dram, Memory::hbm, bytes}, {{up, Access::write}});
  return up;
}

std::vector<TapeId> ParameterFetcher::bring_up(const std::vector<std::size_t>& wanted) {
  std::vector<TapeId> shards;
  if (!job_.config.parameters_on_host()) return shards;
  for (const std::size_t p : wanted) shards.push_back(bring_up_shard(parameters_[p], stream_, pool_));
  tape_.host_waits(stream_);
  return shards;
}

/// With one rank there is nothing to gather: the parameter is its shard, or that one's copy on the GPU.
void ParameterFetcher::start_without_gather(const std::vector<std::size_t>& wanted) {
  const std::vector<TapeId> copies = bring_up(wanted);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    parameters_[wanted[i]].full = copies.empty() ? kNoBuffer : copies[i];
  }
  in_flight(wanted, {kNoBuffer, kNoBuffer, kNoBuffer, wanted, 0, false});
}

/// One parameter is received where it will stay, several in one flat buffer.
void ParameterFetcher::start_flight(const std::vector<std::size_t>& wanted) {
  if (job_.config.mics()) return start_mics_flight(wanted);
  if (job_.ranks == 1) return start_without_gather(wanted);
  if (quantizes_) return start_quantized_flight(wanted);
  const bool single = wanted.size() == 1;
  const Parameter& first = parameters_[wanted.front()];
  std::int64_t bytes = 0;
  Collective collective{CollectiveKind::all_gather, group_of(first), 0, 0, job_.config.precision};
  for (const std::size_t p : wanted) {
    bytes += gathered_bytes(parameters_[p]);
    collective.elements += parameters_[p].elements;
    collective.padded += parameters_[p].shard * shard_ranks_;
  }
  const auto block = static_cast<std::int16_t>(tape_.block());
  const BufferRole role = single ? BufferRole::weights : BufferRole::weight_staging;
  const TapeId buffer = tape_.alloc({bytes, pool_, role, Owner::parameters, block});
  const std::vector<TapeId> shards = bring_up(wanted);
  tape_.work(stream_, collective, {{buffer, Access::write}});
  for (const TapeId shard : shards) tape_.free(shard);
  in_flight(wanted, {buffer, kNoBuffer, kNoBuffer, wanted, 0, false});
}

void ParameterFetcher::in_flight(const std::vector<std::size_t>& wanted, const Flight& flight) {
  flights_.push_back(flight);
  for (const std::size_t p : wanted) {
    parameters_[p].state = State::in_flight;
    ++in_flight_;
    parameters_[p].flight = static_cast<int>(flights_.size()) - 1;
    available_ += parameters_[p].elements;
  }
}

void ParameterFetcher::wait_for(std::size_t p) {
  Parameter& parameter = parameters_[p];
  Flight& flight = flights_[static_cast<std::size_t>(parameter.flight)];
  if (flight.buffer == kNoBuffer) {
    if (parameter.full != kNoBuffer && stream_ != Stream::compute) tape_.wait_written(Stream::compute, parameter.full);
  } else if (flight.parameters.size() == 1 && quantizes_) {
    dequantize_one(p, flight);
  } else if (flight.parameters.size() == 1) {
    parameter.full = flight.buffer;
    if (stream_ != Stream::compute) tape_.wait_written(Stream::compute, flight.buffer);
  } else {
    if (!flight.copied) copy_out(flight);
    if (++flight.waited == static_cast<int>(flight.parameters.size())) {
      for (const TapeId buffer : {flight.buffer, flight.scales, flight.dequantized}) tape_.free(buffer);
    }
  }
  parameter.state = State::available;
  parameter.flight = -1;
  if (--in_flight_ == 0) flights_.clear();
}

/// The first wait copies all parameters of the group out, on a stream that compute waits for at once: it stands on
/// compute here, because gathers issued since are not waited for.
void ParameterFetcher::copy_out(Flight& flight) {
  if (stream_ != Stream::compute) tape_.wait_written(Stream::compute, flight.buffer);
  if (quantizes_) dequantize_all(flight);
  const TapeId source = quantizes_ ? flight.dequantized : flight.buffer;
  std::vector<std::size_t> order = flight.parameters;
  std::sort(order.begin(), order.end());
  for (const std::size_t p : order) {
    Parameter& parameter = parameters_[p];
    const std::int64_t bytes = parameter.elements * weight_size_;
    const auto block = static_cast<std::int16_t>(tape_.block());
    const TapeId half =
        quantizes_ && job_.config.precision != DType::fp16  // put together in fp16, then cast
            ? tape_.alloc({2 * parameter.elements, pool_, BufferRole::weight_staging, Owner::buffers, block})
            : kNoBuffer;
    if (half != kNoBuffer) {
      tape_.pass(Stream::compute, 4 * parameter.elements, {{source, Access::read}, {half, Access::write}});
    }
    parameter.full = tape_.alloc({bytes, pool_, BufferRole::weights, Owner::parameters, block});
    tape_.pass(Stream::compute, 2 * bytes,
               {{half != kNoBuffer ? half : source, Access::read}, {parameter.full, Access::write}});
    tape_.free(half);
  }
  flight.copied = true;
}

// --- hooks -----------------------------------------------------------------------------------------------------------

void ParameterFetcher::fetch(int module, bool forward) {
  tape_.hook();
  if (recording_) recorded_.push_back(module);
  if (!forward) {
    in_backward_ = true;
    open_backwards_.push_back(module);
  }
  std::vector<std::size_t> missing;
  for (const int p : own(module)) {
    if (at(p).state == State::sharded) missing.push_back(static_cast<std::size_t>(p));
  }
  gather(missing);
  for (const int p : own(module)) {
    at(p).users.insert(module);
    if (at(p).state == State::in_flight) wait_for(static_cast<std::size_t>(p));
    if (forward && in_backward_ && !open_backwards_.empty() && !at(p).trainable) {
      recomputed_[open_backwards_.back()].insert(p);
      at(p).users.insert(open_backwards_.back());
    }
  }
  if (traced()) {
    follow_trace(module);
    if (job_.config.prefetch_bucket > 0) prefetch();
  }
  ++position_;
}

/// Takes from the queue until every parameter of the module that was not promised to this position has passed.
void ParameterFetcher::follow_trace(int module) {
  std::set<int> needed;
  for (const int p : own(module)) {
    if (at(p).last_use < position_) needed.insert(p);
  }
  std::set<int> passed;
  while (queue_head_ < queue_.size() && passed.size() < needed.size()) {
    const auto [p, position] = queue_[queue_head_++];
    at(p).last_use = position;
    passed.insert(p);
  }
  if (passed != needed) throw std::logic_error("DeepSpeed stage 3: the module order differs from the recorded one");
}

/// As much of what comes next as the bucket and max_live_parameters allow; the last one may overshoot.
void ParameterFetcher::prefetch() {
  const std::int64_t bucket = job_.config.sequential_gathers() ? 1 : job_.config.prefetch_bucket;  // one parameter
  const std::int64_t budget = std::min(job_.config.max_live - available_, bucket);
  std::vector<std::size_t> wanted;
  std::int64_t size = 0;
  while (queue_head_ < queue_.size() && size < budget) {
    const auto [p, position] = queue_[queue_head_++];
    at(p).last_use = std::max(at(p).last_use, position);
    const auto index = static_cast<std::size_t>(p);
    if (at(p).state != State::sharded || std::find(wanted.begin(), wanted.end(), index) != wanted.end()) continue;
    wanted.push_back(index);
    size += at(p).elements;
  }
  gather(wanted);
}

/// The module's parameters that nothing ahead holds: not persistent, not promised to a later use, not met in the trace
/// within max_reuse_distance.
const std::vector<int>& ParameterFetcher::releasable(int module) {
  const auto [entry, fresh] = release_.try_emplace({module, position_});
  if (!fresh) return entry->second;
  std::set<int> free_to_go;
  for (const int p : own(module)) {
    if (!at(p).persistent && at(p).last_use <= position_) free_to_go.insert(p);
  }
  std::int64_t distance = 0;
  for (auto i = static_cast<std::size_t>(position_); i < trace_.size() && distance < job_.config.max_reuse; ++i) {
    for (const int p : own(trace_[i])) {
      free_to_go.erase(p);
      distance += at(p).elements;
    }
  }
  entry->second.assign(free_to_go.begin(), free_to_go.end());
  return entry->second;
}

void ParameterFetcher::release(int module, bool forward) {
  tape_.hook();
  std::set<int> mine(own(module).begin(), own(module).end());
  std::set<int> given_up = mine;
  if (traced()) {
    const std::vector<int>& list = releasable(module);
    given_up = std::set<int>(list.begin(), list.end());
  }
  if (!forward) {
    for (const int p : recomputed_[module]) {
      mine.insert(p);
      if (!at(p).persistent) given_up.insert(p);
    }
    recomputed_.erase(module);
    const auto open = std::find(open_backwards_.begin(), open_backwards_.end(), module);
    if (open != open_backwards_.end()) open_backwards_.erase(open);
  }
  for (const int p : mine) {
    at(p).users.erase(module);
    if (given_up.count(p) == 0 || !at(p).users.empty()) continue;
    give_up(static_cast<std::size_t>(p), autograd_holds(module, p, forward) ? module : -1);
  }
  if (forward) return;
  for (const TapeId buffer : held_[module]) drop(buffer);
  held_.erase(module);
}

/// Up to DeepSpeed 0.19.3 a model that was not built under zero.Init (MiCS_Init) multiplies with torch's own linear:
/// autograd saves a view of the gathered weight, so that giving it up in forward frees nothing until backward has used
/// it. The first forward of a checkpointed block records nothing.
bool ParameterFetcher::autograd_holds(int module, int parameter, bool forward) const {
  if (!holds_weights_ || !forward) return false;
  if (step_.parameters[static_cast<std::size_t>(parameter)].shape.size() < 2) return false;  // a bias
  if (step_.modules[static_cast<std::size_t>(module)].type != "Linear") return false;
  return in_backward_ || runs_again_.count(module) == 0;
}

/// The block stays in the gather stream's pool until the compute stream has passed (record_stream). hpZ's secondary
/// shard is made before. `holder`: the module whose backward still needs it.
void ParameterFetcher::give_up(std::size_t p, int holder) {
  Parameter& parameter = parameters_[p];
  if (parameter.state != State::available) return;
  make_secondary(p);
  tape_.record_stream(parameter.full, Stream::compute);
  if (holder < 0) {
    drop(parameter.full);
  } else {
    held_[holder].push_back(parameter.full);
  }
  parameter.full = kNoBuffer;
  parameter.state = State::sharded;
  available_ -= parameter.elements;
}

void ParameterFetcher::end_backward() {
  in_backward_ = false;
  for (const auto& [module, buffers] : held_) {
    for (const TapeId buffer : buffers) drop(buffer);
  }
  held_.clear();
  if (job_.config.mics()) {  // 0.19.2 leaves them to the next forward or to the step
    open_backwards_.clear();
    recomputed_.clear();
    return;
  }
  while (!open_backwards_.empty()) {
    const int module = open_backwards_.back();
    open_backwards_.pop_back();
    std::set<int> mine(own(module).begin(), own(module).end());
    mine.insert(recomputed_[module].begin(), recomputed_[module].end());
    recomputed_.erase(module);
    for (const int p : mine) {
      at(p).users.erase(module);
      if (!at(p).persistent && at(p).users.empty()) give_up(static_cast<std::size_t>(p));
    }
  }
}

// --- the whole model -------------------------------------------------------------------------------------------------

void ParameterFetcher::release_all() {
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].state == State::in_flight) wait_for(p);
  }
  for (std::size_t p = 0; p < parameters_.size(); ++p) give_up(p);
}

void ParameterFetcher::gather_persistent() {
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].persistent) gather_alone(p);
  }
  tape_.host_waits(Stream::compute);
}

void ParameterFetcher::visit(std::size_t parameter) {
  if (parameters_[parameter].state != State::sharded) return;
  gather_alone(parameter);
  give_up(parameter);
}

void ParameterFetcher::drop_secondary_shards() {
  for (Parameter& parameter : parameters_) {
    tape_.free(parameter.secondary);
    parameter.secondary = kNoBuffer;
  }
}

}  // namespace zeroplan
