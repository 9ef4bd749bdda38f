// The benchmark table that a widely copied tutorial prints for 8 x A100-80G without naming model, batch or sequence:
// searches the catalog for what comes nearest under DeepSpeed and prints both side by side (docs/accuracy.md).
//
//   ninja tutorial_table && tutorial_table
//
// Distance: root mean square of ln(predicted / printed) over the ten figures. The search is exact within its grid: step
// times and what states alone take are a lower bound of the distance, candidates come in its order, and it ends where
// the bound is above the best.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "models/error.h"
#include "models/model_spec.h"
#include "planner/engine_fit.h"
#include "sim/engine_time.h"

namespace {

using namespace zeroplan;

constexpr int kRanks = 8;

struct Row {
  const char* name;
  int stage;
  bool offload;  // optimizer and parameters
  double samples, gigabytes;
  double states;  // bytes a parameter that stay for the whole step: deepspeed.md sections 3 to 5
};
constexpr std::array kTable{
    Row{"DDP", 0, false, 12.4, 79.2, 14},
    Row{"ZeRO-1", 1, false, 11.8, 68.4, 2 + 12.0 / kRanks},
    Row{"ZeRO-2", 2, false, 11.2, 42.1, 2 + 12.0 / kRanks},
    Row{"ZeRO-3", 3, false, 10.5, 10.8, 16.0 / kRanks},
    Row{"ZeRO-3 + offload", 3, true, 6.2, 4.2, 0},
};

struct Candidate {
  const ModelSpec* model = nullptr;
  TokenShape tokens;
  bool checkpointing = false;
  std::array<double, kTable.size()> samples{};
  double bound = 0;  // sum of squares
};

double square_of_log(double ratio) { return std::log(ratio) * std::log(ratio); }
double distance(double squares) { return std::sqrt(squares / (2.0 * kTable.size())); }

double samples_a_second(const ModelSpec& model, const MachineSpec& machine, const Candidate& c, const Row& row) {
  EngineTimeRun run;
  run.stage = row.stage;
  run.tokens = c.tokens;
  run.ranks = kRanks;
  run.recompute = c.checkpointing ? TimedRecompute::full : TimedRecompute::none;
  run.offload_optimizer = row.offload ? OffloadedOptimizer::host : OffloadedOptimizer::none;
  run.offload_parameters = row.offload;
  return static_cast<double>(kRanks * c.tokens.batch) / predict_engine_time(model, machine, run).step.base();
}

void bound(Candidate& c, const MachineSpec& machine) {
  for (std::size_t i = 0; i < kTable.size(); ++i) {
    c.samples[i] = samples_a_second(*c.model, machine, c, kTable[i]);
    c.bound += square_of_log(c.samples[i] / kTable[i].samples);
    const double least = kTable[i].states * static_cast<double>(c.model->parameters()) / 1e9;
    if (least > kTable[i].gigabytes) c.bound += square_of_log(least / kTable[i].gigabytes);
  }
}

/// Every model that both predictors know, with every shape of the grid.
std::vector<Candidate> candidates(const std::vector<ModelSpec>& models, const MachineSpec& machine) {
  std::vector<Candidate> all;
  for (const ModelSpec& model : models) {
    for (const std::int64_t batch : {1, 2, 4, 8, 16, 32, 64}) {
      for (const std::int64_t seq_len : {128, 256, 512, 1024, 2048, 4096}) {
        for (const bool checkpointing : {false, true}) {
          Candidate c{&model, {batch, seq_len}, checkpointing, {}, 0};
          try {
            bound(c, machine);
          } catch (const InputError&) {
            continue;  // experts, encoders; sequences beyond the model's
          }
          all.push_back(c);
        }
      }
    }
  }
  std::ranges::stable_sort(all, {}, &Candidate::bound);
  return all;
}

DeepSpeedConfig config_of(const Row& row) {
  DeepSpeedConfig config;
  config.stage = row.stage;
  config.precision = DType::bf16;
  config.overlap_comm = row.stage > 0;
  if (row.offload) config.offload_optimizer.device = config.offload_param.device = OffloadDevice::cpu;
  return config;
}

/// What a tutorial may have meant by "memory per GPU".
enum class Measure { allocated, used };
/// Whether a row may need more than its card has.
enum class Cards { any, all_fit };

struct Fit {
  double allocated = 0, used = 0;  // GB; torch.cuda.max_memory_allocated(), nvidia-smi
  GpuVerdict verdict = GpuVerdict::fits;
  double gigabytes(Measure measure) const { return measure == Measure::used ? used : allocated; }
};
using Fits = std::array<Fit, kTable.size()>;
bool fits_card(const Fit& fit) { return fit.verdict != GpuVerdict::does_not_fit; }

double squares(const Candidate& c, const Fits& fits, Measure measure) {
  double sum = 0;
  for (std::size_t i = 0; i < kTable.size(); ++i) {
    sum += square_of_log(c.samples[i] / kTable[i].samples);
    sum += square_of_log(fits[i].gigabytes(measure) / kTable[i].gigabytes);
  }
  return sum;
}

/// Nothing for a family without an eager graph.
std::optional<Fits> memory_of(const Candidate& c, const MachineSpec& machine) {
  EngineFitter fitter(*c.model, machine, 0);
  EngineWorkload workload;
  workload.tokens = c.tokens;
  workload.ranks = kRanks;
  workload.checkpointing = c.checkpointing;
  Fits fits;
  try {
    for (std::size_t i = 0; i < kTable.size(); ++i) {
      const EngineFit fit = fitter.deepspeed(config_of(kTable[i]), workload);
      fits[i] = {fit.allocated.base() / 1e9, fit.device().base() / 1e9, fit.gpu};
    }
  } catch (const InputError&) {
    return std::nullopt;
  }
  return fits;
}

void print(const Candidate& c, const Fits& fits, Measure measure) {
  fmt::print("{}, {} x {} tokens a GPU, {}: distance {:.3f}\n", c.model->name, c.tokens.batch, c.tokens.seq_len,
             c.checkpointing ? "checkpointed" : "not checkpointed", distance(squares(c, fits, measure)));
  fmt::print("{:<18} {:>9} {:>9} {:>9} {:>9}  {}\n", "", "samples/s", "predicted", "GB a GPU", "predicted", "card");
  for (std::size_t i = 0; i < kTable.size(); ++i) {
    fmt::print("{:<18} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f}  {}\n", kTable[i].name, kTable[i].samples, c.samples[i],
               kTable[i].gigabytes, fits[i].gigabytes(measure), to_string(fits[i].verdict));
  }
}

/// Searches with one memory of replays.
class Search {
 public:
  Search(const std::vector<Candidate>& all, const MachineSpec& machine)
      : all_(all), machine_(machine), known_(all.size()) {}

  void nearest(Measure measure, Cards cards) {
    std::optional<std::size_t> best;
    double least = 0;
    std::size_t compared = 0;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (best && all_[i].bound >= least) break;
      const std::optional<Fits>& fits = replayed(i);
      if (!fits) continue;
      ++compared;
      if (cards == Cards::all_fit && !std::ranges::all_of(*fits, fits_card)) continue;
      const double sum = squares(all_[i], *fits, measure);
      if (!best || sum < least) best = i, least = sum;
    }
    if (!best) return;
    fmt::print("\nMemory as {}{}; {} of {} candidates replayed\n",
               measure == Measure::used ? "nvidia-smi shows it" : "PyTorch allocates it",
               cards == Cards::all_fit ? ", every row fits its card" : "", compared, all_.size());
    print(all_[*best], **known_[*best], measure);
  }

 private:
  const std::optional<Fits>& replayed(std::size_t i) {
    if (!known_[i]) known_[i] = memory_of(all_[i], machine_);
    return *known_[i];
  }

  const std::vector<Candidate>& all_;
  const MachineSpec& machine_;
  std::vector<std::optional<std::optional<Fits>>> known_;
};

}  // namespace

int main() {
  const MachineSpec machine = find_machine("DGX-A100-640GB");
  std::vector<ModelSpec> models;
  for (const std::string& name : model_names()) models.push_back(find_model(name));
  const std::vector<Candidate> all = candidates(models, machine);
  Search search(all, machine);
  for (const Cards cards : {Cards::any, Cards::all_fit}) {
    for (const Measure measure : {Measure::used, Measure::allocated}) search.nearest(measure, cards);
  }
  return 0;
}
