#pragma once
// Tensors as PyTorch has them: handles that share counted storages. Nothing is computed; what matters is which
// storage lives when. Names and rules are PyTorch's (c10/core, aten, torch/csrc/autograd), see docs/eager-step.md.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>

#include "models/units.h"

namespace zeroplan::eager {

inline constexpr int kMaxDims = 6;

/// Sizes or strides of a tensor. Indices may count from the end: [-1] is the last.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values) {
    for (const std::int64_t value : values) push_back(value);
  }
  int size() const { return size_; }
  std::int64_t operator[](int i) const { return values_[index(i)]; }
  std::int64_t& operator[](int i) { return values_[index(i)]; }
  void push_back(std::int64_t value) { values_[static_cast<std::size_t>(size_++)] = value; }
  void insert(int at, std::int64_t value);
  void erase(int at);
  /// Product of all.
  std::int64_t count() const;
  friend bool operator==(const Dims& a, const Dims& b) {
    if (a.size_ != b.size_) return false;
    for (int i = 0; i < a.size_; ++i) {
      if (a[i] != b[i]) return false;
    }
    return true;
  }

 private:
  std::size_t index(int i) const { return static_cast<std::size_t>(i < 0 ? i + size_ : i); }
  std::array<std::int64_t, kMaxDims> values_{};
  int size_ = 0;
};

enum class Element : std::uint8_t { bf16, fp16, fp32, fp64, i64, i32, boolean };
/// What kernels on such elements compute in; fp32 for all that is not 16 bits wide.
DType kernel_type(Element type);
std::int64_t bytes_of(Element type);
/// Floating types promote to the wider one; integers and booleans give way.
Element promote(Element a, Element b);

/// Intrusive reference. T has `int refs` and `static void destroy(T*)`.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* p) : p_(p) { retain(); }
  Ref(const Ref& other) : p_(other.p_) { retain(); }
  Ref(Ref&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
  Ref& operator=(const Ref& other) {
    Ref copy(other);
    std::swap(p_, copy.p_);
    return *this;
  }
  Ref& operator=(Ref&& other) noexcept {
    Ref moved(std::move(other));
    std::swap(p_, moved.p_);
    return *this;
  }
  ~Ref() { reset(); }
  void reset() {
    T* p = std::exchange(p_, nullptr);
    if (p != nullptr && --p->refs == 0) T::destroy(p);
  }
  T* get() const { return p_; }
  T* operator->() const { return p_; }
  T& operator*() const { return *p_; }
  explicit operator bool() const { return p_ != nullptr; }
  friend bool operator==(const Ref& a, const Ref& b) { return a.p_ == b.p_; }

 private:
  void retain() {
    if (p_ != nullptr) ++p_->refs;
  }
  T* p_ = nullptr;
};

class Tape;
struct Node;

struct Storage {
  int refs = 0;
  std::int32_t id = -1;         // -1: not counted (parameters, buffers, token ids)
  std::int32_t parameter = -1;  // a parameter's own, or what holds one
  std::int32_t hold = -1;       // number of that hold
  std::int64_t bytes = 0;
  Tape* tape = nullptr;
  static void destroy(Storage* storage);
};

struct TensorImpl {
  int refs = 0;
  Element type = Element::bf16;
  bool requires_grad = false;
  int parameter = -1;  // leaf: index into EagerStep::parameters
  int output = 0;      // of grad_fn
  Tape* tape = nullptr;
  Ref<Storage> storage;
  Dims sizes, strides;
  Ref<Node> grad_fn;
  Ref<Node> accumulator;  // of a leaf that is no parameter
  static void destroy(TensorImpl* impl);
};

/// A Python variable. Assignment drops what it held before; drop() is `del`.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(TensorImpl* impl) : impl_(impl) {}
  explicit operator bool() const { return static_cast<bool>(impl_); }
  void drop() { impl_.reset(); }
  TensorImpl& impl() const { return *impl_; }
  Tape& tape() const { return *impl_->tape; }
  const Dims& sizes() const { return impl_->sizes; }
  const Dims& strides() const { return impl_->strides; }
  std::int64_t size(int dim) const { return impl_->sizes[dim]; }
  int dims() const { return impl_->sizes.size(); }
  std::int64_t count() const { return impl_->sizes.count(); }
  Element type() const { return impl_->type; }
  std::int64_t bytes() const { return count() * bytes_of(type()); }
  bool requires_grad() const { return impl_ && impl_->requires_grad; }
  int owners() const { return impl_ ? impl_->refs : 0; }
  bool is_contiguous() const;
  /// No gaps and no overlaps, in some order of dimensions.
  bool is_dense() const;
  friend bool operator==(const Tensor& a, const Tensor& b) { return a.impl_ == b.impl_; }

 private:
  Ref<TensorImpl> impl_;
};

template <class... Tensors>
void drop(Tensors&... tensors) {
  (tensors.drop(), ...);
}

Dims contiguous_strides(const Dims& sizes);
/// Sizes that a and b broadcast to. Throws std::logic_error when they do not.
Dims broadcast(const Dims& a, const Dims& b);
/// Strides of a pointwise op's output: TensorIterator::reorder_dimensions (aten/src/ATen/TensorIterator.cpp).
Dims pointwise_strides(const Dims& sizes, std::span<const Tensor* const> inputs);
/// Strides of empty_like and of copies: the tensor's own where it is dense, else its order of dimensions without gaps.
Dims preserved_strides(const Tensor& tensor);
/// Strides with which `sizes` is a view of the tensor; false: there is no such view.
bool view_strides(const Tensor& tensor, const Dims& sizes, Dims& strides);

}  // namespace zeroplan::eager
