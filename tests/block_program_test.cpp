// Backward as derived from a block's graph: right by an interpreter that knows nothing of slots, and as small as the
// published accounts of kept activations.

#include "models/block_program.h"

#include <map>
#include <optional>
#include <set>

#include "tests/catch.h"
#include "tests/model_test_support.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

constexpr std::array kModes{Recompute::none, Recompute::selective, Recompute::full};

/// Plays a program on one number a value. Ops are linear with random integer factors (arithmetic wraps, so it is
/// exact), and every slot remembers which value it holds.
class Interpreter {
 public:
  Interpreter(const BlockKind& kind, const BlockProgram& program, Random& random)
      : kind_(kind),
        program_(program),
        holds_(program.slots.size(), -1),
        alive_(program.slots.size(), false),
        gradient_(program.slots.size(), 0) {
    for (const GraphOp& op : kind.ops) {
      auto& factors = factors_.emplace_back();
      for (std::size_t k = 0; k < op.inputs.size(); ++k)
        factors.push_back(op.kernel == Kernel::add ? 1 : random.bits());
    }
    make_reference(random);
  }

  void run() {
    born(program_.input, kind_.input);
    born(program_.memory, kind_.memory);
    play(program_.forward);
    require(program_.output < 0 || holds(program_.output) == kind_.output, "forward does not end with the output");
    // The block's output belongs to the next block.
    leave_forward();
    start_backward();
    play(program_.backward);
    finish();
  }

 private:
  using Number = std::uint64_t;

  static void require(bool ok, const std::string& what) {
    if (!ok) throw std::runtime_error(what);
  }
  int& holds(int slot) { return holds_[static_cast<std::size_t>(slot)]; }
  Number& gradient(int slot) { return gradient_[static_cast<std::size_t>(slot)]; }
  Number reference(int value) const { return reference_[static_cast<std::size_t>(value)]; }
  void born(int slot, int value) {
    if (slot < 0) return;
    alive_[static_cast<std::size_t>(slot)] = true;
    holds(slot) = value;
  }

  /// d(output) / d(value), by the chain rule over values, plus what other blocks put on the encoder output.
  void make_reference(Random& random) {
    output_seed_ = random.bits(), memory_seed_ = random.bits();
    reference_.assign(kind_.values.size(), 0);
    if (kind_.output >= 0) reference_[static_cast<std::size_t>(kind_.output)] += output_seed_;
    for (std::size_t i = kind_.ops.size(); i-- > 0;) {
      const GraphOp& op = kind_.ops[i];
      const Number g = reference(op.outputs[0]);
      for (std::size_t k = 0; k < op.inputs.size(); ++k) {
        reference_[static_cast<std::size_t>(op.inputs[k])] += factors_[i][k] * g;
      }
    }
  }

  void leave_forward() {
    std::set<int> saved(program_.saved.begin(), program_.saved.end());
    if (program_.memory >= 0) saved.insert(program_.memory);
    if (program_.output >= 0) saved.insert(program_.output);
    for (std::size_t s = 0; s < alive_.size(); ++s) {
      require(alive_[s] == saved.contains(static_cast<int>(s)),
              "what forward leaves alive is not what it says it saves");
    }
    if (program_.output >= 0 && !std::count(program_.saved.begin(), program_.saved.end(), program_.output)) {
      alive_[static_cast<std::size_t>(program_.output)] = false;
    }
  }

  void start_backward() {
    if (program_.output_gradient >= 0) {
      alive_[static_cast<std::size_t>(program_.output_gradient)] = true;
      gradient(program_.output_gradient) = output_seed_;
    }
    if (program_.memory_gradient >= 0) {
      alive_[static_cast<std::size_t>(program_.memory_gradient)] = true;
      gradient(program_.memory_gradient) = memory_seed_;
    }
  }

  void finish() {
    if (program_.input_gradient >= 0) {
      require(gradient(program_.input_gradient) == reference(kind_.input), "the input's gradient is wrong");
    }
    if (program_.memory_gradient >= 0) {
      require(gradient(program_.memory_gradient) == memory_seed_ + reference(kind_.memory),
              "the encoder output's gradient is wrong");
    }
    for (std::size_t i = 0; i < kind_.ops.size(); ++i) {
      bool trainable = false;
      for (const int t : kind_.ops[i].tensors)
        trainable = trainable || kind_.tensors[static_cast<std::size_t>(t)].trainable;
      const int expected = trainable ? 1 : 0;
      require(weight_gradients_[static_cast<int>(i)] == expected, "an op's weights get no gradient, or two");
    }
    for (std::size_t s = 0; s < alive_.size(); ++s) {
      const int slot = static_cast<int>(s);
      const bool stays = slot == program_.input_gradient || slot == program_.memory || slot == program_.memory_gradient;
      require(alive_[s] == stays, "backward leaves storage behind");
    }
  }

  void play(const std::vector<ProgramStep>& steps) {
    for (const ProgramStep& step : steps) {
      for (const int s : step.alloc_before) {
        require(!alive_[static_cast<std::size_t>(s)], "storage is allocated twice");
        alive_[static_cast<std::size_t>(s)] = true;
      }
      for (const ProgramOperand& o : step.operands)
        require(alive_[static_cast<std::size_t>(o.slot)], "dead storage is used");
      if (step.graph_op >= 0 && (step.pass == Pass::forward || step.pass == Pass::recompute)) {
        forward(step);
      } else {
        backward(step);
      }
      for (const int s : step.free_after) alive_[static_cast<std::size_t>(s)] = false;
    }
  }

  void forward(const ProgramStep& step) {
    const GraphOp& op = kind_.ops[static_cast<std::size_t>(step.graph_op)];
    std::size_t at = 0;
    for (const int v : op.inputs)
      require(holds(step.operands[at++].slot) == v, "'" + op.name + "' reads another value than its input");
    for (std::size_t k = 0; k < op.outputs.size(); ++k) {
      const int slot = k == 0 && op.in_place >= 0 ? step.operands[static_cast<std::size_t>(op.in_place)].slot
                                                  : step.operands[at++].slot;
      holds(slot) = op.outputs[k];
    }
  }

  void backward(const ProgramStep& step) {
    std::size_t at = 0;
    const ProgramOperand g_operand = step.operands[at++];
    const Number g = gradient(g_operand.slot);
    if (step.graph_op < 0) {
      contribute(step, at, g);
      require(at == step.operands.size(), "operands left over");
      return;
    }
    const auto index = static_cast<std::size_t>(step.graph_op);
    const GraphOp& op = kind_.ops[index];
    require(g == reference(op.outputs[0]), "'" + op.name + "' uses a gradient that is not complete");
    if (g_operand.access == Access::read_write) {
      gradient(g_operand.slot) = factors_[index][0] * g;
      return;
    }
    const bool weights = step.weight_gradient;
    if (weights) ++weight_gradients_[step.graph_op];
    const bool only_weights = step.pass == Pass::backward_weight || op.inputs.empty();
    if (op.kernel != Kernel::rotary && (only_weights || step.pass == Pass::backward)) {
      for (const int v : op.keeps)
        require(holds(step.operands[at++].slot) == v, "backward of '" + op.name + "' reads an overwritten value");
    }
    if (!only_weights) {
      for (std::size_t k = 0; k < op.inputs.size(); ++k) contribute(step, at, factors_[index][k] * g);
    }
    require(at == step.operands.size(), "operands left over");
  }

  void contribute(const ProgramStep& step, std::size_t& at, Number what) {
    std::optional<Number> old;
    if (step.operands.at(at).access == Access::read) old = gradient(step.operands[at++].slot);
    const ProgramOperand target = step.operands.at(at++);
    if (target.access == Access::read_write) old = gradient(target.slot);
    require(!old || step.accumulate, "a sum is not marked as one");
    gradient(target.slot) = old.value_or(0) + what;
  }

  const BlockKind& kind_;
  const BlockProgram& program_;
  std::vector<std::vector<Number>> factors_;  // by op and input
  std::vector<Number> reference_;             // by value
  std::vector<int> holds_;                    // by slot: the value in it
  std::vector<bool> alive_;
  std::vector<Number> gradient_;         // by slot
  std::map<int, int> weight_gradients_;  // by op
  Number output_seed_ = 0, memory_seed_ = 0;
};

enum class Blocks { all, layers };

void check_model(const ModelSpec& model, Random& random, Blocks which = Blocks::all) {
  for (const BlockKind& kind : model.kinds) {
    if (which == Blocks::layers && kind.role != BlockRole::layer) continue;
    for (const Recompute mode : kModes) {
      const BlockProgram program = build_program(kind, mode);
      std::string error;
      try {
        Interpreter(kind, program, random).run();
      } catch (const std::exception& e) {
        error = e.what();
      }
      INFO(model.name << ", " << kind.name << ", recompute " << to_string(mode) << ": " << error);
      CHECK(error.empty());
    }
  }
}

/// Bytes a token that live between a block's forward and backward, in bf16.
std::int64_t saved_bytes(const BlockKind& kind, Recompute mode) {
  const BlockProgram program = build_program(kind, mode);
  std::int64_t bytes = 0;
  for (const int s : program.saved) {
    const Value& value = kind.values[static_cast<std::size_t>(program.slots[static_cast<std::size_t>(s)].value)];
    bytes += value.per_token * (value.type == ValueType::activation ? 2 : value.type == ValueType::fp32 ? 4 : 1);
  }
  return bytes;
}

}  // namespace

TEST_CASE("Backward of every block of the catalog is the chain rule in every recompute mode") {
  Random random(11);
  for (const std::string& name : model_names()) check_model(find_model(name), random);
}

TEST_CASE("Backward of random blocks is the chain rule in every recompute mode") {
  Random random(12);
  for (int i = 0; i < 300; ++i) check_model(read_model(random_config(random), "random.json"), random);
}

// Only layers: a frozen embedding has no backward, and lowering refuses adapters until it stops above one.
TEST_CASE("Backward of layers with frozen weights and adapters is the chain rule") {
  Random random(13);
  for (const std::string& name : model_names()) {
    ModelSpec model = find_model(name);
    apply_lora(model, 8);
    check_model(model, random, Blocks::layers);
  }
}

TEST_CASE("A Llama layer keeps the bytes of the fused column of transformer-math 3.2") {
  // shared/reference/transformer-math.md section 3.2, "Check values", column "fused norm + fused SwiGLU": own count
  // there.
  struct Row {
    const char* model;
    std::int64_t bytes_per_token, checkpoint;
  };
  const auto row = GENERATE(Row{"llama-2-7b", 131'720, 8'192}, Row{"llama-3-8b", 139'400, 8'192},
                            Row{"llama-3-70b", 274'696, 16'384}, Row{"llama-3.1-405b", 520'712, 32'768},
                            Row{"llama-3.2-1b", 75'912, 4'096}, Row{"qwen2.5-7b", 158'840, 7'168},
                            Row{"tinyllama-1.1b", 59'528, 4'096});
  const ModelSpec model = find_model(row.model);
  const BlockKind& layer = test::first_layer(model);
  INFO(row.model);
  CHECK(saved_bytes(layer, Recompute::none) == row.bytes_per_token);
  CHECK(saved_bytes(layer, Recompute::full) == row.checkpoint);
  CHECK(saved_bytes(layer, Recompute::full) == 2 * model.hidden);
}

TEST_CASE("Selective recompute keeps what only a matmul or attention can make again") {
  // runtime.md section 10: 2(4h + 2rh + 2F) + 4 Hq + 8 bytes a token, r = Hkv / Hq. Korthikanti et al.
  // (arXiv:2205.05198) drop the attention core's s x s terms, which fused attention never stores.
  const auto name = GENERATE("llama-2-7b", "llama-2-70b", "llama-3-8b", "tinyllama-1.1b");
  const ModelSpec model = find_model(name);
  const BlockKind& layer = test::first_layer(model);
  std::int64_t ffn = 0, heads = 0, kv_heads = 0;
  for (const GraphOp& op : layer.ops) {
    if (op.kernel == Kernel::activation) ffn = op.out_features;
    if (op.kernel == Kernel::attention) heads = op.attention.heads, kv_heads = op.attention.kv_heads;
  }
  const std::int64_t h = model.hidden, kv = h * kv_heads / heads;
  INFO(name);
  CHECK(saved_bytes(layer, Recompute::selective) == 2 * (4 * h + 2 * kv + 2 * ffn) + 4 * heads + 8);
  CHECK(saved_bytes(layer, Recompute::none) == 2 * (6 * h + 2 * kv + 3 * ffn) + 4 * heads + 8);
}

TEST_CASE("Every recompute mode keeps at most what the one before keeps") {
  for (const std::string& name : model_names()) {
    const ModelSpec model = find_model(name);
    for (const BlockKind& kind : model.kinds) {
      INFO(name << ", " << kind.name);
      const std::int64_t none = saved_bytes(kind, Recompute::none);
      const std::int64_t selective = saved_bytes(kind, Recompute::selective);
      CHECK(selective <= none);
      if (kind.role == BlockRole::layer) CHECK(saved_bytes(kind, Recompute::full) <= selective);
    }
  }
}

}  // namespace zeroplan::tests
