#include "planner/shortfall.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "models/error.h"
#include "planner/engine_search.h"
#include "planner/searcher.h"

namespace zeroplan {
namespace {

bool own_engine(const Request& request) { return request.engine == Engine::zeroplan; }

/// Some plan under another engine, which the final answer improves on; ours is the best at once.
std::optional<Candidate> plan_changed(const Request& request) {
  if (!own_engine(request)) return engine_plan_that_fits(request);
  std::vector<Assumption> ignored;
  std::vector<std::string> warnings;
  Request one = request;
  one.top_k = 1;
  one.per_stage = false;
  const Workload workload = workload_of(one, ignored, warnings);
  auto plans = Searcher(one, workload).run();
  if (plans.empty()) return std::nullopt;
  return plans.front();
}

/// Another engine's plan was the first that fits.
void take_fastest(Shortfall::Change& change, const Request& request) {
  if (own_engine(request)) return;
  if (auto plan = fastest_engine_plan(request)) change.result = std::move(*plan);
}
void add_change(std::vector<Shortfall::Change>& changes, const Request& request, std::string what, std::string flag) {
  auto plan = plan_changed(request);
  if (!plan) return;
  changes.push_back({std::move(what), std::move(flag), std::move(*plan)});
  take_fastest(changes.back(), request);
}

/// The first of `count` growing changes that fits: the largest is tried first, then the smallest is found by halving.
/// More memory never turns "fits" into "does not", so halving is right.
struct Step {
  Request request;
  std::string what, flag;
};
void smallest(std::vector<Shortfall::Change>& changes, int count, const std::function<std::optional<Step>(int)>& make) {
  const auto at = [&](int i) -> std::optional<Shortfall::Change> {
    const auto step = make(i);
    if (!step) return std::nullopt;
    auto plan = plan_changed(step->request);
    if (!plan) return std::nullopt;
    return Shortfall::Change{step->what, step->flag, *plan};
  };
  int high = count - 1, low = -1;
  auto found = at(high);
  if (!found) return;
  while (high - low > 1) {
    const int middle = (high + low) / 2;
    if (auto one = at(middle)) {
      found = std::move(one);
      high = middle;
    } else {
      low = middle;
    }
  }
  take_fastest(*found, make(high)->request);
  changes.push_back(std::move(*found));
}

void more_host(const Request& r, std::vector<Shortfall::Change>& changes) {
  static constexpr int sizes[] = {64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096};
  std::vector<int> larger;
  for (int gib : sizes) {
    if (gib * kGiB > r.machine.dram.base()) larger.push_back(gib);
  }
  if (larger.empty()) return;
  smallest(changes, static_cast<int>(larger.size()), [&](int i) -> std::optional<Step> {
    const int gib = larger[static_cast<std::size_t>(i)];
    Request more = r;
    more.machine.dram = Bytes(gib * kGiB);
    return Step{more, fmt::format("{} GiB of host memory a node (now {})", gib, format_gib(r.machine.dram)),
                fmt::format("--host-memory {}GiB", gib)};
  });
}

/// As `--offload` spells it.
std::string_view flag_value(OffloadWhat what) {
  switch (what) {
    case OffloadWhat::none:
      return "none";
    case OffloadWhat::optimizer:
      return "optimizer";
    case OffloadWhat::parameters:
      return "parameters";
    case OffloadWhat::all:
      return "all";
  }
  return "";
}

void a_disk(const Request& r, std::vector<Shortfall::Change>& changes) {
  static constexpr const char* disks[] = {"1x1TB", "1x2TB", "2x2TB", "4x2TB", "4x4TB", "8x8TB"};
  std::vector<const char*> larger;
  for (const char* d : disks) {
    if (parse_nvme(d).capacity > r.machine.nvme.capacity) larger.push_back(d);
  }
  if (larger.empty()) return;
  smallest(changes, static_cast<int>(larger.size()), [&](int i) -> std::optional<Step> {
    const char* d = larger[static_cast<std::size_t>(i)];
    Request more = r;
    more.machine.nvme = parse_nvme(d);
    std::string flag = fmt::format("--nvme {}", d);
    auto& offload = more.constraints.offload;
    if (offload && offload->what != OffloadWhat::none && offload->to != Tier::nvme) {
      offload->to = Tier::nvme;
      flag += fmt::format(" --offload {}:nvme", flag_value(offload->what));
    }
    return Step{more, fmt::format("NVMe {} a node", d), flag};
  });
}

void more_nodes(const Request& r, std::vector<Shortfall::Change>& changes) {
  if (r.machine.host_device) return;
  std::vector<int> counts;
  for (int n = 2 * r.machine.nodes; n <= 128; n *= 2) counts.push_back(n);
  if (counts.empty()) return;
  smallest(changes, static_cast<int>(counts.size()), [&](int i) -> std::optional<Step> {
    const int nodes = counts[static_cast<std::size_t>(i)];
    Request more = r;
    set_nodes(more.machine, nodes);
    const std::int64_t unit = more.machine.ranks() * more.constraints.micro_batch.value_or(1);
    more.global_batch = (*r.global_batch + unit - 1) / unit * unit;
    return Step{more, fmt::format("{} nodes ({} GPUs)", nodes, more.machine.ranks()), fmt::format("--nodes {}", nodes)};
  });
}

void smaller_workload(const Request& r, std::vector<Shortfall::Change>& changes) {
  if (r.constraints.micro_batch && *r.constraints.micro_batch > 1) {
    Request less = r;
    less.constraints.micro_batch = 1;
    add_change(changes, less, "micro-batch 1", "--micro-batch 1");
  }
  if (r.constraints.recompute && *r.constraints.recompute != Recompute::full) {
    Request less = r;
    less.constraints.recompute = Recompute::full;
    add_change(changes, less, "full recompute", "--recompute full");
  }
  std::vector<std::int64_t> lengths;
  for (std::int64_t s = *r.seq_len / 2; s >= 256; s /= 2) lengths.push_back(s);
  if (lengths.empty()) return;
  smallest(changes, static_cast<int>(lengths.size()), [&](int i) -> std::optional<Step> {
    Request less = r;
    less.seq_len = lengths[static_cast<std::size_t>(i)];
    return Step{less, fmt::format("sequences of {} tokens", *less.seq_len), fmt::format("--seq-len {}", *less.seq_len)};
  });
}

/// PyTorch's allocator loses less to fragments with segments that grow.
void growing_segments(const Request& r, std::vector<Shortfall::Change>& changes) {
  if (own_engine(r) || !r.allocator_conf.empty()) return;
  Request growing = r;
  growing.allocator_conf = "expandable_segments:True";
  add_change(changes, growing, "PYTORCH_CUDA_ALLOC_CONF=" + growing.allocator_conf,
             "--alloc-conf " + growing.allocator_conf);
}

void freer_choice(const Request& r, std::vector<Shortfall::Change>& changes) {
  if (!r.constraints.stages.empty() || r.constraints.offload) {
    Request free = r;
    free.constraints.stages.clear();
    free.constraints.offload.reset();
    add_change(changes, free, "any stage and offload", "without --zero and --offload");
    if (!changes.empty()) changes.back().what += ": " + describe(changes.back().result.plan);
  }
}

}  // namespace

Shortfall shortfall_of(const Request& request, const Candidate& nearest) {
  Shortfall s;
  s.nearest = nearest;
  const auto look = [&](std::string_view tier, const TierMemory& memory) {
    const Bytes available = (1 - request.margin) * memory.capacity;
    if (memory.peak > available) s.lacks.push_back({std::string(tier), memory.peak, available});
  };
  look("gpu", nearest.prediction.gpu);
  if (nearest.prediction.host) look("host", *nearest.prediction.host);
  if (nearest.prediction.nvme) look("nvme", *nearest.prediction.nvme);
  Precision full;
  full.weights = request.precision;
  full.master = request.precision != DType::fp32;
  s.optimizer_states = Bytes(static_cast<double>(request.model.parameters() * full.optimizer_bytes_per_parameter()));

  s.changes = changes_that_fit(request);
  return s;
}

std::vector<Shortfall::Change> changes_that_fit(const Request& request) {
  std::vector<Shortfall::Change> changes;
  growing_segments(request, changes);
  freer_choice(request, changes);
  smaller_workload(request, changes);
  if (request.engine != Engine::fsdp2) a_disk(request, changes);  // FSDP2 offloads to host memory only
  more_host(request, changes);
  more_nodes(request, changes);
  return changes;
}

}  // namespace zeroplan
