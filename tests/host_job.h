#pragma once
// Trains a small model with the host executor, every rank a thread, and returns what must not depend on the plan.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "models/plan.h"
#include "runtime/host_executor.h"

namespace zeroplan::tests {

struct HostJob {
  int steps = 5;
  AdamSettings adam{.learning_rate = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  HostOptions options;
  double loss_scale = 1;
  /// Of an element of a block's flat buffer; padding is never asked for. Empty: small numbers that look random.
  std::function<float(int block, std::int64_t element)> initial;
  /// Token of a sequence; targets are the tokens at position + 1. Empty: a pattern.
  std::function<std::int32_t(std::int64_t step, std::int64_t sample, std::int64_t position)> token;
};

struct HostResult {
  std::vector<double> losses;               // one a step, mean over the global batch
  std::vector<double> norms;                // of rank 0
  std::vector<float> master;                // of the whole model, blocks one after the other, padding left out
  std::vector<std::byte> moments;           // first, then second of each range
  std::vector<std::int64_t> planned, used;  // bytes of rank 0 by memory
};

/// Throws what the first failing rank threw.
HostResult run_host_job(const ModelSpec& model, const Plan& plan, const HostJob& job);

/// A plan with every choice at its plainest: ZeRO-0, one micro-step, nothing offloaded.
Plan plain_plan(const ModelSpec& model, int ranks, DType type, std::int64_t seq_len, std::int64_t micro_batch);

}  // namespace zeroplan::tests
