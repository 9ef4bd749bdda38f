#include "models/arena_gaps.h"

#include <algorithm>
#include <numeric>

namespace zeroplan::arena {
namespace {

constexpr std::int32_t kFirstWindow = 48;  // Alloc ops on each side; then doubled

}  // namespace

void Taken::insert(const Piece& piece) {
  const Range range{piece.begin, piece.end, piece.offset, piece.top()};
  insert(lists_[0], range);
  for (int row = 0; row < 2; ++row) {
    const std::int32_t last = bucket(piece.end - 1, row);
    for (std::int32_t b = bucket(piece.begin, row); b <= last; ++b) insert(lists_[list(b, row)], range);
  }
}

std::int64_t Taken::lowest_gap(const Piece& piece, std::int64_t& scans) const {
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

std::int64_t Taken::highest_gap(const Piece& piece, std::int64_t ceiling, std::int64_t& scans) const {
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

const std::vector<Taken::Range>& Taken::around(const Piece& piece) const {
  for (int row = 0; row < 2; ++row) {
    const std::int32_t first = bucket(piece.begin, row);
    if (first == bucket(piece.end - 1, row)) return lists_[list(first, row)];
  }
  return lists_[0];
}

void Taken::insert(std::vector<Range>& ranges, const Range& range) {
  const auto less = [](const Range& a, const Range& b) { return a.offset < b.offset; };
  ranges.insert(std::upper_bound(ranges.begin(), ranges.end(), range, less), range);
}

void Gaps::place_all() {
  std::vector<std::size_t> order(pieces_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  sort(order);
  put(order);
}

void Gaps::improve(const Budget& budget) {
  for (std::int32_t margin = kFirstWindow; margin <= budget.widest_window && scans_ > 0; margin *= 2) {
    const auto found = windows(margin);
    if (found.empty()) return;
    for (auto [begin, end] : found) improve_window(begin, end, budget.rounds);
  }
}

void Gaps::sort(std::vector<std::size_t>& order) const {
  const auto key = [&](std::size_t i) {
    const Piece& piece = pieces_[i];
    return static_cast<double>(piece.size) * (start_.order == Order::area ? piece.end - piece.begin : 1);
  };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return key(a) > key(b); });
}

Score Gaps::put(std::span<const std::size_t> order) {
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

std::vector<std::pair<std::int32_t, std::int32_t>> Gaps::windows(std::int32_t margin) const {
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

void Gaps::improve_window(std::int32_t begin, std::int32_t end, int rounds) {
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

std::vector<std::pair<std::size_t, std::int64_t>> Gaps::offsets_of(std::span<const std::size_t> ids) const {
  std::vector<std::pair<std::size_t, std::int64_t>> offsets;
  offsets.reserve(ids.size());
  for (std::size_t i : ids) offsets.emplace_back(i, pieces_[i].offset);
  return offsets;
}

}  // namespace zeroplan::arena
