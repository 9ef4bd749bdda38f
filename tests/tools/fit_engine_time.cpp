// fit_engine_time OUT.json FILE...: fits models/catalog/fits/engine_time.json to measured steps and prints the errors,
// in the fit and with each model left out of it in turn. FILEs are data/published/*.csv and data/groundtruth/*.jsonl.
// "-" for OUT.json only prints. The numbers are pulled towards a prior (what step-time.md or physics says), so that one
// with few rows stays where it was.

#include <fmt/format.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/error.h"
#include "planner/validate_step_time.h"

namespace {

using namespace zeroplan;

struct Prior {
  TimeFit key;
  double value, deviation;  // of the logarithm
};
constexpr Prior kPriors[] = {
    {TimeFit::memory_rate_eager, 0.60, 0.15},
    {TimeFit::memory_rate_hugging_face, 0.55, 0.2},
    {TimeFit::unfused_attention_rate, 0.25, 0.3},
    {TimeFit::memory_rate_scores, 0.65, 0.2},
    {TimeFit::contention, 0.3, 0.5},
    {TimeFit::fp8_rate, 0.65, 0.2},
    {TimeFit::host_op, 32, 0.15},
    {TimeFit::host_op_backward, 0.5, 0.4},
    {TimeFit::host_hook_deepspeed, 150, 0.5},
    {TimeFit::host_op_deepspeed, 120, 0.3},
    {TimeFit::host_fsdp2_hugging_face, 1.5, 0.3},
    {TimeFit::host_stage3, 1.6, 0.2},
    {TimeFit::optimizer_decoupled, 80, 0.4},
    {TimeFit::optimizer_fused, 50, 0.3},
    {TimeFit::optimizer_deepspeed, 115, 0.3},
    {TimeFit::optimizer_start_deepspeed, 4, 0.5},
    {TimeFit::optimizer_tensor_deepspeed, 0.1, 0.3},
    {TimeFit::deepspeed_overhead, 0.15, 0.6},
    {TimeFit::deepspeed_hidden, 0.7, 0.2},
    {TimeFit::deepspeed_network_volta, 0.8, 0.06},
    {TimeFit::deepspeed_network_ampere, 0.5, 0.2},
    {TimeFit::deepspeed_adam_ampere, 5, 0.6},
    {TimeFit::deepspeed_adam_hopper, 2.0, 0.5},
};
/// What a matmul in a step reaches where nothing else is known: 0.88 x sustained rate.
struct MatmulPrior {
  const char *gpu, *era;
  double value, deviation;
};
constexpr MatmulPrior kMatmul[] = {
    {"A100", "any", 0.76, 0.1}, {"H100-96GB", "any", 0.55, 0.2}, {"H100", "torch 2.6 or older", 0.65, 0.15},
    {"H200", "any", 0.71, 0.1}, {"GB200", "any", 0.6, 0.1},      {"V100", "any", 0.6, 0.12}};
struct AttentionPrior {
  const char *arch, *kernel;
  double value, deviation;
};
constexpr AttentionPrior kAttention[] = {{"Ampere", "early flash", 0.4, 0.4},
                                         {"Ampere", "triton flash", 0.45, 0.4},
                                         {"Ampere", "SDPA", 0.7, 0.2},
                                         {"Hopper", "triton flash", 0.4, 0.4},
                                         {"Hopper", "SDPA", 0.8, 0.25}};
constexpr const char* kFitted = "fitted to published and measured steps (docs/step-time.md)";

/// Groups that are fitted to; errors of others are only printed.
double sigma_of(const MeasuredStep& step) {
  const std::string& group = step.groups.front();
  if (group.starts_with("MosaicML") || group.starts_with("torchtitan") || group.ends_with("4096 tokens")) return 0.06;
  if (group.find("noise") != std::string::npos) return 0;
  if (group.starts_with("DeepSpeed")) return 0.12;
  if (group.starts_with("ZeRO-3") || group == "at most 512 tokens") return 0.2;
  if (group == "eager attention") return 0.1;
  return 0;
}

struct Row {
  MeasuredStep step;
  std::string source;
  double sigma;
  double flop_time;
};

EngineTimeFit with_priors(EngineTimeFit fit) {
  for (const Prior& prior : kPriors) {
    TimeFitValue& value = fit.values[static_cast<std::size_t>(prior.key)];
    value = {prior.value, true, kFitted};
  }
  fit.matmul.clear();
  for (const MatmulPrior& m : kMatmul) fit.matmul.push_back({m.gpu, m.era, m.value, true, kFitted});
  fit.attention.clear();
  for (const AttentionPrior& a : kAttention) fit.attention.push_back({a.arch, a.kernel, a.value, true, kFitted});
  return fit;
}

constexpr int kNumFree = static_cast<int>(std::size(kPriors) + std::size(kMatmul) + std::size(kAttention));

double deviation_of(int i) {
  std::size_t k = static_cast<std::size_t>(i);
  if (k < std::size(kPriors)) return kPriors[k].deviation;
  k -= std::size(kPriors);
  return k < std::size(kMatmul) ? kMatmul[k].deviation : kAttention[k - std::size(kMatmul)].deviation;
}

/// Priors times e^x.
EngineTimeFit at(const EngineTimeFit& prior, const Eigen::VectorXd& x) {
  EngineTimeFit fit = prior;
  int i = 0;
  for (const Prior& p : kPriors) fit.values[static_cast<std::size_t>(p.key)].value *= std::exp(x[i++]);
  for (MatmulEfficiency& m : fit.matmul) m.value *= std::exp(x[i++]);
  for (AttentionEfficiency& a : fit.attention) a.value *= std::exp(x[i++]);
  double& hidden = fit.values[static_cast<std::size_t>(TimeFit::deepspeed_hidden)].value;
  hidden = std::min(hidden, 1.0);
  return fit;
}

Eigen::VectorXd residuals(const EngineTimeFit& fit, const Eigen::VectorXd& x, const std::vector<const Row*>& rows) {
  Eigen::VectorXd r(static_cast<Eigen::Index>(rows.size()) + kNumFree);
  Eigen::Index i = 0;
  for (const Row* row : rows) r[i++] = std::log(predict_step(row->step, fit).step / row->step.measured) / row->sigma;
  for (int k = 0; k < kNumFree; ++k) r[i++] = x[k] / deviation_of(k);
  return r;
}

/// Soft L1 beyond two standard deviations on rows; the prior is plain.
double weight(double residual) {
  constexpr double kScale = 2;
  return 1 / std::sqrt(std::sqrt(1 + residual * residual / (kScale * kScale)));
}
double cost(const Eigen::VectorXd& r, Eigen::Index rows) {
  double sum = 0;
  constexpr double kScale = 2;
  for (Eigen::Index i = 0; i < r.size(); ++i)
    sum += i < rows ? 2 * kScale * kScale * (std::sqrt(1 + r[i] * r[i] / (kScale * kScale)) - 1) : r[i] * r[i];
  return sum;
}

Eigen::VectorXd fit_rows(const EngineTimeFit& prior, const std::vector<const Row*>& rows, Eigen::VectorXd x,
                         int rounds) {
  constexpr double kStep = 1e-4;
  const auto n = static_cast<Eigen::Index>(rows.size());
  double damping = 1e-3;
  Eigen::VectorXd r = residuals(at(prior, x), x, rows);
  for (int round = 0; round < rounds; ++round) {
    Eigen::MatrixXd jacobian(r.size(), kNumFree);
    for (int k = 0; k < kNumFree; ++k) {
      Eigen::VectorXd moved = x;
      moved[k] += kStep;
      jacobian.col(k) = (residuals(at(prior, moved), moved, rows) - r) / kStep;
    }
    Eigen::VectorXd weighted = r;
    for (Eigen::Index i = 0; i < n; ++i) {
      const double w = weight(r[i]);
      weighted[i] *= w;
      jacobian.row(i) *= w;
    }
    Eigen::MatrixXd normal = jacobian.transpose() * jacobian;
    const Eigen::VectorXd gradient = jacobian.transpose() * weighted;
    const double before = cost(r, n);
    bool better = false;
    for (int attempt = 0; attempt < 6 && !better; ++attempt) {
      Eigen::MatrixXd damped = normal;
      damped.diagonal() *= 1 + damping;
      const Eigen::VectorXd next = x - damped.ldlt().solve(gradient);
      const Eigen::VectorXd there = residuals(at(prior, next), next, rows);
      better = cost(there, n) < before;
      damping *= better ? 0.3 : 5;
      if (better) {
        x = next;
        r = there;
      }
    }
    if (!better || before - cost(r, n) < 1e-3) break;
  }
  return x;
}

struct Errors {
  std::vector<double> values;
  void add(double error) { values.push_back(std::abs(error)); }
  std::string text() {
    if (values.empty()) return "-";
    std::sort(values.begin(), values.end());
    double sum = 0;
    for (const double v : values) sum += v;
    const auto p90 = static_cast<std::size_t>(std::ceil(0.9 * static_cast<double>(values.size()))) - 1;
    return fmt::format("{:5.1f} {:5.1f} {:5.1f}", 100 * sum / static_cast<double>(values.size()), 100 * values[p90],
                       100 * values.back());
  }
};

/// Llama3-8B, llama-3-8b and Llama3.1-8B are one model.
std::string same_model(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::erase_if(name, [](char c) { return c == '-' || c == ' '; });
  if (name.starts_with("llama3.1")) name.erase(6, 2);
  return name;
}

double baseline(const std::vector<const Row*>& rows, const Row& out) {
  std::vector<double> ratios;
  for (const Row* row : rows)
    if (row->step.machine.gpu.name == out.step.machine.gpu.name)
      ratios.push_back(row->step.measured.base() / row->flop_time);
  if (ratios.empty()) return -1;
  std::sort(ratios.begin(), ratios.end());
  return ratios[ratios.size() / 2] * out.flop_time / out.step.measured.base() - 1;
}

double flop_time_of(const MeasuredStep& step) {
  const EngineTimeRun& run = step.run;
  const TokenShape all{run.tokens.batch * run.accumulation + run.remainder_batch, run.tokens.seq_len};
  const GpuSpec& gpu = step.machine.gpu;
  const double peak =
      std::max(gpu.peak_bf16.value_or(FlopsPerSecond()), gpu.peak_fp16.value_or(FlopsPerSecond())).base();
  return model_flops(*step.model, all, AttentionCount::full).base() / peak / run.tensor_parallel;
}

/// Each GPU's rows predicted from 0.88 x its sustained rate, everything else fitted without them.
void print_unseen_gpus(const std::vector<Row>& rows, const EngineTimeFit& prior, const Eigen::VectorXd& x) {
  fmt::print("\nA GPU left out, its matmuls from the rule: MAPE p90 max %\n");
  for (const MatmulPrior& gpu : kMatmul) {
    const auto its = [&](const Row& row) {
      const MatmulPrior* best = nullptr;
      for (const MatmulPrior& each : kMatmul)
        if (row.step.machine.gpu.name.starts_with(each.gpu) &&
            (best == nullptr || std::string_view(each.gpu).size() > std::string_view(best->gpu).size()))
          best = &each;
      return best == &gpu;
    };
    std::vector<const Row*> rest;
    for (const Row& row : rows)
      if (row.sigma > 0 && !its(row)) rest.push_back(&row);
    EngineTimeFit without = at(prior, fit_rows(prior, rest, x, 8));
    std::erase_if(without.matmul, [&](const MatmulEfficiency& m) { return m.gpu == gpu.gpu && m.era == gpu.era; });
    Errors errors;
    for (const Row& row : rows)
      if (row.sigma > 0 && its(row)) errors.add(predict_step(row.step, without).step / row.step.measured - 1);
    fmt::print("{:<12}{:>4}   {}\n", gpu.gpu, errors.values.size(), errors.text());
  }
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void read_file(const std::string& path, std::vector<Row>& rows) {
  const std::string text = read_text(path);
  std::map<std::string, int> skipped;
  const auto add = [&](MeasuredStep step) {
    try {
      predict_step(step);
      const double sigma = sigma_of(step);
      const double flops = flop_time_of(step);
      rows.push_back({std::move(step), path, sigma, flops});
    } catch (const InputError& error) {
      ++skipped[error.what()];
    }
  };
  if (is_published_table(text)) {
    MeasuredSteps steps = read_published_steps(text, path);
    for (const SkippedStep& each : steps.skipped) ++skipped[each.reason];
    for (MeasuredStep& step : steps.steps) add(std::move(step));
  } else {
    GroundtruthSteps reader;
    std::size_t start = 0;
    for (int line = 1; start < text.size(); ++line) {
      const std::size_t end = std::min(text.find('\n', start), text.size());
      const JsonDocument document = JsonDocument::parse(text.substr(start, end - start), path);
      start = end + 1;
      if (auto step = reader.read(document.root(), fmt::format("{} {}", path, line))) {
        step->line = line;
        add(std::move(*step));
      }
    }
  }
  fmt::print("{}: {} rows so far\n", path, rows.size());
  for (const auto& [reason, count] : skipped) fmt::print("  {} not read: {}\n", count, reason);
}

void print_details(const std::vector<Row>& rows, const EngineTimeFit& fit, const std::string& wanted) {
  for (const Row& row : rows) {
    if (row.step.groups.front().find(wanted) == std::string::npos && row.source.find(wanted) == std::string::npos)
      continue;
    const EngineTime t = predict_step(row.step, fit);
    fmt::print(
        "{:>4} {:<70.70} {:8.3f} for {:8.3f} {:+6.1f} % | comp {:.3f} (mm {:.3f} att {:.3f} str {:.3f} head {:.3f}) "
        "exp {:.3f} host {:.3f} opt {:.3f} off {:.3f} f {:.3f} b {:.3f}\n",
        row.step.line, row.step.row, t.step.base(), row.step.measured.base(), 100 * (t.step / row.step.measured - 1),
        t.compute.base(), t.matmul.base(), t.attention.base(), t.streaming.base(), t.head.base(),
        t.exposed_communication.base(), t.host.base(), t.optimizer.base(), t.offload.base(), t.forward.base(),
        t.backward.base());
  }
}

int run(int count, char** arguments) {
  if (count < 3)
    throw std::runtime_error(
        "usage: fit_engine_time OUT.json|- [--details GROUP] [--no-held-out] [--as-is] [--with FIT.json] FILE...");
  std::vector<Row> rows;
  std::string details;
  bool held_out = true, as_is = false;
  EngineTimeFit given = builtin_engine_time_fit();
  for (int i = 2; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument == "--details") {
      details = arguments[++i];
    } else if (argument == "--no-held-out") {
      held_out = false;
    } else if (argument == "--as-is") {
      as_is = true;
    } else if (argument == "--with") {
      as_is = true;
      given = read_engine_time_fit(read_text(arguments[++i]));
    } else {
      read_file(argument, rows);
    }
  }
  std::vector<const Row*> fitted;
  for (const Row& row : rows)
    if (row.sigma > 0) fitted.push_back(&row);
  const EngineTimeFit prior = with_priors(builtin_engine_time_fit());
  const Eigen::VectorXd zero = Eigen::VectorXd::Zero(kNumFree);
  const Eigen::VectorXd x = as_is ? zero : fit_rows(prior, fitted, zero, 25);
  const EngineTimeFit best = as_is ? given : at(prior, x);
  for (const Prior& p : kPriors) fmt::print("{:<28}{:10.4f} {}\n", to_string(p.key), best[p.key], unit_of(p.key));
  for (const MatmulEfficiency& m : best.matmul) fmt::print("matmul {:<12}{:<20}{:8.4f}\n", m.gpu, m.era, m.value);
  for (const AttentionEfficiency& a : best.attention)
    fmt::print("attention {:<10}{:<16}{:8.4f}\n", a.arch, a.kernel, a.value);

  std::map<std::string, Errors> in_fit, out_of_fit, constant;
  for (const Row& row : rows)
    in_fit[row.step.groups.front()].add(predict_step(row.step, best).step / row.step.measured - 1);
  if (held_out && !as_is) {
    std::set<std::string> kinds;
    for (const Row& row : rows) kinds.insert(same_model(row.step.kind));
    for (const std::string& kind : kinds) {
      std::vector<const Row*> rest;
      for (const Row* row : fitted)
        if (same_model(row->step.kind) != kind) rest.push_back(row);
      const EngineTimeFit without = at(prior, fit_rows(prior, rest, x, 8));
      for (const Row& row : rows) {
        if (same_model(row.step.kind) != kind) continue;
        out_of_fit[row.step.groups.front()].add(predict_step(row.step, without).step / row.step.measured - 1);
        if (const double error = baseline(rest, row); error > -1) constant[row.step.groups.front()].add(error);
      }
    }
  }
  fmt::print("\n{:<40}{:>4}   {:<20}{:<20}{}\n", "MAPE p90 max %", "n", "in the fit", "model left out",
             "constant MFU, model left out");
  for (auto& [group, errors] : in_fit)
    fmt::print("{:<40}{:>4}   {:<20}{:<20}{} ({})\n", group, errors.values.size(), errors.text(),
               out_of_fit[group].text(), constant[group].text(), constant[group].values.size());
  if (held_out && !as_is) print_unseen_gpus(rows, prior, x);
  if (!details.empty()) print_details(rows, best, details);
  if (std::string(arguments[1]) != "-") std::ofstream(arguments[1]) << write_engine_time_fit(best);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(count, arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
