#include "runtime/op_operands.h"

#include <stdexcept>

namespace zeroplan {
namespace {

class Sorter {
 public:
  Sorter(const Schedule& schedule, bool backward) : schedule_(schedule), expect_gradient_(backward) {}

  void take(const Operand& operand) {
    const BufferId id = operand.buffer;
    switch (schedule_.buffer(id).role) {
      case BufferRole::value:
        result.values.push_back(id);
        return;
      case BufferRole::value_gradient:
        return take_gradient(operand);
      case BufferRole::weights:
        result.weights.push_back(id);
        return;
      case BufferRole::gradient:
        result.weight_gradients.push_back({id, operand.access == Access::read_write});
        return;
      case BufferRole::token_ids:
        result.token_ids = id;
        return;
      case BufferRole::logits:
        result.logits = id;
        return;
      case BufferRole::scalars:
        result.scalars = id;
        return;
      case BufferRole::weight_shard:
      case BufferRole::weight_staging:
      case BufferRole::gradient_staging:
      case BufferRole::gradient_shard:
      case BufferRole::master:
      case BufferRole::moments:
      case BufferRole::state_slot:
      case BufferRole::norm:
      case BufferRole::workspace:
        break;
    }
    throw std::logic_error("kernel operands: a buffer that no kernel of a graph uses");
  }

  KernelOperands result;

 private:
  void take_gradient(const Operand& operand) {
    const BufferId id = operand.buffer;
    if (expect_gradient_) {
      expect_gradient_ = false;
      result.gradient = id;
      if (operand.access == Access::read_write) result.targets.push_back({id, {}});  // turned in place
    } else if (operand.access == Access::read) {
      base_ = id;
    } else {
      if (operand.access == Access::read_write) base_ = id;
      result.targets.push_back({id, base_});
      base_.reset();
    }
  }

  const Schedule& schedule_;
  bool expect_gradient_;
  std::optional<BufferId> base_;
};

}  // namespace

KernelOperands kernel_operands(const Schedule& schedule, const Op& op, bool backward) {
  Sorter sorter(schedule, backward);
  for (const Operand& operand : schedule.operands(op)) sorter.take(operand);
  return std::move(sorter.result);
}

}  // namespace zeroplan
