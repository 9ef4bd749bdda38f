#pragma once
// The states of one rank between steps: weights, master and moments, wherever the plan keeps them, read and written in
// the form of checkpoints.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "runtime/checkpoint.h"
#include "runtime/op_binding.h"

namespace zeroplan {

struct StateSpans;  // host_executor.h

class RankStates {
 public:
  /// `context` outlives this.
  explicit RankStates(const RankContext& context);

  using Use = std::function<void(const FlatRange&, const StateSpans&)>;
  /// HostExecutor::load_states() and save_states().
  void load(const Use& fill);
  void save(const Use& use);
  /// HostExecutor::gather_weights(); `group`: the shard group, null for one rank.
  void gather(int block, std::vector<std::byte>& weights, Communicator* group);

 private:
  /// Where one block's states are.
  struct Block {
    std::optional<BufferId> weights;  // whole
    std::optional<BufferId> shard, master, moments;
    std::int64_t padded = 0;  // elements of the flat buffer
    std::int64_t begin = 0;   // of it, this rank updates [begin, begin + count)
    std::int64_t count = 0;
  };

  /// All of a block's weights, where every rank holds them.
  void load_whole_weights(int block, const Block& b, const Use& fill);
  /// What the rank updates: its shard of the weights, master and moments, each asked for once, some elements at a time.
  void load_own(int block, const Block& b, const Use& fill);
  /// Rounds to the compute type, from element `at` of the buffer on.
  void write_weights(BufferId to, std::int64_t at, std::span<const float> master) const;
  /// The master, or the part of it that a split one keeps, from element `at` of the rank's on.
  void write_master(BufferId to, std::int64_t at, std::span<const float> master) const;
  /// The fp32 values of the rank's elements from `begin` on, out of a master, a split one or the weights.
  void read_master(const Block& b, std::int64_t begin, std::span<float> master) const;
  void save_range(int block, const Block& b, std::int64_t begin, std::int64_t end, const Use& use);
  /// Bytes [offset, offset + size) of a buffer, on disk or not.
  void read(BufferId buffer, std::int64_t offset, std::span<std::byte> to) const;
  void write(BufferId buffer, std::int64_t offset, std::span<const std::byte> from) const;

  const RankContext& context_;
  std::vector<Block> blocks_;
};

}  // namespace zeroplan
