#include "planner/export_fit.h"

#include <fmt/format.h>

#include <functional>

#include "models/error.h"
#include "planner/engine_counts.h"

namespace zeroplan {
namespace {

EngineWorkload workload_of(const Plan& plan) {
  EngineWorkload w;
  w.tokens = plan.micro_step();
  w.accumulation = plan.accumulation;
  w.ranks = plan.ranks;
  w.checkpointing = plan.recompute != Recompute::none;  // launch.sh turns it on for every layer
  w.type = plan.precision.weights;
  w.lora_rank = plan.lora_rank;
  w.allocator_conf = plan.allocator_conf;
  return w;
}

ExportSubject with_plan(const ExportSubject& subject, const Plan& plan) {
  return {plan, subject.model, subject.machine, subject.prediction, subject.margin};
}

void checkpoint_everything(Plan& plan, const ModelSpec& model) {
  plan.recompute = Recompute::full;
  plan.recompute_layers = static_cast<int>(model.num_layers);
}

void halve_micro_batch(Plan& plan) {
  plan.micro_batch /= 2;
  plan.accumulation *= 2;
}

/// Places for the states, the fastest first: less and less on the GPU, then, with drives, less and less on the host.
std::vector<Plan> placements(const Plan& plan, const MachineSpec& machine) {
  std::vector<Plan> plans{plan};
  const int blocks = plan.optimizer.total();
  const auto push = [&](const std::function<void(Plan&)>& change) {
    Plan next = plans.back();
    change(next);
    if (!(next == plans.back())) plans.push_back(next);
  };
  push([](Plan& p) {
    p.zero_stage = 3;
    p.shard_ranks = p.ranks;
    p.reduce_each = ReduceEach::micro_step;
  });
  push([&](Plan& p) {
    if (p.optimizer.nvme == 0) p.optimizer = Placement::all(Tier::host, blocks);
    p.update = UpdateOn::host;
  });
  push([&](Plan& p) {
    if (p.parameters.nvme == 0) p.parameters = Placement::all(Tier::host, blocks);
  });
  if (machine.nvme.drives == 0) return plans;
  push([&](Plan& p) {
    p.optimizer = Placement::all(Tier::nvme, blocks);
    p.parameters = plan.parameters;
  });
  push([&](Plan& p) {
    if (p.parameters.nvme == 0) p.parameters = Placement::all(Tier::host, blocks);
  });
  push([&](Plan& p) { p.parameters = Placement::all(Tier::nvme, blocks); });
  return plans;
}

/// One word for each difference that a user would see. Where the host has no room for an optimizer that the plan puts
/// there, the exporter sends it to NVMe and says so itself.
std::string changes(const Plan& from, const DeepspeedFit& found) {
  const Plan& to = found.plan;
  std::vector<std::string> words;
  if (from.micro_batch != to.micro_batch) {
    words.push_back(fmt::format("micro-batch {} x {} instead of {} x {}", to.micro_batch, to.accumulation,
                                from.micro_batch, from.accumulation));
  }
  if (from.recompute != to.recompute || from.recompute_layers != to.recompute_layers) {
    words.emplace_back("gradient checkpointing of every layer");
  }
  if (from.zero_stage != to.zero_stage) words.push_back(fmt::format("stage {}", to.zero_stage));
  if (!(from.optimizer == to.optimizer))
    words.emplace_back(to.optimizer.nvme > 0 ? "the optimizer on NVMe"
                       : found.exported.nvme ? "the whole optimizer off the GPU"
                                             : "the optimizer on the host");
  if (from.allocator_conf != to.allocator_conf)
    words.push_back("PYTORCH_CUDA_ALLOC_CONF=" + to.allocator_conf + " (launch.sh sets it)");
  if (!(from.parameters == to.parameters))
    words.emplace_back(to.parameters.nvme > 0 ? "weights on NVMe" : "weights on the host");
  return fmt::format("{}", fmt::join(words, ", "));
}

class Fitting {
 public:
  Fitting(const ExportSubject& subject, EngineFitter& fitter) : subject_(subject), fitter_(fitter) {}

  DeepspeedFit as(const Plan& plan) {
    DeepspeedFit result;
    result.plan = plan;
    result.exported = export_deepspeed(with_plan(subject_, plan));
    result.exported.plan = plan;
    try {
      result.fit = fitter_.deepspeed_text(result.exported.json, workload_of(plan));
      result.as_planned = describe(*result.fit);
    } catch (const InputError& e) {
      result.unknown = e.what();
    }
    return result;
  }

  DeepspeedFit best() {
    const DeepspeedFit planned = as(subject_.plan);
    if (const auto found = with_expandable_segments(planned)) return noted(*found, planned);
    if (fits(planned)) return planned;
    for (const Plan& place : placements(subject_.plan, subject_.machine)) {
      Plan smallest = place;
      checkpoint_everything(smallest, subject_.model);
      while (smallest.micro_batch % 2 == 0) halve_micro_batch(smallest);
      const DeepspeedFit least = as(smallest);
      if (!fits(least)) continue;
      const DeepspeedFit largest = largest_that_fits(place, least);
      return noted(with_expandable_segments(largest).value_or(largest), planned);
    }
    if (!planned.fit) return planned;
    DeepspeedFit none = planned;
    none.exported.notes.insert(none.exported.notes.begin(),
                               "deepspeed.json: does not fit under DeepSpeed, with smaller micro-batches, every layer "
                               "checkpointed and states on the host" +
                                   std::string(subject_.machine.nvme.drives > 0 ? " or NVMe" : "") +
                                   " neither: " + planned.as_planned + ".");
    return none;
  }

 private:
  bool fits(const DeepspeedFit& f) const {
    const Bytes disk = subject_.machine.nvme.capacity * (1 - subject_.margin);
    return f.fit && f.fit->fits() && engine_nvme(subject_.model, subject_.machine, f.plan) <= disk;
  }

  /// What fits only after flushes, or not at all, when fragments are the reason: the same with segments that grow. Not
  /// where the user chose the allocator's settings.
  std::optional<DeepspeedFit> with_expandable_segments(const DeepspeedFit& tight) {
    const bool needed = tight.fit && !tight.fit->fits_in_step() && tight.fit->host_fits();
    if (!needed || !tight.plan.allocator_conf.empty()) return std::nullopt;
    Plan plan = tight.plan;
    plan.allocator_conf = "expandable_segments:True";
    DeepspeedFit found = as(plan);
    if (!found.fit || !found.fit->fits_in_step()) return std::nullopt;
    return found;
  }

  // From the plan's own micro-batch down; `least`, the smallest, fits, and the subject's plan does not.
  DeepspeedFit largest_that_fits(const Plan& place, const DeepspeedFit& least) {
    Plan plan = place;
    if (!(place == subject_.plan)) {
      const DeepspeedFit found = as(plan);
      if (fits(found)) return found;
    }
    checkpoint_everything(plan, subject_.model);
    while (plan.micro_batch > least.plan.micro_batch) {
      const DeepspeedFit found = as(plan);
      if (fits(found)) return found;
      halve_micro_batch(plan);
    }
    return least;
  }

  DeepspeedFit noted(DeepspeedFit found, const DeepspeedFit& planned) const {
    found.as_planned = planned.as_planned;
    const std::string why = planned.fit ? fmt::format("as the plan has it DeepSpeed would take {}.", planned.as_planned)
                                        : fmt::format("what the plan has cannot be predicted ({}).", planned.unknown);
    found.exported.notes.insert(found.exported.notes.begin(),
                                fmt::format("deepspeed.json: {}: {}", changes(subject_.plan, found), why));
    return found;
  }

  const ExportSubject& subject_;
  EngineFitter& fitter_;
};

}  // namespace

DeepspeedFit deepspeed_as_planned(const ExportSubject& subject, EngineFitter& fitter) {
  return Fitting(subject, fitter).as(subject.plan);
}

DeepspeedFit deepspeed_that_fits(const ExportSubject& subject, EngineFitter& fitter) {
  return Fitting(subject, fitter).best();
}

}  // namespace zeroplan
