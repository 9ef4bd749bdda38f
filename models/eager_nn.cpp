#include <utility>

#include "models/eager_ops.h"

namespace zeroplan::eager {
namespace {

void backward_embedding(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  call.results[0] = call.tape.allocate(call.node.dims, grad.type());
  call.tape.pointwise_kernel(call.results[0].bytes() + grad.bytes());
}

void backward_layer_norm(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  if (call.node.needs(0)) call.results[0] = call.tape.allocate(grad.sizes(), grad.type());
  for (std::size_t i = 1; i < call.node.next.size(); ++i) {
    if (call.node.needs(i)) call.results[i] = call.tape.allocate(call.node.dims, grad.type());
  }
  call.tape.pointwise_kernel(3 * grad.bytes());
}

/// The kernel for CUDA writes grad x output to memory first.
void backward_softmax(BackwardCall& call) {
  const Tensor& grad = call.grads[0];
  Tensor product = call.tape.allocate(grad.sizes(), grad.type());
  call.results[0] = call.tape.allocate(grad.sizes(), grad.type());
  call.tape.pointwise_kernel(5 * grad.bytes());
}

void backward_pointwise(BackwardCall& call) {
  call.results[0] = pointwise({&call.grads[0], &call.saved[0]}, call.grads[0].type());
}

void backward_nll(BackwardCall& call) {
  const Tensor& probabilities = call.saved[0];
  call.results[0] = call.tape.allocate(probabilities.sizes(), probabilities.type());
  call.tape.pointwise_kernel(probabilities.bytes());
}

}  // namespace

Tensor embedding(Tensor weight, Tensor ids) {
  Tape& tape = weight.tape();
  const Ref<Node> node = tape.make_node(backward_embedding, {&weight});
  if (node) {
    node->dims = weight.sizes();
    tape.save(*node, ids);
  }
  Dims sizes = ids.sizes();
  sizes.push_back(weight.size(1));
  Tensor out = tape.allocate(sizes, weight.type());
  tape.pointwise_kernel(2 * out.bytes());
  tape.attach(out, node);
  drop(weight, ids);
  return out;
}

Tensor layer_norm(Tensor x, Tensor weight, Tensor bias) {
  Tape& tape = x.tape();
  const Ref<Node> node = bias ? tape.make_node(backward_layer_norm, {&x, &weight, &bias})
                              : tape.make_node(backward_layer_norm, {&x, &weight});
  if (node) {
    node->dims = weight.sizes();
    if (bias) tape.save(*node, bias);
    tape.save(*node, x);
    tape.save(*node, weight);
  }
  Dims rows = x.sizes();
  rows[-1] = 1;
  Tensor out = tape.allocate(x.sizes(), x.type());
  Tensor center = tape.allocate(rows, tape.statistic_type(x.type()));
  Tensor deviation = tape.allocate(rows, tape.statistic_type(x.type()));
  tape.pointwise_kernel(2 * out.bytes());
  if (node) {
    tape.save(*node, center);
    tape.save(*node, deviation);
  }
  tape.attach(out, node);
  drop(center, deviation);
  drop(x, weight, bias);
  return out;
}

Tensor dropout(Tensor x, double probability) {
  if (probability <= 0) return x;
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_pointwise, {&x});
  const Tensor* inputs[] = {&x};
  const Dims strides = pointwise_strides(x.sizes(), inputs);
  Tensor out = tape.allocate(x.sizes(), strides, x.type());
  Tensor mask = tape.allocate(x.sizes(), strides, Element::boolean);
  tape.pointwise_kernel(x.bytes() + out.bytes() + mask.bytes());
  if (node) tape.save(*node, mask);
  tape.attach(out, node);
  drop(mask, x);
  return out;
}

namespace {

/// One pass over x whose backward needs the result.
Tensor keeping_result(Tensor x, void (*backward)(BackwardCall&)) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward, {&x});
  Tensor out = tape.allocate(x.sizes(), x.type());
  tape.pointwise_kernel(2 * out.bytes());
  if (node) tape.save(*node, out);
  tape.attach(out, node);
  x.drop();
  return out;
}

}  // namespace

Tensor softmax(Tensor x) { return keeping_result(std::move(x), backward_softmax); }

Tensor log_softmax(Tensor x) { return keeping_result(std::move(x), backward_pointwise); }

Tensor nll_loss(Tensor log_probabilities, Tensor labels) {
  Tape& tape = log_probabilities.tape();
  const Ref<Node> node = tape.make_node(backward_nll, {&log_probabilities});
  if (node) {
    tape.save(*node, log_probabilities);
    tape.save(*node, labels);
  }
  Tensor loss = tape.allocate({}, log_probabilities.type());
  Tensor weight = tape.allocate({}, log_probabilities.type());
  if (node) tape.save(*node, weight);
  tape.attach(loss, node);
  drop(weight, log_probabilities, labels);
  return loss;
}

}  // namespace zeroplan::eager
