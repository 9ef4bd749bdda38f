#include <stdexcept>
#include <utility>

#include "models/eager_ops.h"

namespace zeroplan::eager {
namespace {

/// `adds_bias`: addmm, which goes through cuBLASLt where the right operand is a matrix proper
/// (aten/src/ATen/native/cuda/Blas.cpp).
void gemm_kernel(const Tensor& out, std::int64_t inner, bool adds_bias = false) {
  Compute work;
  work.pass = out.tape().pass();
  Gemm gemm;
  gemm.groups = out.dims() == 3 ? out.size(0) : 1;
  gemm.m = out.size(-2);
  gemm.n = out.size(-1);
  gemm.k = inner;
  gemm.type = kernel_type(out.type());
  work.kernel = gemm;
  out.tape().kernel(work, adds_bias && inner > 1 && out.size(-1) > 1);
}

/// [sizes[1], sizes[0]] stored row by row: the transpose of a contiguous matrix.
bool is_transposed(const Tensor& matrix) { return matrix.strides()[0] == 1 && matrix.strides()[1] == matrix.size(0); }

Tensor product(const Tensor& a, const Tensor& b, bool transposed, bool adds_bias = false) {
  const Dims sizes = {a.size(0), b.size(1)};
  Tensor out = a.tape().allocate(sizes, transposed ? Dims{1, a.size(0)} : contiguous_strides(sizes), a.type());
  gemm_kernel(out, a.size(1), adds_bias);
  return out;
}

/// mm_mat1_backward, mm_mat2_backward: the result has the layout of the operand.
Tensor gradient_of_left(const Tensor& grad, const Tensor& right, const Dims& left_sizes, bool transposed) {
  const Tensor swapped = transpose(right, 0, 1);
  Tensor out = product(grad, swapped, transposed);
  if (!(out.sizes() == left_sizes)) throw std::logic_error("eager step: matrix gradient");
  return out;
}

Tensor gradient_of_right(const Tensor& grad, const Tensor& left, bool transposed) {
  const Tensor swapped = transpose(left, 0, 1);
  return product(swapped, grad, transposed);
}

// node.numbers: [0] left operand transposed, [1] right operand transposed, [2] index of the left edge.
void save_operands(Ref<Node> node, const Tensor& a, const Tensor& b, std::size_t left, bool left_first) {
  if (!node) return;
  node->numbers = {is_transposed(a) ? 1 : 0, is_transposed(b) ? 1 : 0, static_cast<std::int64_t>(left),
                   left_first ? 1 : 0};
  node->dims = a.sizes();
  Tape& tape = a.tape();
  if (left_first && node->needs(left + 1)) tape.save(*node, a);
  if (node->needs(left)) tape.save(*node, b);
  if (!left_first && node->needs(left + 1)) tape.save(*node, a);
}

// mm(self, mat2): mat2 comes first by name. addmm(self, mat1, mat2): mat1 first.
void backward_matrix(BackwardCall& call) {
  const Node& node = call.node;
  const auto left = static_cast<std::size_t>(node.numbers[2]);
  const bool left_first = node.numbers[3] != 0;
  const Tensor& grad = call.grads[0];
  const bool both = node.needs(left) && node.needs(left + 1);
  const auto right_gradient = [&] {
    if (!node.needs(left + 1)) return;
    const Tensor& a = call.saved[left_first ? 0 : (both ? 1 : 0)];
    call.results[left + 1] = gradient_of_right(grad, a, node.numbers[1] != 0);
  };
  const auto left_gradient = [&] {
    if (!node.needs(left)) return;
    const Tensor& b = call.saved[left_first && both ? 1 : 0];
    call.results[left] = gradient_of_left(grad, b, node.dims, node.numbers[0] != 0);
  };
  if (left_first) {
    left_gradient();
    right_gradient();
    if (node.needs(0)) call.results[0] = grad;  // the bias: summed by the engine
  } else {
    right_gradient();
    left_gradient();
  }
}

Tensor batched(const Tensor& a, const Tensor& b) {
  Tensor out = a.tape().allocate({a.size(0), a.size(1), b.size(2)}, a.type());
  gemm_kernel(out, a.size(2));
  return out;
}

/// mat2 first, then self (or batch1 after batch2's).
void backward_bmm(BackwardCall& call) {
  const Node& node = call.node;
  std::size_t next = 0;
  const Tensor* mat2 = node.needs(0) ? &call.saved[next++] : nullptr;
  const Tensor* self = node.needs(1) ? &call.saved[next] : nullptr;
  if (self != nullptr) {
    const Tensor left = transpose(*self, 1, 2);
    call.results[1] = batched(left, call.grads[0]);
  }
  if (mat2 != nullptr) {
    const Tensor right = transpose(*mat2, 1, 2);
    call.results[0] = batched(call.grads[0], right);
  }
}

Tensor finish(Tensor& a, Tensor& b, Tensor out, const Ref<Node>& node) {
  a.tape().attach(out, node);
  a.drop();
  b.drop();
  return out;
}

/// x [..., in] as rows.
Tensor fold(Tensor x) {
  const std::int64_t width = x.size(-1);
  return reshape(std::move(x), {x.count() / width, width});
}

}  // namespace

Tensor mm(Tensor a, Tensor b) {
  const Ref<Node> node = a.tape().make_node(backward_matrix, {&a, &b});
  save_operands(node, a, b, 0, false);
  Tensor out = a.tape().kept(a.tape().keeps_next_matmul(), [&] { return product(a, b, false); });
  return finish(a, b, std::move(out), node);
}

Tensor addmm(Tensor bias, Tensor a, Tensor b) {
  const Ref<Node> node = a.tape().make_node(backward_matrix, {&bias, &a, &b});
  save_operands(node, a, b, 1, true);
  Tensor out = product(a, b, false, true);
  bias.drop();
  return finish(a, b, std::move(out), node);
}

Tensor bmm(Tensor a, Tensor b) {
  Tape& tape = a.tape();
  const Ref<Node> node = tape.make_node(backward_bmm, {&a, &b});
  if (node && node->needs(0)) tape.save(*node, b);
  if (node && node->needs(1)) tape.save(*node, a);
  Tensor out = batched(a, b);
  return finish(a, b, std::move(out), node);
}

Tensor baddbmm(Tensor input, Tensor a, Tensor b) {
  Tape& tape = a.tape();
  const Ref<Node> node = tape.make_node(
      [](BackwardCall& call) {  // batch1, then batch2, each times alpha; both are needed or none
        const Tensor right = transpose(call.saved[1], 1, 2);
        call.results[0] = mul_scalar(batched(call.grads[0], right));
        const Tensor left = transpose(call.saved[0], 1, 2);
        call.results[1] = mul_scalar(batched(left, call.grads[0]));
      },
      {&a, &b});
  if (node) {
    tape.save(*node, a);
    tape.save(*node, b);
  }
  Tensor out = batched(a, b);
  input.drop();
  return finish(a, b, std::move(out), node);
}

Tensor matmul(Tensor a, Tensor b) {
  Dims batch_a = a.sizes(), batch_b = b.sizes();
  for (Dims* dims : {&batch_a, &batch_b}) {
    dims->erase(dims->size() - 1);
    dims->erase(dims->size() - 1);
  }
  const Dims batch = broadcast(batch_a, batch_b);
  const auto flat = [&](const Tensor& given) {
    Tensor x = given;
    Dims sizes = batch;
    const std::int64_t rows = x.size(-2), columns = x.size(-1);
    sizes.push_back(rows);
    sizes.push_back(columns);
    x = expand(std::move(x), sizes);
    return reshape(std::move(x), {batch.count(), rows, columns});
  };
  Dims sizes = batch;
  sizes.push_back(a.size(-2));
  sizes.push_back(b.size(-1));
  Tensor left = flat(a);
  Tensor right = flat(b);
  Tensor out = view(bmm(left, right), sizes);
  drop(right, left);
  drop(a, b);
  return out;
}

namespace {

/// LinearFunctionForZeroStage3.backward: the input's gradient, the weight's, the bias's.
void backward_zero3_linear(BackwardCall& call) {
  const Tensor &grad = call.grads[0], &input = call.saved[0], &weight = call.saved[1];
  if (call.node.needs(0)) {
    const Tensor rows = fold(grad);
    call.results[0] = view(product(rows, weight, false), input.sizes());
  }
  if (call.node.needs(1)) {
    const Tensor columns = transpose(fold(grad), 0, 1);
    const Tensor rows = fold(input);
    call.results[1] = product(columns, rows, false);
  }
  if (call.node.needs(2)) call.results[2] = sum_to(grad, {grad.size(-1)});
}

/// What DeepSpeed's stage 3 puts in F.linear's place: one node that saves input, weight and bias, whether their
/// gradients are needed or not, when the product is there.
Tensor zero3_linear(Tensor x, Tensor weight, Tensor bias) {
  Tape& tape = x.tape();
  Dims sizes = x.sizes();
  sizes[-1] = weight.size(0);
  const Ref<Node> node = tape.make_node(backward_zero3_linear, {&x, &weight, &bias});
  Tensor out;
  {
    const NoGrad no_grad(tape);
    const Tensor rows = fold(x);
    out = view(product(rows, transpose(weight, 0, 1), false, bias && x.dims() == 2), sizes);
    if (bias && x.dims() > 2) tape.pointwise_kernel(2 * out.bytes());
  }
  for (const Tensor* tensor : {&x, &weight, &bias}) {
    if (node && *tensor) tape.save(*node, *tensor);
  }
  tape.attach(out, node);
  drop(x, weight, bias);
  return out;
}

}  // namespace

Tensor linear(Tensor x, Tensor weight, Tensor bias) {
  if (x.tape().under_zero3()) return zero3_linear(std::move(x), std::move(weight), std::move(bias));
  Dims sizes = x.sizes();
  sizes[-1] = weight.size(0);
  if (x.dims() == 2) {
    Tensor transposed = transpose(std::move(weight), 0, 1);
    return bias ? addmm(std::move(bias), std::move(x), std::move(transposed)) : mm(std::move(x), std::move(transposed));
  }
  if (bias && x.is_contiguous()) {
    Tensor rows = fold(std::move(x));
    Tensor transposed = transpose(std::move(weight), 0, 1);
    return view(addmm(std::move(bias), std::move(rows), std::move(transposed)), sizes);
  }
  Tensor transposed = transpose(std::move(weight), 0, 1);
  Tensor rows = fold(std::move(x));
  Tensor out = view(mm(std::move(rows), std::move(transposed)), sizes);
  return bias ? add(std::move(out), std::move(bias)) : out;
}

}  // namespace zeroplan::eager
