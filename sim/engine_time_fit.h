#pragma once
// The fitted numbers behind step times under DeepSpeed and PyTorch FSDP: models/catalog/fits/engine_time.json, written
// by tests/tools/fit_engine_time.cpp from measured steps (docs/step-time.md). Each has a name, a unit and a source.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

/// One number of the model. Fractions have the unit "1".
enum class TimeFit : std::uint8_t {
  memory_rate_eager,           // 1: of the spec memory bandwidth that streaming kernels reach in a step
  memory_rate_hugging_face,    // 1: the same under transformers, whose kernels are small and many
  unfused_attention_rate,      // 1: of the peak, on the full count of scores
  memory_rate_scores,          // 1: of the memory bandwidth, eager attention's kernels over its scores
  contention,                  // 1: how much a collective slows the kernels that it hides behind, fully overlapped
  fp8_rate,                    // 1: of twice the 16-bit rate
  host_op,                     // us: host time of one PyTorch op in forward, or in backward
  host_op_deepspeed,           // us: the same in DeepSpeed runs of several processes
  host_op_backward,            // 1: of host_op, an op's backward, which autograd starts without Python
  host_hook_deepspeed,         // us a trained tensor: DeepSpeed's hook in backward; stage 0 has none, but copies
  host_stage3,                 // 1: factor of that under ZeRO-3, whose hooks run for every module
  host_fsdp1,                  // ms: hooks of one unit in forward, or in backward
  host_fsdp2,                  // ms
  host_fsdp2_hugging_face,     // ms
  host_compiled,               // 1: share of a layer's ops that is left when blocks are compiled
  host_graph,                  // 1: when the whole step is one graph
  host_composer,               // 1: MPT in llm-foundry: few modules, fused qkv
  host_megatron,               // 1: Megatron's GPT
  optimizer_decoupled,         // B a local parameter over the spec memory bandwidth: Composer's decoupled AdamW
  optimizer_fused,             // B: torch.optim.AdamW, fused
  optimizer_deepspeed,         // B: FusedAdam, unscaling, norm, fp32 to 16-bit copies
  optimizer_deepspeed_all,     // B a parameter of the whole model: copies of gathered weights
  optimizer_start,             // ms a step
  optimizer_start_deepspeed,   // ms a step
  optimizer_tensor_deepspeed,  // ms a tensor that a rank updates at stages 0 to 2: flat views, norm, copies
  deepspeed_overhead,          // s a step of several processes: barriers, overflow check, timers
  deepspeed_hidden,            // 1: of the shorter of compute and communication that runs under the longer
  deepspeed_messages,          // 1: messages a layer is gathered in under ZeRO-3
  deepspeed_network_volta,     // 1: of the sum of a node's NICs
  deepspeed_network_ampere,    // 1
  deepspeed_network_hopper,    // 1
  deepspeed_adam_volta,        // G parameters/s a node: DeepSpeedCPUAdam
  deepspeed_adam_ampere,       // G parameters/s a node
  deepspeed_adam_hopper,       // G parameters/s a node
  cpu_adam_deepspeed,          // 1: of the rate that the host model gives an AVX AdamW (stages 1 and 2)
  cpu_adam_deepspeed_stage3,   // 1: the same under ZeRO-3, which updates sub-group by sub-group
  cpu_adam_torch,              // 1: torch.optim.AdamW on CPU tensors under FSDP2's offload policy
  pcie_rate,                   // 1: of the nominal link, pinned copies of an engine
};
inline constexpr std::size_t kNumTimeFits = 38;

std::string_view to_string(TimeFit key);
/// "1", "us", "B", ...
std::string_view unit_of(TimeFit key);

struct TimeFitValue {
  double value = 0;
  bool fitted = false;  // by fit_engine_time; else a constant from its source
  std::string source;
};

/// Efficiency of matmuls in training steps, of the dense 16-bit peak. The one number that a new GPU or a new software
/// era should be measured for.
struct MatmulEfficiency {
  std::string gpu;  // names that begin so: "A100", "H200"
  std::string era;  // "torch 2.1": software of that time; "any"
  double value = 0;
  bool fitted = false;
  std::string source;
};

/// Efficiency of fused attention's products on the causal half, of the dense 16-bit peak; exponentials come on top
/// (exponential_dims()), and the backward takes 2.5 times the forward.
struct AttentionEfficiency {
  std::string arch;    // "Ampere"
  std::string kernel;  // "SDPA", "triton flash", "early flash"
  double value = 0;
  bool fitted = false;
  std::string source;
};

struct EngineTimeFit {
  std::array<TimeFitValue, kNumTimeFits> values;
  std::vector<MatmulEfficiency> matmul;
  std::vector<AttentionEfficiency> attention;

  double operator[](TimeFit key) const { return values[static_cast<std::size_t>(key)].value; }
};

/// Throws InputError with file and line on unknown or missing names, a wrong unit, or a value out of range.
EngineTimeFit read_engine_time_fit(std::string_view json);
/// What read_engine_time_fit reads. Deterministic.
std::string write_engine_time_fit(const EngineTimeFit& fit);
/// The embedded one, read once.
const EngineTimeFit& builtin_engine_time_fit();

}  // namespace zeroplan
