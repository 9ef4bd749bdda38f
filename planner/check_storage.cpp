#include "planner/check_storage.h"

namespace zeroplan {

StorageNeeds storage_needs(const ModelSpec& model, const MachineSpec& machine, const DeepSpeedConfig& config) {
  const double gpus = machine.gpus_per_node;
  const std::int64_t trained = model.trainable_parameters();
  StorageNeeds needs;
  needs.load_each = bytes_of(model.parameters(), config.precision) * gpus;
  needs.load_each_fp32 = bytes_of(model.parameters(), DType::fp32) * gpus;
  needs.load_one_fp32 = bytes_of(model.parameters(), DType::fp32);
  if (config.stage == 3) needs.load_gpu = bytes_of(model.parameters(), config.precision);
  needs.weights = bytes_of(trained, config.precision);
  const double master = config.master_16bit ? 2 : 4, moments = config.states_16bit ? 4 : 8;
  const bool own_master = config.shards() || config.precision != DType::fp32;
  needs.states = Bytes((moments + (own_master ? master : 0)) * static_cast<double>(trained));
  if (config.stage == 3) needs.gather = bytes_of(model.parameters(), config.precision);
  if (config.stage == 1 || config.stage == 2) needs.resume = needs.states * gpus;
  if (machine.nvme.drives > 0 && machine.nvme.write > BytesPerSecond()) {
    needs.write = (needs.weights + needs.states) / (machine.nvme.write * static_cast<double>(machine.nodes));
  }
  return needs;
}

}  // namespace zeroplan
