#include "models/eager_tensor.h"

#include <algorithm>
#include <stdexcept>

#include "models/eager_tape.h"

namespace zeroplan::eager {

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

void Dims::insert(int at, std::int64_t value) {
  push_back(value);
  for (int i = size_ - 1; i > at; --i) std::swap((*this)[i], (*this)[i - 1]);
}

void Dims::erase(int at) {
  for (int i = at; i + 1 < size_; ++i) (*this)[i] = (*this)[i + 1];
  --size_;
}

std::int64_t Dims::count() const {
  std::int64_t product = 1;
  for (int i = 0; i < size_; ++i) product *= (*this)[i];
  return product;
}

std::int64_t bytes_of(Element type) {
  switch (type) {
    case Element::bf16:
    case Element::fp16:
      return 2;
    case Element::fp32:
    case Element::i32:
      return 4;
    case Element::fp64:
    case Element::i64:
      return 8;
    case Element::boolean:
      return 1;
  }
  return 0;
}

Element promote(Element a, Element b) {
  const auto rank = [](Element type) {
    switch (type) {
      case Element::boolean:
        return 0;
      case Element::i32:
        return 1;
      case Element::i64:
        return 2;
      case Element::bf16:
      case Element::fp16:
        return 3;
      case Element::fp32:
        return 4;
      case Element::fp64:
        return 5;
    }
    return 0;
  };
  return rank(a) >= rank(b) ? a : b;
}

void Storage::destroy(Storage* storage) {
  if (storage->id >= 0) storage->tape->record_free(storage->id);
  if (storage->hold >= 0) storage->tape->let_go(storage->parameter, storage->hold);
  delete storage;
}

void TensorImpl::destroy(TensorImpl* impl) { delete impl; }

Dims contiguous_strides(const Dims& sizes) {
  Dims strides = sizes;
  std::int64_t step = 1;
  for (int i = sizes.size() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<std::int64_t>(sizes[i], 1);
  }
  return strides;
}

bool Tensor::is_contiguous() const {
  std::int64_t step = 1;
  for (int i = dims() - 1; i >= 0; --i) {
    if (size(i) == 1) continue;
    if (strides()[i] != step) return false;
    step *= size(i);
  }
  return true;
}

bool Tensor::is_dense() const {
  // The next stride must be the product so far: dimension by dimension, at most kMaxDims of them.
  std::int64_t step = 1;
  std::array<bool, kMaxDims> seen{};
  for (int round = 0; round < dims(); ++round) {
    int found = -1;
    for (int i = 0; i < dims() && found < 0; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (!seen[at] && (size(i) == 1 || strides()[i] == step)) found = i;
    }
    if (found < 0) return false;
    seen[static_cast<std::size_t>(found)] = true;
    step *= size(found);
  }
  return true;
}

Dims broadcast(const Dims& a, const Dims& b) {
  Dims out = a.size() >= b.size() ? a : b;
  const Dims& less = a.size() >= b.size() ? b : a;
  for (int i = 1; i <= less.size(); ++i) {
    if (out[-i] == 1) {
      out[-i] = less[-i];
    } else if (less[-i] != 1 && less[-i] != out[-i]) {
      throw std::logic_error("eager step: shapes do not broadcast");
    }
  }
  return out;
}

namespace {

/// Stride of an operand along an output dimension; 0 where it is broadcast.
std::int64_t operand_stride(const Tensor& tensor, const Dims& sizes, int dim) {
  const int own = dim - (sizes.size() - tensor.dims());
  if (own < 0 || (tensor.size(own) == 1 && sizes[dim] != 1)) return 0;
  return tensor.strides()[own];
}

/// > 0: dim0 should come after dim1; < 0: before; 0: the operands do not say.
int compare_dims(const Dims& sizes, std::span<const Tensor* const> inputs, int dim0, int dim1) {
  for (const Tensor* tensor : inputs) {
    const std::int64_t stride0 = operand_stride(*tensor, sizes, dim0);
    const std::int64_t stride1 = operand_stride(*tensor, sizes, dim1);
    if (stride0 == 0 || stride1 == 0) continue;
    if (stride0 != stride1) return stride0 < stride1 ? -1 : 1;
    if (sizes[dim0] > sizes[dim1]) return 1;
  }
  return 0;
}

}  // namespace

Dims pointwise_strides(const Dims& sizes, std::span<const Tensor* const> inputs) {
  const int n = sizes.size();
  std::array<int, kMaxDims> perm{};
  const auto at = [&](int i) -> int& { return perm[static_cast<std::size_t>(i)]; };
  for (int i = 0; i < n; ++i) at(i) = n - 1 - i;
  for (int i = 1; i < n; ++i) {
    int dim1 = i;
    for (int dim0 = i - 1; dim0 >= 0; --dim0) {
      const int order = compare_dims(sizes, inputs, at(dim0), at(dim1));
      if (order < 0) break;
      if (order > 0) {
        std::swap(at(dim0), at(dim1));
        dim1 = dim0;
      }
    }
  }
  Dims strides = sizes;
  std::int64_t step = 1;
  for (int i = 0; i < n; ++i) {
    strides[at(i)] = step;
    step *= std::max<std::int64_t>(sizes[at(i)], 1);
  }
  return strides;
}

Dims preserved_strides(const Tensor& tensor) {
  const Tensor* inputs[] = {&tensor};
  return tensor.is_dense() ? tensor.strides() : pointwise_strides(tensor.sizes(), inputs);
}

// computeStride of aten/src/ATen/TensorUtils.cpp: chunks of dimensions that lie in one run of memory.
bool view_strides(const Tensor& tensor, const Dims& sizes, Dims& strides) {
  strides = sizes;
  if (tensor.count() == 0) {
    strides = contiguous_strides(sizes);
    return true;
  }
  int view_dim = sizes.size() - 1;
  std::int64_t base = tensor.dims() == 0 ? 1 : tensor.strides()[-1];
  std::int64_t chunk = 1, viewed = 1;
  for (int dim = tensor.dims() - 1; dim >= 0; --dim) {
    chunk *= tensor.size(dim);
    const bool ends = dim == 0 || (tensor.size(dim - 1) != 1 && tensor.strides()[dim - 1] != chunk * base);
    if (!ends) continue;
    while (view_dim >= 0 && (viewed < chunk || sizes[view_dim] == 1)) {
      strides[view_dim] = viewed * base;
      viewed *= sizes[view_dim];
      --view_dim;
    }
    if (viewed != chunk) return false;
    if (dim > 0) {
      base = tensor.strides()[dim - 1];
      chunk = 1;
      viewed = 1;
    }
  }
  while (view_dim >= 0 && sizes[view_dim] == 1) strides[view_dim--] = 1;
  return view_dim < 0;
}

}  // namespace zeroplan::eager
