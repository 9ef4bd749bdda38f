#pragma once
// The host kernels of GPT-2 and Llama: one function for each Kernel of models/model_spec.h and pass of a ProgramStep,
// with the operands that the block program gives it. Bits do not depend on the pool's size, and (but for std::erf of
// the exact GELU) not on the instruction set. Kernels allocate no memory but a scratch of at most
// kernel_scratch_bytes() a thread.
//
// T: storage of activations and weights. G: storage of weight gradients (T or float).

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "models/model_spec.h"
#include "runtime/exact_sum.h"
#include "runtime/kernels/views.h"
#include "runtime/thread_pool.h"

namespace zeroplan {

/// Offset of each tensor of `kind` in the flat parameter (and gradient) buffer, in elements: tensors in order, each
/// aligned to 256 bytes of the compute type `type` (models/lower.h, FlatLayout). -1 for tied tensors.
std::vector<std::int64_t> tensor_offsets(const BlockKind& kind, DType type);

/// Most scratch that one thread holds after any kernel ran with these sizes. It is outside the plan's arenas.
std::int64_t kernel_scratch_bytes(TokenShape tokens, std::int64_t head_dim);

// --- linear ----------------------------------------------------------------------------------------

/// One of the weights that lie side by side in a linear (q, k and v; gate and up).
template <class T>
struct LinearPart {
  std::span<const T> weight;     // [out, in]
  std::span<const T> bias = {};  // [out] or empty
};
template <class G>
struct LinearPartGradient {
  WeightGradient<G> weight;     // [out, in]
  WeightGradient<G> bias = {};  // [out]; out empty without bias
};

/// y[t, :] = (x[t, :] W_p^T + b_p for each part p side by side). x [tokens, in], y [tokens, sum of out].
template <class T>
void linear_forward(std::span<const T> x, std::span<const LinearPart<T>> parts, std::int64_t in, std::span<T> y,
                    ThreadPool& pool);
/// dx[t, :] = sum over the parts of dy_p[t, :] W_p. dy [tokens, sum of out], dx [tokens, in].
template <class T>
void linear_backward_data(std::span<const T> dy, std::span<const LinearPart<T>> parts, std::int64_t in,
                          ValueGradient<T> dx, ThreadPool& pool);
/// dW_p = dy_p^T x, db_p = sum of dy_p over tokens. x [tokens, in], dy [tokens, sum of out].
template <class T, class G>
void linear_backward_weight(std::span<const T> dy, std::span<const T> x, std::span<const LinearPartGradient<G>> parts,
                            std::int64_t in, ThreadPool& pool);

// --- norm ------------------------------------------------------------------------------------------

enum class NormFunction : std::uint8_t {
  rms,    // y = x / sqrt(mean x^2 + epsilon) w; statistics [tokens]: rstd
  layer,  // y = (x - mean x) / sqrt(var x + epsilon) w + b, biased variance; statistics [tokens, 2]: mean, rstd
};
struct NormShape {
  NormFunction function = NormFunction::rms;
  std::int64_t width = 0;
  double epsilon = 1e-5;
};
/// x, y [tokens, width]; weight [width]; bias [width], empty for rms or without bias.
template <class T>
void norm_forward(const NormShape& shape, std::span<const T> x, std::span<const T> weight, std::span<const T> bias,
                  std::span<T> y, std::span<Wide<T>> statistics, ThreadPool& pool);
/// dx and the gradients of weight and bias (bias.out empty: none) from dy, x and the statistics of forward.
template <class T, class G>
void norm_backward(const NormShape& shape, std::span<const T> dy, std::span<const T> x, std::span<const T> weight,
                   std::span<const Wide<T>> statistics, ValueGradient<T> dx, WeightGradient<G> weight_gradient,
                   WeightGradient<G> bias_gradient, ThreadPool& pool);

// --- rotary ----------------------------------------------------------------------------------------

/// Llama 3.1's stretching of low frequencies ("rope_type": "llama3" of Hugging Face configurations).
struct Llama3Scaling {
  double factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0;
  std::int64_t original_positions = 8192;
};
/// cos and sin of position x frequency, [positions, head_dim / 2] each, in fp64; kernels round them to Wide<T>.
struct RotaryTable {
  std::int64_t positions = 0, half = 0;
  std::vector<double> cos, sin;
};
/// Frequencies theta^(-2 i / head_dim). head_dim is even.
RotaryTable make_rotary_table(std::int64_t positions, std::int64_t head_dim, double theta);
RotaryTable make_rotary_table(std::int64_t positions, std::int64_t head_dim, double theta,
                              const Llama3Scaling& scaling);

/// In place on packed q, k, v [tokens, (heads + 2 kv_heads) d]: each q and k head is turned by its position, elements i
/// and i + d/2 making a pair (Hugging Face convention); v stays. Position of token t: t mod seq_len.
template <class T>
void rotary_forward(const AttentionShape& shape, std::int64_t seq_len, const RotaryTable& table, std::span<T> qkv,
                    ThreadPool& pool);
/// The opposite turn of the gradient: in place with base empty and dqkv.data() == out.data(), else out = base + turned.
template <class T>
void rotary_backward(const AttentionShape& shape, std::int64_t seq_len, const RotaryTable& table,
                     std::span<const T> dqkv, ValueGradient<T> dx, ThreadPool& pool);

// --- attention -------------------------------------------------------------------------------------

/// softmax(q k^T / sqrt(d)) v over packed qkv [tokens, (heads + 2 kv_heads) d] (q heads, then k heads, then v heads; q
/// head h uses kv head h / (heads / kv_heads)); out [tokens, heads d]. Saves only log_sum_exp [tokens, heads], natural
/// log of the scaled scores' sum. Scores exist for a block of rows only: O(seq_len) memory. Causal or full, sliding
/// window as the shape says. Throws std::logic_error for chunked windows, cross attention and qk_dim != v_dim.
template <class T>
void attention_forward(const AttentionShape& shape, std::int64_t seq_len, std::span<const T> qkv, std::span<T> out,
                       std::span<Wide<T>> log_sum_exp, ThreadPool& pool);
/// Scores are formed again from q and k. dout [tokens, heads d], dqkv as qkv.
template <class T>
void attention_backward(const AttentionShape& shape, std::int64_t seq_len, std::span<const T> dout,
                        std::span<const T> qkv, std::span<const T> out, std::span<const Wide<T>> log_sum_exp,
                        ValueGradient<T> dqkv, ThreadPool& pool);

// --- activation ------------------------------------------------------------------------------------

enum class ActivationFunction : std::uint8_t { gelu_tanh, gelu_erf, silu, relu };
/// From a configuration's name ("gelu_new", "gelu_pytorch_tanh", "gelu_fast": tanh form; "gelu"; "silu", "swish";
/// "relu"). Throws InputError for one that has no kernel here.
ActivationFunction activation_function(std::string_view name);

/// Not gated: y = f(x), x and y [tokens, width]. Gated: x [tokens, 2 width] holds gate then up, y = f(gate) up.
struct ActivationShape {
  ActivationFunction function = ActivationFunction::gelu_tanh;
  bool gated = false;
  std::int64_t width = 0;  // of the output
};
/// From the op: its name ends in the function's, its widths tell whether it is gated.
ActivationShape activation_shape(const GraphOp& op);
template <class T>
void activation_forward(const ActivationShape& shape, std::span<const T> x, std::span<T> y, ThreadPool& pool);
template <class T>
void activation_backward(const ActivationShape& shape, std::span<const T> dy, std::span<const T> x, ValueGradient<T> dx,
                         ThreadPool& pool);

// --- embedding -------------------------------------------------------------------------------------

/// y[t] = table[ids[t]] + positions[t mod seq_len]. table [vocab, hidden]; positions [rows >= seq_len, hidden] or
/// empty. Throws InputError when an id is outside [0, vocab).
template <class T>
void embedding_forward(std::span<const std::int32_t> ids, std::int64_t seq_len, std::int64_t hidden,
                       std::span<const T> table, std::span<const T> positions, std::span<T> y, ThreadPool& pool);
/// Each row's sum is in token order, rounded once. Without `accumulate`, rows that no token names become 0.
template <class T, class G>
void embedding_backward(std::span<const std::int32_t> ids, std::int64_t seq_len, std::int64_t hidden,
                        std::span<const T> dy, WeightGradient<G> table, WeightGradient<G> positions, ThreadPool& pool);

// --- loss ------------------------------------------------------------------------------------------

inline constexpr std::int32_t kIgnoredTarget = -100;  // as PyTorch: no loss, no gradient

/// Cross-entropy of one chunk: logits [rows, vocab] become scale x (softmax - one-hot), the gradient of scale x the sum
/// of the rows' losses. Returns loss_before + the losses in row order, so a loss summed over chunks has the same bits
/// for any chunk size. Throws InputError when a target is neither kIgnoredTarget nor in [0, vocab).
template <class T>
double cross_entropy(std::span<T> logits, std::int64_t vocab, std::span<const std::int32_t> targets, double scale,
                     double loss_before, ThreadPool& pool);

// --- sums ------------------------------------------------------------------------------------------

/// y = the terms' sum, left to right. y may be the storage of any term. 2 to 8 terms.
template <class T>
void add_forward(std::span<const std::span<const T>> terms, std::span<T> y, ThreadPool& pool);
/// dx.out = dx.base + dy: kGradientSum.
template <class T>
void gradient_sum(std::span<const T> dy, ValueGradient<T> dx, ThreadPool& pool);
/// sum += gradient: kAccumulate.
template <class G, class Sum>
void accumulate(std::span<const G> gradient, std::span<Sum> sum, ThreadPool& pool);
/// Adds the squares of the gradient's elements: kGradientNorm. Exact but for one rounding in each block of 64 elements
/// (the finest unit of a shard), so ranks may sum any shards and get the same bits for every ZeRO stage and rank count.
template <class G>
void sum_of_squares(std::span<const G> gradient, ExactSum& sum, ThreadPool& pool);
/// to = from, rounded to nearest even.
template <class From, class To>
void convert(std::span<const From> from, std::span<To> to, ThreadPool& pool);

}  // namespace zeroplan
