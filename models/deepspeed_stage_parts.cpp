#include "models/deepspeed_stage_parts.h"

#include <algorithm>
#include <numeric>

#include "models/fsdp2_engine.h"  // passes of AdamW

namespace zeroplan {

std::int64_t ZeroLayout::owned(std::size_t parameter, std::int64_t elements_of, int rank) const {
  if (start[parameter] < 0) return 0;
  const std::int64_t begin = std::max(start[parameter], rank * partition);
  const std::int64_t end = std::min(start[parameter] + elements_of, (rank + 1) * partition);
  return std::max<std::int64_t>(0, end - begin);
}

ZeroLayout zero_layout(const EagerStep& step, int ranks, bool round_robin) {
  std::vector<std::size_t> order;
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    if (step.parameters[p].trainable) order.push_back(p);
  }
  if (round_robin) {  // parameter i goes to partition i mod ranks
    std::vector<std::size_t> dealt;
    for (std::size_t first = 0; first < static_cast<std::size_t>(ranks); ++first) {
      for (std::size_t i = first; i < order.size(); i += static_cast<std::size_t>(ranks)) dealt.push_back(order[i]);
    }
    order = std::move(dealt);
  }
  ZeroLayout layout;
  layout.start.assign(step.parameters.size(), -1);
  for (const std::size_t p : order) {
    layout.start[p] = layout.elements;
    layout.elements += step.parameters[p].elements;
  }
  layout.padded = ceil_div(layout.elements, 2 * ranks) * 2 * ranks;
  layout.partition = layout.padded / ranks;
  return layout;
}

std::vector<std::int64_t> sub_groups(const EagerStep& step, int ranks, std::int64_t sub_group_size) {
  std::vector<std::int64_t> groups;
  std::int64_t current = 0;
  for (const EagerParameter& parameter : step.parameters) {
    if (!parameter.trainable) continue;
    current += ceil_div(parameter.elements, ranks);
    if (current < sub_group_size) continue;
    groups.push_back(current);
    current = 0;
  }
  if (current > 0) groups.push_back(current);
  return groups;
}

bool uses_bf16_optimizer(const DeepSpeedConfig& config) {
  return config.stage == 1 && config.precision == DType::bf16 && config.grad_accum == DType::fp32 &&
         config.offload_optimizer.device != OffloadDevice::cpu;
}

DeepSpeedStage::DeepSpeedStage(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape)
    : step_(step),
      job_(job),
      tape_(tape),
      type_(job.config.precision),
      communication_(job.config.communication.value_or(job.config.precision)),
      weight_size_(size_of(job.config.precision)),
      blocks_(step.parameters.size(), -1) {
  for (const EagerModule& module : step.modules) {
    for (const int parameter : module.parameters) blocks_[static_cast<std::size_t>(parameter)] = module.layer;
  }
}

TapeId DeepSpeedStage::resident(std::int64_t size, BufferRole role, Owner owner, Pool pool) {
  return tape_.alloc({size, pool, role, owner, -1});
}

TapeId DeepSpeedStage::staging(std::int64_t size, BufferRole role, Pool pool) {
  return tape_.alloc({size, pool, role, Owner::buffers, static_cast<std::int16_t>(tape_.block())});
}

void DeepSpeedStage::transient(std::int64_t size, BufferRole role, Stream stream, Pool pool) {
  const TapeId buffer = staging(size, role, pool);
  tape_.pass(stream, 2 * size, {{buffer, Access::write}});
  tape_.free(buffer);
}

void DeepSpeedStage::collective(Stream stream, CollectiveKind kind, Group group, std::int64_t count,
                                std::int64_t padded, DType type, std::initializer_list<TapeOperand> operands) {
  tape_.work(stream, Collective{kind, group, count, padded, type}, operands);
}

void DeepSpeedStage::agree(DType type, Group group) {
  collective(Stream::compute, CollectiveKind::all_reduce, group, 1, 1, type);
  tape_.host_waits(Stream::compute);
}

void DeepSpeedStage::adam(std::int64_t count, bool on_host, std::span<const std::int64_t> tensors) {
  const std::int64_t passes = job_.config.torch_adam ? kUnfusedAdamPasses : kFusedAdamPasses;
  const auto traffic = Bytes(static_cast<double>(passes * fp32(count)));
  if (on_host) {
    tape_.host_waits(Stream::d2h);
    tape_.work(Stream::host, AdamStep{count, UpdateOn::host, traffic});
    tape_.host_waits(Stream::host);
    return;
  }
  std::vector<TapeId> roots;
  if (job_.config.torch_adam) {
    if (tensors.empty()) tensors = {&count, 1};
    for (const std::int64_t each : tensors) {
      roots.push_back(tape_.alloc({fp32(each), Pool::compute, BufferRole::workspace, Owner::optimizer, -1}));
    }
  }
  tape_.work(Stream::compute, AdamStep{count, UpdateOn::device, traffic});
  drop(roots);
}

void DeepSpeedStage::offload_copy(Stream stream, bool up, std::int64_t size,
                                  std::initializer_list<TapeOperand> operands) {
  const Memory host = offload_memory();
  tape_.work(stream, Copy{up ? host : Memory::hbm, up ? Memory::hbm : host, Bytes(static_cast<double>(size))},
             operands);
  if (host == Memory::dram) tape_.host_waits(stream);
}

std::vector<TapeId> DeepSpeedStage::load_model() {
  std::vector<TapeId> loaded;
  for (std::size_t p = 0; p < num_parameters(); ++p) {
    loaded.push_back(tape_.alloc({bytes(elements(p)), Pool::compute, BufferRole::weights, Owner::parameters,
                                  static_cast<std::int16_t>(block_of(p))}));
  }
  return loaded;
}

void DeepSpeedStage::drop(std::vector<TapeId>& buffers) {
  for (const TapeId buffer : buffers) tape_.free(buffer);
  buffers.clear();
}

}  // namespace zeroplan
