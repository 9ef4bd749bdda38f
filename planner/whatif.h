#pragma once
// The same training on several machines, and which of them to take within a budget and a deadline.

#include <optional>
#include <string>
#include <vector>

#include "planner/cost.h"
#include "planner/search.h"

namespace zeroplan {

/// One machine and the name it was asked for by.
struct Alternative {
  std::string name;  // "2x8xH100"
  MachineSpec machine;
  std::string unit = {};    // without the number of nodes: "8xH100"
  bool nodes_given = true;  // false: within limits the number of nodes is searched
  bool from_file = false;   // stated in whatif's file, not on the command line
};

/// What is best among those that keep the limits.
enum class Prefer : std::uint8_t { cheapest, fastest };

/// The most that a limit may be: what --deadline and --budget accept.
inline constexpr Seconds kLongestDeadline = Seconds(36525.0 * kSecondsPerDay);
inline constexpr double kLargestBudget = 1e12;  // USD

/// What the whole run must keep to. A budget or a deadline needs `tokens`.
struct WhatifLimits {
  std::optional<double> tokens;  // of the run
  std::optional<double> budget_usd;
  std::optional<Seconds> deadline;
  Prefer prefer = Prefer::cheapest;
  bool any() const { return budget_usd || deadline; }
};

/// A run of all tokens.
struct WhatifRun {
  int nodes = 1;
  Seconds time;
  double node_hours = 0;      // nodes x hours
  std::optional<double> usd;  // node_hours x price of a node and hour; absent without a price

  /// By how much the limits are missed; 0 when they are kept. A run without a price never says a budget is missed.
  Seconds late(const WhatifLimits& limits) const;
  double over(const WhatifLimits& limits) const;
  /// The larger of both as a part of its limit: 0.1 is a tenth too long or too expensive.
  double excess(const WhatifLimits& limits) const;
  /// Both kept, and the budget known to be.
  bool meets(const WhatifLimits& limits) const;
};

/// One number of nodes that was planned.
struct NodeTrial {
  int nodes = 1;
  double tokens_per_second = 0;  // 0: nothing fits
  std::optional<WhatifRun> run;  // of the best plan, when one fits and the number of tokens is known
};

struct WhatifRow {
  Alternative alternative;       // the machine with the number of nodes that was given or chosen
  std::optional<Answer> answer;  // absent when the machine cannot run the workload at all: then `refusal` says why
  std::string refusal;
  bool cheapest = false, fastest = false;  // among those that fit; ties go to the first
  std::vector<NodeTrial> trials;           // every number of nodes that was planned, ascending
  bool recommended = false;

  /// The best plan, or nullptr when none fits.
  const Candidate* best() const;
  std::optional<RunCost> cost() const;
  /// Of the best plan; nothing without one or without a number of tokens.
  std::optional<WhatifRun> run(const WhatifLimits& limits) const;
};

/// A change of the question to which the answer is yes: planned, not extrapolated.
struct WhatifChange {
  std::string what;  // "a deadline 7.3 days longer, 37.3 days: 8xH100 on 16 nodes, 41,000 USD"
  std::string flag;  // "--deadline 37.3days", or what to write in the file: "\"nodes\": 4 in \"our H100s\""
  std::string hardware;
  WhatifRun run;
};

/// What the table says in one sentence.
struct WhatifVerdict {
  std::optional<std::size_t> recommended;  // row
  std::string why;                         // in words, with the next best
  // When no row keeps the limits:
  std::optional<std::size_t> nearest;  // row
  std::vector<WhatifChange> changes;   // the cheapest first: other machines, then limits by the part they grow
};

struct WhatifAnswer {
  Request workload;  // with sequence length and global batch; its machine is not set
  WhatifLimits limits;
  std::vector<WhatifRow> rows;           // in the order asked for
  std::vector<Assumption> assumptions;   // of the workload; each row's answer has the machine's
  std::optional<WhatifVerdict> verdict;  // with a budget or a deadline
  bool any_fits() const;
  /// Something fits and, with limits, keeps them.
  bool satisfied() const;
};

/// Numbers of nodes that can share a step of `global_batch` sequences evenly: the divisors, at most 12 of them about
/// equally far apart, the smallest and the largest included. {1} when no number can.
std::vector<int> node_counts(std::int64_t global_batch, int gpus_per_node, std::int64_t micro_batch);

/// Plans the workload on each machine, with one global batch for all: a multiple of the ranks of each. Within limits,
/// machines whose number of nodes was not given are planned with each of node_counts(), and the best of them is the
/// row. Throws InputError when the workload is wrong everywhere, when limits lack `tokens`, or with a budget when no
/// machine has a price.
WhatifAnswer plan_alternatives(const Request& workload, const std::vector<Alternative>& alternatives,
                               const WhatifLimits& limits = {});

}  // namespace zeroplan
