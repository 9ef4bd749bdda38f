#include "models/op_kind.h"

#include <array>
#include <stdexcept>

#include "models/overloaded.h"

namespace zeroplan {
namespace {

OpKind kind_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::embedding:
      return OpKind::embedding;
    case Kernel::norm:
      return OpKind::norm;
    case Kernel::linear:
    case Kernel::grouped_linear:
      return OpKind::matmul;
    case Kernel::rotary:
      return OpKind::rotary;
    case Kernel::attention:
      return OpKind::attention;
    case Kernel::activation:
      return OpKind::activation;
    case Kernel::add:
      return OpKind::sum;
    case Kernel::router:
    case Kernel::permute:
    case Kernel::combine:
      return OpKind::routing;
  }
  throw std::logic_error("op_kind: unknown kernel");
}

OpKind kind_of(const Compute& c, const ModelSpec& model) {
  if (c.graph_op >= 0) {
    const auto kind = static_cast<std::size_t>(c.kind), op = static_cast<std::size_t>(c.graph_op);
    if (c.kind < 0 || kind >= model.kinds.size() || op >= model.kinds[kind].ops.size()) {
      throw std::logic_error("op_kind: a graph op that the model does not have");
    }
    return kind_of(model.kinds[kind].ops[op].kernel);
  }
  switch (c.graph_op) {
    case kHeadLogits:
    case kHeadData:
    case kHeadWeight:
      return OpKind::matmul;
    case kHeadLoss:
      return OpKind::loss;
    case kGradientSum:
    case kAccumulate:
      return OpKind::sum;
    case kGradientNorm:
    case kNormSum:
      return OpKind::gradient_norm;
    case kZero:
    case kHostPass:
      return OpKind::clear;
    default:
      throw std::logic_error("op_kind: unknown op code");
  }
}

OpKind kind_of(const Collective& c) {
  switch (c.kind) {
    case CollectiveKind::all_gather:
      return OpKind::all_gather;
    case CollectiveKind::reduce_scatter:
      return OpKind::reduce_scatter;
    case CollectiveKind::all_reduce:
      return OpKind::all_reduce;
  }
  throw std::logic_error("op_kind: unknown collective");
}

OpKind kind_of(const Copy& c) {
  if (c.from == Memory::nvme) return OpKind::nvme_read;
  if (c.to == Memory::nvme) return OpKind::nvme_write;
  return c.to == Memory::hbm ? OpKind::h2d : OpKind::d2h;
}

}  // namespace

std::string_view to_string(OpKind kind) {
  static constexpr std::array<std::string_view, kNumOpKinds> names{
      "matmul",     "attention", "norm",          "rotary",    "activation", "embedding",  "loss",
      "sum",        "routing",   "gradient norm", "clear",     "Adam",       "all-gather", "reduce-scatter",
      "all-reduce", "h2d",       "d2h",           "NVMe read", "NVMe write", "bookkeeping"};
  return names[static_cast<std::size_t>(kind)];
}

OpKind op_kind(const Work& work, const ModelSpec& model) {
  return std::visit(overloaded{
                        [](const Alloc&) { return OpKind::bookkeeping; },
                        [](const Free&) { return OpKind::bookkeeping; },
                        [](const Join&) { return OpKind::bookkeeping; },
                        [&](const Compute& c) { return kind_of(c, model); },
                        [](const Collective& c) { return kind_of(c); },
                        [](const Copy& c) { return kind_of(c); },
                        [](const AdamStep&) { return OpKind::adam; },
                    },
                    work);
}

}  // namespace zeroplan
