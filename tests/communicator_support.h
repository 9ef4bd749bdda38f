#pragma once
// Random sequences of collectives, run on any World and by a naive loop: both give the bytes that a rank ends with.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "runtime/communicator.h"
#include "runtime/numeric.h"

namespace zeroplan::tests {

using ByteVector = std::vector<std::byte>;

struct RandomCall {
  enum class Kind { all_gather, reduce_scatter, all_reduce } kind = Kind::all_gather;
  DType dtype = DType::fp32;
  std::int64_t count = 0;  // of the shard; of the tensor in all_reduce
  bool in_place = false;
  unsigned seed = 0;
};

/// Calls of one group on one channel.
struct RandomGroup {
  std::vector<int> members;
  int channel = 0;
  std::vector<RandomCall> calls;
};

struct Scenario {
  int ranks = 1;
  std::vector<std::vector<RandomGroup>> rounds;  // each a partition of the ranks: one World::communicator call
};

inline Scenario random_scenario(unsigned seed, int ranks, int calls, std::int64_t largest) {
  std::mt19937 random(seed);
  Scenario scenario{ranks, {}};
  for (int round = 0; round < 2; ++round) {
    const int groups = 1 + static_cast<int>(random() % 3);
    std::vector<RandomGroup> parts(static_cast<std::size_t>(groups));
    for (int rank = 0; rank < ranks; ++rank) parts[random() % parts.size()].members.push_back(rank);
    std::erase_if(parts, [](const RandomGroup& group) { return group.members.empty(); });
    for (RandomGroup& group : parts) {
      group.channel = static_cast<int>(random() % 5);
      for (int i = 0; i < calls; ++i) {
        RandomCall call;
        call.kind = static_cast<RandomCall::Kind>(random() % 3);
        const DType all[] = {DType::bf16, DType::fp16, DType::fp32, DType::i32, DType::u8, DType::i64};
        call.dtype = all[random() % (call.kind == RandomCall::Kind::all_gather ? 6 : 3)];
        // Small ones often: 0, 1, and fewer elements than members.
        call.count = static_cast<std::int64_t>(random() % 2 ? random() % 9 : random() % largest);
        call.in_place = random() % 2;
        call.seed = static_cast<unsigned>(random());
        group.calls.push_back(call);
      }
    }
    scenario.rounds.push_back(std::move(parts));
  }
  return scenario;
}

/// What member `index` brings: any bits for integers and one call in four; else numbers of like size, whose sums round.
inline ByteVector input_of(const RandomCall& call, int index, std::int64_t count) {
  std::mt19937_64 random(call.seed * 1000003ull + static_cast<unsigned>(index));
  const auto width = static_cast<std::size_t>(size_of(call.dtype));
  ByteVector bytes(static_cast<std::size_t>(count) * width);
  for (std::size_t i = 0; i < bytes.size(); i += width) {
    std::uint64_t bits = random();
    if (call.seed % 4 != 0) {
      const float value = static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-28f;
      if (call.dtype == DType::fp32) bits = std::bit_cast<std::uint32_t>(value);
      if (call.dtype == DType::bf16) bits = narrow<Bf16>(value).bits;
      if (call.dtype == DType::fp16) bits = narrow<Fp16>(value).bits;
    }
    std::memcpy(&bytes[i], &bits, width);
  }
  return bytes;
}

/// The sum over all members of element i, by the rule of communicator.h.
inline void naive_sum(std::span<const ByteVector> inputs, std::size_t i, DType dtype, std::byte* target) {
  const auto sum = [&]<class T>(T) {
    float total = 0;
    for (std::size_t member = 0; member < inputs.size(); ++member) {
      T value;
      std::memcpy(&value, &inputs[member][i * sizeof(T)], sizeof(T));
      total = member == 0 ? widen(value) : total + widen(value);
    }
    T result = narrow<T>(total);
    if constexpr (sizeof(T) == 4) result = std::isnan(total) ? std::bit_cast<float>(0x7fc00000u) : total;
    std::memcpy(target, &result, sizeof(T));
  };
  if (dtype == DType::bf16) sum(Bf16{});
  if (dtype == DType::fp16) sum(Fp16{});
  if (dtype == DType::fp32) sum(float{});
}

inline std::int64_t input_count(const RandomCall& call, std::size_t members) {
  return call.kind == RandomCall::Kind::reduce_scatter ? call.count * static_cast<std::int64_t>(members) : call.count;
}

/// The bytes that the member at `index` ends with.
inline ByteVector naive_result(const RandomCall& call, std::size_t members, int index) {
  std::vector<ByteVector> inputs;
  for (std::size_t i = 0; i < members; ++i) {
    inputs.push_back(input_of(call, static_cast<int>(i), input_count(call, members)));
  }
  const auto width = static_cast<std::size_t>(size_of(call.dtype));
  const auto count = static_cast<std::size_t>(call.count);
  ByteVector result;
  if (call.kind == RandomCall::Kind::all_gather) {
    for (const ByteVector& input : inputs) result.insert(result.end(), input.begin(), input.end());
    return result;
  }
  const std::size_t first = call.kind == RandomCall::Kind::reduce_scatter ? count * static_cast<std::size_t>(index) : 0;
  result.resize(count * width);
  for (std::size_t i = 0; i < count; ++i) naive_sum(inputs, first + i, call.dtype, result.data() + i * width);
  return result;
}

/// Makes the call, and gives the bytes that this rank ends with.
inline ByteVector run_call(Communicator& communicator, const RandomCall& call) {
  const auto members = static_cast<std::size_t>(communicator.size());
  ByteVector input = input_of(call, communicator.rank(), input_count(call, members));
  const std::int64_t width = size_of(call.dtype);
  const auto shard_bytes = static_cast<std::size_t>(call.count * width);
  const std::size_t own = shard_bytes * static_cast<std::size_t>(communicator.rank());
  const auto view = [&](std::byte* data, std::size_t bytes) {
    return TensorView{data, static_cast<std::int64_t>(bytes) / width, call.dtype};
  };
  switch (call.kind) {
    case RandomCall::Kind::all_gather: {
      ByteVector full(shard_bytes * members, std::byte{0xee});
      if (call.in_place) std::copy(input.begin(), input.end(), full.begin() + static_cast<std::ptrdiff_t>(own));
      std::byte* shard = call.in_place ? full.data() + own : input.data();
      communicator.all_gather(view(shard, shard_bytes), view(full.data(), full.size()));
      return full;
    }
    case RandomCall::Kind::reduce_scatter: {
      ByteVector shard(shard_bytes, std::byte{0xee});
      std::byte* target = call.in_place ? input.data() + own : shard.data();
      communicator.reduce_scatter(view(input.data(), input.size()), view(target, shard_bytes));
      if (call.in_place) std::copy(target, target + shard_bytes, shard.begin());
      return shard;
    }
    case RandomCall::Kind::all_reduce:
      communicator.all_reduce(view(input.data(), input.size()));
      return input;
  }
  return {};
}

/// Runs the scenario as this rank. Empty when every result has the naive loop's bits, else what differs. Sums the bytes
/// sent minus those received over all calls into `balance`.
inline std::string run_scenario(World& world, const Scenario& scenario, std::int64_t& balance) {
  for (const std::vector<RandomGroup>& groups : scenario.rounds) {
    for (const RandomGroup& group : groups) {
      const auto mine = std::find(group.members.begin(), group.members.end(), world.rank());
      if (mine == group.members.end()) continue;
      const auto communicator = world.communicator(group.members, group.channel);
      const int index = static_cast<int>(mine - group.members.begin());
      if (communicator->rank() != index || communicator->size() != static_cast<int>(group.members.size())) {
        return "the communicator has another rank or size";
      }
      for (std::size_t i = 0; i < group.calls.size(); ++i) {
        const RandomCall& call = group.calls[i];
        if (run_call(*communicator, call) == naive_result(call, group.members.size(), index)) continue;
        return "rank " + std::to_string(world.rank()) + ", call " + std::to_string(i) + " of kind " +
               std::to_string(static_cast<int>(call.kind)) + ", count " + std::to_string(call.count) + " x " +
               std::string(to_string(call.dtype));
      }
      balance += communicator->bytes_sent() - communicator->bytes_received();
    }
  }
  return {};
}

}  // namespace zeroplan::tests
