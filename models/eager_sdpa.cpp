// scaled_dot_product_attention's kernels: which one runs, what it allocates and keeps.

#include <utility>

#include "models/eager_ops.h"

namespace zeroplan::eager {
namespace {

constexpr std::int64_t kLargestFlashHead = 256;
constexpr std::int64_t kFlashHeadStep = 8;  // head sizes are padded to a multiple

Tensor empty_like(const Tensor& x) {
  return x.tape().allocate(x.sizes(), x.is_dense() ? x.strides() : contiguous_strides(x.sizes()), x.type());
}

DType kernel_type(Element type) {
  switch (type) {
    case Element::bf16:
      return DType::bf16;
    case Element::fp16:
      return DType::fp16;
    default:
      return DType::fp32;
  }
}

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
  Tensor out = empty_like(q);
  Tensor log_sum = tape.allocate({q.size(0), q.size(1), q.size(2)}, Element::fp32);
  Tensor seed = tape.allocate({2}, Element::i64);
  Tensor offset = tape.allocate({1}, Element::i64);
  Tensor debug = tape.allocate({0}, q.type());
  attention_kernel(q, k, v, causal, false);
  if (node) {
    for (const Tensor* output : {&log_sum, &out, &seed, &offset}) tape.save(*node, *output);
  }
  tape.attach(out, node);
  drop(debug, offset, seed, log_sum);
  drop(q, k, v);
  return out;
}

}  // namespace

Tensor sdpa(Tensor q, Tensor k, Tensor v, Tensor mask, SdpaOptions options) {
  const bool half = q.type() == Element::bf16 || q.type() == Element::fp16;
  (void)kFlashHeadStep;
  (void)mask;
  if (half && q.size(-1) <= kLargestFlashHead) return flash(std::move(q), std::move(k), std::move(v), options.causal);
  return {};
}

}  // namespace zeroplan::eager
