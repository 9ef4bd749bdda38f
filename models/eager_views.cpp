#include <algorithm>
#include <stdexcept>

#include "models/eager_ops.h"

namespace zeroplan::eager {
namespace {

/// Attaches a view to its node and drops the base.
Tensor finish(Tensor& base, Tensor out, const Ref<Node>& node) {
  base.tape().attach(out, node);
  base.drop();
  return out;
}

/// -1 in `sizes` stands for what is left.
Dims infer(Dims sizes, std::int64_t count) {
  for (int i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != -1) continue;
    sizes[i] = 1;
    sizes[i] = count / std::max<std::int64_t>(sizes.count(), 1);
  }
  return sizes;
}

void backward_view(BackwardCall& call) { call.results[0] = reshape(std::move(call.grads[0]), call.node.dims); }

void backward_transpose(BackwardCall& call) {
  call.results[0] =
      transpose(call.grads[0], static_cast<int>(call.node.numbers[0]), static_cast<int>(call.node.numbers[1]));
}

/// The engine sums what was expanded (fit_gradient).
void backward_expand(BackwardCall& call) { call.results[0] = call.grads[0]; }

void backward_unsqueeze(BackwardCall& call) {
  call.results[0] = squeeze(call.grads[0], static_cast<int>(call.node.numbers[0]));
}

void backward_squeeze(BackwardCall& call) {
  call.results[0] = unsqueeze(call.grads[0], static_cast<int>(call.node.numbers[0]));
}

/// slice_backward and select_backward: zeros of the whole, the part copied in.
void backward_slice(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  call.results[0] = call.tape.allocate(call.node.dims, grad.type());
  call.tape.pointwise_kernel(call.results[0].bytes() + 2 * grad.bytes());
}

void backward_split(BackwardCall& call) {
  Tensors parts;
  for (std::size_t i = 0; i < call.grads.size(); ++i) {
    if (call.grads[i]) {
      parts.push_back(call.grads[i]);
      continue;
    }
    Dims sizes = call.node.dims;
    sizes[static_cast<int>(call.node.numbers[0])] = call.node.lengths[i];
    parts.push_back(call.tape.allocate(sizes, call.node.type));
    call.tape.pointwise_kernel(parts.back().bytes());
  }
  call.results[0] = cat(std::move(parts), static_cast<int>(call.node.numbers[0]));
}

void backward_clone(BackwardCall& call) { call.results[0] = call.grads[0]; }

int from_end(const Tensor& x, int dim) { return dim < 0 ? dim + x.dims() : dim; }

}  // namespace

Tensor view(Tensor x, Dims sizes) {
  sizes = infer(sizes, x.count());
  Dims strides;
  if (!view_strides(x, sizes, strides)) throw std::logic_error("eager step: no such view");
  const Ref<Node> node = x.tape().make_node(backward_view, {&x});
  if (node) node->dims = x.sizes();
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensor reshape(Tensor x, Dims sizes) {
  sizes = infer(sizes, x.count());
  Dims strides;
  if (view_strides(x, sizes, strides)) return view(std::move(x), sizes);
  Tensor copy = contiguous(std::move(x));
  return view(std::move(copy), sizes);
}

Tensor transpose(Tensor x, int dim0, int dim1) {
  dim0 = from_end(x, dim0);
  dim1 = from_end(x, dim1);
  const Ref<Node> node = x.tape().make_node(backward_transpose, {&x});
  if (node) node->numbers = {dim0, dim1};
  Dims sizes = x.sizes(), strides = x.strides();
  std::swap(sizes[dim0], sizes[dim1]);
  std::swap(strides[dim0], strides[dim1]);
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensor permute(Tensor x, std::initializer_list<int> order) {
  const Ref<Node> node = x.tape().make_node(
      [](BackwardCall& call) {
        const Tensor& grad = call.grads[0];
        Dims sizes = grad.sizes(), strides = grad.strides();
        for (int i = 0; i < grad.dims(); ++i) {
          sizes[static_cast<int>(call.node.dims[i])] = grad.size(i);
          strides[static_cast<int>(call.node.dims[i])] = grad.strides()[i];
        }
        call.results[0] = call.tape.alias(grad, sizes, strides);
      },
      {&x});
  Dims sizes, strides;
  for (const int dim : order) {
    if (node) node->dims.push_back(dim);
    sizes.push_back(x.size(dim));
    strides.push_back(x.strides()[dim]);
  }
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensor expand(Tensor x, Dims sizes) {
  Dims strides = sizes;
  for (int i = 0; i < sizes.size(); ++i) {
    const int own = i - (sizes.size() - x.dims());
    if (own >= 0 && sizes[i] == -1) sizes[i] = x.size(own);
    strides[i] = own < 0 || (x.size(own) == 1 && sizes[i] != 1) ? 0 : x.strides()[own];
  }
  const Ref<Node> node = x.tape().make_node(backward_expand, {&x});
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensor unsqueeze(Tensor x, int dim) {
  if (dim < 0) dim += x.dims() + 1;
  const Ref<Node> node = x.tape().make_node(backward_unsqueeze, {&x});
  if (node) node->numbers[0] = dim;
  Dims sizes = x.sizes(), strides = x.strides();
  strides.insert(dim, dim < x.dims() ? x.size(dim) * x.strides()[dim] : 1);
  sizes.insert(dim, 1);
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensor squeeze(Tensor x, int dim) {
  dim = from_end(x, dim);
  const Ref<Node> node = x.tape().make_node(backward_squeeze, {&x});
  if (node) node->numbers[0] = dim;
  Dims sizes = x.sizes(), strides = x.strides();
  sizes.erase(dim);
  strides.erase(dim);
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensor select(Tensor x, int dim) {
  dim = from_end(x, dim);
  const Ref<Node> node = x.tape().make_node(backward_slice, {&x});
  if (node) node->dims = x.sizes();
  Dims sizes = x.sizes(), strides = x.strides();
  sizes.erase(dim);
  strides.erase(dim);
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensor slice(Tensor x, int dim, std::int64_t /*start*/, std::int64_t length, std::int64_t step) {
  dim = from_end(x, dim);
  if (length == x.size(dim) && step == 1) {  // Python's indexing makes an alias of it
    const Ref<Node> same = x.tape().make_node(backward_clone, {&x});
    return finish(x, detach(x), same);
  }
  const Ref<Node> node = x.tape().make_node(backward_slice, {&x});
  if (node) node->dims = x.sizes();
  Dims sizes = x.sizes(), strides = x.strides();
  sizes[dim] = length;
  strides[dim] *= step;
  return finish(x, x.tape().alias(x, sizes, strides), node);
}

Tensors split(Tensor x, const std::vector<std::int64_t>& lengths, int dim) {
  dim = from_end(x, dim);
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_split, {&x});
  if (node) {
    node->dims = x.sizes();
    node->type = x.type();
    node->numbers[0] = dim;
    node->lengths = lengths;
    node->outputs = static_cast<int>(lengths.size());
  }
  Tensors parts;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    Dims sizes = x.sizes();
    sizes[dim] = lengths[i];
    parts.push_back(tape.alias(x, sizes, x.strides()));
    tape.attach(parts.back(), node, static_cast<int>(i));
  }
  return parts;
}

Tensor contiguous(Tensor x) {
  if (x.is_contiguous()) return x;
  const Ref<Node> node = x.tape().make_node(backward_clone, {&x});
  Tensor out = x.tape().allocate(x.sizes(), x.type());
  x.tape().pointwise_kernel(2 * out.bytes());
  return finish(x, std::move(out), node);
}

Tensor clone(Tensor x) {
  const Ref<Node> node = x.tape().make_node(backward_clone, {&x});
  const Tensor* inputs[] = {&x};
  Tensor out =
      x.tape().allocate(x.sizes(), x.is_dense() ? x.strides() : pointwise_strides(x.sizes(), inputs), x.type());
  x.tape().pointwise_kernel(2 * out.bytes());
  return finish(x, std::move(out), node);
}

Tensor detach(const Tensor& x) { return x.tape().alias(x, x.sizes(), x.strides()); }

}  // namespace zeroplan::eager
