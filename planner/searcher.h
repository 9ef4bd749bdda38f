#pragma once
// One pass over the space. search() runs it once, once per stage, or again with a changed request to verify an advice.

#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "planner/placement_moves.h"
#include "planner/search.h"
#include "planner/search_space.h"

namespace zeroplan {

class Searcher {
 public:
  Searcher(const Request& request, const Workload& workload);

  /// The best `top_k` plans of different kinds, laid out, best first; empty when nothing fits.
  std::vector<Candidate> run();
  /// The plan that lacks least when nothing fits: GPU needs as they are, what is left over put on the host.
  Candidate nearest();

  const SearchStats& stats() const { return stats_; }
  const Predictor& predictor() const { return predictor_; }

 private:
  /// Plans that differ here are different plans; within one kind only the best is kept.
  using Kind = std::tuple<int, int, Tier, Tier, Tier, UpdateOn, Recompute, bool, std::int64_t>;
  static Kind kind_of(const Plan& plan);
  /// Alternatives that are reported differ here: in stage, group, or where states live.
  using Family = std::tuple<int, int, Tier, Tier, Tier>;
  static Family family_of(const Plan& plan);
  /// What decides how long the kernels of a step take, whatever the placement: the key of the lower bound.
  using KernelKey = std::tuple<Recompute, std::int64_t, bool>;

  void explore(bool split_master, bool narrow_sum = false);
  void explore_batches(Choice choice);
  enum class Fit { yes, gpu_full, no };
  Fit try_choice(const Choice& choice);
  Prediction evaluate(const Plan& plan);
  bool hopeless(const Plan& plan) const;
  void keep(const Plan& plan, const Prediction& prediction);
  double lack(const Prediction& prediction) const;
  bool better(const Prediction& a, const Prediction& b) const;
  double cut() const;

  std::vector<Candidate> ranked() const;
  std::vector<Candidate> report(std::vector<Candidate> all);
  std::optional<Candidate> emptied(const Candidate& filled, bool weights);
  void refine(Candidate& candidate);
  void refine_recompute(Candidate& candidate);
  void refine_prefetch(Candidate& candidate);
  bool lay_out_plan(Candidate& candidate);
  void prefer_simpler(std::vector<Candidate>& plans) const;
  void settle(std::vector<Candidate>& plans);
  double whole_ops(const Plan& plan) const;
  double played_ops(const Plan& plan) const;
  void play(Candidate& candidate);

  const Request& request_;
  Workload workload_;
  Predictor predictor_;
  PlacementMoves moves_;
  SearchStats stats_;
  std::map<Kind, Candidate> best_;
  std::map<KernelKey, double> kernel_seconds_;
};

}  // namespace zeroplan
