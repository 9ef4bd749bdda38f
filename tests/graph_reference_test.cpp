// Tiny GPT-2 and Llamas, put together from the host kernels along the graphs of models/model_spec.h, against PyTorch in
// fp64: loss and gradients in fp64, then 20 steps with AdamW and clipping in fp32 (tests/data/reference/models.json).

#include <cmath>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "runtime/adam.h"
#include "runtime/kernels/kernels.h"
#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

double value(std::int64_t i, std::int64_t seed) {
  return static_cast<double>((31 * i * (i + seed) + 17 * i + 101 * seed) % 257 - 128) / 64;
}

/// As initial() of make_reference.py.
double initial(const ListedTensor& tensor, std::int64_t i, std::int64_t seed) {
  const double x = value(i, seed);
  if (tensor.name.ends_with(".bias")) return x / 32;
  return tensor.shape.size() == 2 ? x / 16 : 1 + x / 2;
}

template <class T>
struct Block {
  const BlockKind* kind;
  std::vector<std::int64_t> offsets;
  std::vector<T> weights, gradient;               // flat
  std::vector<std::vector<T>> values, gradients;  // by value; gradients empty until one arrives
  std::vector<std::vector<Wide<T>>> saved;        // by value: statistics and log-sum-exp
};

/// Runs blocks op by op, every value in storage of its own.
template <class T>
class Network {
 public:
  Network(const ModelSpec& model, std::int64_t batch, std::int64_t seq_len, double epsilon)
      : model_(model), batch_(batch), seq_len_(seq_len), epsilon_(epsilon) {
    for (const int k : model.sequence) {
      Block<T> b;
      b.kind = &model.kinds[static_cast<std::size_t>(k)];
      b.offsets = tensor_offsets(*b.kind, DType::fp32);
      const auto last = b.kind->tensors.size() - 1;
      std::int64_t end = 0;
      for (std::size_t t = 0; t <= last; ++t) {
        if (b.offsets[t] >= 0) end = b.offsets[t] + b.kind->tensors[t].elements();
      }
      b.weights.resize(static_cast<std::size_t>(end));
      b.gradient.resize(b.weights.size());
      blocks.push_back(std::move(b));
    }
    table_ = make_rotary_table(seq_len, 8, 10000.0);
  }

  std::vector<Block<T>> blocks;

  double step(std::span<const std::int32_t> ids, std::span<const std::int32_t> targets) {
    ids_ = ids;
    for (Block<T>& b : blocks) std::fill(b.gradient.begin(), b.gradient.end(), T{});
    std::vector<T> x;
    for (Block<T>& b : blocks) x = forward(b, std::move(x));
    double loss = 0;
    std::vector<T> g = head(x, targets, loss);
    for (std::size_t i = blocks.size(); i-- > 0;) g = backward(blocks[i], std::move(g));
    return loss;
  }

 private:
  std::span<T> tensor(Block<T>& b, int index, bool gradient) {
    const TensorSpec& spec = b.kind->tensors[static_cast<std::size_t>(index)];
    Block<T>& owner = spec.tied ? blocks[0] : b;
    auto& flat = gradient ? owner.gradient : owner.weights;
    const std::int64_t offset = spec.tied ? 0 : b.offsets[static_cast<std::size_t>(index)];
    return std::span(flat).subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(spec.elements()));
  }
  static bool matrix(const Block<T>& b, int index) {
    return b.kind->tensors[static_cast<std::size_t>(index)].shape.size() == 2;
  }

  std::vector<LinearPart<T>> parts(Block<T>& b, const GraphOp& op) {
    std::vector<LinearPart<T>> result;
    for (const int t : op.tensors) {
      if (matrix(b, t)) {
        result.push_back({tensor(b, t, false), {}});
      } else {
        result.back().bias = tensor(b, t, false);
      }
    }
    return result;
  }
  std::vector<LinearPartGradient<T>> part_gradients(Block<T>& b, const GraphOp& op) {
    std::vector<LinearPartGradient<T>> result;
    for (const int t : op.tensors) {
      if (matrix(b, t)) {
        result.push_back({{tensor(b, t, true), true}, {}});
      } else {
        result.back().bias = {tensor(b, t, true), true};
      }
    }
    return result;
  }
  NormShape norm_shape(const Block<T>& b, const GraphOp& op) const {
    const bool rms = b.kind->values[static_cast<std::size_t>(op.outputs[1])].per_token == 1;
    return {rms ? NormFunction::rms : NormFunction::layer, op.out_features, epsilon_};
  }
  std::vector<T>& at(Block<T>& b, int v) { return b.values[static_cast<std::size_t>(v)]; }
  /// Where the next part of a value's gradient goes: zeros at first.
  ValueGradient<T> gradient_of(Block<T>& b, int v) {
    auto& g = b.gradients[static_cast<std::size_t>(v)];
    if (g.empty()) g.resize(at(b, v).size());
    return {g, g};
  }

  std::vector<T> forward(Block<T>& b, std::vector<T> input) {
    const BlockKind& kind = *b.kind;
    b.values.assign(kind.values.size(), {});
    b.gradients.assign(kind.values.size(), {});
    b.saved.assign(kind.values.size(), {});
    if (kind.input >= 0) at(b, kind.input) = std::move(input);
    for (const GraphOp& op : kind.ops) {
      for (const int v : op.outputs) {
        const Value& value = kind.values[static_cast<std::size_t>(v)];
        const auto count = static_cast<std::size_t>(value.per_token * batch_ * seq_len_);
        if (value.type == ValueType::fp32) {
          b.saved[static_cast<std::size_t>(v)].resize(count);
        } else {
          at(b, v).resize(count);
        }
      }
      run(b, op);
    }
    return at(b, kind.output);
  }

  void run(Block<T>& b, const GraphOp& op) {
    std::vector<T>& y = at(b, op.outputs[0]);
    const auto saved = [&] { return std::span<Wide<T>>(b.saved[static_cast<std::size_t>(op.outputs[1])]); };
    const auto optional = [&](std::size_t i) {
      return op.tensors.size() > i ? tensor(b, op.tensors[i], false) : std::span<T>{};
    };
    switch (op.kernel) {
      case Kernel::embedding:
        return embedding_forward<T>(ids_, seq_len_, op.out_features, optional(0), optional(1), y, pool_);
      case Kernel::norm:
        return norm_forward<T>(norm_shape(b, op), at(b, op.inputs[0]), optional(0), optional(1), y, saved(), pool_);
      case Kernel::linear:
        return linear_forward<T>(at(b, op.inputs[0]), parts(b, op), op.in_features, y, pool_);
      case Kernel::rotary:
        y = at(b, op.inputs[0]);
        return rotary_forward<T>(attention_, seq_len_, table_, y, pool_);
      case Kernel::attention:
        return attention_forward<T>(op.attention, seq_len_, at(b, op.inputs[0]), y, saved(), pool_);
      case Kernel::activation:
        return activation_forward<T>(activation_shape(op), at(b, op.inputs[0]), y, pool_);
      case Kernel::add: {
        const std::vector<std::span<const T>> terms = {at(b, op.inputs[0]), at(b, op.inputs[1])};
        return add_forward<T>(terms, y, pool_);
      }
      default:
        FAIL("no host kernel");
    }
  }

  /// Logits of all tokens, mean loss, gradients of the head's input and matrix.
  std::vector<T> head(const std::vector<T>& x, std::span<const std::int32_t> targets, double& loss) {
    Block<T>& b = blocks.back();
    const std::int64_t hidden = model_.hidden, vocab = b.kind->vocab, tokens = batch_ * seq_len_;
    std::vector<T> logits(static_cast<std::size_t>(tokens * vocab)), dx(x.size());
    const std::vector<LinearPart<T>> matrix = {{tensor(b, b.kind->head_tensor, false), {}}};
    linear_forward<T>(x, matrix, hidden, logits, pool_);
    loss = cross_entropy<T>(logits, vocab, targets, 1.0 / static_cast<double>(tokens), 0.0, pool_) /
           static_cast<double>(tokens);
    linear_backward_data<T>(logits, matrix, hidden, {dx, {}}, pool_);
    const std::vector<LinearPartGradient<T>> to = {{{tensor(b, b.kind->head_tensor, true), true}, {}}};
    linear_backward_weight<T, T>(logits, x, to, hidden, pool_);
    return dx;
  }

  std::vector<T> backward(Block<T>& b, std::vector<T> output_gradient) {
    b.gradients[static_cast<std::size_t>(b.kind->output)] = std::move(output_gradient);
    for (std::size_t i = b.kind->ops.size(); i-- > 0;) run_backward(b, b.kind->ops[i]);
    return b.kind->input < 0 ? std::vector<T>{} : b.gradients[static_cast<std::size_t>(b.kind->input)];
  }

  void run_backward(Block<T>& b, const GraphOp& op) {
    const std::vector<T>& dy = b.gradients[static_cast<std::size_t>(op.outputs[0])];
    const auto saved = [&] { return std::span<const Wide<T>>(b.saved[static_cast<std::size_t>(op.outputs[1])]); };
    const auto to = [&](std::size_t i) {
      return op.tensors.size() > i ? WeightGradient<T>{tensor(b, op.tensors[i], true), true} : WeightGradient<T>{};
    };
    switch (op.kernel) {
      case Kernel::embedding:
        return embedding_backward<T, T>(ids_, seq_len_, op.out_features, dy, to(0), to(1), pool_);
      case Kernel::norm:
        return norm_backward<T, T>(norm_shape(b, op), dy, at(b, op.inputs[0]), tensor(b, op.tensors[0], false), saved(),
                                   gradient_of(b, op.inputs[0]), to(0), to(1), pool_);
      case Kernel::linear:
        linear_backward_weight<T, T>(dy, at(b, op.inputs[0]), part_gradients(b, op), op.in_features, pool_);
        return linear_backward_data<T>(dy, parts(b, op), op.in_features, gradient_of(b, op.inputs[0]), pool_);
      case Kernel::rotary:
        return rotary_backward<T>(attention_, seq_len_, table_, dy, gradient_of(b, op.inputs[0]), pool_);
      case Kernel::attention:
        return attention_backward<T>(op.attention, seq_len_, dy, at(b, op.inputs[0]), at(b, op.outputs[0]), saved(),
                                     gradient_of(b, op.inputs[0]), pool_);
      case Kernel::activation:
        return activation_backward<T>(activation_shape(op), dy, at(b, op.inputs[0]), gradient_of(b, op.inputs[0]),
                                      pool_);
      case Kernel::add:
        for (const int v : op.inputs) gradient_sum<T>(dy, gradient_of(b, v), pool_);
        return;
      default:
        FAIL("no host kernel");
    }
  }

  static AttentionShape find_attention(const ModelSpec& model) {
    for (const GraphOp& op : model.kinds[1].ops) {
      if (op.kernel == Kernel::attention) return op.attention;
    }
    return {};
  }

  const ModelSpec& model_;
  std::int64_t batch_, seq_len_;
  double epsilon_;
  AttentionShape attention_ = find_attention(model_);
  RotaryTable table_;
  std::span<const std::int32_t> ids_;
  std::shared_ptr<ThreadPool> shared_pool_ = std::make_shared<ThreadPool>(2);
  ThreadPool& pool_ = *shared_pool_;
};

struct Case {
  nlohmann::json right;
  ModelSpec model;
  std::int64_t batch, seq_len;
  explicit Case(const std::string& name) {
    right = nlohmann::json::parse(std::ifstream(ZEROPLAN_TESTS_DIR "/data/reference/models.json")).at(name);
    model = read_model(right.at("config").dump(), name);
    batch = right.at("batch").get<std::int64_t>();
    seq_len = right.at("seq_len").get<std::int64_t>();
  }
  double epsilon() const {
    const auto& config = right.at("config");
    return config.contains("rms_norm_eps") ? config.at("rms_norm_eps").get<double>()
                                           : config.at("layer_norm_epsilon").get<double>();
  }
  /// Calls use(tensor, seed, block, offset) for each stored tensor.
  template <class Use>
  void for_tensors(Use&& use) const {
    const auto listed = list_tensors(model);
    std::size_t next = 0;
    std::int64_t seed = 0;
    for (std::size_t b = 0; b < model.sequence.size(); ++b) {
      const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[b])];
      const auto offsets = tensor_offsets(kind, DType::fp32);
      for (std::size_t t = 0; t < kind.tensors.size(); ++t, ++next) {
        if (!kind.tensors[t].tied) use(listed[next], seed++, b, static_cast<std::size_t>(offsets[t]));
      }
    }
  }
  template <class T>
  Network<T> network() const {
    Network<T> n(model, batch, seq_len, epsilon());
    for_tensors([&](const ListedTensor& tensor, std::int64_t seed, std::size_t b, std::size_t offset) {
      const auto count =
          std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1}, std::multiplies<>());
      for (std::int64_t i = 0; i < count; ++i) {
        n.blocks[b].weights[offset + static_cast<std::size_t>(i)] = static_cast<T>(initial(tensor, i, seed));
      }
    });
    return n;
  }
  template <class T>
  double run(Network<T>& n, std::int64_t step) const {
    std::vector<std::int32_t> ids, targets;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t j = 0; j < seq_len; ++j) {
        const std::int64_t i = b * (seq_len + 1) + j;
        const auto token = [&](std::int64_t k) {
          return static_cast<std::int32_t>((7 * k * k + 3 * k + 13 * (step % 4)) % model.vocab);
        };
        ids.push_back(token(i));
        targets.push_back(token(i + 1));
      }
    }
    return n.step(ids, targets);
  }
};

}  // namespace

TEST_CASE("Loss and gradients of tiny GPT-2 and Llama models are PyTorch's in fp64") {
  for (const char* name : {"gpt2", "llama", "llama_tied"}) {
    INFO(name);
    const Case c(name);
    auto n = c.network<double>();
    CHECK_THAT(c.run(n, 0), WithinRel(c.right.at("losses")[0].get<double>(), 1e-12));
    std::size_t seen = 0;
    c.for_tensors([&](const ListedTensor& tensor, std::int64_t, std::size_t b, std::size_t offset) {
      INFO(tensor.name);
      const auto right = c.right.at("gradients").at(tensor.name).get<std::vector<double>>();
      const auto count =
          std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1}, std::multiplies<>());
      double squares = 0, product = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const double g = n.blocks[b].gradient[offset + static_cast<std::size_t>(i)];
        squares += g * g;
        product += g * value(i, 7);
      }
      CHECK_THAT(std::sqrt(squares), WithinRel(right[0], 1e-10));
      CHECK_THAT(product, WithinAbs(right[1], 1e-10 * right[0] * std::sqrt(static_cast<double>(count))));
      ++seen;
    });
    CHECK(seen == c.right.at("gradients").size());
  }
}

TEST_CASE("Twenty fp32 steps with AdamW and clipping follow PyTorch's fp64 losses") {
  ThreadPool pool(1);
  for (const char* name : {"gpt2", "llama", "llama_tied"}) {
    INFO(name);
    const Case c(name);
    auto n = c.network<float>();
    std::vector<std::vector<float>> first, second;
    for (const auto& b : n.blocks) first.emplace_back(b.weights.size()), second.emplace_back(b.weights.size());
    const auto& losses = c.right.at("losses");
    for (std::size_t step = 0; step < losses.size(); ++step) {
      INFO("step " << step);
      // fp32 roundings, grown by the steps between.
      CHECK_THAT(c.run(n, static_cast<std::int64_t>(step)), WithinRel(losses[step].get<double>(), 1e-6));
      ExactSum squares;
      for (const auto& b : n.blocks) sum_of_squares<float>(b.gradient, squares, pool);
      const double norm = std::sqrt(squares.value());
      CHECK_THAT(norm, WithinRel(c.right.at("norms")[step].get<double>(), 2e-5));
      const AdamSettings settings{
          .learning_rate = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
      const double clip = std::min(1.0, 1.0 / (norm + 1e-6));  // as clip_grad_norm_
      for (std::size_t b = 0; b < n.blocks.size(); ++b) {
        AdamRange range;
        range.count = static_cast<std::int64_t>(n.blocks[b].weights.size());
        range.gradient = n.blocks[b].gradient.data();
        range.gradient_type = DType::fp32;
        range.master = n.blocks[b].weights.data();
        range.first_moment = first[b].data();
        range.second_moment = second[b].data();
        adam_step(adam_scalars(settings, static_cast<std::int64_t>(step) + 1, clip), range, pool);
      }
    }
  }
}
