// Placement. A step falls apart into stretches between moments when nothing is alive (micro-steps); equal ones are solved
// once. In a stretch every life goes into the lowest gap that holds it, largest first: on training steps that nearly always
// meets the live peak. It costs n^2, so the long lives that are alive at the turn from forward to backward, which nest like a
// stack, are first stacked without looking for gaps; only when that misses the peak is the whole stretch placed by gaps, and
// after that the surroundings of what sticks out are searched.

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "models/arena_parts.h"

namespace zeroplan::arena {
namespace {

constexpr std::int32_t kLongLife = 96;      // Alloc ops; a layer's forward has 10 to 20
constexpr std::int32_t kWindow = 48;        // Alloc ops searched on each side of what sticks out, at first
constexpr int kRounds = 4;                  // how often the window is doubled
constexpr std::int64_t kNormalTries = 6000;      // single placements spent on searching, per stretch
constexpr std::int64_t kThoroughTries = 4'000'000;

std::size_t index(std::int32_t i) { return static_cast<std::size_t>(i); }

/// Height over time: raise() sets a range to at least a height, highest() asks for its maximum.
class Skyline {
 public:
  explicit Skyline(std::int32_t length) : leaves_(std::bit_ceil(index(length) + 1)), highest_(2 * leaves_), whole_(2 * leaves_) {}

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

/// Occupied ranges over time, in order of offset.
class Taken {
 public:
  void clear() { pieces_.clear(); }

  void insert(const Piece& piece) {
    const auto less = [](const Range& a, const Range& b) { return a.offset < b.offset; };
    const Range range{piece.begin, piece.end, piece.offset, piece.top()};
    pieces_.insert(std::upper_bound(pieces_.begin(), pieces_.end(), range, less), range);
  }

  /// The lowest offset at which the piece overlaps nothing.
  std::int64_t lowest_gap(const Piece& piece) const {
    std::int64_t low = piece.floor;
    for (const Range& r : pieces_) {
      const bool meets = (r.begin < piece.end) & (piece.begin < r.end);
      if (meets & (r.offset - low >= piece.size)) break;
      low = std::max(low, meets ? r.top : low);
    }
    return low;
  }

 private:
  struct Range {
    std::int32_t begin, end;
    std::int64_t offset, top;
  };
  std::vector<Range> pieces_;
};

/// How far pieces stick out over the live peak.
struct Score {
  std::int64_t worst = 0, sum = 0;
  friend auto operator<=>(const Score&, const Score&) = default;
};

/// Pieces in order of birth, over a stack.
class Gaps {
 public:
  Gaps(std::vector<Piece> pieces, std::int64_t ceiling, std::int64_t tries)
      : pieces_(std::move(pieces)), ceiling_(ceiling), tries_(tries) {}

  const std::vector<Piece>& pieces() const { return pieces_; }
  Score score() const {
    Score total;
    for (const Piece& piece : pieces_) add(total, piece);
    return total;
  }

  void place_all() {
    std::vector<std::size_t> order(pieces_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    sort_by_size(order);
    taken_.clear();
    put(order);
  }

  void search() {
    for (int round = 0; round < kRounds && tries_ > 0; ++round) {
      for (auto [begin, end] : windows(kWindow << round)) search_window(begin, end);
    }
  }

 private:
  void sort_by_size(std::vector<std::size_t>& order) const {
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return pieces_[a].size > pieces_[b].size; });
  }
  std::int64_t sticks_out(const Piece& piece) const { return std::max(std::int64_t{0}, piece.top() - ceiling_); }
  void add(Score& total, const Piece& piece) const {
    total.worst = std::max(total.worst, sticks_out(piece));
    total.sum += sticks_out(piece);
  }

  Score put(std::span<const std::size_t> order) {
    Score total;
    for (std::size_t i : order) {
      pieces_[i].offset = taken_.lowest_gap(pieces_[i]);
      taken_.insert(pieces_[i]);
      add(total, pieces_[i]);
    }
    return total;
  }

  std::vector<std::pair<std::int32_t, std::int32_t>> windows(std::int32_t margin) const {
    std::vector<std::pair<std::int32_t, std::int32_t>> found;
    for (const Piece& piece : pieces_) {
      if (sticks_out(piece) == 0) continue;
      const std::int32_t begin = piece.begin - margin, end = piece.end + margin;
      if (!found.empty() && found.back().second >= begin) {
        found.back().second = std::max(found.back().second, end);
      } else {
        found.emplace_back(begin, end);
      }
    }
    return found;
  }

  /// Pieces inside the window are placed again and again; those that reach over its edge stay.
  void search_window(std::int32_t begin, std::int32_t end) {
    std::vector<std::size_t> order;
    Taken around;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      if (begin <= piece.begin && piece.end <= end) {
        order.push_back(i);
      } else if (piece.begin < end && begin < piece.end) {
        around.insert(piece);
      }
    }
    std::vector<std::int64_t> offsets = offsets_of(order);
    Score best;
    for (std::size_t i : order) add(best, pieces_[i]);
    sort_by_size(order);
    std::vector<std::size_t> accepted = order;
    Score current{std::numeric_limits<std::int64_t>::max(), 0};
    std::vector<std::size_t> members = order;
    std::sort(members.begin(), members.end());
    while (best.worst > 0 && tries_ > 0) {
      taken_ = around;
      const Score score = put(order);
      tries_ -= static_cast<std::int64_t>(order.size());
      if (score < best) best = score, offsets = offsets_of(members);
      if (score <= current) current = score, accepted = order, remember_out(order);
      order = accepted;
      if (!move_one_out(order)) break;
    }
    for (std::size_t k = 0; k < members.size(); ++k) pieces_[members[k]].offset = offsets[k];
  }

  std::vector<std::int64_t> offsets_of(std::span<const std::size_t> ids) const {
    std::vector<std::int64_t> offsets;
    for (std::size_t i : ids) offsets.push_back(pieces_[i].offset);
    return offsets;
  }

  void remember_out(std::span<const std::size_t> order) {
    out_.clear();
    for (std::size_t k = 0; k < order.size(); ++k) {
      if (sticks_out(pieces_[order[k]]) > 0) out_.push_back(k);
    }
  }

  /// Moves one of what sticks out to a random earlier place in the order.
  bool move_one_out(std::vector<std::size_t>& order) {
    if (out_.empty()) return false;
    const std::size_t from = out_[random(out_.size())];
    if (from == 0) return false;
    const auto at = [&](std::size_t k) { return order.begin() + static_cast<std::ptrdiff_t>(k); };
    std::rotate(at(random(from)), at(from), at(from + 1));
    return true;
  }

  /// Knuth's 64-bit congruential generator (MMIX): the same moves on every run.
  std::size_t random(std::size_t below) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>((state_ >> 33) % below);
  }

  std::vector<Piece> pieces_;
  std::int64_t ceiling_;
  std::int64_t tries_;
  Taken taken_;
  std::vector<std::size_t> out_;  // places in the accepted order of what sticks out
  std::uint64_t state_ = 1;
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
    const std::int64_t tries = effort == LayoutEffort::normal ? kNormalTries : kThoroughTries;
    for (bool stack : {true, false}) {
      try_out(stack, 0);
      if (placed_.height == placed_.live_peak) return std::move(placed_);
    }
    for (bool stack : {true, false}) {
      try_out(stack, tries / 2);
      if (placed_.height == placed_.live_peak) return std::move(placed_);
    }
    return std::move(placed_);
  }

 private:
  void try_out(bool stack, std::int64_t tries) {
    std::vector<std::int64_t> offset(lives_.size(), 0);
    std::vector<bool> stacked(lives_.size(), false);
    std::vector<std::int64_t> ground(index(times_), 0);
    if (stack) ground = stack_up(stacked, offset);
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < lives_.size(); ++i) {
      if (stacked[i]) continue;
      const Life& life = lives_[i];
      const auto from = ground.begin() + life.begin, to = ground.begin() + life.end;
      pieces.push_back({life.begin, life.end, life.size, stack ? *std::max_element(from, to) : 0, 0});
    }
    Gaps gaps(std::move(pieces), placed_.live_peak, tries);
    gaps.place_all();
    if (tries > 0) gaps.search();
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
  std::vector<std::int64_t> stack_up(std::vector<bool>& stacked, std::vector<std::int64_t>& offset) const {
    const std::int32_t turn = busiest(lives_, times_);
    const auto length = [&](std::size_t i) { return lives_[i].end - lives_[i].begin; };
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < lives_.size(); ++i) {
      if (length(i) >= kLongLife && lives_[i].begin <= turn && turn < lives_[i].end) order.push_back(i);
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
