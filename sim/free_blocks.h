#pragma once
// The free blocks of one pool of the caching allocator, in order.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace zeroplan {

/// A set of (first, second, block), ordered by the first two, as std::set would keep it: in runs of neighbouring
/// entries, because a search replays millions of insertions and most pools hold few blocks. Not thread-safe.
class FreeBlocks {
 public:
  struct Key {
    std::int64_t first = 0, second = 0;  // (size, address) or (address, 0)
    std::int32_t block = 0;
    friend bool operator<(const Key& a, const Key& b) {
      return a.first != b.first ? a.first < b.first : a.second < b.second;
    }
  };

  /// Where an entry stands; invalid after the next insertion or erasure.
  struct Position {
    std::size_t run = 0, index = 0;
    friend bool operator==(const Position&, const Position&) = default;
  };

  bool empty() const { return runs_.empty(); }
  Position begin() const { return {0, 0}; }
  Position end() const { return {runs_.size(), 0}; }
  const Key& at(Position p) const { return runs_[p.run][p.index]; }
  const Key& last() const { return runs_.back().back(); }
  Position next(Position p) const {
    return p.index + 1 < runs_[p.run].size() ? Position{p.run, p.index + 1} : Position{p.run + 1, 0};
  }
  /// The first entry not before (first, second).
  Position lower_bound(std::int64_t first, std::int64_t second) const {
    const Key key{first, second, 0};
    const auto run = std::partition_point(runs_.begin(), runs_.end(), [&](const Run& r) { return r.back() < key; });
    if (run == runs_.end()) return end();
    const auto entry = std::lower_bound(run->begin(), run->end(), key);
    return {static_cast<std::size_t>(run - runs_.begin()), static_cast<std::size_t>(entry - run->begin())};
  }

  void insert(const Key& key) {
    if (runs_.empty()) {
      runs_.emplace_back().push_back(key);
      return;
    }
    Position at = lower_bound(key.first, key.second);
    if (at == end()) at = {runs_.size() - 1, runs_.back().size()};
    Run& run = runs_[at.run];
    run.insert(run.begin() + static_cast<std::ptrdiff_t>(at.index), key);
    if (std::ssize(run) <= kLongestRun) return;
    Run rest(run.begin() + kLongestRun / 2, run.end());
    run.resize(kLongestRun / 2);
    runs_.insert(runs_.begin() + static_cast<std::ptrdiff_t>(at.run) + 1, std::move(rest));
  }
  void erase(Position p) {
    Run& run = runs_[p.run];
    run.erase(run.begin() + static_cast<std::ptrdiff_t>(p.index));
    if (run.empty()) runs_.erase(runs_.begin() + static_cast<std::ptrdiff_t>(p.run));
  }
  /// Precondition: it is there.
  void erase(std::int64_t first, std::int64_t second) { erase(lower_bound(first, second)); }

  /// All entries in order.
  std::vector<Key> entries() const {
    std::vector<Key> all;
    for (const Run& run : runs_) all.insert(all.end(), run.begin(), run.end());
    return all;
  }

 private:
  static constexpr std::ptrdiff_t kLongestRun = 128;
  using Run = std::vector<Key>;
  std::vector<Run> runs_;  // none is empty
};

}  // namespace zeroplan
