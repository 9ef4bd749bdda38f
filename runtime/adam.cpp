#include "runtime/adam.h"

#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>

#include "runtime/adam_paths.h"
#include "runtime/cpu_features.h"

namespace zeroplan {
namespace {

/// From here on the weights would push states out of the caches before anyone reads them: write past the caches.
constexpr std::int64_t kStreamFrom = std::int64_t{1} << 20;
/// Threads take multiples of this: a multiple of every vector and of a cache line in every array.
constexpr std::int64_t kGrain = std::int64_t{1} << 14;

AdamPass* pass_of(AdamPath path) {
  switch (path) {
    case AdamPath::scalar:
      return adam_pass_scalar;
#ifdef ZEROPLAN_X86_KERNELS
    case AdamPath::avx2:
      if (cpu_has_avx2()) return adam_pass_avx2;
      break;
    case AdamPath::avx512:
      if (cpu_has_avx512()) return adam_pass_avx512;
      break;
#else
    case AdamPath::avx2:
    case AdamPath::avx512:
      break;
#endif
  }
  throw std::logic_error("adam_step: this machine has no " + std::string(to_string(path)));
}

void check(const AdamRange& r) {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("adam_step: ") + what);
  };
  const bool gradient =
      r.gradient_type == DType::bf16 || r.gradient_type == DType::fp16 || r.gradient_type == DType::fp32;
  require(gradient, "gradients are bf16, fp16 or fp32");
  require(r.moment_type == DType::fp32 || r.moment_type == DType::bf16, "moments are fp32 or bf16");
  require(r.gradient != nullptr && r.first_moment != nullptr && r.second_moment != nullptr, "an array is missing");
  require((r.master == nullptr) != (r.remainder == nullptr), "either an fp32 master or a split one");
  const bool bf16 = r.weights != nullptr && r.weights_type == DType::bf16;
  require(r.remainder == nullptr || bf16, "a split master needs bf16 weights");
  require(r.weights == nullptr || bf16 || r.weights_type == DType::fp16, "16-bit weights are bf16 or fp16");
}

}  // namespace

AdamScalars adam_scalars(const AdamSettings& settings, std::int64_t step, double gradient_scale) {
  if (step < 1) throw std::logic_error("adam_scalars: steps count from 1");
  const auto count = static_cast<double>(step);
  AdamScalars s;
  s.gradient_scale = static_cast<float>(gradient_scale);
  s.beta1 = static_cast<float>(settings.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - settings.beta1);
  s.beta2 = static_cast<float>(settings.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - settings.beta2);
  s.decay = static_cast<float>(1 - settings.learning_rate * settings.weight_decay);
  s.step_size = static_cast<float>(settings.learning_rate / (1 - std::pow(settings.beta1, count)));
  s.inverse_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(settings.beta2, count)));
  s.epsilon = static_cast<float>(settings.epsilon);
  return s;
}

std::string_view to_string(AdamPath path) {
  switch (path) {
    case AdamPath::scalar:
      return "scalar";
    case AdamPath::avx2:
      return "AVX2";
    case AdamPath::avx512:
      return "AVX-512";
  }
  return {};
}

std::vector<AdamPath> adam_paths() {
  std::vector<AdamPath> paths = {AdamPath::scalar};
  if (cpu_has_avx2()) paths.push_back(AdamPath::avx2);
  if (cpu_has_avx512()) paths.push_back(AdamPath::avx512);
  return paths;
}

void adam_step(const AdamScalars& scalars, const AdamRange& range, ThreadPool& pool) {
  static const AdamPath best = adam_paths().back();
  adam_step(scalars, range, pool, best);
}

void adam_step(const AdamScalars& scalars, const AdamRange& range, ThreadPool& pool, AdamPath path) {
  AdamPass* pass = pass_of(path);
  if (range.count == 0) return;
  check(range);
  pool.for_ranges(range.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    pass(scalars, range, begin, end, range.count >= kStreamFrom);
  });
}

void split_master(std::span<const float> master, std::span<std::uint16_t> weights, std::span<std::int16_t> remainder) {
  if (weights.size() != master.size() || remainder.size() != master.size()) {
    throw std::logic_error("split_master: arrays of different length");
  }
  for (std::size_t i = 0; i < master.size(); ++i) {
    const std::uint32_t bits = std::isnan(master[i]) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(master[i]);
    const std::uint32_t high = (bits + 0x8000u) >> 16;
    weights[i] = static_cast<std::uint16_t>(high);
    remainder[i] = static_cast<std::int16_t>(bits - (high << 16));
  }
}

void join_master(std::span<const std::uint16_t> weights, std::span<const std::int16_t> remainder,
                 std::span<float> master) {
  if (weights.size() != master.size() || remainder.size() != master.size()) {
    throw std::logic_error("join_master: arrays of different length");
  }
  for (std::size_t i = 0; i < master.size(); ++i) {
    const auto low = static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder[i]));
    master[i] = std::bit_cast<float>((static_cast<std::uint32_t>(weights[i]) << 16) + low);
  }
}

}  // namespace zeroplan
