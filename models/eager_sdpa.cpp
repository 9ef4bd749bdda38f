// scaled_dot_product_attention's kernels: which one runs, what it allocates and keeps.

#include <utility>

#include "models/eager_ops.h"

namespace zeroplan::eager {
namespace {

constexpr std::int64_t kLargestFlashHead = 256;
constexpr std::int64_t kFlashHeadStep = 8;  // head sizes are padded to a multiple

Tensor empty_like(const Tensor& x) { return x.tape().allocate(x.sizes(), preserved_strides(x), x.type()); }

void attention_kernel(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, bool backward) {
  AttentionWork work;
  work.shape.heads = q.size(1);
  work.shape.kv_heads = k.size(1);
  work.shape.qk_dim = q.size(3);
  work.shape.v_dim = v.size(3);
  work.shape.causal = causal;
  work.tokens = {q.size(0), q.size(2)};
  work.type = kernel_type(q.type());
  work.backward = backward;
  Compute compute;
  compute.pass = q.tape().pass();
  compute.kernel = work;
  q.tape().kernel(compute);
}

// Saved: key, query, value, then log-sum-exp, output and the two random states.
void backward_flash(BackwardCall& call) {
  const Tensor& q = call.saved[1];
  const Tensor& k = call.saved[0];
  const Tensor& v = call.saved[2];
  call.results[0] = empty_like(q);
  call.results[1] = empty_like(k);
  call.results[2] = empty_like(v);
  attention_kernel(q, k, v, call.node.numbers[0] != 0, true);
}

Tensor flash(Tensor q, Tensor k, Tensor v, bool causal) {
  Tape& tape = q.tape();
  const Ref<Node> node = tape.make_node(backward_flash, {&q, &k, &v});
  if (node) {
    node->numbers[0] = causal ? 1 : 0;
    for (const Tensor* input : {&k, &q, &v}) tape.save(*node, *input);
  }
  const bool keeps = tape.keeps_attention();
  const auto output = [&](const Dims& sizes, Element type) {
    return tape.kept(keeps, [&] { return tape.allocate(sizes, type); });
  };
  Tensor out = tape.kept(keeps, [&] { return empty_like(q); });
  Tensor log_sum = output({q.size(0), q.size(1), q.size(2)}, Element::fp32);
  Tensor seed = output({2}, Element::i64);
  Tensor offset = output({1}, Element::i64);
  Tensor debug = output({0}, q.type());
  if (!keeps || !tape.recomputing()) attention_kernel(q, k, v, causal, false);
  if (node) {
    for (const Tensor* made : {&log_sum, &out, &seed, &offset}) tape.save(*node, *made);
  }
  tape.attach(out, node);
  drop(debug, offset, seed, log_sum);
  drop(q, k, v);
  return out;
}

/// The memory-efficient kernel lays its outputs out as [b, s, h, d], with the query's heads: a key head that all of
/// them share gets a gradient from each, summed by the engine.
Tensor empty_by_token(const Tensor& x, std::int64_t heads) {
  const Dims sizes = {x.size(0), heads, x.size(2), x.size(3)};
  const std::int64_t row = heads * x.size(3);
  return x.tape().allocate(sizes, {x.size(2) * row, x.size(3), row, 1}, x.type());
}

// Saved: bias (when given), key, query, value, then log-sum-exp, output and the two random states.
void backward_efficient(BackwardCall& call) {
  const std::size_t first = call.node.numbers[1] != 0 ? 1 : 0;
  const Tensor& k = call.saved[first];
  const Tensor& q = call.saved[first + 1];
  const Tensor& v = call.saved[first + 2];
  call.results[0] = empty_by_token(q, q.size(1));
  call.results[1] = empty_by_token(k, q.size(1));
  call.results[2] = empty_by_token(v, q.size(1));
  if (call.node.next.size() > 3 && call.node.needs(3)) {
    const Tensor& bias = call.saved[0];
    call.results[3] = call.tape.allocate(bias.sizes(), bias.type());
  }
  attention_kernel(q, k, v, call.node.numbers[0] != 0, true);
}

Tensor efficient(Tensor q, Tensor k, Tensor v, Tensor bias, bool causal) {
  constexpr std::int64_t kSumStep = 32;  // the log-sum-exp's rows are padded to it
  Tape& tape = q.tape();
  const Ref<Node> node =
      bias ? tape.make_node(backward_efficient, {&q, &k, &v, &bias}) : tape.make_node(backward_efficient, {&q, &k, &v});
  if (node) {
    node->numbers = {causal ? 1 : 0, bias ? 1 : 0, 0, 0};
    if (bias) tape.save(*node, bias);
    for (const Tensor* input : {&k, &q, &v}) tape.save(*node, *input);
  }
  const std::int64_t row = q.size(1) * v.size(3);
  Tensor out =
      tape.allocate({q.size(0), q.size(1), q.size(2), v.size(3)}, {q.size(2) * row, v.size(3), row, 1}, q.type());
  const std::int64_t padded = (q.size(2) + kSumStep - 1) / kSumStep * kSumStep;
  Tensor log_sum = tape.allocate({q.size(0), q.size(1), padded}, Element::fp32);
  Tensor seed = tape.allocate({}, Element::i64);
  Tensor offset = tape.allocate({}, Element::i64);
  attention_kernel(q, k, v, causal, false);
  if (node) {
    for (const Tensor* output : {&log_sum, &out, &offset, &seed}) tape.save(*node, *output);
  }
  tape.attach(out, node);
  drop(offset, seed, log_sum);
  drop(q, k, v, bias);
  return out;
}

Tensor repeat_interleave(Tensor x, std::int64_t count) {
  const std::int64_t batch = x.size(0), heads = x.size(1), length = x.size(2), width = x.size(3);
  Tensor wide = contiguous(expand(unsqueeze(std::move(x), 2), {batch, heads, count, length, width}));
  return view(std::move(wide), {batch, heads * count, length, width});
}

/// The math kernel: scores and mask in memory, queries and keys scaled by the root of the scale each.
Tensor math(Tensor q, Tensor k, Tensor v, SdpaOptions options) {
  Tape& tape = q.tape();
  const std::int64_t length = q.size(2), groups = q.size(1) / k.size(1);
  Tensor scaled = mul_scalar(q);
  Tensor bias;
  if (options.causal) {
    Tensor ones = tape.allocate({length, length}, Element::boolean);
    Tensor lower = pointwise({&ones}, Element::boolean);
    ones.drop();
    Tensor zero = tape.allocate({}, q.type());
    Tensor lowest = tape.allocate({}, q.type());
    bias = pointwise({&lower}, q.type());
    drop(lowest, zero, lower);
  }
  Tensor keys = groups > 1 ? repeat_interleave(k, groups) : k;
  Tensor values = groups > 1 ? repeat_interleave(v, groups) : v;
  Tensor scores = matmul(scaled, mul_scalar(transpose(keys, 2, 3)));
  if (bias) scores = add(scores, bias);
  Tensor safe = tape.allocate(scores.sizes(), Element::boolean);  // rows that are -inf throughout
  Tensor weights = softmax(scores);
  drop(safe, scores);
  if (options.dropout > 0) weights = dropout(weights, options.dropout);
  Tensor out = matmul(weights, values);
  drop(keys, values, scaled, bias, weights);
  drop(q, k, v);
  return out;
}

/// constant_pad_nd of the last dimension.
Tensor pad_heads(Tensor x, std::int64_t width) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(
      [](BackwardCall& call) { call.results[0] = clone(slice(call.grads[0], -1, 0, call.node.dims[-1])); }, {&x});
  if (node) node->dims = x.sizes();
  Dims sizes = x.sizes();
  sizes[-1] = width;
  Tensor out = tape.allocate(sizes, x.type());
  tape.pointwise_kernel(x.bytes() + out.bytes());
  tape.attach(out, node);
  x.drop();
  return out;
}

Tensor padded_flash(Tensor q, Tensor k, Tensor v, bool causal) {
  const std::int64_t width = q.size(-1);
  const std::int64_t padded = (width + kFlashHeadStep - 1) / kFlashHeadStep * kFlashHeadStep;
  if (padded == width) return flash(std::move(q), std::move(k), std::move(v), causal);
  Tensor wide_q = pad_heads(q, padded);
  Tensor wide_k = pad_heads(k, padded);
  Tensor wide_v = pad_heads(v, padded);
  drop(q, k, v);
  return slice(flash(std::move(wide_q), std::move(wide_k), std::move(wide_v), causal), -1, 0, width);
}

}  // namespace

Tensor sdpa(Tensor q, Tensor k, Tensor v, Tensor mask, SdpaOptions options) {
  const bool half = q.type() == Element::bf16 || q.type() == Element::fp16;
  if (!mask && half && q.size(-1) == v.size(-1) && q.size(-1) <= kLargestFlashHead) {
    return padded_flash(std::move(q), std::move(k), std::move(v), options.causal);
  }
  if (!mask && options.grouped && !half) return math(std::move(q), std::move(k), std::move(v), options);
  if (options.grouped) {
    const std::int64_t groups = q.size(1) / k.size(1);
    k = repeat_interleave(std::move(k), groups);
    v = repeat_interleave(std::move(v), groups);
  }
  Tensor bias = mask;
  if (mask && mask.type() == Element::boolean) {
    bias = q.tape().allocate(mask.sizes(), q.type());
    q.tape().pointwise_kernel(bias.bytes());
  }
  if (bias) bias = expand(bias, {q.size(0), q.size(1), q.size(2), k.size(2)});
  mask.drop();
  return efficient(std::move(q), std::move(k), std::move(v), std::move(bias), options.causal);
}

}  // namespace zeroplan::eager
