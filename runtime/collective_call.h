#pragma once
// What one rank asks of a collective: how calls are checked, compared between ranks and named in errors. Shared by all
// communicators, so that they refuse the same things.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/communicator.h"

namespace zeroplan {

// Not CollectiveKind, which is the schedule's (models/schedule.h): one name may not have two meanings in a namespace.
enum class CallKind : std::uint8_t { all_gather, reduce_scatter, all_reduce, exchange, communicator };

std::string_view to_string(CallKind kind);

/// What must be equal on all members. `count` is that of the shard (all_reduce: of the tensor).
struct CollectiveCall {
  CallKind kind = CallKind::exchange;
  DType dtype = DType::u8;
  std::int64_t count = 0;
  friend bool operator==(const CollectiveCall&, const CollectiveCall&) = default;
};

/// "all_gather of 128 x bf16", "exchange".
std::string describe(const CollectiveCall& call);
/// "rank 1 called all_reduce of 4 x fp32 where rank 0 called exchange (channel 2, call 17)".
std::string describe_mismatch(int rank, const CollectiveCall& call, int other_rank, const CollectiveCall& other,
                              std::string_view where);
/// "rank 3", "ranks 1, 3 and 4".
std::string name_ranks(std::span<const int> ranks);

// The arguments of one call, checked: std::logic_error for sizes that do not fit, null data, integer sums, and a shard
// that overlaps `full` anywhere but at this rank's part.
CollectiveCall check_all_gather(TensorView shard, TensorView full, int rank, int size);
CollectiveCall check_reduce_scatter(TensorView full, TensorView shard, int rank, int size);
CollectiveCall check_all_reduce(TensorView tensor);

/// [begin, end) of the elements that member `index` of `size` sums in an all_reduce of `count`.
struct ElementRange {
  std::int64_t begin = 0, end = 0;
};
ElementRange part_of(std::int64_t count, int index, int size);

/// What one rank asks of World::communicator, as a text to exchange.
std::string encode_group(std::span<const int> members, int channel);
/// All ranks' texts, in rank order. Throws DeviceError, the same on every rank, when ranks of one group do not name the
/// same members and channel.
void check_groups(std::span<const std::string> texts);
/// Throws std::logic_error unless `members` are ascending ranks of the world, `rank` among them, and channel >= 0.
void check_members(std::span<const int> members, int channel, int rank, int world_size);

}  // namespace zeroplan
