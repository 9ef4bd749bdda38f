#pragma once
// aten's operators as far as models use them: what each allocates, what its node saves and what its backward
// allocates, in order (torch 2.11: tools/autograd/derivatives.yaml and the kernels it names). Arguments are taken by
// value and dropped when the op has run, as Python drops its stack.

#include <span>
#include <vector>

#include "models/eager_tape.h"

namespace zeroplan::eager {

// --- views (eager_views.cpp) ----------------------------------------------------------------------
/// Throws std::logic_error where PyTorch's view would.
Tensor view(Tensor x, Dims sizes);
/// A view where there is one, else a contiguous copy.
Tensor reshape(Tensor x, Dims sizes);
Tensor transpose(Tensor x, int dim0, int dim1);
Tensor permute(Tensor x, std::initializer_list<int> order);
Tensor expand(Tensor x, Dims sizes);
Tensor unsqueeze(Tensor x, int dim);
Tensor squeeze(Tensor x, int dim);
Tensor select(Tensor x, int dim);
/// x[..., start : start + length, ...]; the whole dimension is a view too.
Tensor slice(Tensor x, int dim, std::int64_t start, std::int64_t length, std::int64_t step = 1);
Tensors split(Tensor x, const std::vector<std::int64_t>& lengths, int dim);
Tensor contiguous(Tensor x);
Tensor clone(Tensor x);
Tensor detach(const Tensor& x);

// --- pointwise and reductions (eager_pointwise.cpp) -----------------------------------------------
Tensor to(Tensor x, Element type);
Tensor mul(Tensor a, Tensor b);
Tensor add(Tensor a, Tensor b);
Tensor sub(Tensor a, Tensor b);
Tensor div(Tensor a, Tensor b);
/// A Python number beside the tensor.
Tensor mul_scalar(Tensor x);
Tensor add_scalar(Tensor x);
Tensor div_scalar(Tensor x);
Tensor neg(Tensor x);
/// x += y and x /= number: no storage of their own.
Tensor add_in_place(Tensor x, Tensor y);
Tensor scale_in_place(Tensor x);
Tensor pow_scalar(Tensor x);
Tensor rsqrt(Tensor x);
/// Functions whose backward is one kernel: they keep their input or their output.
enum class Activation : std::uint8_t { silu, gelu, relu, tanh, sigmoid, exp };
Tensor activate(Tensor x, Activation function);
Tensor mean(Tensor x, int dim, bool keepdim);
Tensor sum(Tensor x, int dim, bool keepdim);
Tensor sum_to(Tensor x, const Dims& sizes);
Tensor cat(Tensors parts, int dim);
/// torch.stack of two along a new last dimension.
Tensor stack_last(Tensor a, Tensor b);
/// Without a gradient: a new tensor of the broadcast size that reads the inputs.
Tensor pointwise(std::initializer_list<const Tensor*> inputs, Element type);
Tensor masked_fill(Tensor x, Tensor mask);
/// x.max(-1, keepdim=True).values; the indices are kept for backward.
Tensor max_values(Tensor x);
/// clamp between numbers: one bound or both.
Tensor clamp(Tensor x, bool both);
/// torch.where(mask, x, number).
Tensor where_scalar(Tensor mask, Tensor x);

// --- matrix products (eager_matmul.cpp) -----------------------------------------------------------
Tensor mm(Tensor a, Tensor b);
Tensor addmm(Tensor bias, Tensor a, Tensor b);
Tensor bmm(Tensor a, Tensor b);
/// torch.matmul of two tensors with more than two dimensions each.
Tensor matmul(Tensor a, Tensor b);
/// F.linear; `bias` may be undefined.
Tensor linear(Tensor x, Tensor weight, Tensor bias);
/// baddbmm: input + a b.
Tensor baddbmm(Tensor input, Tensor a, Tensor b);

// --- layers' kernels (eager_nn.cpp) ---------------------------------------------------------------
Tensor embedding(Tensor weight, Tensor ids);
Tensor layer_norm(Tensor x, Tensor weight, Tensor bias);
/// CUDA's: keeps a mask of one byte an element. probability 0: x itself.
Tensor dropout(Tensor x, double probability);
Tensor softmax(Tensor x);
Tensor log_softmax(Tensor x);
/// Mean negative log-likelihood of rows.
Tensor nll_loss(Tensor log_probabilities, Tensor labels);

struct SdpaOptions {
  double dropout = 0;
  bool causal = true;
  bool grouped = false;  // enable_gqa
};
/// scaled_dot_product_attention: flash, memory-efficient or math kernel by the rules of torch's dispatcher.
Tensor sdpa(Tensor q, Tensor k, Tensor v, Tensor mask, SdpaOptions options);

}  // namespace zeroplan::eager
