#include "models/model_spec.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "models/error.h"

namespace zeroplan {
namespace {

/// Above this a listing would not help anyone and not fit in memory.
constexpr std::int64_t kMaxListedTensors = 10'000'000;

std::int64_t per_copy(const TensorSpec& tensor) {
  return std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// Keys a query sees on average. Causal: (s + 1) / 2; a sliding window W < s: W - W (W - 1) / (2 s)
/// (transformer-math 2.1); chunks of W: every chunk is causal by itself, the last one may be short.
double mean_keys(const AttentionShape& attention, std::int64_t seq_len) {
  const auto s = static_cast<double>(seq_len);
  if (!attention.causal) return s;
  if (attention.window == 0 || attention.window >= seq_len) return (s + 1) / 2;
  const auto w = static_cast<double>(attention.window);
  if (!attention.chunked) return w - w * (w - 1) / (2 * s);
  const auto chunks = static_cast<double>(seq_len / attention.window);
  const auto rest = static_cast<double>(seq_len % attention.window);
  return (chunks * w * (w + 1) + rest * (rest + 1)) / (2 * s);
}

double attention_flops(const AttentionShape& a, double keys, TokenShape shape) {
  return 2.0 * keys * static_cast<double>(a.qk_dim + a.v_dim) * static_cast<double>(a.heads) *
         static_cast<double>(shape.tokens());
}

double matrix_flops(const GraphOp& op, TokenShape shape) {
  return 2.0 * static_cast<double>(op.in_features) * static_cast<double>(op.out_features) *
         static_cast<double>(op.rows_per_token) * static_cast<double>(shape.tokens());
}

/// A patch embedding's pixels need no gradient, so its backward is the weight gradient alone.
bool has_data_gradient(const GraphOp& op) { return op.kernel != Kernel::embedding; }

bool trains_weights(const BlockKind& kind, const GraphOp& op) {
  return std::ranges::any_of(op.tensors, [&](int t) { return kind.tensors[static_cast<std::size_t>(t)].trainable; });
}

/// Forward and backward of one op without what the kernel does twice; a frozen matrix gets no gradient.
double training_flops(const BlockKind& kind, const GraphOp& op, TokenShape shape, AttentionCount count) {
  if (op.kernel == Kernel::attention) {
    const double keys = count == AttentionCount::full ? static_cast<double>(shape.seq_len)
                                                      : mean_keys(op.attention, shape.seq_len);
    return 3.0 * attention_flops(op.attention, keys, shape);
  }
  const double factor = 1.0 + (has_data_gradient(op) ? 1.0 : 0.0) + (trains_weights(kind, op) ? 1.0 : 0.0);
  return factor * forward_flops(op, shape).base();
}

std::int64_t routed_share(const BlockKind& kind, const TensorSpec& tensor) {
  if (tensor.kind != TensorKind::expert) return tensor.elements();
  for (const GraphOp& op : kind.ops) {
    if (op.kernel == Kernel::grouped_linear && op.groups > 0) {
      return tensor.elements() / op.groups * op.rows_per_token;
    }
  }
  return tensor.elements();
}

template <class Count>
std::int64_t sum_over_blocks(const ModelSpec& model, Count count) {
  std::vector<std::int64_t> each;
  for (const BlockKind& kind : model.kinds) each.push_back(count(kind));
  std::int64_t sum = 0;
  for (int index : model.sequence) sum += each[static_cast<std::size_t>(index)];
  return sum;
}

}  // namespace

std::string_view to_string(TensorKind kind) {
  switch (kind) {
    case TensorKind::embedding:
      return "embedding";
    case TensorKind::position:
      return "position";
    case TensorKind::layer:
      return "layer";
    case TensorKind::router:
      return "router";
    case TensorKind::expert:
      return "expert";
    case TensorKind::final:
      return "final";
    case TensorKind::head:
      return "head";
  }
  return "?";
}

std::string_view to_string(Kernel kernel) {
  switch (kernel) {
    case Kernel::embedding:
      return "embedding";
    case Kernel::norm:
      return "norm";
    case Kernel::linear:
      return "linear";
    case Kernel::rotary:
      return "rotary";
    case Kernel::attention:
      return "attention";
    case Kernel::activation:
      return "activation";
    case Kernel::add:
      return "add";
    case Kernel::router:
      return "router";
    case Kernel::permute:
      return "permute";
    case Kernel::grouped_linear:
      return "grouped_linear";
    case Kernel::combine:
      return "combine";
  }
  return "?";
}

std::int64_t TensorSpec::elements() const { return per_copy(*this) * copies; }

std::int64_t BlockKind::parameters() const {
  std::int64_t sum = 0;
  for (const TensorSpec& tensor : tensors) sum += tensor.tied ? 0 : tensor.elements();
  return sum;
}

std::int64_t BlockKind::trainable_parameters() const {
  std::int64_t sum = 0;
  for (const TensorSpec& tensor : tensors) sum += tensor.tied || !tensor.trainable ? 0 : tensor.elements();
  return sum;
}

std::int64_t ModelSpec::parameters() const {
  return sum_over_blocks(*this, [](const BlockKind& kind) { return kind.parameters(); });
}

std::int64_t ModelSpec::trainable_parameters() const {
  return sum_over_blocks(*this, [](const BlockKind& kind) { return kind.trainable_parameters(); });
}

std::int64_t ModelSpec::active_parameters() const {
  return sum_over_blocks(*this, [](const BlockKind& kind) {
    std::int64_t sum = 0;
    for (const TensorSpec& tensor : kind.tensors) sum += tensor.tied ? 0 : routed_share(kind, tensor);
    return sum;
  });
}

Flops forward_flops(const GraphOp& op, TokenShape shape) {
  switch (op.kernel) {
    case Kernel::linear:
    case Kernel::grouped_linear:
    case Kernel::router:
    case Kernel::embedding:  // in_features is 0 for a look-up
      return Flops(matrix_flops(op, shape));
    case Kernel::attention:
      return Flops(attention_flops(op.attention, mean_keys(op.attention, shape.seq_len), shape));
    case Kernel::norm:
    case Kernel::rotary:
    case Kernel::activation:
    case Kernel::add:
    case Kernel::permute:
    case Kernel::combine:
      return Flops(0);
  }
  return Flops(0);
}

Flops backward_flops(const GraphOp& op, TokenShape shape) {
  constexpr double kFusedAttention = 2.5;  // five matmuls for the forward's two (transformer-math 2.3)
  const Flops forward = forward_flops(op, shape);
  if (op.kernel == Kernel::attention) return forward * kFusedAttention;
  return forward * (has_data_gradient(op) ? 2.0 : 1.0);
}

Flops head_flops(const BlockKind& head, std::int64_t hidden, TokenShape shape) {
  return Flops(2.0 * static_cast<double>(head.vocab) * static_cast<double>(hidden) *
               static_cast<double>(shape.tokens()));
}

Flops model_flops(const ModelSpec& model, TokenShape shape, AttentionCount count) {
  std::vector<double> each;
  for (const BlockKind& kind : model.kinds) {
    double sum = 0;
    for (const GraphOp& op : kind.ops) sum += training_flops(kind, op, shape, count);
    if (kind.role == BlockRole::head && kind.head_tensor >= 0) {
      const bool trains = kind.tensors[static_cast<std::size_t>(kind.head_tensor)].trainable;
      sum += (trains ? 3.0 : 2.0) * head_flops(kind, model.hidden, shape).base();
    }
    each.push_back(sum);
  }
  double total = 0;
  for (int index : model.sequence) total += each[static_cast<std::size_t>(index)];
  return Flops(total);
}

namespace {

/// Adds to `kind` the adapters of the linear `index`, which becomes y = add(W x, B (A x)). Returns the number of ops
/// put in.
int add_adapters(BlockKind& kind, std::size_t index, std::int64_t rank) {
  GraphOp base = kind.ops[index];
  const int y = base.outputs[0];
  GraphOp down = base;
  GraphOp up = base;
  down.name = base.name + " lora A";
  up.name = base.name + " lora B";
  down.tensors.clear();
  up.tensors.clear();
  std::int64_t adapters = 0;
  for (int t : base.tensors) {
    const TensorSpec tensor = kind.tensors[static_cast<std::size_t>(t)];
    if (tensor.shape.size() < 2) continue;  // a bias
    const std::int64_t out = per_copy(tensor) / base.in_features;
    constexpr std::string_view kSuffix = ".weight";
    std::string stem = tensor.name;
    if (stem.ends_with(kSuffix)) stem.erase(stem.size() - kSuffix.size());
    const auto add = [&](std::string_view name, std::vector<std::int64_t> shape, GraphOp& op) {
      op.tensors.push_back(static_cast<int>(kind.tensors.size()));
      kind.tensors.push_back({fmt::format("{}.{}.weight", stem, name), std::move(shape), tensor.copies, tensor.kind,
                              false, true});
    };
    add("lora_A", {rank, base.in_features}, down);
    add("lora_B", {out, rank}, up);
    ++adapters;
  }
  const auto new_value = [&](std::string name, std::int64_t per_token) {
    kind.values.push_back({std::move(name), per_token, ValueType::activation});
    return static_cast<int>(kind.values.size()) - 1;
  };
  const int frozen = new_value(base.name + " frozen output", kind.values[static_cast<std::size_t>(y)].per_token);
  const int inner = new_value(down.name + " output", adapters * rank * base.rows_per_token);
  const int change = new_value(up.name + " output", kind.values[static_cast<std::size_t>(y)].per_token);
  base.outputs[0] = frozen;
  base.keeps.clear();  // a frozen linear's backward reads its weight only
  down.outputs = {inner};
  down.out_features = adapters * rank;
  up.inputs = {inner};
  up.outputs = {change};
  up.keeps = {inner};
  up.in_features = rank;  // block-diagonal: each adapter's rank columns meet its own outputs only
  GraphOp sum;
  sum.kernel = Kernel::add;
  sum.name = base.name + " lora add";
  sum.inputs = {frozen, change};
  sum.outputs = {y};
  sum.in_place = 0;
  sum.rows_per_token = base.rows_per_token;
  sum.in_features = sum.out_features = base.out_features;
  kind.ops[index] = std::move(base);
  const auto after = kind.ops.begin() + static_cast<std::ptrdiff_t>(index) + 1;
  kind.ops.insert(after, {std::move(down), std::move(up), std::move(sum)});
  return 3;
}

std::string expand(std::string_view pattern, std::string_view key, std::int64_t number) {
  std::string name(pattern);
  if (const std::size_t at = name.find(key); at != std::string::npos) {
    name.replace(at, key.size(), fmt::format("{}", number));
  }
  return name;
}

}  // namespace

void apply_lora(ModelSpec& model, std::int64_t rank) {
  if (rank < 1 || rank > model.hidden) {
    throw InputError(fmt::format("LoRA rank: expected an integer from 1 to {} (the hidden size of {}), got {}",
                                 model.hidden, model.name, rank));
  }
  for (BlockKind& kind : model.kinds) {
    for (TensorSpec& tensor : kind.tensors) tensor.trainable = false;
    if (kind.role != BlockRole::layer) continue;
    for (std::size_t i = 0; i < kind.ops.size(); ++i) {
      const Kernel kernel = kind.ops[i].kernel;
      if (kernel != Kernel::linear && kernel != Kernel::grouped_linear) continue;
      i += static_cast<std::size_t>(add_adapters(kind, i, rank));
    }
  }
}

std::vector<ListedTensor> list_tensors(const ModelSpec& model) {
  const std::int64_t count = sum_over_blocks(model, [](const BlockKind& kind) {
    std::int64_t sum = 0;
    for (const TensorSpec& tensor : kind.tensors) sum += tensor.copies;
    return sum;
  });
  if (count > kMaxListedTensors) {
    throw InputError(fmt::format("{}: {} tensors are too many to list", model.name, count));
  }
  std::vector<ListedTensor> list;
  list.reserve(static_cast<std::size_t>(count));
  int layer = 0;           // counted through the model
  int layer_of_stack = 0;  // as names count: a decoder after an encoder starts at 0 again
  for (int index : model.sequence) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(index)];
    if (kind.role == BlockRole::embedding) layer_of_stack = 0;
    for (const TensorSpec& tensor : kind.tensors) {
      const bool in_layer = tensor.name.find("{layer}") != std::string::npos;
      const std::string name = expand(tensor.name, "{layer}", layer_of_stack);
      for (std::int64_t copy = 0; copy < tensor.copies; ++copy) {
        list.push_back({expand(name, "{copy}", copy), tensor.shape, in_layer ? layer : -1, tensor.tied});
      }
    }
    if (kind.role == BlockRole::layer) {
      ++layer;
      ++layer_of_stack;
    }
  }
  return list;
}

}  // namespace zeroplan
