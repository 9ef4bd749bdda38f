// Placement. A step falls apart into stretches between moments when nothing is alive (micro-steps); equal ones are
// solved once. In a stretch the long lives around the turn from forward to backward nest like a stack and are stacked
// without looking for gaps. Every other life goes into a gap, in an order: largest first, or largest size x time first.
// Then what sticks out over the live peak is moved to the front of the order and its surroundings are placed again, as
// often as the budget allows. Several starts differ in order, in the end of memory they fill from and in what counts as
// long; the first that meets the live peak wins, else the lowest. Which starts, and in this order:
// docs/memory-layout.md.

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "models/arena_gaps.h"
#include "models/arena_parts.h"

namespace zeroplan::arena {
namespace {

constexpr Start kStarts[] = {
    {96, Order::size, Fill::lowest},  {96, Order::area, Fill::lowest}, {96, Order::size, Fill::highest},
    {24, Order::area, Fill::lowest},  {0, Order::area, Fill::lowest},  {0, Order::size, Fill::lowest},
    {24, Order::size, Fill::highest},
};

constexpr Budget kNormal{4'000'000, 16, 100'000};
constexpr Budget kThorough{300'000'000, 200, 100'000};

/// Height over time: raise() sets a range to at least a height, highest() asks for its maximum.
class Skyline {
 public:
  explicit Skyline(std::int32_t length)
      : leaves_(std::bit_ceil(index(length) + 1)), highest_(2 * leaves_), whole_(2 * leaves_) {}

  void raise(std::int32_t begin, std::int32_t end, std::int64_t height) {
    const std::size_t first = index(begin) + leaves_, last = index(end) + leaves_ - 1;
    for (std::size_t l = first, r = last + 1; l < r; l /= 2, r /= 2) {
      if (l % 2 == 1) set(l++, height);
      if (r % 2 == 1) set(--r, height);
    }
    for (std::size_t node = first / 2; node > 0; node /= 2) highest_[node] = std::max(highest_[node], height);
    for (std::size_t node = last / 2; node > 0; node /= 2) highest_[node] = std::max(highest_[node], height);
  }

  std::int64_t highest(std::int32_t begin, std::int32_t end) const {
    std::int64_t best = 0;
    for (std::size_t l = index(begin) + leaves_, r = index(end) + leaves_; l < r; l /= 2, r /= 2) {
      if (l % 2 == 1) best = std::max(best, at(l++));
      if (r % 2 == 1) best = std::max(best, at(--r));
    }
    return best;
  }

  /// The height at each time.
  std::vector<std::int64_t> flat(std::int32_t length) const {
    std::vector<std::int64_t> down = whole_;
    for (std::size_t node = 2; node < down.size(); ++node) down[node] = std::max(down[node], down[node / 2]);
    const auto begin = down.begin() + static_cast<std::ptrdiff_t>(leaves_);
    return {begin, begin + length};
  }

 private:
  void set(std::size_t node, std::int64_t height) {
    whole_[node] = std::max(whole_[node], height);
    highest_[node] = std::max(highest_[node], height);
  }
  /// Heights set on the ancestors hold here too.
  std::int64_t at(std::size_t node) const {
    std::int64_t best = highest_[node];
    for (std::size_t up = node / 2; up > 0; up /= 2) best = std::max(best, whole_[up]);
    return best;
  }

  std::size_t leaves_;
  std::vector<std::int64_t> highest_, whole_;
};

std::int64_t live_peak(std::span<const Life> lives, std::int32_t times) {
  std::vector<std::int64_t> change(index(times) + 1);
  for (const Life& life : lives) {
    change[index(life.begin)] += life.size;
    change[index(life.end)] -= life.size;
  }
  std::int64_t live = 0, peak = 0;
  for (std::int64_t c : change) peak = std::max(peak, live += c);
  return peak;
}

/// When most lives are alive: where forward turns into backward.
std::int32_t busiest(std::span<const Life> lives, std::int32_t times) {
  std::vector<int> change(index(times) + 1);
  for (const Life& life : lives) ++change[index(life.begin)], --change[index(life.end)];
  std::partial_sum(change.begin(), change.end(), change.begin());
  return static_cast<std::int32_t>(std::max_element(change.begin(), change.end()) - change.begin());
}

/// One stretch of time during which something is always alive.
class Stretch {
 public:
  explicit Stretch(std::vector<Life> lives) : lives_(std::move(lives)), times_(lives_.back().begin + 1) {
    for (Life& life : lives_) life.end = std::min(life.end, times_);
    placed_.offset.assign(lives_.size(), 0);
    placed_.live_peak = live_peak(lives_, times_);
    placed_.height = std::numeric_limits<std::int64_t>::max();
  }

  Placed place(LayoutEffort effort) {
    const Budget& budget = effort == LayoutEffort::normal ? kNormal : kThorough;
    std::int64_t scans = budget.scans;
    std::int64_t first_scans = scans / 2;
    for (const Start& start : kStarts) {  // plainly first: most stretches end here
      const std::int64_t before = first_scans;
      attempt(start, Budget{0, 0, 0}, first_scans);
      scans -= before - first_scans;
      if (placed_.height == placed_.live_peak) return std::move(placed_);
      if (first_scans <= 0) break;
    }
    for (const Start& start : kStarts) {
      if (scans <= 0) break;
      attempt(start, budget, scans);
      if (placed_.height == placed_.live_peak) break;
    }
    return std::move(placed_);
  }

 private:
  void attempt(const Start& start, const Budget& budget, std::int64_t& scans) {
    std::vector<std::int64_t> offset(lives_.size(), 0);
    std::vector<bool> stacked(lives_.size(), false);
    std::vector<std::int64_t> ground(index(times_), 0);
    if (start.long_life > 0) ground = stack_up(start.long_life, stacked, offset);
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < lives_.size(); ++i) {
      if (stacked[i]) continue;
      const Life& life = lives_[i];
      const auto from = ground.begin() + life.begin, to = ground.begin() + life.end;
      pieces.push_back({life.begin, life.end, life.size, start.long_life > 0 ? *std::max_element(from, to) : 0, 0});
    }
    Gaps gaps(std::move(pieces), times_, placed_.live_peak, start, scans);
    gaps.place_all();
    gaps.improve(budget);
    std::size_t k = 0;
    for (std::size_t i = 0; i < lives_.size(); ++i) {
      if (!stacked[i]) offset[i] = gaps.pieces()[k++].offset;
    }
    keep_if_better(std::move(offset));
  }

  void keep_if_better(std::vector<std::int64_t> offset) {
    std::int64_t height = 0;
    for (std::size_t i = 0; i < lives_.size(); ++i) height = std::max(height, offset[i] + lives_[i].size);
    if (height >= placed_.height) return;
    placed_.height = height;
    placed_.offset = std::move(offset);
  }

  /// Long lives around the turn, longest first, each on top of what is there during it. Returns the heights over time.
  std::vector<std::int64_t> stack_up(std::int32_t long_life, std::vector<bool>& stacked,
                                     std::vector<std::int64_t>& offset) const {
    const std::int32_t turn = busiest(lives_, times_);
    const auto length = [&](std::size_t i) { return lives_[i].end - lives_[i].begin; };
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < lives_.size(); ++i) {
      if (length(i) >= long_life && nests(lives_[i], turn)) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return length(a) > length(b); });
    Skyline skyline(times_);
    for (std::size_t i : order) {
      stacked[i] = true;
      offset[i] = skyline.highest(lives_[i].begin, lives_[i].end);
      skyline.raise(lives_[i].begin, lives_[i].end, offset[i] + lives_[i].size);
    }
    return skyline.flat(times_);
  }

  /// Alive at the turn and about as long before as after it. A tied embedding's weights (all of forward) and gradient
  /// (all of backward) are alive there too, and nest with nothing.
  static bool nests(const Life& life, std::int32_t turn) {
    constexpr std::int32_t kLopsided = 8, kSlack = 16;
    const std::int32_t before = turn - life.begin, after = life.end - turn;
    return before >= 0 && after > 0 && std::max(before, after) <= kLopsided * std::min(before, after) + kSlack;
  }

  std::vector<Life> lives_;
  std::int32_t times_;
  Placed placed_;
};

/// Ends of the stretches: indices of lives that begin when all before them are over.
std::vector<std::size_t> stretches(std::span<const Life> lives) {
  std::vector<std::size_t> ends;
  std::int32_t over = 0;
  for (std::size_t i = 0; i < lives.size(); ++i) {
    if (i > 0 && lives[i].begin >= over) ends.push_back(i);
    over = std::max(over, lives[i].end);
  }
  ends.push_back(lives.size());
  return ends;
}

/// Copied with time from 0 on and the buffer left out: micro-steps look the same so.
std::vector<Life> from_zero(std::span<const Life> lives) {
  std::vector<Life> copy(lives.begin(), lives.end());
  const std::int32_t start = copy.front().begin;
  for (Life& life : copy) life = {life.begin - start, life.end - start, life.size, 0};
  return copy;
}

}  // namespace

Placed place(std::span<const Life> lives, LayoutEffort effort) {
  Placed all;
  if (lives.empty()) return all;
  std::vector<std::pair<std::vector<Life>, Placed>> solved;
  std::size_t begin = 0;
  for (std::size_t end : stretches(lives)) {
    std::vector<Life> stretch = from_zero(lives.subspan(begin, end - begin));
    const auto same = [&](const auto& known) { return known.first == stretch; };
    auto it = std::find_if(solved.begin(), solved.end(), same);
    if (it == solved.end()) {
      Placed placed = Stretch(stretch).place(effort);
      it = solved.insert(solved.end(), {std::move(stretch), std::move(placed)});
    }
    all.offset.insert(all.offset.end(), it->second.offset.begin(), it->second.offset.end());
    all.height = std::max(all.height, it->second.height);
    all.live_peak = std::max(all.live_peak, it->second.live_peak);
    begin = end;
  }
  return all;
}

}  // namespace zeroplan::arena
