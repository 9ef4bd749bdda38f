// The global norm and the optimizer.

#include <cmath>
#include <stdexcept>

#include "runtime/exact_sum.h"
#include "runtime/kernels/kernels.h"
#include "runtime/op_binding.h"

namespace zeroplan {
namespace {

/// PyTorch's clip_grad_norm_ divides by norm + 1e-6.
constexpr double kClipEpsilon = 1e-6;

std::span<float, ExactSum::kDigits> digits(const RankContext& context, BufferId norm) {
  const auto bytes = context.memory.bytes(norm);
  return std::span<float, ExactSum::kDigits>(reinterpret_cast<float*>(bytes.data()), ExactSum::kDigits);
}

/// What Adam multiplies gradients with: 1 / loss scale, and the clip factor. Not finite: the step must be left out.
double gradient_scale(const Plan& plan, const StepInput& input, double norm) {
  const double unscale = 1.0 / input.loss_scale;
  if (plan.clip_norm <= 0) return std::isfinite(norm) ? unscale : norm;
  const double clip = plan.clip_norm / (norm * unscale + kClipEpsilon);
  if (!std::isfinite(norm)) return norm;
  return std::min(1.0, clip) * unscale;
}

/// The buffers of one Adam op.
struct AdamBuffers {
  BufferId gradient;
  std::optional<BufferId> weights, master, moments, slot, norm;

  AdamBuffers(const Schedule& schedule, const Op& op) {
    const auto operands = schedule.operands(op);
    gradient = operands[0].buffer;
    for (const Operand& operand : operands.subspan(1)) take(schedule, operand.buffer);
  }

 private:
  void take(const Schedule& schedule, BufferId id) {
    switch (schedule.buffer(id).role) {
      case BufferRole::weights:
      case BufferRole::weight_shard:
      case BufferRole::weight_staging:
        weights = id;
        return;
      case BufferRole::master:
        master = id;
        return;
      case BufferRole::moments:
        moments = id;
        return;
      case BufferRole::state_slot:
        slot = id;
        return;
      case BufferRole::norm:
        norm = id;
        return;
      default:
        throw std::logic_error("executor: Adam with a buffer that it has no use for");
    }
  }
};

AdamRange adam_range(const RankContext& context, const AdamBuffers& buffers, std::int64_t n) {
  const Precision& p = context.plan.precision;
  AdamRange range;
  range.count = n;
  range.gradient_type = p.accumulation;
  range.gradient = context.part(buffers.gradient, n * size_of(p.accumulation)).data();
  range.moment_type = p.states;
  range.weights_type = p.weights;
  std::byte* weights = context.part(buffers.weights.value(), n * size_of(p.weights)).data();
  const std::int64_t master_bytes = !p.master ? 0 : p.split_master ? 2 * n : 4 * n;
  std::byte *master = nullptr, *moments = nullptr;
  if (buffers.slot) {
    master = context.memory.bytes(*buffers.slot).data();
    moments = master + master_bytes;
  } else {
    if (buffers.master) master = context.memory.bytes(*buffers.master).data();
    moments = context.memory.bytes(buffers.moments.value()).data();
  }
  range.first_moment = moments;
  range.second_moment = moments + n * size_of(p.states);
  if (!p.master) {
    range.master = reinterpret_cast<float*>(weights);
    return range;
  }
  range.weights = weights;
  if (p.split_master) {
    range.remainder = reinterpret_cast<std::int16_t*>(master);
  } else {
    range.master = reinterpret_cast<float*>(master);
  }
  return range;
}

}  // namespace

Action bind_adam(const RankContext& context, const Op& op, const AdamStep& work) {
  const AdamBuffers buffers(context.schedule, op);
  const AdamRange range = adam_range(context, buffers, work.parameters);
  ThreadPool* pool = work.where == UpdateOn::host ? &context.host_pool : &context.compute_pool;
  const bool has_norm = buffers.norm.has_value();
  const auto sum = has_norm ? digits(context, *buffers.norm).data() : nullptr;
  return [=, plan = &context.plan, input = &context.input]() -> std::optional<TimePoint> {
    double scale = 1.0 / input->loss_scale;
    if (has_norm) {
      const std::span<const float, ExactSum::kDigits> there(sum, ExactSum::kDigits);
      scale = gradient_scale(*plan, *input, std::sqrt(ExactSum::from_digits(there).value()));
    }
    // Every rank sees the same norm: all leave the step out, or none.
    if (!std::isfinite(scale)) return {};
    adam_step(adam_scalars(input->adam, input->update, scale), range, *pool);
    return {};
  };
}

Action bind_norm(const RankContext& context, const Op& op, const Compute& work) {
  const auto operands = context.schedule.operands(op);
  const auto to = digits(context, operands[1].buffer).data();
  if (work.graph_op == kNormSum) {
    const auto from = digits(context, operands[0].buffer).data();
    return [=]() -> std::optional<TimePoint> {
      ExactSum sum = ExactSum::from_digits(std::span<const float, ExactSum::kDigits>(to, ExactSum::kDigits));
      sum.add(ExactSum::from_digits(std::span<const float, ExactSum::kDigits>(from, ExactSum::kDigits)));
      sum.to_digits(std::span<float, ExactSum::kDigits>(to, ExactSum::kDigits));
      return {};
    };
  }
  const auto traffic = std::get<Pointwise>(work.kernel).traffic;
  const auto gradient = context.part(operands[0].buffer, static_cast<std::int64_t>(traffic.base()));
  ThreadPool* pool = work.on_host ? &context.host_pool : &context.compute_pool;
  return with_storage(context.plan.precision.accumulation, [&]<class G>(Storage<G>) -> Action {
    const std::span<const G> g(reinterpret_cast<const G*>(gradient.data()), gradient.size() / sizeof(G));
    return [=]() -> std::optional<TimePoint> {
      ExactSum sum = ExactSum::from_digits(std::span<const float, ExactSum::kDigits>(to, ExactSum::kDigits));
      sum_of_squares<G>(g, sum, *pool);
      sum.to_digits(std::span<float, ExactSum::kDigits>(to, ExactSum::kDigits));
      return {};
    };
  });
}

}  // namespace zeroplan
