#pragma once
// What loading a model, saving it and going on from a checkpoint take, beside the steady step.

#include <optional>

#include "models/deepspeed_config.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"

namespace zeroplan {

struct StorageNeeds {
  // Host memory of a node while every rank builds the model on its own, in the weights' type and in fp32, and while
  // one rank does and the others get it from there.
  Bytes load_each, load_each_fp32, load_one_fp32;
  Bytes load_gpu;  // of each GPU at stage 3 without zero.Init: the whole model, before it is cut
  // A checkpoint, all ranks together.
  Bytes weights;  // in the weights' type; of adapters alone when only they are trained
  Bytes states;   // masters and the optimizer's states
  Bytes gather;   // host memory of rank 0 while stage 3 collects all weights to save them
  /// Stages 1 and 2: host memory of a node when the number of ranks has changed: every rank reads the states of all
  /// (DeepSpeed issue 1111). Zero at stages 0 and 3.
  Bytes resume;
  /// weights and states through the drives of all nodes; nothing without known drives.
  std::optional<Seconds> write;
};

/// `model` with its adapters, when there are any.
StorageNeeds storage_needs(const ModelSpec& model, const MachineSpec& machine, const DeepSpeedConfig& config);

}  // namespace zeroplan
