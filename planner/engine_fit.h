#pragma once
// Whether a configuration fits under DeepSpeed or FSDP2 on a machine: what PyTorch allocates and reserves on a GPU,
// what the host holds, and the verdict on both.

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "planner/engine_prediction.h"

namespace zeroplan {

enum class GpuVerdict : std::uint8_t {
  fits,
  fits_after_flushes,  // only because the caching allocator gives cached segments back, each time at a standstill
  does_not_fit,
};
std::string_view to_string(GpuVerdict verdict);

/// Bytes of the workspace that PyTorch allocates for a BLAS handle without CUBLAS_WORKSPACE_CONFIG: 32 MiB from Hopper
/// on, 8.125 MiB before (pytorch-allocator.md section 6), under ROCm 32 MiB and from MI300 on 128 MiB (PyTorch,
/// ATen/cuda/CublasHandlePool.cpp, which also gives Blackwell 32 MiB).
std::int64_t blas_workspace(const GpuSpec& gpu);

/// What is trained, apart from the engine's configuration.
struct EngineWorkload {
  TokenShape tokens;  // of a micro-step and rank
  std::int64_t accumulation = 1;
  int ranks = 1;
  bool checkpointing = false;  // of every layer
  DType type = DType::bf16;
  std::int64_t lora_rank = 0;  // adapters on the linear layers of the blocks, all else frozen; 0: all is trained
  // As EagerOptions has them:
  std::optional<EagerAttention> attention = std::nullopt;  // none: usual_attention()
  int checkpoint_every = 1;
  bool keeps_operators = false;
  bool offloads_checkpoints = false;
  EagerCode code = EagerCode::transformers;
  std::string allocator_conf = {};  // PYTORCH_CUDA_ALLOC_CONF, as parse_allocator_options() reads it
};

struct EngineFit {
  Bytes allocated;  // peak of the steady step, worst rank
  Bytes reserved;   // by the allocator on a card without limit, with the host's lead as our clocks have it
  Bytes reserved_low, reserved_high;  // host in step with the GPU, host twice as fast (EnginePrediction)
  Bytes overhead;                     // context, libraries, communicators, page tables of pinned memory
  Bytes capacity;                     // of the GPU, with the margin taken off
  GpuVerdict gpu = GpuVerdict::fits;
  std::int64_t flushes = 0;  // of the allocator, whole run
  std::string failed_at;     // does_not_fit: "step 1 backward"
  std::string failure;       // does_not_fit: what was asked and what was there
  Bytes host;                // a node: processes, pinned and pageable buffers
  Bytes host_capacity;       // a node, margin taken off
  int rank = 0;              // whose GPU: the rank that needs most
  std::string caveat;        // what no measured run covers; empty: all is covered
  EnginePrediction prediction;

  Bytes device() const { return reserved + overhead; }
  bool host_fits() const { return host <= host_capacity; }
  bool fits() const { return gpu != GpuVerdict::does_not_fit && host_fits(); }
  /// Fits, and the allocator has to give memory back at most because the host runs ahead (stage 3), which depends on
  /// timing: not when it keeps in step.
  bool fits_in_step() const { return fits() && reserved_low + overhead <= capacity; }
};

/// How much of a fit is worked out; what is left out saves replays.
enum class FitDetail : std::uint8_t {
  needs,    // what GPU and host need; a GPU that has less counts as does_not_fit
  verdict,  // and whether it fits_in_step(); of what does not, whether flushes would make room is not looked at
  whole,    // and the bounds of the host's lead, flushes, where it fails
};

/// What a search asks of a configuration: its fit if it does fit, else what is over, found as cheaply as it shows.
struct EngineTrial {
  std::optional<EngineFit> fit;  // fits_in_step(); without the bounds of the host's lead unless the verdict took them
  Bytes device_at_least;         // no fit: what the fit finds is no less
  Bytes host;                    // no fit: exact, or less when the GPU was too small before the host was looked at
};

/// Fits of many configurations of one model on one machine; keeps eager steps, which many share. Not thread-safe.
class EngineFitter {
 public:
  /// The references outlive it. `margin` is taken off GPU and host.
  EngineFitter(const ModelSpec& model, const MachineSpec& machine, double margin);
  ~EngineFitter();

  /// Throws InputError when the model has no eager graph, or the configuration has what no rule covers.
  EngineFit deepspeed(const DeepSpeedConfig& config, const EngineWorkload& workload,
                      FitDetail detail = FitDetail::whole);
  EngineFit fsdp2(const Fsdp2Options& options, const EngineWorkload& workload, FitDetail detail = FitDetail::whole);
  /// Fits, or not, by the same rules: as the above for a search over many. `known`: bytes that are surely alive on the
  /// GPU at one moment (engine_counts.h).
  EngineTrial try_deepspeed(const DeepSpeedConfig& config, const EngineWorkload& workload, Bytes known);
  EngineTrial try_fsdp2(const Fsdp2Options& options, const EngineWorkload& workload, Bytes known);
  /// What the fits are read off. Of the rank that needs most.
  EngineRecording record_deepspeed(const DeepSpeedConfig& config, const EngineWorkload& workload,
                                   RecordedMicroSteps recorded);
  EngineRecording record_fsdp2(const Fsdp2Options& options, const EngineWorkload& workload,
                               RecordedMicroSteps recorded);
  /// deepspeed() of a file's text.
  EngineFit deepspeed_text(std::string_view json, const EngineWorkload& workload);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// "29.3 GiB allocated, 34.0 GiB reserved, 2.0 GiB on the host; fits".
std::string describe(const EngineFit& fit);

}  // namespace zeroplan
