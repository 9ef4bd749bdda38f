#pragma once
// Kernel times of one layer under an engine: what the graph of the model becomes as PyTorch kernels.

#include <cstdint>

#include "sim/engine_time.h"
#include "sim/gpu_model.h"

namespace zeroplan {

/// What the kernels of a run reach on its GPU.
struct KernelRates {
  const GpuModel* gpu = nullptr;
  double matmul_scale = 1;           // seconds of a matmul here over those of GpuModel's tuned engine
  FlopsPerSecond fused_attention;    // its products, on the causal half
  FlopsPerSecond exponentials;       // the same over one dimension of a head: products in the time of an exponential
  FlopsPerSecond unfused_attention;  // on the full count
  BytesPerSecond streaming;
  BytesPerSecond scores;     // kernels of eager attention over its scores
  bool wide_softmax = true;  // eager attention's softmax runs in fp32
};

/// Bytes that an op of the forward moves for each of its elements, and its backward.
struct ElementBytes {
  double forward = 0, backward = 0;
};

/// Products of one multiply-add a score that a GPU does in the time of one exponential: dense 16-bit FLOPs a clock of a
/// multiprocessor over its 16 special-function results, over 4 FLOPs (two products) a dimension. A score of heads of d
/// dimensions takes as long as (d / efficiency + this) dimensions: FlashAttention-3 (Shah et al. 2024, section 3.1)
/// has 3.9 TFLOP/s of exponentials beside 989 of products on the H100. 0: unknown.
double exponential_dims(const GpuSpec& gpu);

/// One layer in one micro-step, on one GPU of its tensor-parallel group.
struct LayerWork {
  Seconds matmul_forward, matmul_backward;
  Seconds attention_forward, attention_backward;
  Seconds streaming_forward, streaming_backward;
  Seconds casts_forward, casts_backward;  // to fp8
  double last_linear = 0;                 // share of the forward's matmul FLOPs
  double host_ops = 0;                    // PyTorch ops that the host issues in forward
  double parameters = 0;                  // of the layer, over the tensor-parallel group
  double trainable = 0;
  double trained_tensors = 0;
};

LayerWork layer_work(const BlockKind& layer, const EngineTimeRun& run, TokenShape tokens, const KernelRates& rates,
                     const EngineTimeFit& fit);

/// The output matrix and the loss, never recomputed.
struct HeadWork {
  Seconds matmul;     // forward and backward
  Seconds streaming;  // loss over the vocabulary
};
HeadWork head_work(const ModelSpec& model, const EngineTimeRun& run, TokenShape tokens, const KernelRates& rates);

/// Bytes a token a vocabulary entry that the loss moves, forward and backward (step-time.md section 2).
double loss_bytes(const EngineTimeRun& run);

}  // namespace zeroplan
