#include "cli/workload.h"

#include <fmt/format.h>

#include <limits>

#include "cli/values.h"
#include "models/error.h"
#include "sim/caching_allocator.h"

namespace zeroplan {
namespace {

// Bounds of check_plan() (models/plan.cpp), and one for the global batch, which has none there.
constexpr std::int64_t kLongestSequence = std::int64_t{1} << 26;
constexpr std::int64_t kLargestMicroBatch = std::int64_t{1} << 20;
constexpr std::int64_t kLargestBatch = std::int64_t{1} << 20;  // a thousand times what is trained with
constexpr std::int64_t kMostRanks = std::int64_t{1} << 20;
constexpr Bytes kLargestMemory = Bytes(1024 * kTiB);  // of a node; catches a wrong unit

void require_named(const std::string& text, std::string_view flag, std::string_view expected) {
  if (text.empty()) throw InputError(fmt::format("{}: expected {}, got nothing; see --help", flag, expected));
}

/// `--gpus` beside `--machine`: ranks in all ("32"), or GPUs of each node as always ("8xH100", of that very GPU).
int ranks_on(const MachineSpec& machine, const std::string& text, int nodes) {
  if (text.find_first_of("xX") == std::string::npos) {
    return static_cast<int>(parse_integer(text, "--gpus", 1, kMostRanks));
  }
  const GpuRequest request = parse_gpu_request(text);
  if (request.gpu != machine.gpu.name) {
    throw InputError(fmt::format("--gpus: expected the GPU of --machine {}, {}, got {}", machine.name, machine.gpu.name,
                                 request.gpu));
  }
  return request.count * nodes;
}

/// Uses `per_node` of the node's GPUs.
void use_part(MachineSpec& machine, int per_node) {
  if (per_node == machine.gpus_per_node) return;
  if (machine.host_device) return set_host_ranks(machine, per_node);
  if (per_node < machine.gpus_per_node) {
    machine.assumptions.push_back({"GPUs used", fmt::format("{} of the {} of a node", per_node, machine.gpus_per_node),
                                   "--gpus; host memory, disks and price are those of the whole node"});
  }
  machine.gpus_per_node = per_node;
  if (per_node == 1) machine.interconnect = Interconnect::single;
}

/// With a machine given, --gpus counts ranks (spec section 3).
void set_ranks(MachineSpec& machine, int ranks, std::optional<int> nodes) {
  const int most = machine.host_device ? ranks : machine.gpus_per_node;
  const int num_nodes = nodes ? *nodes : ranks <= most ? 1 : ranks / most;
  if (ranks % num_nodes != 0 || ranks / num_nodes > most) {
    throw InputError(fmt::format("--gpus: expected 1 to {} GPUs a node of {}, evenly on the nodes, got {} on {}", most,
                                 machine.name, ranks, num_nodes == 1 ? "1 node" : fmt::format("{} nodes", num_nodes)));
  }
  use_part(machine, ranks / num_nodes);
  set_nodes(machine, num_nodes);
}

}  // namespace

void WorkloadFlags::add_to(CommandLine& line) {
  line.group("Workload");
  line.value("--model", "MODEL", "Catalog name, size (70B), config.json or its directory; required", model);
  line.value("--seq-len", "TOKENS", "Tokens of a sequence [the smaller of 4096 and the model's maximum]", seq_len);
  line.value("--global-batch", "SEQUENCES", "Sequences a step, all GPUs together [512 Ki tokens]", global_batch);
  line.value("--precision", "TYPE", "bf16, fp16 or fp32 weights and compute [bf16]", precision);
  line.value("--trainable", "WHAT", "all, or lora:r=16 with --engine deepspeed or fsdp2 [all]", trainable);
  line.value("--tokens", "COUNT", "Tokens of the whole run, for hours and cost: 300B, 1T, 2e12", tokens);
  line.group("Fixed choices (what is not given is searched)");
  line.value("--zero", "STAGES", "0, 1, 2 or 3; several (0,1,2,3) give one row each", zero);
  line.value("--offload", "WHAT[:TIER]", "none, optimizer, parameters or all; to cpu [cpu] or nvme", offload);
  line.value("--recompute", "WHAT", "none, selective or full", recompute);
  line.value("--micro-batch", "SEQUENCES", "Sequences a GPU and micro-step", micro_batch);
  line.value("--engine", "ENGINE", "Who runs the plan: zeroplan, deepspeed (0.19) or fsdp2 (torch 2.11) [zeroplan]",
             engine);
  line.value(
      "--adam", "FORM",
      "AdamW on the GPU under fsdp2: fused (Hugging Face Trainer's), foreach (torch.optim.AdamW's own choice, one "
      "more copy of the share in the step) or loop (foreach=False) [fused]",
      adam);
  line.value("--alloc-conf", "CONF",
             "PYTORCH_CUDA_ALLOC_CONF under deepspeed and fsdp2, such as expandable_segments:True: memory is predicted "
             "with it and launch.sh sets it [PyTorch's defaults]",
             alloc_conf);
  line.group("Search");
  line.value("--objective", "WHAT", "time, cost or memory [time]", objective);
  line.value("--margin", "PERCENT", "Part of every memory that stays free [5%]", margin);
}

/// What belongs to PyTorch under the engine; it is set already.
void WorkloadFlags::set_software(Request& request) const {
  if (!adam.empty()) {
    request.adam = parse_adam_form(adam, "--adam");
    if (request.engine != Engine::fsdp2) {
      throw InputError(fmt::format("--adam: expected --engine fsdp2 beside it, got {}", to_string(request.engine)));
    }
  }
  if (alloc_conf.empty()) return;
  parse_allocator_options(alloc_conf);
  if (request.engine == Engine::zeroplan) {
    throw InputError(
        "--alloc-conf: expected --engine deepspeed or fsdp2 beside it: the zeroplan engine lays memory out by itself");
  }
  request.allocator_conf = alloc_conf;
}

Request WorkloadFlags::request() const {
  require_named(model, "--model", "a model such as 70B");
  Request request;
  if (!seq_len.empty()) request.seq_len = parse_integer(seq_len, "--seq-len", 1, kLongestSequence);
  if (!global_batch.empty()) request.global_batch = parse_integer(global_batch, "--global-batch", 1, kLargestBatch);
  if (!precision.empty()) request.precision = parse_precision(precision, "--precision");
  if (!zero.empty()) request.constraints.stages = parse_stages(zero, "--zero");
  request.per_stage = request.constraints.stages.size() > 1;
  if (!offload.empty()) request.constraints.offload = parse_offload(offload, "--offload");
  if (!recompute.empty()) request.constraints.recompute = parse_recompute(recompute, "--recompute");
  if (!micro_batch.empty()) {
    request.constraints.micro_batch = parse_integer(micro_batch, "--micro-batch", 1, kLargestMicroBatch);
  }
  if (!engine.empty()) request.engine = parse_engine(engine, "--engine");
  set_software(request);
  if (!objective.empty()) request.objective = parse_objective(objective, "--objective");
  if (!margin.empty()) request.margin = parse_margin(margin, "--margin");
  num_tokens();
  request.model = find_model(model);
  if (!trainable.empty()) request.lora_rank = parse_trainable(trainable, "--trainable");
  return request;
}

std::optional<double> WorkloadFlags::num_tokens() const {
  if (tokens.empty()) return std::nullopt;
  return parse_tokens(tokens, "--tokens");
}

void MachineFlags::add_to(CommandLine& line) {
  line.group("Machine");
  line.value("--gpus", "NxGPU", "GPUs of a node: 4xA100-80G, 8xH100, 2x3090-24G; with --machine a bare N is all ranks",
             gpus);
  line.value("--nodes", "N", "Nodes [1]", nodes);
  line.value("--machine", "NAME|FILE", "A catalog node (zeroplan machines) or a machine.json", machine);
  line.value("--host-memory", "SIZE", "Memory installed in a node: 1TiB, 256GB", host_memory);
  line.value("--nvme", "NxSIZE[@RATE]", "Drives of a node and the read rate of each: 4x2TB@6.5GB/s; none: no drives",
             nvme);
}

MachineSpec MachineFlags::resolve() const {
  std::optional<int> num_nodes;
  if (!nodes.empty()) num_nodes = static_cast<int>(parse_integer(nodes, "--nodes", 1, kMostNodes));
  MachineSpec result;
  if (machine.empty()) {
    require_named(gpus, "--gpus", "NxGPU such as 4xA100-80G, or --machine");
    result = machine_for(parse_gpu_request(gpus), num_nodes.value_or(1));
  } else {
    result = find_machine(machine);
    if (!gpus.empty()) {
      set_ranks(result, ranks_on(result, gpus, num_nodes.value_or(1)), num_nodes);
    } else if (num_nodes) {
      set_nodes(result, *num_nodes);
    }
  }
  if (!host_memory.empty()) {
    const Bytes memory = parse_bytes(host_memory, "--host-memory");
    if (memory < 1_MiB || memory > kLargestMemory) {
      throw InputError(fmt::format("--host-memory: expected 1MiB to 1024TiB, got \"{}\"", host_memory));
    }
    set_host_memory(result, memory);
  }
  if (!nvme.empty()) {
    set_nvme(result, nvme);
    if (result.nvme.capacity > kLargestMemory) {
      throw InputError(fmt::format("--nvme: expected at most 1024TiB a node, got \"{}\"", nvme));
    }
  }
  return result;
}

}  // namespace zeroplan
