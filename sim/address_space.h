#pragma once
// Where cudaMalloc puts segments. Addresses matter only for their order: of free blocks of one size the caching
// allocator takes the one that lies lowest, so they decide which segments are whole again when the card is full.

#include <cstdint>
#include <map>

namespace zeroplan {

/// Addresses from the top down, as the system's mmap hands them out: the highest gap that is wide enough, at its upper
/// end; what is given back is a gap again. By measured runs: reserved memory of nearly full cards (docs/engines.md,
/// "The allocator"), where it differs by up to 0.3 GiB from addresses that go up.
class AddressSpace {
 public:
  static constexpr std::int64_t kTop = std::int64_t{1} << 62;

  /// First address of `bytes`. Throws std::logic_error when nothing is left.
  std::int64_t take(std::int64_t bytes);
  /// Of an earlier take().
  void give_back(std::int64_t address, std::int64_t bytes);

 private:
  std::map<std::int64_t, std::int64_t> gaps_{{0, kTop}};  // end by begin; never two that touch
};

}  // namespace zeroplan
