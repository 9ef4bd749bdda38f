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

#include "models/arena_parts.h"

namespace zeroplan::arena {
namespace {

enum class Order : std::uint8_t { size, area };
enum class Fill : std::uint8_t { lowest, highest };

/// `long_life` in Alloc ops (a layer's forward has 10 to 20): lives of at least that length are stacked; 0: none.
struct Start {
  std::int32_t long_life;
  Order order;
  Fill fill;
};
constexpr Start kStarts[] = {
    {96, Order::size, Fill::lowest},  {96, Order::area, Fill::lowest}, {96, Order::size, Fill::highest},
    {24, Order::area, Fill::lowest},  {0, Order::area, Fill::lowest},  {0, Order::size, Fill::lowest},
    {24, Order::size, Fill::highest},
};

/// How long one stretch is worked on.
struct Budget {
  std::int64_t scans;          // occupied ranges looked at, about 1 ns each
  int rounds;                  // reorderings of one window
  std::int32_t widest_window;  // Alloc ops on each side of what sticks out; 48 at first, then doubled
};
constexpr Budget kNormal{4'000'000, 16, 100'000};
constexpr Budget kThorough{300'000'000, 200, 100'000};
constexpr std::int32_t kFirstWindow = 48;

std::size_t index(std::int32_t i) { return static_cast<std::size_t>(i); }

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

/// A life that is placed by gaps; `floor` is the highest of the stacked lives during it.
struct Piece {
  std::int32_t begin = 0, end = 0;
  std::int64_t size = 0;
  std::int64_t floor = 0;
  std::int64_t offset = 0;
  std::int64_t top() const { return offset + size; }
};

/// Occupied ranges, in order of offset: all of them, and again for each of two rows of time buckets, one shifted by
/// half a bucket. A short piece lies inside a bucket of one of them and meets only what is listed there.
class Taken {
 public:
  explicit Taken(std::int32_t times) : lists_(index(2 * (times / kBucket + 2) + 1)) {}

  void insert(const Piece& piece) {
    const Range range{piece.begin, piece.end, piece.offset, piece.top()};
    insert(lists_[0], range);
    for (int row = 0; row < 2; ++row) {
      const std::int32_t last = bucket(piece.end - 1, row);
      for (std::int32_t b = bucket(piece.begin, row); b <= last; ++b) insert(lists_[list(b, row)], range);
    }
  }

  /// The lowest offset at which the piece overlaps nothing.
  std::int64_t lowest_gap(const Piece& piece, std::int64_t& scans) const {
    const std::vector<Range>& ranges = around(piece);
    scans -= static_cast<std::int64_t>(ranges.size()) + kOverhead;
    std::int64_t low = piece.floor;
    for (const Range& r : ranges) {
      const bool meets = (r.begin < piece.end) & (piece.begin < r.end);
      if (meets & (r.offset - low >= piece.size)) break;
      low = std::max(low, meets ? r.top : low);
    }
    return low;
  }

  /// The highest such offset under the ceiling; without one, above everything.
  std::int64_t highest_gap(const Piece& piece, std::int64_t ceiling, std::int64_t& scans) const {
    const std::vector<Range>& ranges = around(piece);
    scans -= static_cast<std::int64_t>(ranges.size()) + kOverhead;
    std::int64_t low = piece.floor, best = -1;
    for (const Range& r : ranges) {
      const bool meets = (r.begin < piece.end) & (piece.begin < r.end);
      const std::int64_t end = std::min(r.offset, ceiling);
      if (meets & (end - low >= piece.size)) best = end - piece.size;
      low = std::max(low, meets ? r.top : low);
    }
    if (ceiling - low >= piece.size) return ceiling - piece.size;
    return best >= 0 ? best : low;
  }

 private:
  struct Range {
    std::int32_t begin, end;
    std::int64_t offset, top;
  };
  static constexpr std::int32_t kBucket = 128;    // Alloc ops
  static constexpr std::int64_t kOverhead = 100;  // scans that an insertion and the sorting cost

  static std::int32_t bucket(std::int32_t time, int row) { return (time + row * (kBucket / 2)) / kBucket; }
  static std::size_t list(std::int32_t bucket, int row) { return index(2 * bucket + row + 1); }
  const std::vector<Range>& around(const Piece& piece) const {
    for (int row = 0; row < 2; ++row) {
      const std::int32_t first = bucket(piece.begin, row);
      if (first == bucket(piece.end - 1, row)) return lists_[list(first, row)];
    }
    return lists_[0];
  }
  static void insert(std::vector<Range>& ranges, const Range& range) {
    const auto less = [](const Range& a, const Range& b) { return a.offset < b.offset; };
    ranges.insert(std::upper_bound(ranges.begin(), ranges.end(), range, less), range);
  }

  std::vector<std::vector<Range>> lists_;
};

/// How far pieces stick out over the live peak.
struct Score {
  std::int64_t worst = 0, sum = 0;
  void add(std::int64_t out) {
    worst = std::max(worst, out);
    sum += out;
  }
  friend auto operator<=>(const Score&, const Score&) = default;
};

/// Pieces in order of birth, over a stack.
class Gaps {
 public:
  /// `scans` is what is left of the budget; counted down.
  Gaps(std::vector<Piece> pieces, std::int32_t times, std::int64_t ceiling, const Start& start, std::int64_t& scans)
      : pieces_(std::move(pieces)), ceiling_(ceiling), start_(start), scans_(scans), times_(times), taken_(times) {}

  const std::vector<Piece>& pieces() const { return pieces_; }

  void place_all() {
    std::vector<std::size_t> order(pieces_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    sort(order);
    put(order);
  }

  void improve(const Budget& budget) {
    for (std::int32_t margin = kFirstWindow; margin <= budget.widest_window && scans_ > 0; margin *= 2) {
      const auto found = windows(margin);
      if (found.empty()) return;
      for (auto [begin, end] : found) improve_window(begin, end, budget.rounds);
    }
  }

 private:
  void sort(std::vector<std::size_t>& order) const {
    const auto key = [&](std::size_t i) {
      const Piece& piece = pieces_[i];
      return static_cast<double>(piece.size) * (start_.order == Order::area ? piece.end - piece.begin : 1);
    };
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return key(a) > key(b); });
  }
  std::int64_t sticks_out(std::size_t i) const { return std::max(std::int64_t{0}, pieces_[i].top() - ceiling_); }

  /// Places pieces among what is taken.
  Score put(std::span<const std::size_t> order) {
    Score score;
    for (std::size_t i : order) {
      Piece& piece = pieces_[i];
      piece.offset =
          start_.fill == Fill::lowest ? taken_.lowest_gap(piece, scans_) : taken_.highest_gap(piece, ceiling_, scans_);
      taken_.insert(piece);
      score.add(sticks_out(i));
    }
    return score;
  }

  std::vector<std::pair<std::int32_t, std::int32_t>> windows(std::int32_t margin) const {
    std::vector<std::pair<std::int32_t, std::int32_t>> found;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      if (sticks_out(i) == 0) continue;
      const std::int32_t begin = pieces_[i].begin - margin, end = pieces_[i].end + margin;
      if (!found.empty() && found.back().second >= begin) {
        found.back().second = std::max(found.back().second, end);
      } else {
        found.emplace_back(begin, end);
      }
    }
    return found;
  }

  /// Pieces inside the window are placed again and again; those that reach over its edges stay.
  void improve_window(std::int32_t begin, std::int32_t end, int rounds) {
    std::vector<std::size_t> order;
    Taken around(times_);
    Score best;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      if (begin <= piece.begin && piece.end <= end) {
        order.push_back(i);
        best.add(sticks_out(i));
      } else if (piece.begin < end && begin < piece.end) {
        around.insert(piece);
      }
    }
    sort(order);
    auto offsets = offsets_of(order);
    for (int round = 0; round < rounds && best.worst > 0 && scans_ > 0; ++round) {
      taken_ = around;
      const Score score = put(order);
      if (score < best) best = score, offsets = offsets_of(order);
      std::stable_partition(order.begin(), order.end(), [&](std::size_t i) { return sticks_out(i) > 0; });
    }
    for (auto [i, offset] : offsets) pieces_[i].offset = offset;
  }

  std::vector<std::pair<std::size_t, std::int64_t>> offsets_of(std::span<const std::size_t> ids) const {
    std::vector<std::pair<std::size_t, std::int64_t>> offsets;
    offsets.reserve(ids.size());
    for (std::size_t i : ids) offsets.emplace_back(i, pieces_[i].offset);
    return offsets;
  }

  std::vector<Piece> pieces_;
  std::int64_t ceiling_;
  Start start_;
  std::int64_t& scans_;
  std::int32_t times_;
  Taken taken_;
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
