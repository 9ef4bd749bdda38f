#include "models/block_program.h"

#include <algorithm>
#include <stdexcept>

#include "models/block_lifetimes.h"

namespace zeroplan {
namespace {

/// Builds one program. Forward and backward are first lists of kernels with operands; births and deaths of slots follow
/// from first and last use.
class ProgramBuilder {
 public:
  ProgramBuilder(const BlockKind& kind, Recompute mode) : kind_(kind), mode_(mode) {}

  BlockProgram build() {
    assign_storage();
    choose_kept();
    forward_steps();
    backward_steps();
    births_and_deaths(program_);
    return std::move(program_);
  }

 private:
  const GraphOp& op(int index) const { return kind_.ops[static_cast<std::size_t>(index)]; }
  int num_ops() const { return static_cast<int>(kind_.ops.size()); }
  int slot_of(int value) const { return slot_of_value_[static_cast<std::size_t>(value)]; }
  bool kept(int slot) const { return kept_[static_cast<std::size_t>(slot)]; }

  int new_slot(BufferRole role, int value) {
    program_.slots.push_back({role, value});
    return static_cast<int>(program_.slots.size()) - 1;
  }

  // Values that are made in place share the slot of the value they replace.
  void assign_storage() {
    slot_of_value_.assign(kind_.values.size(), -1);
    writers_.clear();
    const auto give = [&](int value) {
      slot_of_value_[static_cast<std::size_t>(value)] = new_slot(BufferRole::value, value);
    };
    if (kind_.input >= 0) give(kind_.input);
    if (kind_.memory >= 0) give(kind_.memory);
    for (int i = 0; i < num_ops(); ++i) {
      const GraphOp& o = op(i);
      for (std::size_t k = 0; k < o.outputs.size(); ++k) {
        if (k == 0 && o.in_place >= 0) {
          slot_of_value_[static_cast<std::size_t>(o.outputs[0])] =
              slot_of(o.inputs[static_cast<std::size_t>(o.in_place)]);
        } else {
          give(o.outputs[k]);
        }
      }
    }
    writers_.resize(program_.slots.size());
    for (int i = 0; i < num_ops(); ++i) {
      for (int v : op(i).outputs) writers_[static_cast<std::size_t>(slot_of(v))].push_back(i);
    }
    program_.input = kind_.input >= 0 ? slot_of(kind_.input) : -1;
    program_.output = kind_.output >= 0 ? slot_of(kind_.output) : -1;
    program_.memory = kind_.memory >= 0 ? slot_of(kind_.memory) : -1;
    check_in_place();
  }

  // A value that some backward reads must still be in its storage at the end of forward.
  void check_in_place() const {
    for (const GraphOp& reader : kind_.ops) {
      for (int v : reader.keeps) {
        const auto& writers = writers_[static_cast<std::size_t>(slot_of(v))];
        if (writers.empty()) continue;
        const auto& last = op(writers.back()).outputs;
        if (std::find(last.begin(), last.end(), v) == last.end()) {
          throw std::logic_error("block '" + kind_.name + "': '" + kind_.values[static_cast<std::size_t>(v)].name +
                                 "' is overwritten in place but '" + reader.name + "' needs it in backward");
        }
      }
    }
  }

  // kept_: alive between forward and backward. needed_: read by some backward.
  void choose_kept() {
    needed_.assign(program_.slots.size(), false);
    for (const GraphOp& o : kind_.ops) {
      for (int v : o.keeps) needed_[static_cast<std::size_t>(slot_of(v))] = true;
    }
    kept_ = needed_;
    if (mode_ == Recompute::full) {
      kept_.assign(program_.slots.size(), false);
      if (program_.input >= 0) kept_[static_cast<std::size_t>(program_.input)] = true;
    } else if (mode_ == Recompute::selective) {
      for (std::size_t s = 0; s < kept_.size(); ++s) {
        if (kept_[s] && can_drop(static_cast<int>(s))) kept_[s] = false;
      }
    }
    if (program_.memory >= 0) kept_[static_cast<std::size_t>(program_.memory)] = true;
    if (program_.output >= 0 && program_.output != program_.input && kept_[static_cast<std::size_t>(program_.output)]) {
      throw std::logic_error("block '" + kind_.name + "': keeps its own output, which the next block owns");
    }
  }

  // Selective recompute drops what pointwise kernels alone can make again from kept values; statistics stay.
  bool can_drop(int slot) const {
    const auto& writers = writers_[static_cast<std::size_t>(slot)];
    if (writers.empty() || slot == program_.output) return false;
    for (int w : writers) {
      if (!op(w).pointwise) return false;
      if (slot_of(op(w).outputs[0]) != slot) return false;
      for (int v : op(w).inputs) {
        const int s = slot_of(v);
        if (s != slot && !needed_[static_cast<std::size_t>(s)] && s != program_.input) return false;
      }
    }
    return true;
  }

  ProgramStep forward_step(int index, Pass pass) const {
    const GraphOp& o = op(index);
    ProgramStep step;
    step.graph_op = index;
    step.pass = pass;
    for (std::size_t k = 0; k < o.inputs.size(); ++k) {
      const bool replaced = static_cast<int>(k) == o.in_place;
      step.operands.push_back({slot_of(o.inputs[k]), replaced ? Access::read_write : Access::read});
    }
    for (std::size_t k = 0; k < o.outputs.size(); ++k) {
      if (k == 0 && o.in_place >= 0) continue;
      step.operands.push_back({slot_of(o.outputs[k]), Access::write});
    }
    return step;
  }

  void forward_steps() {
    for (int i = 0; i < num_ops(); ++i) program_.forward.push_back(forward_step(i, Pass::forward));
    for (std::size_t s = 0; s < kept_.size(); ++s) {
      const bool through = static_cast<int>(s) == program_.memory;
      if (kept_[s] && !through) program_.saved.push_back(static_cast<int>(s));
    }
  }

  // --- backward -----------------------------------------------------------------------------------

  void backward_steps() {
    present_ = kept_;
    grad_.assign(kind_.values.size(), -1);
    if (kind_.output >= 0) {
      program_.output_gradient = new_slot(BufferRole::value_gradient, kind_.output);
      holders_.assign(program_.slots.size(), 0);
      set_gradient(kind_.output, program_.output_gradient);
    }
    if (kind_.memory >= 0) {
      program_.memory_gradient = new_slot(BufferRole::value_gradient, kind_.memory);
      set_gradient(kind_.memory, program_.memory_gradient);
    }
    if (mode_ == Recompute::full) recompute_forward();
    for (int i = num_ops() - 1; i >= 0; --i) backward_of(i);
    if (kind_.input >= 0) program_.input_gradient = grad_[static_cast<std::size_t>(kind_.input)];
    if (kind_.input >= 0 && program_.input_gradient < 0) {
      throw std::logic_error("block '" + kind_.name + "': no gradient reaches its input");
    }
  }

  // Full recompute: run again what leads to a value that a backward reads; the tail that leads to none is left out.
  void recompute_forward() {
    std::vector<bool> wanted = needed_;
    std::vector<bool> runs(kind_.ops.size(), false);
    for (int i = num_ops() - 1; i >= 0; --i) {
      bool run = false;
      for (int v : op(i).outputs) run = run || wanted[static_cast<std::size_t>(slot_of(v))];
      // An in-place tail that only overwrites a needed slot with a value nobody keeps must not run: see check_in_place.
      runs[static_cast<std::size_t>(i)] = run;
      if (!run) continue;
      for (int v : op(i).inputs) wanted[static_cast<std::size_t>(slot_of(v))] = true;
    }
    for (int i = 0; i < num_ops(); ++i) {
      if (!runs[static_cast<std::size_t>(i)]) continue;
      program_.backward.push_back(forward_step(i, Pass::recompute));
      for (int v : op(i).outputs) present_[static_cast<std::size_t>(slot_of(v))] = true;
    }
  }

  // Selective recompute: makes a dropped slot again just before its first reader.
  void require(int slot) {
    if (present_[static_cast<std::size_t>(slot)]) return;
    for (int w : writers_[static_cast<std::size_t>(slot)]) {
      for (int v : op(w).inputs) {
        if (slot_of(v) != slot) require(slot_of(v));
      }
      ProgramStep step = forward_step(w, Pass::recompute);
      // Statistics were kept: they are read, not made again.
      for (ProgramOperand& operand : step.operands) {
        if (operand.slot != slot && operand.access == Access::write) operand.access = Access::read;
      }
      program_.backward.push_back(std::move(step));
    }
    present_[static_cast<std::size_t>(slot)] = true;
  }

  void set_gradient(int value, int slot) {
    holders_.resize(program_.slots.size(), 0);
    grad_[static_cast<std::size_t>(value)] = slot;
    ++holders_[static_cast<std::size_t>(slot)];
  }
  int& holders(int slot) { return holders_[static_cast<std::size_t>(slot)]; }

  struct Contribution {
    int write = -1;  // slot that gets the value's gradient
    int read = -1;   // old gradient in another slot, to be added
    bool accumulate = false;
  };

  // Where a kernel puts its part of the gradient of `value`: a new slot; added in place when nobody else reads the old
  // one as the gradient of another value; else old + new into a new slot.
  Contribution contribute(int value) {
    const int old = grad_[static_cast<std::size_t>(value)];
    Contribution c;
    if (old >= 0 && holders(old) == 1) {
      c.write = old;
      c.accumulate = true;
      return c;
    }
    if (old >= 0) {
      --holders(old);
      c.read = old;
      c.accumulate = true;
    }
    c.write = new_slot(BufferRole::value_gradient, value);
    set_gradient(value, c.write);
    return c;
  }

  static void add_operands(ProgramStep& step, const Contribution& c) {
    if (c.read >= 0) step.operands.push_back({c.read, Access::read});
    step.operands.push_back({c.write, c.accumulate && c.read < 0 ? Access::read_write : Access::write});
    step.accumulate = step.accumulate || c.accumulate;
  }

  void backward_of(int index) {
    const GraphOp& o = op(index);
    const int y = o.outputs[0];
    const int g = grad_[static_cast<std::size_t>(y)];
    if (g < 0) return;  // nothing depends on it
    switch (o.kernel) {
      case Kernel::add:
        for (int v : o.inputs) pass_through(v, g);
        --holders(g);
        return;
      case Kernel::rotary:
        in_place_backward(index, g);
        return;
      case Kernel::linear:
      case Kernel::grouped_linear:
        weight_step(index, g);
        if (!o.inputs.empty()) data_step(index, g, Pass::backward_data);
        --holders(g);
        return;
      case Kernel::embedding:
        weight_step(index, g);
        --holders(g);
        return;
      case Kernel::norm:
      case Kernel::attention:
      case Kernel::activation:
      case Kernel::router:
      case Kernel::permute:
      case Kernel::combine:
        data_step(index, g, Pass::backward);
        --holders(g);
        return;
    }
  }

  // The gradient of a sum is the gradient of each addend.
  void pass_through(int value, int g) {
    const int old = grad_[static_cast<std::size_t>(value)];
    if (old < 0) {
      set_gradient(value, g);
      return;
    }
    ProgramStep step;
    step.pass = Pass::backward;
    const Contribution c = contribute(value);
    step.operands.push_back({g, Access::read});
    add_operands(step, c);
    program_.backward.push_back(std::move(step));
  }

  void in_place_backward(int index, int g) {
    const GraphOp& o = op(index);
    const int x = o.inputs[0];
    ProgramStep step;
    step.graph_op = index;
    step.pass = Pass::backward;
    if (holders(g) == 1 && grad_[static_cast<std::size_t>(x)] < 0) {
      step.operands.push_back({g, Access::read_write});
      set_gradient(x, g);
    } else {
      step.operands.push_back({g, Access::read});
      add_operands(step, contribute(x));
    }
    --holders(g);
    program_.backward.push_back(std::move(step));
  }

  bool has_trainable(const GraphOp& o) const {
    return std::any_of(o.tensors.begin(), o.tensors.end(),
                       [&](int t) { return kind_.tensors[static_cast<std::size_t>(t)].trainable; });
  }

  void weight_step(int index, int g) {
    const GraphOp& o = op(index);
    if (!has_trainable(o)) return;
    ProgramStep step;
    step.graph_op = index;
    step.pass = o.inputs.empty() ? Pass::backward : Pass::backward_weight;
    step.weight_gradient = true;
    step.operands.push_back({g, Access::read});
    read_kept(o, step);
    program_.backward.push_back(std::move(step));
  }

  void read_kept(const GraphOp& o, ProgramStep& step) {
    for (int v : o.keeps) {
      require(slot_of(v));
      step.operands.push_back({slot_of(v), Access::read});
    }
  }

  void data_step(int index, int g, Pass pass) {
    const GraphOp& o = op(index);
    ProgramStep step;
    step.graph_op = index;
    step.pass = pass;
    step.operands.push_back({g, Access::read});
    if (pass == Pass::backward) {
      step.weight_gradient = has_trainable(o);
      read_kept(o, step);
    }
    for (int v : o.inputs) add_operands(step, contribute(v));
    program_.backward.push_back(std::move(step));
  }

  const BlockKind& kind_;
  Recompute mode_;
  BlockProgram program_;
  std::vector<int> slot_of_value_;
  std::vector<std::vector<int>> writers_;  // ops that write a slot, in order
  std::vector<bool> kept_, needed_, present_;
  std::vector<int> grad_;     // slot of a value's gradient so far
  std::vector<int> holders_;  // how many values a gradient slot stands for
};

}  // namespace

BlockProgram build_program(const BlockKind& kind, Recompute recompute) {
  return ProgramBuilder(kind, recompute).build();
}

}  // namespace zeroplan
