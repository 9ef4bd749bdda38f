#pragma once
// Lives placed one by one, each into the first gap that it fits: the part of place() that stacking leaves over.

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "models/arena_parts.h"

namespace zeroplan::arena {

/// Largest first, or largest size x time first.
enum class Order : std::uint8_t { size, area };
/// From which end of memory gaps are filled.
enum class Fill : std::uint8_t { lowest, highest };

/// `long_life` in Alloc ops (a layer's forward has 10 to 20): lives of at least that length are stacked; 0: none.
struct Start {
  std::int32_t long_life;
  Order order;
  Fill fill;
};

/// How long one stretch is worked on.
struct Budget {
  std::int64_t scans;          // occupied ranges looked at, about 1 ns each
  int rounds;                  // reorderings of one window
  std::int32_t widest_window;  // Alloc ops on each side of what sticks out: where doubling ends
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

  void insert(const Piece& piece);
  /// The lowest offset at which the piece overlaps nothing.
  std::int64_t lowest_gap(const Piece& piece, std::int64_t& scans) const;
  /// The highest such offset under the ceiling; without one, above everything.
  std::int64_t highest_gap(const Piece& piece, std::int64_t ceiling, std::int64_t& scans) const;

 private:
  struct Range {
    std::int32_t begin, end;
    std::int64_t offset, top;
  };
  static constexpr std::int32_t kBucket = 128;    // Alloc ops
  static constexpr std::int64_t kOverhead = 100;  // scans that an insertion and the sorting cost

  static std::int32_t bucket(std::int32_t time, int row) { return (time + row * (kBucket / 2)) / kBucket; }
  static std::size_t list(std::int32_t bucket, int row) { return index(2 * bucket + row + 1); }
  /// The ranges among which the piece must find room.
  const std::vector<Range>& around(const Piece& piece) const;
  static void insert(std::vector<Range>& ranges, const Range& range);

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

  /// Places each piece once, in the start's order.
  void place_all();
  /// Places again what sticks out over the ceiling, and its surroundings.
  void improve(const Budget& budget);

 private:
  void sort(std::vector<std::size_t>& order) const;
  std::int64_t sticks_out(std::size_t i) const { return std::max(std::int64_t{0}, pieces_[i].top() - ceiling_); }

  /// Places pieces among what is taken.
  Score put(std::span<const std::size_t> order);
  /// Times around pieces that stick out, those that overlap joined.
  std::vector<std::pair<std::int32_t, std::int32_t>> windows(std::int32_t margin) const;
  /// Pieces inside the window are placed again and again; those that reach over its edges stay.
  void improve_window(std::int32_t begin, std::int32_t end, int rounds);
  std::vector<std::pair<std::size_t, std::int64_t>> offsets_of(std::span<const std::size_t> ids) const;

  std::vector<Piece> pieces_;
  std::int64_t ceiling_;
  Start start_;
  std::int64_t& scans_;
  std::int32_t times_;
  Taken taken_;
};

}  // namespace zeroplan::arena
