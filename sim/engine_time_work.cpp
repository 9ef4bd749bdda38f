#include "sim/engine_time_work.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"
#include "sim/kernel_shapes.h"

namespace zeroplan {
namespace {

// Bytes an element of 16-bit tensors that each op reads and writes, forward and backward: the kernels that PyTorch
// starts for it (step-time.md section 2). Not fitted; memory_rate_* is.
constexpr ElementBytes kRmsNormEager{36, 60};  // to fp32, pow, mean, rsqrt, mul, to 16 bits, mul by the weight
constexpr ElementBytes kRmsNormCompiled{6, 12};
constexpr ElementBytes kLayerNorm{4, 8};
constexpr ElementBytes kLayerNormFp32{20, 32};  // autocast: to fp32, norm, back
constexpr ElementBytes kAdd{6, 6};
constexpr ElementBytes kAddCompiled{4, 4};
constexpr ElementBytes kRotaryEager{20, 24};
constexpr ElementBytes kRotaryCompiled{4, 4};
constexpr ElementBytes kGatedEager{10, 16};  // of the output: SiLU, product
constexpr ElementBytes kGatedCompiled{6, 10};
constexpr ElementBytes kActivation{4, 6};
constexpr ElementBytes kGeluNew{36, 48};  // eight kernels: pow, products, sums, tanh
// Copies around attention, of its output: splitting packed q, k, v and putting heads together again.
constexpr ElementBytes kPackedCopies{8, 10};
constexpr ElementBytes kSeparateCopies{2, 4};
constexpr ElementBytes kComposerCopies{4, 6};
constexpr ElementBytes kUnpadCopies{20, 30};  // flash attention that unpads and pads

// Experts as transformers runs them (integrations/moe.py): probabilities and the best k of them of each token; rows
// put in the order of their experts and back; one grouped product a projection. Of a row's elements.
constexpr ElementBytes kRouterScores{24, 28};  // fp32 softmax, top k, their sum
constexpr ElementBytes kGatherRows{4, 8};      // index; its backward adds rows up in fp32
constexpr ElementBytes kCombineRows{14, 18};   // times the weight, back in place, sum over the k

/// Bytes a score that unfused attention moves forward, and its backward over that (V100, step-time.md section 2).
constexpr double kScoreBytes = 10;
constexpr double kScoreBackward = 1.3;
/// Bytes a score that transformers' eager attention moves with each operation as a kernel of its own, 16 bits: product,
/// scale, mask, softmax, product; gradients of them. A softmax in fp32: casts there and back, and 4 B in place of 2;
/// from fp16 torch's softmax kernel and its backward cast by themselves.
constexpr ElementBytes kEagerScores{16, 18};
constexpr ElementBytes kWideSoftmax{16, 18}, kWideSoftmaxFp16{8, 10};
/// Casts to fp8 with dynamic scales: bytes an input element, an output element, a weight; without compilation they are
/// separate kernels.
constexpr double kCastInput = 5, kCastOutput = 5, kCastWeight = 6, kCastEager = 4;
constexpr double kCastForward = 0.33;  // share of the forward

// Effective PyTorch ops a layer's op takes of the host. They give 40 for Llama, 28 for OPT, 30 for GPT-2, 24 for MPT,
// the counts of step-time.md section 2 (MPT and Megatron by host_composer, host_megatron). A LoRA matrix under PEFT
// also casts, drops out and scales (groundtruth LoRA rows: forward 1.2 to 1.4 times as long where the host decides).
constexpr double kOpsRmsNorm = 4, kOpsLayerNorm = 2, kOpsLinear = 2, kOpsAdapter = 3, kOpsRotary = 5, kOpsGated = 2,
                 kOpsGeluNew = 7, kOpsActivation = 1, kOpsAdd = 1, kOpsAttention = 9;
// Experts: product, softmax, top k, normalised; sort, counts, offsets, index; a grouped product with its transposed
// view; weights, index back, sum.
constexpr double kOpsRouter = 10, kOpsGather = 9, kOpsGrouped = 3, kOpsCombine = 6;

bool compiled(KernelStack stack) {
  return stack == KernelStack::compiled_blocks || stack == KernelStack::compiled_graph;
}
bool composer(KernelStack stack) { return stack == KernelStack::composer || stack == KernelStack::composer_fp32; }

const Value& value_of(const BlockKind& kind, int index) { return kind.values[static_cast<std::size_t>(index)]; }
const TensorSpec& tensor_of(const BlockKind& kind, int index) { return kind.tensors[static_cast<std::size_t>(index)]; }

bool is_rms(const BlockKind& kind, const GraphOp& op) {
  // LayerNorm keeps mean and 1 / deviation, RMSNorm the latter; QK norms keep them for every head.
  const double statistics = op.outputs.size() < 2 ? 1 : static_cast<double>(value_of(kind, op.outputs[1]).per_token);
  return statistics != 2;
}

bool is_adapter(const GraphOp& op) { return op.name.find(" lora ") != std::string::npos; }
bool is_gelu_new(const GraphOp& op) { return op.name.find("gelu_new") != std::string::npos; }
bool is_gated(const GraphOp& op) { return op.in_features == 2 * op.out_features; }

int matrices(const BlockKind& kind, const GraphOp& op) {
  return static_cast<int>(
      std::count_if(op.tensors.begin(), op.tensors.end(), [&](int t) { return tensor_of(kind, t).shape.size() >= 2; }));
}

ElementBytes norm_bytes(const BlockKind& kind, const GraphOp& op, KernelStack stack) {
  if (is_rms(kind, op)) return compiled(stack) ? kRmsNormCompiled : kRmsNormEager;
  return stack == KernelStack::composer_fp32 ? kLayerNormFp32 : kLayerNorm;
}

ElementBytes activation_bytes(const GraphOp& op, KernelStack stack) {
  if (is_gated(op)) return compiled(stack) ? kGatedCompiled : kGatedEager;
  const bool separate = is_gelu_new(op) && (stack == KernelStack::hugging_face || stack == KernelStack::torchtitan);
  return separate ? kGeluNew : kActivation;
}

ElementBytes attention_copies(const BlockKind& kind, KernelStack stack) {
  switch (stack) {
    case KernelStack::composer:
    case KernelStack::megatron:
      return kComposerCopies;
    case KernelStack::composer_fp32:
      return kUnpadCopies;
    case KernelStack::compiled_blocks:
    case KernelStack::compiled_graph:
    case KernelStack::torchtitan:
      return {};
    case KernelStack::hugging_face:
      break;
  }
  bool rotary = false, packed = false;
  for (const GraphOp& op : kind.ops) {
    rotary |= op.kernel == Kernel::rotary;
    packed |= op.kernel == Kernel::linear && op.name == "qkv" && matrices(kind, op) == 1;
  }
  if (packed) return kPackedCopies;
  return rotary ? ElementBytes{} : kSeparateCopies;
}

double host_ops(const BlockKind& kind, const GraphOp& op) {
  switch (op.kernel) {
    case Kernel::norm:
      return is_rms(kind, op) ? kOpsRmsNorm : kOpsLayerNorm;
    case Kernel::linear:
      return (is_adapter(op) ? kOpsAdapter : kOpsLinear) * std::max(1, matrices(kind, op));
    case Kernel::rotary:
      return kOpsRotary;
    case Kernel::attention:
      return kOpsAttention;
    case Kernel::activation:
      return is_gated(op) ? kOpsGated : is_gelu_new(op) ? kOpsGeluNew : kOpsActivation;
    case Kernel::permute:
      return op.rows_per_token > 1 ? kOpsGather : kOpsAdd;
    case Kernel::add:
    case Kernel::embedding:
      return kOpsAdd;
    case Kernel::combine:
      return kOpsCombine;
    case Kernel::router:
      return kOpsRouter;
    case Kernel::grouped_linear:
      return kOpsGrouped;
  }
  return 0;
}

/// One layer's walk over its graph.
class LayerWalk {
 public:
  LayerWalk(const BlockKind& kind, const EngineTimeRun& run, TokenShape tokens, const KernelRates& rates,
            const EngineTimeFit& fit)
      : kind_(kind), run_(run), tokens_(tokens), rates_(rates), fit_(fit), split_(run.tensor_parallel) {}

  LayerWork take() {
    for (const GraphOp& op : kind_.ops) visit(op);
    for (const TensorSpec& tensor : kind_.tensors) {
      if (tensor.tied) continue;
      work_.parameters += static_cast<double>(tensor.elements());
      if (!tensor.trainable) continue;
      work_.trainable += static_cast<double>(tensor.elements());
      work_.trained_tensors += static_cast<double>(tensor.copies);
    }
    if (matmul_flops_ > 0) work_.last_linear = last_flops_ / matmul_flops_;
    if (run_.fp8) add_casts();
    return work_;
  }

 private:
  double tokens() const { return static_cast<double>(tokens_.tokens()); }

  void visit(const GraphOp& op) {
    work_.host_ops += host_ops(kind_, op);
    const double out = op.outputs.empty() ? 0 : static_cast<double>(value_of(kind_, op.outputs[0]).per_token);
    switch (op.kernel) {
      case Kernel::linear:
        return linear(op);
      case Kernel::attention:
        return attention(op);
      case Kernel::norm:
        return stream(norm_bytes(kind_, op, run_.stack), out);
      case Kernel::add:
        return stream(compiled(run_.stack) ? kAddCompiled : kAdd, out);
      case Kernel::activation:
        return stream(activation_bytes(op, run_.stack), static_cast<double>(op.out_features * op.rows_per_token));
      case Kernel::rotary:
        return stream(compiled(run_.stack) ? kRotaryCompiled : kRotaryEager, rotated(op));
      case Kernel::permute:
        return stream(op.rows_per_token > 1 ? kGatherRows : kAdd, out);
      case Kernel::embedding:
        return stream(kAdd, out);
      case Kernel::router:
        matrix(op, op.out_features, trains(op));
        return stream(kRouterScores, static_cast<double>(op.out_features));
      case Kernel::grouped_linear:
        return grouped(op);
      case Kernel::combine:
        return stream(kCombineRows, out * static_cast<double>(op.rows_per_token));
    }
  }

  void stream(ElementBytes bytes, double elements) {
    const double scale = elements / split_ * tokens() * size_of(run_.type) / size_of(DType::bf16);
    work_.streaming_forward += Bytes(bytes.forward * scale) / rates_.streaming;
    work_.streaming_backward += Bytes(bytes.backward * scale) / rates_.streaming;
  }

  /// Of a packed q, k, v the values are not rotated.
  double rotated(const GraphOp& op) const {
    for (const GraphOp& other : kind_.ops) {
      if (other.kernel != Kernel::attention || other.attention.cross) continue;
      const AttentionShape& a = other.attention;
      return static_cast<double>(std::min(op.out_features, (a.heads + a.kv_heads) * a.qk_dim));
    }
    return static_cast<double>(op.out_features);
  }

  /// The weights of a packed linear are separate modules unless they are one tensor.
  void linear(const GraphOp& op) {
    cast_inputs_ += static_cast<double>(op.in_features) / (by_row(op) ? split_ : 1);
    bool separate = false;
    if (matrices(kind_, op) > 1) {
      std::int64_t sum = 0;
      for (const int t : op.tensors) {
        const TensorSpec& tensor = tensor_of(kind_, t);
        if (tensor.shape.size() >= 2) sum += tensor.shape[0];
      }
      separate = sum == op.out_features;
    }
    if (!separate) return matrix(op, op.out_features, trains(op));
    for (const int t : op.tensors) {
      const TensorSpec& tensor = tensor_of(kind_, t);
      if (tensor.shape.size() >= 2) matrix(op, tensor.shape[0], tensor.trainable);
    }
  }

  bool trains(const GraphOp& op) const {
    return std::any_of(op.tensors.begin(), op.tensors.end(), [&](int t) { return tensor_of(kind_, t).trainable; });
  }

  Seconds gemm(std::int64_t m, std::int64_t n, std::int64_t k, GemmOutput output) const {
    const KernelCost cost = rates_.gpu->gemm(m, n, k, run_.type, output);
    const double fp8 = run_.fp8 ? 2 * fit_[TimeFit::fp8_rate] : 1;
    return std::max(cost.sm_time * (rates_.matmul_scale / fp8), cost.hbm_time);
  }

  void matrix(const GraphOp& op, std::int64_t out, bool trained) {
    std::int64_t in = op.in_features;
    (by_row(op) ? in : out) = std::max<std::int64_t>(1, (by_row(op) ? in : out) / split_);
    const std::int64_t rows = tokens_.tokens();
    const GemmOutput weight_type = run_.fp32_gradients ? GemmOutput::fp32 : GemmOutput::same;
    work_.matmul_forward += gemm(rows, out, in, GemmOutput::same);
    work_.matmul_backward += gemm(rows, in, out, GemmOutput::same);
    if (trained) work_.matmul_backward += gemm(out, in, rows, weight_type);
    last_flops_ = static_cast<double>(out) * static_cast<double>(in);
    matmul_flops_ += last_flops_;
    cast_outputs_ += static_cast<double>(out);
  }

  /// One product for all experts, their rows alike.
  void grouped(const GraphOp& op) {
    const std::int64_t rows = std::max<std::int64_t>(1, tokens_.tokens() * op.rows_per_token / op.groups);
    const auto product = [&](std::int64_t m, std::int64_t n, std::int64_t k, GemmOutput output) {
      const KernelCost cost = rates_.gpu->grouped_gemm(op.groups, m, n, k, run_.type, output);
      return std::max(cost.sm_time * rates_.matmul_scale, cost.hbm_time);
    };
    work_.matmul_forward += product(rows, op.out_features, op.in_features, GemmOutput::same);
    work_.matmul_backward += product(rows, op.in_features, op.out_features, GemmOutput::same);
    const GemmOutput weight_type = run_.fp32_gradients ? GemmOutput::fp32 : GemmOutput::same;
    if (trains(op)) work_.matmul_backward += product(op.out_features, op.in_features, rows, weight_type);
    last_flops_ = static_cast<double>(op.out_features) * static_cast<double>(op.in_features) *
                  static_cast<double>(op.rows_per_token);
    matmul_flops_ += last_flops_;
  }

  /// Output and down projections split their input over a tensor-parallel group, all others their output.
  static bool by_row(const GraphOp& op) { return op.name == "out" || op.name.ends_with("down"); }

  void attention(const GraphOp& op) {
    const AttentionShape& a = op.attention;
    stream(attention_copies(kind_, run_.stack), static_cast<double>(a.heads * a.v_dim));
    if (run_.attention == AttentionSoftware::eager || sdpa_takes_math(a)) return eager_attention(a);
    if (run_.attention == AttentionSoftware::unfused || !(rates_.fused_attention > FlopsPerSecond())) {
      const Seconds traffic = Bytes(kScoreBytes * scores(a)) / rates_.streaming;
      return unfused_attention(a, traffic, traffic * kScoreBackward);
    }
    const Flops products = forward_flops(op, tokens_) / split_;
    const double width = static_cast<double>(a.qk_dim + a.v_dim) / 2;
    Seconds forward = products / rates_.fused_attention;
    if (rates_.exponentials > FlopsPerSecond()) forward += products / (rates_.exponentials * width);
    work_.attention_forward += forward;
    work_.attention_backward += forward * kAttentionBackwardFlops;
  }

  /// PyTorch's SDPA has no fused kernel for grouped heads in fp32 (models/eager_sdpa.cpp); its math kernel moves scores
  /// as eager attention does.
  bool sdpa_takes_math(const AttentionShape& a) const {
    return run_.stack == KernelStack::hugging_face && run_.attention == AttentionSoftware::sdpa &&
           run_.type == DType::fp32 && a.kv_heads < a.heads;
  }

  void eager_attention(const AttentionShape& a) {
    const double width = static_cast<double>(size_of(run_.type)) / size_of(DType::bf16);
    const bool casts = rates_.wide_softmax && run_.type != DType::fp32;
    const ElementBytes wide = run_.type == DType::fp16 ? kWideSoftmaxFp16 : kWideSoftmax;
    const auto traffic = [&](double usual, double casting) {
      return Bytes((usual * width + (casts ? casting : 0)) * scores(a)) / rates_.scores;
    };
    unfused_attention(a, traffic(kEagerScores.forward, wide.forward), traffic(kEagerScores.backward, wide.backward));
  }

  /// Of all pairs of tokens, on one GPU of the tensor-parallel group.
  double scores(const AttentionShape& a) const {
    return static_cast<double>(a.heads) / split_ * static_cast<double>(tokens_.seq_len) * tokens();
  }

  /// Products of all scores, and what moves the scores forward and backward.
  void unfused_attention(const AttentionShape& a, Seconds forward, Seconds backward) {
    const Flops flops(2 * scores(a) * static_cast<double>(a.qk_dim + a.v_dim));
    work_.attention_forward += flops / rates_.unfused_attention + forward;
    work_.attention_backward += 2 * flops / rates_.unfused_attention + backward;
  }

  void add_casts() {
    const double eager = compiled(run_.stack) ? 1 : kCastEager;
    const double bytes =
        (kCastInput * cast_inputs_ + kCastOutput * cast_outputs_) * tokens() + kCastWeight * work_.parameters / split_;
    const Seconds all = Bytes(bytes * eager) / rates_.streaming;
    work_.casts_forward = all * kCastForward;
    work_.casts_backward = all * (1 - kCastForward);
  }

  const BlockKind& kind_;
  const EngineTimeRun& run_;
  TokenShape tokens_;
  const KernelRates& rates_;
  const EngineTimeFit& fit_;
  int split_;
  LayerWork work_;
  double matmul_flops_ = 0, last_flops_ = 0;
  double cast_inputs_ = 0, cast_outputs_ = 0;
};

}  // namespace

double exponential_dims(const GpuSpec& gpu) {
  constexpr double kFlopsOfDimension = 4;
  const std::string_view capability = gpu.compute_capability;
  // 16-bit products with fp32 sums, FLOPs a clock and multiprocessor, in NVIDIA's architecture papers.
  double flops = 0;
  if (capability == "8.0") flops = 2048;
  if (capability == "9.0") flops = 4096;
  if (capability.starts_with("10.")) flops = 8192;
  if (capability == "8.6" || capability == "8.9" || capability.starts_with("12.")) flops = 1024;
  // Cards that were cut (GeForce, A10G, H20) show it against fp32, 2 FLOPs in each lane; the clocks of the two peaks
  // differ by less than a fifth.
  if (gpu.peak_bf16 && gpu.peak_fp32) {
    const double lanes = capability == "8.0" ? 64 : 128;
    const double by_peaks = 2 * lanes * (*gpu.peak_bf16 / *gpu.peak_fp32);
    if (by_peaks < 0.8 * flops) flops = by_peaks;
  }
  const double results =
      capability == "10.3" ? 32 : 16;  // special functions a clock; Blackwell Ultra has twice as many
  return flops / results / kFlopsOfDimension;
}

LayerWork layer_work(const BlockKind& layer, const EngineTimeRun& run, TokenShape tokens, const KernelRates& rates,
                     const EngineTimeFit& fit) {
  LayerWork work = LayerWalk(layer, run, tokens, rates, fit).take();
  if (composer(run.stack)) work.host_ops *= fit[TimeFit::host_composer];
  if (run.stack == KernelStack::megatron) work.host_ops *= fit[TimeFit::host_megatron];
  if (run.stack == KernelStack::compiled_blocks) work.host_ops *= fit[TimeFit::host_compiled];
  if (run.stack == KernelStack::compiled_graph) work.host_ops *= fit[TimeFit::host_graph];
  return work;
}

double loss_bytes(const EngineTimeRun& run) {
  constexpr double kChunked = 24, kFp32Logits = 36, kCompiled = 20;
  if (compiled(run.stack)) return kCompiled;
  return run.chunked_loss ? kChunked : kFp32Logits;
}

HeadWork head_work(const ModelSpec& model, const EngineTimeRun& run, TokenShape tokens, const KernelRates& rates) {
  HeadWork work;
  if (model.vocab == 0) return work;
  const std::int64_t rows = tokens.tokens();
  const std::int64_t vocab = std::max<std::int64_t>(1, model.vocab / run.tensor_parallel);
  const auto gemm = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    const KernelCost cost = rates.gpu->gemm(m, n, k, run.type);
    return std::max(cost.sm_time * rates.matmul_scale, cost.hbm_time);
  };
  work.matmul = gemm(rows, vocab, model.hidden) + gemm(rows, model.hidden, vocab);
  const bool frozen = std::none_of(model.kinds.begin(), model.kinds.end(), [](const BlockKind& kind) {
    return kind.role != BlockRole::layer && kind.trainable_parameters() > 0;
  });
  if (!frozen) work.matmul += gemm(vocab, model.hidden, rows);
  work.streaming = Bytes(loss_bytes(run) * static_cast<double>(vocab) * static_cast<double>(rows)) / rates.streaming;
  return work;
}

}  // namespace zeroplan
