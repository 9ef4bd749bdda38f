#pragma once
// Plans that may not change results, and which of them must agree bit for bit.

#include <string>
#include <vector>

#include "tests/host_job.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {

/// Plans whose sums are formed in one order have equal keys: their results have the same bits (docs/runtime.md, "Which
/// sums, in which order"). What differs:
/// - the shard group: sums inside groups come before sums across them, each rounded;
/// - whole gradients that stay (one rank, or reduce_each = step): backward adds to them, so tied tables and loss chunks
///   enter one by one, and fp32 sums are never rounded to 16 bits in between;
/// - hosts sum across replicas in each micro-step.
std::string sum_order(const Plan& plan);

/// `count` legal plans that differ from `base` in stage, shard group, placement, recompute, prefetch and reductions.
std::vector<Plan> variants(const Plan& base, const ModelSpec& model, Random& random, int count);

/// Trains with each plan. Returns what was wrong, empty for nothing: a result that differs in a bit of losses, norms,
/// weights or moments from that of the first plan with the same order of sums, a loss that is not finite or never
/// changes, memory used that is not the memory planned. `compared` counts the pairs.
std::string check_invariance(const std::string& name, const ModelSpec& model, const std::vector<Plan>& plans,
                             HostJob job, Random& random, int* compared = nullptr);

}  // namespace zeroplan::tests
