// Kernels and AdamW against PyTorch in fp64: tests/data/reference/kernels.json, made by tests/tools/make_reference.py.

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/adam.h"
#include "runtime/kernels/kernels.h"
#include "tests/catch.h"

using namespace zeroplan;

namespace {

using Array = std::vector<double>;

/// As value() of make_reference.py.
Array array(std::int64_t seed, std::int64_t count) {
  Array result;
  for (std::int64_t i = 0; i < count; ++i) {
    result.push_back(static_cast<double>((31 * i * (i + seed) + 17 * i + 101 * seed) % 257 - 128) / 64);
  }
  return result;
}

const nlohmann::json& reference() {
  static const nlohmann::json all =
      nlohmann::json::parse(std::ifstream(ZEROPLAN_TESTS_DIR "/data/reference/kernels.json"));
  return all;
}

void check_close(const Array& found, const Array& right, double tolerance, const std::string& what) {
  INFO(what);
  REQUIRE(found.size() == right.size());
  double worst = 0, most = 0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    worst = std::max(worst, std::abs(found[i] - right[i]));
    most = std::max(most, std::abs(right[i]));
  }
  CHECK(worst <= tolerance * most);
}

void check_case(const std::string& name, const Array& output, const std::vector<Array>& gradients) {
  const nlohmann::json& right = reference().at(name);
  check_close(output, right.at("output").get<Array>(), 1e-12, name);
  REQUIRE(right.at("gradients").size() == gradients.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    check_close(gradients[i], right.at("gradients")[i].get<Array>(), 1e-12, name + ", gradient " + std::to_string(i));
  }
}

void check_activation(const std::string& name, ActivationFunction function, bool gated) {
  ThreadPool pool(1);
  const ActivationShape shape{function, gated, gated ? 6 : 12};
  const Array x = array(1, 36), dy = array(99, 3 * shape.width);
  Array y(dy.size()), dx(x.size());
  activation_forward<double>(shape, x, y, pool);
  activation_backward<double>(shape, dy, x, {dx, {}}, pool);
  check_case(name, y, {dx});
}

void check_norm(const std::string& name, NormFunction function) {
  ThreadPool pool(1);
  const NormShape shape{function, 9, 1e-5};
  const bool layer = function == NormFunction::layer;
  const Array x = array(1, 36), w = array(2, 9), b = layer ? array(3, 9) : Array{}, dy = array(99, 36);
  Array y(36), statistics(layer ? 8 : 4), dx(36), dw(9), db(layer ? 9 : 0);
  norm_forward<double>(shape, x, w, b, y, statistics, pool);
  norm_backward<double, double>(shape, dy, x, w, statistics, {dx, {}}, {dw, false}, {db, false}, pool);
  std::vector<Array> gradients = {dx, dw};
  if (layer) gradients.push_back(db);
  check_case(name, y, gradients);
}

void check_attention(const std::string& name, bool rotary) {
  ThreadPool pool(2);
  AttentionShape shape;
  shape.heads = 4;
  shape.kv_heads = 2;
  shape.qk_dim = shape.v_dim = 6;
  const RotaryTable table = make_rotary_table(7, 6, 10000.0);
  Array qkv = array(1, 14 * 48), out(14 * 24), log_sum(14 * 4), dx(qkv.size());
  const Array dy = array(99, 14 * 24);
  if (rotary) rotary_forward<double>(shape, 7, table, qkv, pool);
  attention_forward<double>(shape, 7, qkv, out, log_sum, pool);
  attention_backward<double>(shape, 7, dy, qkv, out, log_sum, {dx, {}}, pool);
  if (rotary) rotary_backward<double>(shape, 7, table, dx, {dx, {}}, pool);
  check_case(name, out, {dx});
}

}  // namespace

TEST_CASE("Linear, norms and embedding agree with PyTorch") {
  ThreadPool pool(1);
  const Array x = array(1, 35), w = array(2, 42), b = array(3, 6), dy = array(99, 30);
  Array y(30), dx(35), dw(42), db(6);
  const std::vector<LinearPart<double>> parts = {{w, b}};
  linear_forward<double>(x, parts, 7, y, pool);
  linear_backward_data<double>(dy, parts, 7, {dx, {}}, pool);
  const std::vector<LinearPartGradient<double>> to = {{{dw, false}, {db, false}}};
  linear_backward_weight<double, double>(dy, x, to, 7, pool);
  check_case("linear", y, {dx, dw, db});

  check_norm("rms_norm", NormFunction::rms);
  check_norm("layer_norm", NormFunction::layer);

  const std::vector<std::int32_t> ids = {3, 1, 3, 6, 0, 3, 1, 1, 2, 6};
  const Array table = array(1, 28), positions = array(2, 24), g = array(99, 40);
  Array e(40), dtable(28), dpositions(24);
  embedding_forward<double>(ids, 5, 4, table, positions, e, pool);
  embedding_backward<double, double>(ids, 5, 4, g, {dtable, false}, {dpositions, false}, pool);
  check_case("embedding", e, {dtable, dpositions});
}

TEST_CASE("Attention with grouped heads and rotary agrees with PyTorch") {
  check_attention("attention", false);
  check_attention("rotary_attention", true);
}

TEST_CASE("Activations agree with PyTorch") {
  check_activation("gelu_tanh", ActivationFunction::gelu_tanh, false);
  check_activation("gelu_erf", ActivationFunction::gelu_erf, false);
  check_activation("relu", ActivationFunction::relu, false);
  check_activation("silu_gated", ActivationFunction::silu, true);
  check_activation("gelu_tanh_gated", ActivationFunction::gelu_tanh, true);
}

TEST_CASE("Cross-entropy agrees with PyTorch") {
  ThreadPool pool(1);
  Array logits = array(1, 36);
  const std::vector<std::int32_t> targets = {0, 8, kIgnoredTarget, 3};
  const double loss = cross_entropy<double>(logits, 9, targets, 1.0, 0.0, pool);
  check_case("cross_entropy", {loss}, {logits});
}

TEST_CASE("Five steps of AdamW agree with PyTorch") {
  ThreadPool pool(1);
  constexpr std::int64_t kCount = 40;
  std::vector<float> p, m(kCount), v(kCount);
  for (const double x : array(1, kCount)) p.push_back(static_cast<float>(x));
  for (std::int64_t step = 1; step <= 5; ++step) {
    std::vector<float> gradient;
    for (const double x : array(step + 1, kCount)) gradient.push_back(static_cast<float>(x));
    AdamRange range;
    range.count = kCount;
    range.gradient = gradient.data();
    range.gradient_type = DType::fp32;
    range.master = p.data();
    range.first_moment = m.data();
    range.second_moment = v.data();
    const AdamSettings settings{
        .learning_rate = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
    adam_step(adam_scalars(settings, step, 0.5), range, pool);
  }
  // fp32 against fp64: five roundings.
  check_close(Array(p.begin(), p.end()), reference().at("adamw").at("output").get<Array>(), 5 * 0x1p-24, "adamw");
}
