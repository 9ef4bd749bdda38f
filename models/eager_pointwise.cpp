#include <array>
#include <utility>

#include "models/eager_ops.h"

namespace zeroplan::eager {
namespace {

Tensor run_pointwise(std::span<const Tensor* const> inputs, Element type) {
  Dims sizes = inputs[0]->sizes();
  for (const Tensor* input : inputs.subspan(1)) sizes = broadcast(sizes, input->sizes());
  Tape& tape = inputs[0]->tape();
  Tensor out = tape.allocate(sizes, pointwise_strides(sizes, inputs), type);
  std::int64_t traffic = out.bytes();
  for (const Tensor* input : inputs) traffic += input->bytes();
  tape.pointwise_kernel(traffic);
  return out;
}

Tensor finish(Tensor& x, Tensor out, const Ref<Node>& node) {
  x.tape().attach(out, node);
  x.drop();
  return out;
}

Tensor finish(Tensor& a, Tensor& b, Tensor out, const Ref<Node>& node) {
  a.tape().attach(out, node);
  a.drop();
  b.drop();
  return out;
}

void backward_to(BackwardCall& call) { call.results[0] = to(call.grads[0], call.node.type); }

// Derivatives come in the order of the arguments' names: other before self.
void backward_mul(BackwardCall& call) {
  std::size_t next = 0;
  const Tensor* other = call.node.needs(0) ? &call.saved[next++] : nullptr;
  const Tensor* self = call.node.needs(1) ? &call.saved[next] : nullptr;
  if (self != nullptr) call.results[1] = pointwise({&call.grads[0], self}, promote(call.grads[0].type(), self->type()));
  if (other != nullptr) {
    call.results[0] = pointwise({&call.grads[0], other}, promote(call.grads[0].type(), other->type()));
  }
}

void backward_add(BackwardCall& call) {
  for (std::size_t i = 0; i < 2; ++i) {
    if (call.node.needs(i)) call.results[i] = call.grads[0];
  }
}

void backward_sub(BackwardCall& call) {
  if (call.node.needs(1)) call.results[1] = pointwise({&call.grads[0]}, call.grads[0].type());
  if (call.node.needs(0)) call.results[0] = call.grads[0];
}

/// self: grad / other; other: -grad * ((self / other) / other).
void backward_div(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  const Tensor& other = call.saved[0];
  if (call.node.needs(1)) {
    Tensor negated = pointwise({&grad}, grad.type());
    Tensor once = pointwise({&call.saved[1], &other}, grad.type());
    Tensor twice = pointwise({&once, &other}, grad.type());
    once.drop();
    call.results[1] = pointwise({&negated, &twice}, grad.type());
    drop(twice, negated);
  }
  if (call.node.needs(0)) call.results[0] = pointwise({&grad, &other}, grad.type());
}

/// A number beside the tensor: the gradient takes one pass.
void backward_scale(BackwardCall& call) { call.results[0] = pointwise({&call.grads[0]}, call.grads[0].type()); }

void backward_pass(BackwardCall& call) { call.results[0] = call.grads[0]; }

/// grad * (exponent * self ^ (exponent - 1)).
void backward_pow(BackwardCall& call) {
  Tensor power = pointwise({&call.saved[0]}, call.saved[0].type());
  Tensor scaled = pointwise({&power}, power.type());
  call.results[0] = pointwise({&call.grads[0], &scaled}, call.grads[0].type());
  drop(scaled, power);
}

/// (-0.5 * grad) * result ^ 3.
void backward_rsqrt(BackwardCall& call) {
  Tensor power = pointwise({&call.saved[0]}, call.saved[0].type());
  Tensor scaled = pointwise({&call.grads[0]}, call.grads[0].type());
  call.results[0] = pointwise({&scaled, &power}, scaled.type());
  drop(scaled, power);
}

void backward_activation(BackwardCall& call) {
  call.results[0] = pointwise({&call.grads[0], &call.saved[0]}, call.grads[0].type());
}

void backward_mean(BackwardCall& call) {
  Tensor grad = call.grads[0];
  if (call.node.numbers[1] == 0) grad = unsqueeze(std::move(grad), static_cast<int>(call.node.numbers[0]));
  grad = expand(std::move(grad), call.node.dims);
  call.results[0] = pointwise({&grad}, grad.type());
}

void backward_sum(BackwardCall& call) {
  Tensor grad = call.grads[0];
  if (call.node.numbers[1] == 0) grad = unsqueeze(std::move(grad), static_cast<int>(call.node.numbers[0]));
  call.results[0] = expand(std::move(grad), call.node.dims);
}

void backward_cat(BackwardCall& call) {
  const auto dim = static_cast<int>(call.node.numbers[0]);
  std::int64_t start = 0;
  for (std::size_t i = 0; i < call.node.next.size(); ++i) {
    if (call.node.needs(i)) call.results[i] = slice(call.grads[0], dim, start, call.node.lengths[i]);
    start += call.node.lengths[i];
  }
}

void backward_masked_fill(BackwardCall& call) {
  call.results[0] = pointwise({&call.grads[0], &call.saved[0]}, call.grads[0].type());
}

Tensor scalar_op(Tensor x, Backward backward) {
  const Ref<Node> node = x.tape().make_node(backward, {&x});
  Tensor out = pointwise({&x}, x.type());
  return finish(x, std::move(out), node);
}

Tensor reduce(Tensor& x, int dim, bool keepdim, Backward backward) {
  if (dim < 0) dim += x.dims();
  const Ref<Node> node = x.tape().make_node(backward, {&x});
  if (node) {
    node->dims = x.sizes();
    node->numbers = {dim, keepdim ? 1 : 0};
  }
  Dims sizes = x.sizes();
  if (keepdim) {
    sizes[dim] = 1;
  } else {
    sizes.erase(dim);
  }
  Tensor out = x.tape().allocate(sizes, x.type());
  x.tape().pointwise_kernel(x.bytes() + out.bytes());
  return finish(x, std::move(out), node);
}

}  // namespace

Tensor pointwise(std::initializer_list<const Tensor*> inputs, Element type) {
  return run_pointwise({inputs.begin(), inputs.size()}, type);
}

Tensor to(Tensor x, Element type) {
  if (x.type() == type) return x;
  const Ref<Node> node = x.tape().make_node(backward_to, {&x});
  if (node) node->type = x.type();
  Tensor out = x.tape().allocate(x.sizes(), preserved_strides(x), type);
  x.tape().pointwise_kernel(x.bytes() + out.bytes());
  return finish(x, std::move(out), node);
}

Tensor mul(Tensor a, Tensor b) {
  Tape& tape = a.tape();
  const Ref<Node> node = tape.make_node(backward_mul, {&a, &b});
  if (node && node->needs(0)) tape.save(*node, b);
  if (node && node->needs(1)) tape.save(*node, a);
  Tensor out = pointwise({&a, &b}, promote(a.type(), b.type()));
  return finish(a, b, std::move(out), node);
}

Tensor add(Tensor a, Tensor b) {
  const Ref<Node> node = a.tape().make_node(backward_add, {&a, &b});
  Tensor out = pointwise({&a, &b}, promote(a.type(), b.type()));
  return finish(a, b, std::move(out), node);
}

Tensor sub(Tensor a, Tensor b) {
  const Ref<Node> node = a.tape().make_node(backward_sub, {&a, &b});
  Tensor out = pointwise({&a, &b}, promote(a.type(), b.type()));
  return finish(a, b, std::move(out), node);
}

Tensor div(Tensor a, Tensor b) {
  Tape& tape = a.tape();
  const Ref<Node> node = tape.make_node(backward_div, {&a, &b});
  if (node) tape.save(*node, b);
  if (node && node->needs(1)) tape.save(*node, a);
  Tensor out = pointwise({&a, &b}, promote(a.type(), b.type()));
  return finish(a, b, std::move(out), node);
}

Tensor mul_scalar(Tensor x) { return scalar_op(std::move(x), backward_scale); }
Tensor div_scalar(Tensor x) { return scalar_op(std::move(x), backward_scale); }
Tensor add_scalar(Tensor x) { return scalar_op(std::move(x), backward_pass); }
Tensor neg(Tensor x) { return scalar_op(std::move(x), backward_scale); }

Tensor add_in_place(Tensor x, Tensor y) {
  const Ref<Node> node = x.tape().make_node(backward_add, {&x, &y});
  x.tape().pointwise_kernel(2 * x.bytes() + y.bytes());
  return finish(x, y, detach(x), node);
}

Tensor scale_in_place(Tensor x) {
  const Ref<Node> node = x.tape().make_node(backward_scale, {&x});
  x.tape().pointwise_kernel(2 * x.bytes());
  return finish(x, detach(x), node);
}

Tensor pow_scalar(Tensor x) {
  const Ref<Node> node = x.tape().make_node(backward_pow, {&x});
  if (node) x.tape().save(*node, x);
  Tensor out = pointwise({&x}, x.type());
  return finish(x, std::move(out), node);
}

Tensor rsqrt(Tensor x) {
  const Ref<Node> node = x.tape().make_node(backward_rsqrt, {&x});
  Tensor out = pointwise({&x}, x.type());
  if (node) x.tape().save(*node, out);
  return finish(x, std::move(out), node);
}

Tensor activate(Tensor x, Activation function) {
  const bool keeps_input = function == Activation::silu || function == Activation::gelu;
  const Ref<Node> node = x.tape().make_node(backward_activation, {&x});
  if (node && keeps_input) x.tape().save(*node, x);
  Tensor out = pointwise({&x}, x.type());
  if (node && !keeps_input) x.tape().save(*node, out);
  return finish(x, std::move(out), node);
}

Tensor mean(Tensor x, int dim, bool keepdim) { return reduce(x, dim, keepdim, backward_mean); }
Tensor sum(Tensor x, int dim, bool keepdim) { return reduce(x, dim, keepdim, backward_sum); }

Tensor sum_to(Tensor x, const Dims& sizes) {
  const int leading = x.dims() - sizes.size();
  Dims kept = x.sizes();
  for (int i = 0; i < x.dims(); ++i) {
    if (i < leading || (sizes[i - leading] == 1 && x.size(i) != 1)) kept[i] = 1;
  }
  Tensor out = x.tape().allocate(kept, x.type());
  x.tape().pointwise_kernel(x.bytes() + out.bytes());
  x.drop();
  return leading > 0 ? view(std::move(out), sizes) : out;
}

Tensor cat(Tensors parts, int dim) {
  Tape& tape = parts[0].tape();
  if (dim < 0) dim += parts[0].dims();
  const Ref<Node> node = tape.make_node(backward_cat, std::span<const Tensor>(parts));
  Dims sizes = parts[0].sizes();
  sizes[dim] = 0;
  Element type = parts[0].type();
  for (const Tensor& part : parts) {
    sizes[dim] += part.size(dim);
    type = promote(type, part.type());
    if (node) node->lengths.push_back(part.size(dim));
  }
  if (node) node->numbers[0] = dim;
  Tensor out = tape.allocate(sizes, type);
  tape.pointwise_kernel(2 * out.bytes());
  tape.attach(out, node);
  while (!parts.empty()) parts.pop_back();  // lists and tuples die from their end
  return out;
}

Tensor stack_last(Tensor a, Tensor b) {
  Tape& tape = a.tape();
  const Ref<Node> node = tape.make_node(
      [](BackwardCall& call) {  // unbind: views
        for (std::size_t i = 0; i < 2; ++i) {
          if (!call.node.needs(i)) continue;
          Dims sizes = call.grads[0].sizes(), strides = call.grads[0].strides();
          sizes.erase(sizes.size() - 1);
          strides.erase(strides.size() - 1);
          call.results[i] = call.tape.alias(call.grads[0], sizes, strides);
        }
      },
      {&a, &b});
  Dims sizes = a.sizes();
  sizes.push_back(2);
  Tensor out = tape.allocate(sizes, a.type());
  tape.pointwise_kernel(2 * out.bytes());
  tape.attach(out, node);
  drop(a, b);
  return out;
}

namespace {

/// where with a number: the number becomes a tensor of the type for the moment.
Tensor choose(const Tensor& mask, const Tensor& x) {
  const Tensor number = x.tape().allocate({}, x.type());
  return pointwise({&mask, &x}, x.type());
}

}  // namespace

Tensor where_scalar(Tensor mask, Tensor x) {
  const Ref<Node> node =
      x.tape().make_node([](BackwardCall& call) { call.results[0] = choose(call.saved[0], call.grads[0]); }, {&x});
  if (node) x.tape().save(*node, mask);
  Tensor out = choose(mask, x);
  return finish(x, mask, std::move(out), node);
}

Tensor max_values(Tensor x) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(
      [](BackwardCall& call) {  // zeros, the gradient scattered in
        const Tensor zeros = call.tape.allocate(call.node.dims, call.grads[0].type());
        call.results[0] = call.tape.allocate(call.node.dims, call.grads[0].type());
        call.tape.pointwise_kernel(2 * zeros.bytes());
      },
      {&x});
  if (node) node->dims = x.sizes();
  Dims sizes = x.sizes();
  sizes[-1] = 1;
  Tensor out = tape.allocate(sizes, x.type());
  const Tensor indices = tape.allocate(sizes, Element::i64);
  tape.pointwise_kernel(x.bytes());
  if (node) tape.save(*node, indices);
  return finish(x, std::move(out), node);
}

Tensor clamp(Tensor x, bool both) {
  const Ref<Node> node = x.tape().make_node(
      [](BackwardCall& call) {
        const Tensor& kept = call.saved[0];
        const Tensor zero = call.tape.allocate({}, call.grads[0].type());
        const Tensor above = call.node.numbers[0] != 0 ? pointwise({&kept}, Element::boolean) : Tensor();
        const Tensor inside = pointwise({&kept}, Element::boolean);
        call.results[0] = pointwise({&inside, &call.grads[0]}, call.grads[0].type());
      },
      {&x});
  if (node) {
    node->numbers[0] = both ? 1 : 0;
    x.tape().save(*node, x);
  }
  Tensor out = pointwise({&x}, x.type());
  return finish(x, std::move(out), node);
}

Tensor masked_fill(Tensor x, Tensor mask) {
  const Ref<Node> node = x.tape().make_node(backward_masked_fill, {&x});
  if (node) x.tape().save(*node, mask);
  Tensor out = pointwise({&x, &mask}, x.type());
  return finish(x, mask, std::move(out), node);
}

}  // namespace zeroplan::eager
