#pragma once
// Drives an engine over the events of eager micro-steps: what PyTorch does goes onto the tape as it is, the engine adds
// its own at the hooks.

#include <cstdint>

#include "models/eager_step.h"
#include "models/engine_tape.h"

namespace zeroplan {

/// What surrounds any engine.
struct EngineRun {
  int steps = 4;         // recorded; the last one is the steady step
  int accumulation = 1;  // micro-steps a step
  /// cuBLAS's workspace a handle: 32 MiB from compute capability 9.0, 8.125 MiB before (pytorch-allocator.md section
  /// 6). One is taken by the first forward GEMM, one by the first of backward, which runs on autograd's thread. 0: no
  /// cuBLAS at all.
  std::int64_t cublas_workspace = 32 << 20;
  TokenShape tokens;  // of a micro-step: the token ids stay on the GPU
  /// cuBLASLt's, taken likewise by the first product that adds its bias (ATen/cuda/CublasHandlePool.cpp: 1024 KiB; in
  /// backward only recomputing has one).
  std::int64_t cublaslt_workspace = 1 << 20;
};

/// Where a run stands.
struct MicroStep {
  int step = 0;       // from 0
  int micro = 0;      // within the step
  bool last = false;  // the accumulation boundary
};

/// An engine's hooks. Each may add to the tape; the walk has already recorded what PyTorch did before.
class EngineHooks {
 public:
  virtual ~EngineHooks() = default;
  /// Loading and initialize().
  virtual void initialize() = 0;
  virtual void begin(const MicroStep& now) = 0;
  virtual void forward_pre(int module) = 0;
  virtual void forward_post(int module) = 0;
  virtual void backward_pre(int module) = 0;
  virtual void backward_post(int module) = 0;
  /// The gradient of a parameter is complete; its storage belongs to the engine from here.
  virtual void gradient(int parameter, TapeId storage) = 0;
  /// A recomputed region keeps the parameter's present storage until let_go() of the same number. Matters to engines
  /// that give gathered weights up in between.
  virtual void hold(int /*parameter*/, int /*number*/) {}
  virtual void let_go(int /*number*/) {}
  virtual void forward_end() = 0;
  virtual void backward_end() = 0;
  /// The optimizer's step, once a step.
  virtual void update() = 0;
};

/// Records initialize and `run.steps` steps.
void record_run(EngineHooks& engine, const EagerStep& step, const EngineRun& run, EngineTape& tape);

}  // namespace zeroplan
