#include "planner/whatif.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "models/error.h"

namespace zeroplan {
namespace {

// Spec, Defaults.
constexpr std::int64_t kDefaultSeqLen = 4096;
constexpr std::int64_t kDefaultBatchTokens = 512 * 1024;
// Beyond this a common multiple is no batch that anybody trains with.
constexpr std::int64_t kLargestCommonMultiple = 1 << 20;

/// Sequences a step that every alternative can split evenly.
void fill_workload(WhatifAnswer& answer, const std::vector<Alternative>& alternatives) {
  Request& request = answer.workload;
  if (!request.seq_len) {
    const std::int64_t most = request.model.max_positions;
    request.seq_len = most > 0 ? std::min(kDefaultSeqLen, most) : kDefaultSeqLen;
    answer.assumptions.push_back({"sequence length", fmt::format("{}", *request.seq_len),
                                  "default: the smaller of 4096 and the model's maximum"});
  }
  if (request.global_batch) return;
  std::int64_t unit = request.constraints.micro_batch.value_or(1);
  std::int64_t ranks = 1;
  for (const Alternative& alternative : alternatives) {
    ranks = std::lcm(ranks, static_cast<std::int64_t>(alternative.machine.ranks()));
    if (ranks * unit > kLargestCommonMultiple) {
      throw InputError("--hardware: no common global batch for these numbers of GPUs; give --global-batch");
    }
  }
  unit *= ranks;
  const std::int64_t sequences = (kDefaultBatchTokens + *request.seq_len - 1) / *request.seq_len;
  request.global_batch = (sequences + unit - 1) / unit * unit;
  answer.assumptions.push_back({"global batch", fmt::format("{} sequences", *request.global_batch),
                                fmt::format("default: 512 Ki tokens, rounded up to a multiple of {} so that every "
                                            "alternative can split it",
                                            unit)});
}

void mark_best(std::vector<WhatifRow>& rows) {
  WhatifRow* cheapest = nullptr;
  WhatifRow* fastest = nullptr;
  for (WhatifRow& row : rows) {
    const Candidate* best = row.best();
    if (best == nullptr) continue;
    if (fastest == nullptr || best->prediction.tokens_per_second > fastest->best()->prediction.tokens_per_second) {
      fastest = &row;
    }
    const auto cost = row.cost();
    if (cost && (cheapest == nullptr || cost->usd_per_million_tokens < cheapest->cost()->usd_per_million_tokens)) {
      cheapest = &row;
    }
  }
  if (fastest != nullptr) fastest->fastest = true;
  if (cheapest != nullptr) cheapest->cheapest = true;
}

}  // namespace

const Candidate* WhatifRow::best() const {
  if (!answer || !answer->feasible) return nullptr;
  const Candidate* best = nullptr;
  for (const Candidate& candidate : answer->plans) {
    if (!candidate.fits) continue;
    if (best == nullptr ||
        (answer->request.per_stage && candidate.prediction.tokens_per_second > best->prediction.tokens_per_second)) {
      best = &candidate;
    }
  }
  return best;
}

std::optional<RunCost> WhatifRow::cost() const {
  const Candidate* candidate = best();
  if (candidate == nullptr) return std::nullopt;
  return cost_of(alternative.machine, candidate->prediction);
}

bool WhatifAnswer::any_fits() const {
  return std::ranges::any_of(rows, [](const WhatifRow& row) { return row.best() != nullptr; });
}

WhatifAnswer plan_alternatives(const Request& workload, const std::vector<Alternative>& alternatives) {
  WhatifAnswer answer;
  answer.workload = workload;
  fill_workload(answer, alternatives);
  bool any = false;
  for (const Alternative& alternative : alternatives) {
    WhatifRow row{alternative, std::nullopt, "", false, false};
    Request request = answer.workload;
    request.machine = alternative.machine;
    try {
      row.answer = search(request);
      any = true;
    } catch (const InputError& error) {
      row.refusal = error.what();
    }
    answer.rows.push_back(std::move(row));
  }
  if (!any) throw InputError(answer.rows.front().refusal);
  mark_best(answer.rows);
  return answer;
}

}  // namespace zeroplan
