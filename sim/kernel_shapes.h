#pragma once
// How much work a kernel's shape leaves for its SMs. Shared by the predictions and by the fits they rest on.

#include <algorithm>
#include <cmath>

namespace zeroplan {

/// The useful part of the last wave of output tiles, best over the three usual tile shapes (128x128 runs 0.93 as fast):
/// groups x rows x columns / (ceil(tiles / SMs) x SMs x tile area). In (0, 1]. Source: step-time.md section 2.
inline double tile_utilisation(double groups, double rows, double columns, double num_sms) {
  struct Tile {
    double rows, columns, relative_rate;
  };
  constexpr Tile kTiles[] = {{128, 256, 1.0}, {256, 128, 1.0}, {128, 128, 0.93}};
  double best = 0;
  for (const Tile& tile : kTiles) {
    const double tiles = groups * std::ceil(rows / tile.rows) * std::ceil(columns / tile.columns);
    const double waves = std::ceil(tiles / num_sms);
    const double useful = groups * rows * columns / (waves * num_sms * tile.rows * tile.columns);
    best = std::max(best, useful * tile.relative_rate);
  }
  return best;
}

/// FLOPs of a fused attention's backward over its forward's: five matmuls against two (step-time.md section 2).
inline constexpr double kAttentionBackwardFlops = 2.5;
/// Queries (and keys on the diagonal) that one SM handles at a time in flash attention kernels.
inline constexpr double kAttentionTile = 128;

struct AttentionWork {
  double flops = 0;       // executed by the forward, masked tiles left out
  double tile_flops = 0;  // of the longest single tile of queries
};

/// Forward work of `batch` x `heads` x `queries` rows over `keys` keys each, `dims` = qk + v head sizes. Causal rows
/// see on average half of the keys and half a diagonal tile more. 2 FLOPs a multiply-add.
inline AttentionWork attention_work(double batch, double heads, double queries, double dims, double keys, bool causal) {
  const double seen = causal ? std::min(keys, (keys + kAttentionTile) / 2) : keys;
  return {2 * batch * heads * queries * seen * dims, 2 * std::min(kAttentionTile, queries) * keys * dims};
}

}  // namespace zeroplan
