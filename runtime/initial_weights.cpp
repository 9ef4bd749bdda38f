#include "runtime/initial_weights.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>

#include "models/error.h"
#include "models/json_reader.h"
#include "runtime/random.h"
#include "runtime/tensor_parts.h"

namespace zeroplan {
namespace {

constexpr double kDefaultDeviation = 0.02;

/// Natural logarithm of a positive normal number: m 2^k with m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh(z), z = (m - 1)
/// / (m + 1), |z| < 0.172. The last term left out is below 1e-17 of the sum.
double natural_log(double x) {
  constexpr double kLn2High = 0x1.62e42fefa38p-1;  // 11 zero bits at the end: times k is exact
  constexpr double kLn2Low = 0x1.ef35793c7673p-45;
  const auto bits = std::bit_cast<std::uint64_t>(x);
  auto exponent = static_cast<std::int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double z = (m - 1) / (m + 1);
  const double square = z * z;
  double series = 0;
  for (int odd = 21; odd >= 3; odd -= 2) series = (series + 1.0 / odd) * square;
  const auto k = static_cast<double>(exponent);
  return k * kLn2High + (2 * z + (2 * z * series + k * kLn2Low));
}

/// Coefficients from the constant term up.
double polynomial(const std::array<double, 8>& coefficients, double x) {
  double sum = 0;
  for (std::size_t i = coefficients.size(); i-- > 0;) sum = sum * x + coefficients[i];
  return sum;
}

struct Ratio {
  std::array<double, 8> above, below;
  double operator()(double x) const { return polynomial(above, x) / polynomial(below, x); }
};

// AS 241, PPND16: |p - 1/2| <= 0.425, then sqrt(-ln tail) up to 5, then beyond.
constexpr Ratio kCentre{
    {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3},
    {1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
     3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3}};
constexpr Ratio kTail{
    {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4},
    {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
     1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9}};
constexpr Ratio kFarTail{
    {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7},
    {1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
     1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15}};

double initializer_range(const ModelSpec& model) {
  const JsonDocument config = JsonDocument::parse(model.config, model.source, JsonSyntax::comments);
  const JsonValue* const range = config.root().find("initializer_range");
  return range != nullptr && !range->is_null() ? range->as_real(0, 10) : kDefaultDeviation;
}

bool holds(const std::vector<int>& list, int value) { return std::find(list.begin(), list.end(), value) != list.end(); }

/// The op's output goes into a residual sum, at once or as an expert's part of a token.
bool ends_residual_branch(const BlockKind& kind, const GraphOp& op) {
  for (const GraphOp& user : kind.ops) {
    if (!holds(user.inputs, op.outputs.front())) continue;
    if (user.kernel == Kernel::add) return true;
    if (user.kernel == Kernel::combine && ends_residual_branch(kind, user)) return true;
  }
  return false;
}

bool is_bias(const TensorSpec& tensor) { return std::string_view(tensor.name).ends_with("bias"); }

}  // namespace

double inverse_normal(double p) {
  const double centred = p - 0.5;
  if (std::abs(centred) <= 0.425) return centred * kCentre(0.180625 - centred * centred);
  const double radius = std::sqrt(-natural_log(centred < 0 ? p : 1 - p));
  const double size = radius <= 5 ? kTail(radius - 1.6) : kFarTail(radius - 5);
  return centred < 0 ? -size : size;
}

InitialWeights::InitialWeights(const ModelSpec& model, std::uint64_t seed)
    : model_(&model), seed_(seed), deviation_(initializer_range(model)) {
  for (const BlockKind& kind : model.kinds) {
    std::vector<Rule>& rules = rules_.emplace_back();
    for (std::size_t t = 0; t < kind.tensors.size(); ++t) {
      rules.push_back(kind.tensors[t].tied ? Rule{} : rule(kind, t));
    }
  }
  std::int64_t number = 0;
  for (const int kind : model.sequence) {
    first_tensor_.push_back(number);
    number += std::ssize(model.kinds[static_cast<std::size_t>(kind)].tensors);
  }
}

InitialWeights::Rule InitialWeights::rule(const BlockKind& kind, std::size_t tensor) const {
  const TensorSpec& spec = kind.tensors[tensor];
  // B of an adapter begins as 0, and its base as somebody's weights.
  const bool adapter = spec.name.find(".lora_") != std::string::npos;
  const double branch_end = deviation_ / std::sqrt(2.0 * static_cast<double>(model_->num_layers));
  for (const GraphOp& op : kind.ops) {
    if (adapter || !holds(op.tensors, static_cast<int>(tensor))) continue;
    switch (op.kernel) {
      case Kernel::norm:
        return {0, is_bias(spec) ? 0.0f : 1.0f};
      case Kernel::linear:
      case Kernel::grouped_linear:
        if (is_bias(spec)) return {0, 0};
        return {ends_residual_branch(kind, op) ? branch_end : deviation_, 0};
      case Kernel::router:
        return {is_bias(spec) ? 0 : deviation_, 0};
      case Kernel::embedding:
        return {deviation_, 0};
      case Kernel::rotary:
      case Kernel::attention:
      case Kernel::activation:
      case Kernel::add:
      case Kernel::permute:
      case Kernel::combine:
        break;
    }
  }
  // The loss head's matrix and bias stand outside the graph.
  if (static_cast<int>(tensor) == kind.head_tensor) return {deviation_, 0};
  if (static_cast<int>(tensor) == kind.head_bias) return {0, 0};
  throw InputError(fmt::format("{}: {}: no rule for the initial weights of this tensor", model_->source, spec.name));
}

void InitialWeights::fill(int block, int tensor, std::int64_t begin, std::int64_t end, std::span<float> out) const {
  if (std::ssize(out) != end - begin) throw std::logic_error("initial weights: range and span differ");
  const auto kind = static_cast<std::size_t>(model_->sequence.at(static_cast<std::size_t>(block)));
  if (model_->kinds[kind].tensors.at(static_cast<std::size_t>(tensor)).tied) {
    throw std::logic_error("initial weights: a tied tensor has none of its own");
  }
  const Rule how = rules_[kind][static_cast<std::size_t>(tensor)];
  if (how.deviation == 0) {
    std::fill(out.begin(), out.end(), how.constant);
    return;
  }
  const std::int64_t number = first_tensor_[static_cast<std::size_t>(block)] + tensor;
  const std::uint64_t key = random_key(seed_, static_cast<std::uint64_t>(number));
  for (std::int64_t i = begin; i < end; ++i) {
    const double p = uniform(random_bits(key, static_cast<std::uint64_t>(i)));
    out[static_cast<std::size_t>(i - begin)] = static_cast<float>(how.deviation * inverse_normal(p));
  }
}

void InitialWeights::fill_flat(int block, DType type, std::int64_t begin, std::int64_t end,
                               std::span<float> out) const {
  if (std::ssize(out) != end - begin) throw std::logic_error("initial weights: range and span differ");
  std::fill(out.begin(), out.end(), 0.0f);
  const auto kind = static_cast<std::size_t>(model_->sequence.at(static_cast<std::size_t>(block)));
  for (const TensorPart& part : tensor_parts(model_->kinds[kind], type, begin, end)) {
    fill(block, part.tensor, part.begin, part.begin + part.count,
         out.subspan(static_cast<std::size_t>(part.flat - begin), static_cast<std::size_t>(part.count)));
  }
}

}  // namespace zeroplan
