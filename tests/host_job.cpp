#include "tests/host_job.h"

#include <exception>
#include <mutex>
#include <thread>

#include "models/lower.h"
#include "runtime/kernels/kernels.h"
#include "runtime/thread_communicator.h"
#include "runtime/token_data.h"

namespace zeroplan::tests {
namespace {

/// Small numbers that look random, the same for every sharding.
float initial_weight(int block, std::int64_t element) {
  std::uint64_t x = static_cast<std::uint64_t>(block) * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(element);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<double>((x ^ (x >> 31)) >> 40) / 16777216.0 - 0.5) * 0.2f;
}

std::int32_t token_of(std::int64_t step, std::int64_t sample, std::int64_t position, std::int64_t vocab) {
  return static_cast<std::int32_t>((7 * position * position + 3 * position + 13 * sample + 5 * (step % 2)) % vocab);
}

/// Where every element of the model belongs in HostResult::master.
std::vector<std::int64_t> block_starts(const ModelSpec& model, DType type) {
  std::vector<std::int64_t> starts{0};
  for (const int kind : model.sequence) {
    starts.push_back(starts.back() + flat_layout(model.kinds[static_cast<std::size_t>(kind)], type, 1).padded);
  }
  return starts;
}

class Job {
 public:
  Job(const ModelSpec& model, const Plan& plan, const HostJob& job)
      : model_(model), plan_(plan), job_(job), starts_(block_starts(model, plan.precision.weights)) {
    result_.losses.assign(static_cast<std::size_t>(job.steps), 0.0);
    result_.master.assign(static_cast<std::size_t>(starts_.back()), -1e30f);
    result_.moments.resize(static_cast<std::size_t>(2 * starts_.back() * size_of(plan.precision.states)));
    if (!job_.initial) job_.initial = initial_weight;
    if (!job_.token) {
      job_.token = [&m = model](std::int64_t step, std::int64_t sample, std::int64_t position) {
        return token_of(step, sample, position, m.vocab);
      };
    }
    losses_.resize(static_cast<std::size_t>(job.steps * plan.ranks * plan.accumulation));
  }

  HostResult run() {
    auto worlds = make_thread_worlds(plan_.ranks, std::chrono::seconds(20));
    std::vector<std::thread> threads;
    for (auto& world : worlds) {
      threads.emplace_back([this, w = world.get()] {
        try {
          rank(*w);
        } catch (const std::exception& e) {
          w->abort(e.what());
          const std::lock_guard lock(mutex_);
          if (!error_) error_ = std::current_exception();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    if (error_) std::rethrow_exception(error_);
    sum_losses();
    return std::move(result_);
  }

 private:
  void rank(World& world) {
    HostExecutor executor(model_, plan_, world, job_.options);
    executor.load_states([&](const FlatRange& range, const StateSpans& spans) {
      const std::int64_t stored =
          starts_[static_cast<std::size_t>(range.block) + 1] - starts_[static_cast<std::size_t>(range.block)];
      for (std::size_t i = 0; i < spans.master.size(); ++i) {
        const std::int64_t at = range.begin + static_cast<std::int64_t>(i);
        spans.master[i] = at < stored && in_tensor(range.block, at) ? job_.initial(range.block, at) : 0.0f;
      }
    });
    for (int step = 0; step < job_.steps; ++step) one_step(world.rank(), executor, step);
    executor.save_states([&](const FlatRange& range, const StateSpans& spans) { store(range, spans); });
    if (world.rank() == 0) {
      for (int m = 0; m < kNumMemories; ++m) {
        result_.planned.push_back(executor.memory().planned(static_cast<Memory>(m)));
        result_.used.push_back(executor.memory().used(static_cast<Memory>(m)));
      }
    }
  }

  bool in_tensor(int block, std::int64_t element) const {
    const BlockKind& kind = model_.kinds[static_cast<std::size_t>(model_.sequence[static_cast<std::size_t>(block)])];
    const auto offsets = tensor_offsets(kind, plan_.precision.weights);
    for (std::size_t t = 0; t < offsets.size(); ++t) {
      if (offsets[t] >= 0 && element >= offsets[t] && element < offsets[t] + kind.tensors[t].elements()) return true;
    }
    return false;
  }

  void one_step(int rank, HostExecutor& executor, int step) {
    std::vector<std::int32_t> inputs, targets;
    for (std::int64_t m = 0; m < plan_.accumulation; ++m) {
      for (std::int64_t row = 0; row < plan_.micro_batch; ++row) {
        const std::int64_t sample = sample_in_batch(m, plan_.micro_batch, row, rank, plan_.ranks);
        for (std::int64_t k = 0; k < plan_.seq_len; ++k) {
          inputs.push_back(job_.token(step, sample, k));
          targets.push_back(job_.token(step, sample, k + 1));
        }
      }
    }
    const StepOutput out = executor.step({inputs, targets, job_.adam, step + 1, job_.loss_scale});
    const std::lock_guard lock(mutex_);
    if (rank == 0) result_.norms.push_back(out.gradient_norm);
    for (std::int64_t m = 0; m < plan_.accumulation; ++m) {
      losses_[static_cast<std::size_t>((step * plan_.accumulation + m) * plan_.ranks + rank)] =
          out.losses[static_cast<std::size_t>(m)];
    }
  }

  void store(const FlatRange& range, const StateSpans& spans) {
    const std::lock_guard lock(mutex_);
    const std::int64_t start = starts_[static_cast<std::size_t>(range.block)];
    const std::int64_t stored = starts_[static_cast<std::size_t>(range.block) + 1] - start;
    const auto each = static_cast<std::size_t>(size_of(plan_.precision.states));
    for (std::int64_t i = 0; i < range.count() && range.begin + i < stored; ++i) {
      const auto to = static_cast<std::size_t>(start + range.begin + i), from = static_cast<std::size_t>(i);
      result_.master[to] = spans.master[from];
      std::copy_n(spans.first.begin() + static_cast<std::ptrdiff_t>(from * each), each,
                  result_.moments.begin() + static_cast<std::ptrdiff_t>(2 * to * each));
      std::copy_n(spans.second.begin() + static_cast<std::ptrdiff_t>(from * each), each,
                  result_.moments.begin() + static_cast<std::ptrdiff_t>((2 * to + 1) * each));
    }
  }

  // In the order of samples: micro-steps, and ranks within them.
  void sum_losses() {
    const auto per_step = static_cast<std::size_t>(plan_.ranks * plan_.accumulation);
    const double tokens = static_cast<double>(plan_.global_batch() * plan_.seq_len);
    for (std::size_t step = 0; step < result_.losses.size(); ++step) {
      double sum = 0;
      for (std::size_t i = 0; i < per_step; ++i) sum += losses_[step * per_step + i];
      result_.losses[step] = sum / tokens;
    }
  }

  const ModelSpec& model_;
  const Plan& plan_;
  HostJob job_;
  std::vector<std::int64_t> starts_;
  std::vector<double> losses_;
  HostResult result_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

HostResult run_host_job(const ModelSpec& model, const Plan& plan, const HostJob& job) {
  check_plan(plan, model, "plan");
  return Job(model, plan, job).run();
}

Plan plain_plan(const ModelSpec& model, int ranks, DType type, std::int64_t seq_len, std::int64_t micro_batch) {
  Plan plan;
  plan.ranks = ranks;
  plan.seq_len = seq_len;
  plan.micro_batch = micro_batch;
  plan.precision = {type, type != DType::fp32, false, DType::fp32, type, type};
  const int blocks = static_cast<int>(model.sequence.size());
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, blocks);
  plan.loss_chunk_tokens = 24;
  if (type == DType::fp16) plan.loss_scaling = LossScaling::dynamic;
  return plan;
}

}  // namespace zeroplan::tests
