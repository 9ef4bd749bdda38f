#include <utility>

#include "models/eager_experts.h"

namespace zeroplan::eager {
namespace {

/// zeros of the input, the gradient scattered in.
void backward_topk(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  Tensor zeros = call.tape.allocate(call.node.dims, grad.type());
  call.results[0] = call.tape.allocate(call.node.dims, grad.type());
  call.tape.pointwise_kernel(2 * call.results[0].bytes() + grad.bytes());
}

/// other: -grad * ((self / other) / other); self: grad / other.
void backward_div_in_place(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  const Tensor& other = call.saved[0];
  if (call.node.needs(1)) {
    Tensor once = pointwise({&call.saved[1], &other}, grad.type());
    Tensor twice = pointwise({&once, &other}, grad.type());
    Tensor negated = pointwise({&grad}, grad.type());
    call.results[1] = pointwise({&negated, &twice}, grad.type());
    drop(negated, twice, once);
  }
  if (call.node.needs(0)) call.results[0] = pointwise({&grad, &other}, grad.type());
}

void backward_index(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  Tensor zeros = call.tape.allocate(call.node.dims, grad.type());
  call.results[0] = call.tape.allocate(call.node.dims, grad.type());
  call.tape.pointwise_kernel(2 * call.results[0].bytes() + 2 * grad.bytes());
}

void backward_fill(BackwardCall& call) {
  call.results[0] = pointwise({&call.grads[0], &call.saved[0]}, call.grads[0].type());
}

void grouped_kernel(Tape& tape, std::int64_t rows, std::int64_t out, std::int64_t in, std::int64_t groups,
                    Element type) {
  Gemm gemm;
  gemm.groups = groups;
  gemm.m = (rows + groups - 1) / groups;  // rows spread evenly
  gemm.n = out;
  gemm.k = in;
  gemm.type = type == Element::fp32 ? DType::fp32 : type == Element::fp16 ? DType::fp16 : DType::bf16;
  Compute work;
  work.pass = tape.pass();
  work.kernel = gemm;
  tape.kernel(work);
}

// Saved: mat2, offsets, self. The weights' gradient has their layout.
void backward_grouped(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  std::size_t next = 0;
  const Tensor* weights = call.node.needs(0) ? &call.saved[next++] : nullptr;
  ++next;  // offsets
  const Tensor* rows = call.node.needs(1) ? &call.saved[next] : nullptr;
  const auto groups = call.node.numbers[0], in = call.node.numbers[1], out = call.node.numbers[2];
  if (rows != nullptr) {
    call.results[1] = call.tape.allocate({groups, in, out}, call.node.dims, grad.type());
    grouped_kernel(call.tape, grad.size(0), out, in, groups, grad.type());
  }
  if (weights != nullptr) {
    call.results[0] = call.tape.allocate({grad.size(0), in}, grad.type());
    grouped_kernel(call.tape, grad.size(0), in, out, groups, grad.type());
  }
}

}  // namespace

TopK topk(Tensor x, std::int64_t k) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_topk, {&x});
  if (node) node->dims = x.sizes();
  Dims sizes = x.sizes();
  sizes[-1] = k;
  TopK best;
  best.values = tape.allocate(sizes, x.type());
  best.indices = tape.allocate(sizes, Element::i64);
  tape.pointwise_kernel(x.bytes());
  if (node) tape.save(*node, best.indices);
  tape.attach(best.values, node);
  x.drop();
  return best;
}

TopK max_last(Tensor x) {
  TopK best = topk(std::move(x), 1);
  best.values = squeeze(std::move(best.values), -1);
  return best;
}

Tensor gather(Tensor x, Tensor columns) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_topk, {&x});  // zeros, the gradient scattered in
  if (node) {
    node->dims = x.sizes();
    tape.save(*node, columns);
  }
  Tensor out = tape.allocate(columns.sizes(), x.type());
  tape.pointwise_kernel(2 * out.bytes());
  tape.attach(out, node);
  drop(x, columns);
  return out;
}

Tensor div_in_place(Tensor x, Tensor y) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_div_in_place, {&x, &y});
  if (node) {
    Tensor before;  // the division overwrites what its own backward needs
    if (node->needs(1)) before = clone(detach(x));
    tape.save(*node, y);
    if (before) tape.save(*node, before);
  }
  tape.pointwise_kernel(2 * x.bytes());
  Tensor out = detach(x);
  tape.attach(out, node);
  drop(x, y);
  return out;
}

Tensor index_rows(Tensor x, Tensor rows) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_index, {&x});
  if (node) {
    node->dims = x.sizes();
    tape.save(*node, rows);
  }
  Dims sizes = x.sizes();
  sizes[0] = rows.count();
  Tensor out = tape.allocate(sizes, x.type());
  tape.pointwise_kernel(2 * out.bytes());
  tape.attach(out, node);
  drop(x, rows);
  return out;
}

Tensor masked_fill_in_place(Tensor x, Tensor mask) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_fill, {&x});
  if (node) tape.save(*node, mask);
  tape.pointwise_kernel(x.bytes() + mask.bytes());
  Tensor out = detach(x);
  tape.attach(out, node);
  drop(x, mask);
  return out;
}

Tensor grouped_mm(Tensor x, Tensor weights, Tensor offsets) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_grouped, {&x, &weights});
  if (node) {
    node->numbers = {weights.size(0), weights.size(1), weights.size(2), 0};
    node->dims = weights.strides();
    if (node->needs(0)) tape.save(*node, weights);
    tape.save(*node, offsets);
    if (node->needs(1)) tape.save(*node, x);
  }
  Tensor out = tape.allocate({x.size(0), weights.size(2)}, x.type());
  grouped_kernel(tape, x.size(0), weights.size(2), weights.size(1), weights.size(0), x.type());
  tape.attach(out, node);
  drop(x, weights, offsets);
  return out;
}

}  // namespace zeroplan::eager
