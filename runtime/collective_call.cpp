#include "runtime/collective_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <stdexcept>

#include "models/error.h"

namespace zeroplan {

std::string_view to_string(CallKind kind) {
  switch (kind) {
    case CallKind::all_gather:
      return "all_gather";
    case CallKind::reduce_scatter:
      return "reduce_scatter";
    case CallKind::all_reduce:
      return "all_reduce";
    case CallKind::exchange:
      return "exchange";
    case CallKind::communicator:
      return "communicator";
  }
  return "an unknown call";
}

std::string describe(const CollectiveCall& call) {
  if (call.kind == CallKind::exchange || call.kind == CallKind::communicator) {
    return std::string(to_string(call.kind));
  }
  return fmt::format("{} of {} x {}", to_string(call.kind), call.count, to_string(call.dtype));
}

std::string describe_mismatch(int rank, const CollectiveCall& call, int other_rank, const CollectiveCall& other,
                              std::string_view where) {
  // The lower rank last, so that all ranks tell it the same way.
  if (rank < other_rank) return describe_mismatch(other_rank, other, rank, call, where);
  return fmt::format("rank {} called {} where rank {} called {} ({})", rank, describe(call), other_rank,
                     describe(other), where);
}

std::string name_ranks(std::span<const int> ranks) {
  if (ranks.empty()) return "no rank";
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  return fmt::format("ranks {} and {}", fmt::join(ranks.first(ranks.size() - 1), ", "), ranks.back());
}

namespace {

std::int64_t bytes_of_tensor(TensorView tensor) { return tensor.count * size_of(tensor.dtype); }

void check_tensor(TensorView tensor, std::string_view what) {
  if (tensor.count < 0 || (tensor.count > 0 && tensor.data == nullptr)) {
    throw std::logic_error(fmt::format("{}: a tensor of {} elements at {}", what, tensor.count, tensor.data));
  }
}

void check_summable(DType type, std::string_view what) {
  if (type == DType::bf16 || type == DType::fp16 || type == DType::fp32) return;
  throw std::logic_error(fmt::format("{}: {} is not summed", what, to_string(type)));
}

void check_parts(TensorView shard, TensorView full, int rank, int size, std::string_view what) {
  check_tensor(shard, what);
  check_tensor(full, what);
  if (shard.dtype != full.dtype || full.count != shard.count * size) {
    throw std::logic_error(fmt::format("{} of {} ranks: shard of {} x {}, full of {} x {}", what, size, shard.count,
                                       to_string(shard.dtype), full.count, to_string(full.dtype)));
  }
  const std::int64_t bytes = bytes_of_tensor(shard);
  const auto* begin = static_cast<const std::byte*>(full.data);
  const auto* own = static_cast<const std::byte*>(shard.data);
  const std::less<const std::byte*> before;
  const bool overlaps = bytes > 0 && before(own, begin + bytes * size) && before(begin, own + bytes);
  if (overlaps && own != begin + bytes * rank) {
    throw std::logic_error(fmt::format("{}: the shard overlaps the full tensor away from rank {}'s part", what, rank));
  }
}

}  // namespace

CollectiveCall check_all_gather(TensorView shard, TensorView full, int rank, int size) {
  check_parts(shard, full, rank, size, "all_gather");
  return {CallKind::all_gather, shard.dtype, shard.count};
}

CollectiveCall check_reduce_scatter(TensorView full, TensorView shard, int rank, int size) {
  check_parts(shard, full, rank, size, "reduce_scatter");
  check_summable(shard.dtype, "reduce_scatter");
  return {CallKind::reduce_scatter, shard.dtype, shard.count};
}

CollectiveCall check_all_reduce(TensorView tensor) {
  check_tensor(tensor, "all_reduce");
  check_summable(tensor.dtype, "all_reduce");
  return {CallKind::all_reduce, tensor.dtype, tensor.count};
}

ElementRange part_of(std::int64_t count, int index, int size) {
  constexpr std::int64_t kLine = 32;  // elements: members write to different cache lines
  const std::int64_t even = (count + size - 1) / size;
  const std::int64_t part = (even + kLine - 1) / kLine * kLine;
  return {std::min(count, index * part), std::min(count, (index + 1) * part)};
}

std::string encode_group(std::span<const int> members, int channel) {
  return fmt::format("{}:{}", channel, fmt::join(members, ","));
}

namespace {

std::vector<int> members_in(std::string_view text) {
  std::vector<int> members;
  const char* at = text.data() + std::min(text.find(':'), text.size());
  const char* const end = text.data() + text.size();
  while (at < end) {
    int member = -1;
    const auto [next, error] = std::from_chars(at + 1, end, member);
    if (error != std::errc()) throw std::logic_error("not the text of a group: " + std::string(text));
    members.push_back(member);
    at = next;
  }
  return members;
}

/// "members 0 and 1, channel 2" for the text "2:0,1".
std::string describe_group(std::string_view text) {
  const std::vector<int> members = members_in(text);
  return fmt::format("a group of {} on channel {}", name_ranks(members), text.substr(0, text.find(':')));
}

}  // namespace

void check_groups(std::span<const std::string> texts) {
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (const int member : members_in(texts[rank])) {
      const std::string& other = texts[static_cast<std::size_t>(member)];
      if (other == texts[rank]) continue;
      throw DeviceError(fmt::format("rank {} made {} where rank {} made {}", rank, describe_group(texts[rank]), member,
                                    describe_group(other)));
    }
  }
}

void check_members(std::span<const int> members, int channel, int rank, int world_size) {
  const bool ascending = std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  const bool inside = !members.empty() && members.front() >= 0 && members.back() < world_size;
  const bool mine = std::find(members.begin(), members.end(), rank) != members.end();
  if (ascending && inside && mine && channel >= 0) return;
  throw std::logic_error(
      fmt::format("rank {} of {} asked for the communicator \"{}\"", rank, world_size, encode_group(members, channel)));
}

}  // namespace zeroplan
