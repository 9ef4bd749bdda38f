#pragma once
// Which blocks lie on which memory: back to the GPU while they fit, outwards where a prediction says that they do not.

#include <vector>

#include "planner/prediction.h"
#include "planner/search.h"
#include "planner/search_space.h"

namespace zeroplan {

/// Search compares live peaks; the laid-out arena is a little larger. Part of the peak that is kept for that.
inline constexpr double kArenaReserve = 0.005;

class PlacementMoves {
 public:
  /// `request` must outlive it.
  explicit PlacementMoves(const Request& request) : request_(request) {}

  Bytes gpu_budget() const;
  Bytes host_budget_per_rank() const;

  /// Blocks go back to the GPU while they fit: optimizer states and with them gradients that lie on the host, or
  /// weights first where those left too (they cross PCIe several times a step). `all_off` is the prediction with every
  /// block off the GPU. Returns the host bytes of a rank that this frees.
  double fill_gpu(Plan& plan, const OffloadStyle& style, const Prediction& all_off) const;
  /// Uses what is left: blocks go back to the GPU while they fit, the rest to the host, and what the host cannot hold
  /// to disk. `all_host` is the prediction with every optimizer block on the host. False when it cannot fit.
  bool spread(Plan& plan, const OffloadStyle& style, const Prediction& all_host) const;
  /// Moves outwards what does not fit by this prediction. False when nothing is left to move or the user fixed it.
  bool relieve(Plan& plan, const Prediction& p) const;

 private:
  bool relieve_gpu(Plan& plan, double missing) const;
  bool relieve_host(Plan& plan, double missing) const;
  std::vector<double> block_bytes(const Plan& plan, int bytes_per_parameter) const;

  const Request& request_;
};

}  // namespace zeroplan
