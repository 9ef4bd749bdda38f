// The usual remedies for a slow or large step under DeepSpeed, each played before and after on the simulator: the
// engine's own steady step (models/engine_schedule.h), not a formula. Prints the table of docs/engines.md and ends with
// 1 when a remedy does not move time or memory the way it should. Run by CTest ("examples: remedies").

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "models/deepspeed_engine.h"
#include "models/engine_schedule.h"
#include "models/machine_spec.h"
#include "sim/engine_memory.h"
#include "sim/simulate.h"

namespace {

using namespace zeroplan;

/// What is trained and where.
struct Job {
  ModelSpec model;
  TokenShape tokens;
  bool checkpointing = false;
};

/// One side of a remedy.
struct Side {
  std::string name;
  DeepSpeedConfig config;
  std::int64_t capacity = AllocatorOptions::kUnlimited;  // bytes the allocator may reserve
};

struct Played {
  Seconds step;
  Seconds communication, offload;   // exposed: while no kernel of the GPU runs; communication first where both do
  std::int64_t messages = 0;        // collectives of more than one element
  Bytes allocated, reserved, host;  // of a rank; host: what the engine offloads, the process apart
  bool out_of_memory = false;
  std::int64_t flushes = 0;
};

constexpr std::int64_t kWorkspaceAmpere = 8 << 20 | 1 << 17;  // cuBLAS, a handle (pytorch-allocator.md section 6)

std::int64_t count_messages(const Schedule& schedule) {
  return std::ranges::count_if(schedule.ops(), [&](const Op& op) {
    const auto* collective = std::get_if<Collective>(&schedule.work(op));
    return collective != nullptr && collective->elements > 1;
  });
}

/// What keeps the step going at a time: later ones count only where none before them runs.
enum class Busy : std::uint8_t { kernel, communication, offload };
constexpr std::size_t kNumBusy = 3;

std::optional<Busy> busy_with(const Op& op, const Work& work) {
  if (std::holds_alternative<Collective>(work)) return Busy::communication;
  if (std::holds_alternative<Copy>(work)) return Busy::offload;
  if (std::holds_alternative<Compute>(work) || std::holds_alternative<AdamStep>(work)) {
    return op.stream == Stream::host ? Busy::offload : Busy::kernel;
  }
  return std::nullopt;
}

/// Time in which something of each kind runs and nothing of a kind before it. Adam on the host counts as offload.
std::array<Seconds, kNumBusy> exposed(const Schedule& schedule, const Trace& trace) {
  struct Edge {
    Seconds time;
    std::size_t kind = 0;
    int change = 0;
  };
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    const Op& op = schedule.ops()[i];
    const auto kind = busy_with(op, schedule.work(op));
    if (!kind || trace.ops[i].end <= trace.ops[i].start) continue;
    edges.push_back({trace.ops[i].start, static_cast<std::size_t>(*kind), 1});
    edges.push_back({trace.ops[i].end, static_cast<std::size_t>(*kind), -1});
  }
  std::ranges::sort(edges, {}, &Edge::time);
  std::array<Seconds, kNumBusy> sums{};
  std::array<int, kNumBusy> running{};
  Seconds now;
  for (const Edge& edge : edges) {
    const auto first = std::ranges::find_if(running, [](int count) { return count > 0; });
    if (first != running.end()) sums[static_cast<std::size_t>(first - running.begin())] += edge.time - now;
    running[edge.kind] += edge.change;
    now = edge.time;
  }
  return sums;
}

void fill_memory(const EngineTape& tape, const Side& side, Played& played) {
  AllocatorOptions card;
  card.capacity = side.capacity;
  const RunMemory memory = replay(tape, card, PeakCounting::each_phase);
  played.out_of_memory = memory.out_of_memory.has_value();
  played.flushes = memory.num_alloc_retries;
  played.reserved = memory.peak_reserved;
  if (memory.out_of_memory) {  // what it would have held then
    played.allocated = Bytes(static_cast<double>(memory.out_of_memory->allocated + memory.out_of_memory->requested));
    return;
  }
  if (memory.steps.empty()) return;
  const StepMemory& steady = memory.steps.back();
  played.allocated = std::max({steady.forward, steady.backward, steady.step});
}

Played play(const Job& job, const EagerStep& step, const MachineSpec& machine, const Side& side) {
  DeepSpeedJob run;
  run.config = side.config;
  run.ranks = machine.ranks();
  run.zero_init = side.config.stage == 3;
  run.rank = deepspeed_worst_rank(step, run);
  EngineTape tape;
  const auto engine = make_deepspeed_engine(step, run, tape);
  record_run(*engine, step, {deepspeed_steady_steps(run), 1, kWorkspaceAmpere, job.tokens}, tape);
  const std::vector<HostBuffer> host = deepspeed_host_memory(step, run);
  const Schedule schedule = steady_schedule(tape, job.model, host);
  const MachineCostModel cost(machine, run.ranks, side.config.precision);
  SimulateOptions options;
  options.with_trace = true;
  const Simulation simulation = simulate(schedule, demands(schedule, cost), machine, run.ranks, options);
  const auto shares = exposed(schedule, simulation.trace);
  Played played;
  played.step = simulation.step;
  played.communication = shares[static_cast<std::size_t>(Busy::communication)];
  played.offload = shares[static_cast<std::size_t>(Busy::offload)];
  played.messages = count_messages(schedule);
  played.host = host_use(host).total();
  fill_memory(tape, side, played);
  return played;
}

/// Plays sides, prints rows, keeps count of what did not hold.
class Table {
 public:
  Table() {
    fmt::print("{:<34} {:>9} {:>9} {:>9} {:>6} {:>9} {:>9} {:>9}  {}\n", "", "step", "comm.", "offload", "msgs",
               "allocated", "reserved", "host", "card");
    fmt::print("{:<34} {:>9} {:>9} {:>9} {:>6} {:>9} {:>9} {:>9}\n", "", "ms", "exposed", "exposed", "", "GiB", "GiB",
               "GiB");
  }

  void title(const std::string& text) { fmt::print("{}\n", text); }

  Played row(const Job& job, const MachineSpec& machine, const Side& side) {
    const Played p = play(job, step_of(job), machine, side);
    const std::string card = side.capacity == AllocatorOptions::kUnlimited ? "-"
                             : p.out_of_memory                             ? "out of memory"
                             : p.flushes > 0                               ? "fits after flushes"
                                                                           : "fits";
    fmt::print("  {:<32} {:>9.1f} {:>9.1f} {:>9.1f} {:>6} {:>9.2f} {:>9.2f} {:>9.2f}  {}\n", side.name,
               p.step.base() * 1e3, p.communication.base() * 1e3, p.offload.base() * 1e3, p.messages, gib(p.allocated),
               gib(p.reserved), gib(p.host), card);
    return p;
  }

  void law(bool holds, const std::string& what) {
    if (holds) return;
    ++failures_;
    fmt::print("  FAILED: {}\n", what);
  }
  int failures() const { return failures_; }

 private:
  static double gib(Bytes bytes) { return bytes / 1_GiB; }
  const EagerStep& step_of(const Job& job) {
    const Key key{job.model.name, job.tokens.batch, job.tokens.seq_len, job.checkpointing};
    const auto found = steps_.find(key);
    if (found != steps_.end()) return found->second;
    EagerOptions options;
    options.tokens = job.tokens;
    options.checkpointing = job.checkpointing;
    return steps_.emplace(key, eager_step(job.model, options)).first->second;
  }

  using Key = std::tuple<std::string, std::int64_t, std::int64_t, bool>;
  std::map<Key, EagerStep> steps_;
  int failures_ = 0;
};

DeepSpeedConfig config_of(int stage) {
  DeepSpeedConfig config;
  config.stage = stage;
  config.precision = DType::bf16;
  config.overlap_comm = true;
  return config;
}

template <class Change>
Side side(std::string name, DeepSpeedConfig config, Change change) {
  change(config);
  return {std::move(name), config};
}

using C = DeepSpeedConfig;

/// Longer by more than rounding.
bool slower(const Played& a, const Played& b) { return a.step > 1.001 * b.step; }

void overlap(Table& table, const Job& job, const MachineSpec& machine, int stage) {
  table.title(fmt::format("overlap_comm, {}, stage {}", job.model.name, stage));
  const Played off = table.row(job, machine, side("off", config_of(stage), [](C& c) { c.overlap_comm = false; }));
  const Played on = table.row(job, machine, side("on", config_of(stage), [](C&) {}));
  table.law(slower(off, on), "overlap should be faster");
  table.law(on.communication < off.communication, "overlap should hide communication");
  table.law(on.messages == off.messages, "overlap sends the same messages");
  if (stage == 2) table.law(on.reserved > off.reserved, "overlap takes a second bucket");
}

void buckets(Table& table, const Job& job, const MachineSpec& machine, int stage) {
  table.title(fmt::format("reduce_bucket_size, {}, stage {}", job.model.name, stage));
  std::vector<Played> played;
  for (const std::int64_t size : {500'000, 5'000'000, 50'000'000, 500'000'000}) {
    played.push_back(table.row(job, machine,
                               side(fmt::format("{}", size), config_of(stage), [&](C& c) { c.reduce_bucket = size; })));
  }
  for (std::size_t i = 1; i < played.size(); ++i) {
    table.law(played[i].messages <= played[i - 1].messages, "a larger bucket sends no more messages");
    table.law(played[i].allocated >= played[i - 1].allocated, "a larger bucket holds no less memory");
  }
  table.law(played.back().messages < played.front().messages, "the largest bucket sends fewer messages");
  table.law(played.back().reserved > played.front().reserved, "the largest bucket takes more memory");
  // Stage 2 reduces what is larger than the bucket alone and holds compute up for the reduction before.
  if (stage == 2) table.law(slower(played.front(), played.back()), "a message a tensor should be slower");
}

void links(Table& table, const Job& job, const MachineSpec& machine, int stage) {
  table.title(fmt::format("NVLink or PCIe between the same GPUs, {}, stage {}", job.model.name, stage));
  MachineSpec pcie = machine;
  pcie.nvlink = {};
  pcie.interconnect = Interconnect::root_complex;
  const Played fast = table.row(job, machine, side("NVLink", config_of(stage), [](C&) {}));
  const Played slow = table.row(job, pcie, side("PCIe", config_of(stage), [](C&) {}));
  table.law(slower(slow, fast), "PCIe should be slower");
  table.law(slow.communication > fast.communication, "PCIe should wait longer for ranks");
  table.law(slow.allocated == fast.allocated && slow.reserved == fast.reserved, "the link takes no memory");
}

/// Card: what PyTorch may reserve of it.
void gathers(Table& table, const Job& job, const MachineSpec& machine, Bytes card) {
  table.title(
      fmt::format("prefetch_bucket and stage3_max_live_parameters, {}, stage 3, optimizer on the host, {} free "
                  "for PyTorch",
                  job.model.name, format_gib(card)));
  DeepSpeedConfig config = config_of(3);
  config.offload_optimizer.device = OffloadDevice::cpu;
  const auto on_card = [&](std::string name, auto change) {
    Side result = side(std::move(name), config, change);
    result.capacity = static_cast<std::int64_t>(card.base());
    return table.row(job, machine, result);
  };
  const auto live = [](std::int64_t size) { return [size](C& c) { c.max_live = c.max_reuse = size; }; };
  const Played none = on_card("prefetch 0, live 1e9", [](C& c) { c.prefetch_bucket = 0; });
  const Played ahead = on_card("prefetch 5e7, live 1e9", [](C&) {});
  const Played tight = on_card("prefetch 5e7, live and reuse 1e8", live(100'000'000));
  table.law(slower(none, ahead), "gathering ahead should be faster");
  table.law(ahead.out_of_memory, "with 1e9 live parameters the card should not do");
  table.law(!tight.out_of_memory, "with 1e8 it should");
  table.law(tight.messages > ahead.messages, "what is not kept is gathered again");
}

void pinned(Table& table, const Job& job, const MachineSpec& machine, int stage) {
  table.title(fmt::format("pin_memory, {}, stage {}, optimizer on the host", job.model.name, stage));
  DeepSpeedConfig config = config_of(stage);
  config.offload_optimizer.device = OffloadDevice::cpu;
  const Played without =
      table.row(job, machine, side("off", config, [](C& c) { c.offload_optimizer.pin_memory = false; }));
  const Played with = table.row(job, machine, side("on", config, [](C&) {}));
  table.law(slower(without, with), "pinned copies should be faster");
  table.law(with.host >= without.host, "pinned buffers are rounded up");
  table.law(with.allocated == without.allocated, "the GPU holds the same");
}

void swap_buffers(Table& table, const Job& job, const MachineSpec& machine) {
  table.title(fmt::format("buffer_count, {}, stage 3, optimizer on NVMe, sub-groups of 1e8", job.model.name));
  DeepSpeedConfig config = config_of(3);
  config.offload_optimizer.device = OffloadDevice::nvme;
  config.sub_group = 100'000'000;
  const auto buffers = [](std::int64_t count, bool reads_ahead, bool writes_behind) {
    return [=](C& c) {
      c.offload_optimizer.buffer_count = count;
      c.offload_optimizer.pipeline_read = reads_ahead;
      c.offload_optimizer.pipeline_write = writes_behind;
    };
  };
  const Played four = table.row(job, machine, side("4", config, buffers(4, false, false)));
  const Played eleven = table.row(job, machine, side("11", config, buffers(11, false, false)));
  const Played read = table.row(job, machine, side("11, pipeline_read", config, buffers(11, true, false)));
  const Played both = table.row(job, machine, side("11, pipeline_read and _write", config, buffers(11, true, true)));
  table.law(eleven.step == four.step, "more buffers alone should change no time");
  table.law(eleven.host > four.host, "they are locked memory");
  table.law(slower(eleven, read) && slower(read, both), "reading ahead and writing behind should be faster");
  table.law(both.host == eleven.host, "pipelines use the buffers that are there");
}

}  // namespace

int main() {
  const MachineSpec machine = find_machine("DGX-A100-640GB");
  const Job small{find_model("llama-3.2-1b"), {2, 1024}, false}, large{find_model("llama-2-7b"), {1, 2048}, true};
  Table table;
  for (const Job* job : {&small, &large}) {
    for (const int stage : {2, 3}) overlap(table, *job, machine, stage);
    for (const int stage : {2, 3}) buckets(table, *job, machine, stage);
    for (const int stage : {2, 3}) links(table, *job, machine, stage);
    for (const int stage : {2, 3}) pinned(table, *job, machine, stage);
    swap_buffers(table, *job, machine);
  }
  gathers(table, large, machine, 6_GiB);
  return table.failures() == 0 ? 0 : 1;
}
