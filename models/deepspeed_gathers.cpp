// Forms of stage 3's gathers beside the plain one: of MiCS, of 8-bit weights (qwZ), and of parameters one by one
// outside the hooks; and gathered buffers that graphs keep.

#include <fmt/format.h>

#include "models/deepspeed_fetch.h"
#include "models/error.h"

namespace zeroplan {
namespace {

/// A group of values with one fp32 scale has about so many (CUDAQuantizer.target_group_size), and fewer than the limit.
constexpr std::int64_t kQuantizedGroup = 8000, kLargestQuantizedGroup = 16000;

/// Scales that DeepSpeed takes for so many values: the fewest from count / 8000 on whose groups are whole multiples of
/// 8, doubled while groups stay above 8000 (partition_parameters.py, CUDAQuantizer.quantize). Throws InputError where
/// it asserts.
std::int64_t quantization_groups(std::int64_t count) {
  std::int64_t groups = ceil_div(count, kQuantizedGroup);
  while (groups < count && count % (8 * groups) != 0) ++groups;
  while (count % (16 * groups) == 0 && count > kQuantizedGroup * groups) groups *= 2;
  if (count % (8 * groups) == 0 && count < kLargestQuantizedGroup * groups && count > groups) return groups;
  throw InputError(
      fmt::format("deepspeed: zero_optimization.zero_quantized_weights: DeepSpeed stops: a rank's share of {} values "
                  "has no groups of a multiple of 8",
                  count));
}

}  // namespace

// --- MiCS --------------------------------------------------------------------------------------------------------

/// One group call of all-gathers, each into the parameter's own buffer (mics.py). Hierarchical gathers collect what
/// the nodes have first, in the parameter's place too, and move it from there to where it belongs: through a copy, one
/// parameter after the other.
void ParameterFetcher::start_mics_flight(const std::vector<std::size_t>& wanted) {
  const auto block = static_cast<std::int16_t>(tape_.block());
  Collective collective{CollectiveKind::all_gather, Group::shard, 0, 0, job_.config.precision};
  std::vector<TapeOperand> written;
  for (const std::size_t p : wanted) {
    Parameter& parameter = parameters_[p];
    parameter.full = tape_.alloc({gathered_bytes(parameter), pool_, BufferRole::weights, Owner::parameters, block});
    written.push_back({parameter.full, Access::write});
    collective.elements += parameter.elements;
    collective.padded += parameter.shard * shard_ranks_;
  }
  for (const std::size_t p : job_.config.mics_hierarchical ? wanted : std::vector<std::size_t>()) {
    const std::int64_t bytes = parameters_[p].shard * job_.gather_nodes() * weight_size_;
    const TapeId copy = tape_.alloc({bytes, pool_, BufferRole::weight_staging, Owner::buffers, block});
    tape_.pass(stream_, 4 * bytes, {{copy, Access::write}, {parameters_[p].full, Access::read_write}});
    tape_.free(copy);
  }
  tape_.work(stream_, collective, written);
  in_flight(wanted, {kNoBuffer, kNoBuffer, kNoBuffer, wanted, 0, false});
}

// --- 8-bit weights -----------------------------------------------------------------------------------------------

/// With hpZ's secondary shard the rank's part is larger and its group smaller.
ParameterFetcher::Part ParameterFetcher::part_of(const Parameter& parameter) const {
  if (parameter.secondary == kNoBuffer) return {parameter.shard, shard_ranks_};
  const auto inside = static_cast<int>(job_.config.hpz_ranks);
  return {ceil_div(parameter.shard * shard_ranks_, inside), inside};
}

/// The parts, put together when there are several, in fp16, as 8-bit values with fp32 scales: two gathers. What was
/// sent is dropped once it is under way.
void ParameterFetcher::start_quantized_flight(const std::vector<std::size_t>& wanted) {
  const auto block = static_cast<std::int16_t>(tape_.block());
  const auto staging = [&](std::int64_t bytes) {
    return tape_.alloc({bytes, pool_, BufferRole::weight_staging, Owner::buffers, block});
  };
  std::int64_t count = 0, elements = 0;
  for (const std::size_t p : wanted) {
    count += part_of(parameters_[p]).elements;
    elements += parameters_[p].elements;
  }
  const std::int64_t ranks = part_of(parameters_[wanted.front()]).ranks, groups = quantization_groups(count);
  const TapeId received = staging(count * ranks);
  const TapeId together = wanted.size() > 1 ? staging(weight_size_ * count) : kNoBuffer;
  if (together != kNoBuffer) tape_.pass(stream_, 2 * weight_size_ * count, {{together, Access::write}});
  const TapeId half = job_.config.precision == DType::fp16 ? kNoBuffer : staging(2 * count);
  if (half != kNoBuffer) {
    tape_.pass(stream_, (weight_size_ + 2) * count, {{together, Access::read}, {half, Access::write}});
    tape_.free(together);
  }
  const TapeId scales = staging(4 * groups), sent = staging(count);
  tape_.pass(stream_, 3 * count, {{half, Access::read}, {sent, Access::write}, {scales, Access::write}});
  tape_.free(half != kNoBuffer ? half : together);
  const TapeId all_scales = staging(4 * groups * ranks);
  const Group group = group_of(parameters_[wanted.front()]);
  tape_.work(stream_, Collective{CollectiveKind::all_gather, group, elements, count * ranks, DType::u8},
             {{sent, Access::read}, {received, Access::write}});
  tape_.work(stream_, Collective{CollectiveKind::all_gather, group, groups * ranks, groups * ranks, DType::fp32},
             {{scales, Access::read}, {all_scales, Access::write}});
  tape_.free(sent);
  tape_.free(scales);
  in_flight(wanted, {received, all_scales, kNoBuffer, wanted, 0, false});
}

void ParameterFetcher::dequantize_one(std::size_t p, Flight& flight) {
  Parameter& parameter = parameters_[p];
  const auto block = static_cast<std::int16_t>(tape_.block());
  if (stream_ != Stream::compute) tape_.wait_written(Stream::compute, flight.buffer);
  const TapeId half = tape_.alloc({2 * parameter.elements, pool_, BufferRole::weights, Owner::parameters, block});
  tape_.pass(Stream::compute, 3 * parameter.elements, {{flight.buffer, Access::read}, {half, Access::write}});
  parameter.full = half;
  if (job_.config.precision != DType::fp16) {
    parameter.full =
        tape_.alloc({weight_size_ * parameter.elements, pool_, BufferRole::weights, Owner::parameters, block});
    tape_.pass(Stream::compute, (2 + weight_size_) * parameter.elements,
               {{half, Access::read}, {parameter.full, Access::write}});
    tape_.free(half);
  }
  tape_.free(flight.buffer);
  tape_.free(flight.scales);
}

/// All of the flight in fp16; it stays as long as the 8-bit values do.
void ParameterFetcher::dequantize_all(Flight& flight) {
  std::int64_t count = 0;
  for (const std::size_t p : flight.parameters) {
    const Part part = part_of(parameters_[p]);
    count += part.elements * part.ranks;
  }
  flight.dequantized = tape_.alloc(
      {2 * count, pool_, BufferRole::weight_staging, Owner::buffers, static_cast<std::int16_t>(tape_.block())});
  tape_.pass(Stream::compute, 3 * count, {{flight.buffer, Access::read}, {flight.dequantized, Access::write}});
}

/// hpZ's shard of a small group: from the first time the parameter is given up, by loading or after an update.
void ParameterFetcher::make_secondary(std::size_t p) {
  Parameter& parameter = parameters_[p];
  if (!job_.config.hpz() || parameter.secondary != kNoBuffer) return;
  const std::int64_t elements = ceil_div(parameter.shard * job_.ranks, job_.config.hpz_ranks);
  parameter.secondary = tape_.alloc({elements * weight_size_, Pool::compute, BufferRole::weight_shard,
                                     Owner::parameters, static_cast<std::int16_t>(tape_.block())});
  tape_.pass(Stream::compute, 2 * elements * weight_size_, {{parameter.secondary, Access::write}});
}

// --- one by one --------------------------------------------------------------------------------------------------

/// param.all_gather(): on the current stream, into the parameter's own buffer, without the hooks' hierarchy.
void ParameterFetcher::gather_alone(std::size_t p) {
  Parameter& parameter = parameters_[p];
  const auto block = static_cast<std::int16_t>(tape_.block());
  TapeId up = kNoBuffer;
  if (job_.config.parameters_on_host()) {
    up = bring_up_shard(parameter, Stream::compute, Pool::compute);
    tape_.host_waits(Stream::compute);
  }
  if (job_.ranks == 1) {  // the shard, or its copy, is the parameter
    parameter.full = up;
    parameter.state = State::available;
    available_ += parameter.elements;
    return;
  }
  parameter.full =
      tape_.alloc({gathered_bytes(parameter), Pool::compute, BufferRole::weights, Owner::parameters, block});
  tape_.work(Stream::compute,
             Collective{CollectiveKind::all_gather, group_of(parameter), parameter.elements,
                        parameter.shard * shard_ranks_, job_.config.precision},
             {{parameter.full, Access::write}});
  tape_.free(up);
  parameter.state = State::available;
  available_ += parameter.elements;
}

// --- what graphs keep -------------------------------------------------------------------------------------------

void ParameterFetcher::hold(int parameter, int number) {
  const TapeId full = at(parameter).full;
  if (full == kNoBuffer) return;
  holds_[number] = full;
  ++kept_[full].holds;
}

void ParameterFetcher::let_go(int number) {
  const auto found = holds_.find(number);
  if (found == holds_.end()) return;
  const TapeId full = found->second;
  holds_.erase(found);
  Kept& kept = kept_[full];
  if (--kept.holds > 0) return;
  const bool given_up = kept.given_up;
  kept_.erase(full);
  if (given_up) tape_.free(full);
}

void ParameterFetcher::drop(TapeId full) {
  const auto kept = kept_.find(full);
  if (kept == kept_.end()) {
    tape_.free(full);
  } else {
    kept->second.given_up = true;
  }
}

}  // namespace zeroplan
