#include "runtime/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <new>

#include "models/error.h"
#include "models/host_ranks.h"
#include "models/overloaded.h"
#include "runtime/adam.h"
#include "runtime/atomic_file.h"
#include "runtime/checkpoint_manifest.h"
#include "runtime/directory_lock.h"
#include "runtime/export_weights.h"
#include "runtime/initial_weights.h"
#include "runtime/token_data.h"

namespace zeroplan {
namespace {

/// The first steps fault pages in and fill caches: they are left out of medians.
constexpr std::int64_t kMeasureWarmup = 2;
/// Steps whose op times are kept: more do not change a median, and each costs 32 bytes an op.
constexpr std::int64_t kMostTraced = 64;
constexpr std::int64_t kLeastTraced = 4;
constexpr std::int64_t kTracedOps = 8 << 20;  // over all kept steps: 256 MiB

std::string hex(double x) { return fmt::format("{:a}", x); }

HostOptions host_options(const TrainOptions& options) {
  HostOptions host;
  host.compute_threads = host_threads_per_rank(options.cores, options.ranks_here);
  host.host_threads = host.compute_threads;
  host.memory = options.memory;
  return host;
}

/// What the plan's ops move, as MeasuredTraffic counts it.
MeasuredTraffic traffic_of(const Schedule& schedule) {
  MeasuredTraffic t;
  for (const Op& op : schedule.ops()) {
    std::visit(overloaded{[&](const Collective& c) {
                            auto& sum = c.kind == CollectiveKind::all_gather       ? t.all_gather
                                        : c.kind == CollectiveKind::reduce_scatter ? t.reduce_scatter
                                                                                   : t.all_reduce;
                            sum += static_cast<std::int64_t>(c.message().base());
                          },
                          [&](const Copy& c) {
                            auto& sum = c.from == Memory::nvme ? t.nvme_read
                                        : c.to == Memory::nvme ? t.nvme_write
                                        : c.to == Memory::hbm  ? t.h2d
                                                               : t.d2h;
                            sum += static_cast<std::int64_t>(c.bytes.base());
                          },
                          [](const auto&) {}},
               schedule.work(op));
  }
  return t;
}

class Trainer {
 public:
  Trainer(const PlanFile& file, World& world, const TrainOptions& options,
          const std::function<void(const StepReport&)>& on_step)
      : file_(file),
        plan_(file.plan),
        model_(file.model),
        world_(world),
        options_(options),
        on_step_(on_step),
        checkpoints_(options.checkpoints),
        data_(open_token_data(options.data, {plan_.seq_len, plan_.global_batch(), model_.vocab}, options.data_seed)),
        executor_(model_, plan_, world, host_options(options)) {}

  TrainResult run() {
    prepare();
    begin_measurement();
    for (std::int64_t k = 0; k < options_.steps; ++k) {
      one_step();
      const bool last = k + 1 == options_.steps;
      const bool due = options_.checkpoint_every > 0 && done_ % options_.checkpoint_every == 0;
      if (!checkpoints_.empty() && (last || due)) save();
    }
    end_measurement();
    if (!options_.export_to.empty()) export_weights();
    for (std::string& note : executor_.notes()) result_.notes.push_back(std::move(note));
    result_.assumptions = executor_.assumptions();
    return std::move(result_);
  }

 private:
  // --- states --------------------------------------------------------------------------------------

  void prepare() {
    if (plan_.loss_scaling == LossScaling::dynamic) scale_ = initial_loss_scale(options_.loss_scaling);
    lock_checkpoints();
    if (options_.resume) {
      resume();
    } else if (!options_.weights.empty()) {
      const WeightImporter weights(model_, options_.weights);
      load([&](const FlatRange& range, std::span<float> out) { weights.read(range, plan_.precision.weights, out); });
    } else {
      const InitialWeights weights(model_, options_.weights_seed);
      load([&](const FlatRange& range, std::span<float> out) {
        weights.fill_flat(range.block, plan_.precision.weights, range.begin, range.end, out);
      });
    }
    if (!checkpoints_.empty() && world_.rank() == 0) check_checkpoint_directory(checkpoints_, done_);
    world_.exchange("ready");
  }

  // A step's own folder may be named to resume from; new ones go beside it.
  void lock_checkpoints() {
    if (checkpoints_.empty()) return;
    if (!checkpoints_.has_filename()) checkpoints_ = checkpoints_.parent_path();  // "DIR/"
    if (options_.resume && step_of_folder(checkpoints_)) {
      checkpoints_ = checkpoints_.has_parent_path() ? checkpoints_.parent_path() : ".";
    }
    if (world_.rank() == 0) {
      if (!options_.resume) make_directories(checkpoints_);
      lock_.emplace(checkpoints_);
    }
    world_.exchange("locked");
  }

  template <class Fill>
  void load(Fill fill) {
    executor_.load_states([&](const FlatRange& range, const StateSpans& spans) {
      if (!spans.master.empty()) fill(range, spans.master);
      std::ranges::fill(spans.first, std::byte{0});
      std::ranges::fill(spans.second, std::byte{0});
    });
  }

  void resume() {
    const CheckpointReader reader(options_.checkpoints, model_, plan_);
    const CheckpointMeta& meta = reader.meta();
    if (meta.data != data_.fingerprint() || meta.data_seed != options_.data_seed) {
      throw InputError(fmt::format("{}: data: expected the data of this run ({}, seed {}), found {}, seed {}",
                                   reader.path().string(), data_.fingerprint(), options_.data_seed, meta.data,
                                   meta.data_seed));
    }
    if (meta.samples != meta.step * plan_.global_batch()) {
      throw InputError(fmt::format("{}: global batch: expected {} sequences a step as in the checkpoint, found {}",
                                   reader.path().string(), meta.samples / std::max<std::int64_t>(1, meta.step),
                                   plan_.global_batch()));
    }
    executor_.load_states([&](const FlatRange& range, const StateSpans& spans) {
      reader.read(range, spans.master, spans.first, spans.second);
    });
    done_ = result_.first_step = meta.step;
    updates_ = meta.updates;
    weights_seed_ = meta.weights_seed;
    if (plan_.loss_scaling == LossScaling::dynamic) scale_ = meta.loss_scale;
    result_.notes = reader.notes();
  }

  void save() {
    CheckpointMeta meta = checkpoint_meta(model_, plan_);
    meta.step = done_;
    meta.updates = updates_;
    meta.loss_scale = scale_;
    meta.weights_seed = weights_seed_.value_or(options_.weights_seed);
    meta.data_seed = options_.data_seed;
    meta.samples = done_ * plan_.global_batch();
    meta.data = data_.fingerprint();
    CheckpointWriter writer(checkpoints_, meta, model_, world_.rank());
    executor_.save_states([&](const FlatRange& range, const StateSpans& spans) {
      // Without a global norm nobody looked at the gradients before they were used.
      if (!std::ranges::all_of(spans.master, [](float x) { return std::isfinite(x); })) {
        throw DeviceError(
            fmt::format("training diverged: weights of block {} are not finite after step {}; no checkpoint is written",
                        range.block, done_));
      }
      writer.add(range, spans.master, spans.first, spans.second);
    });
    const auto files = world_.exchange(writer.finish());
    if (world_.rank() == 0) {
      commit_manifest(checkpoints_, meta, model_, files, options_.keep_checkpoints);
    }
    world_.exchange("saved");
  }

  void export_weights() {
    std::optional<WeightExporter> exporter;
    if (world_.rank() == 0) exporter.emplace(model_, plan_.precision.weights, options_.export_to);
    std::vector<std::byte> flat;
    for (std::size_t block = 0; block < model_.sequence.size(); ++block) {
      executor_.gather_weights(static_cast<int>(block), flat);
      if (exporter) exporter->add_block(plan_.precision.weights, flat);
    }
    if (exporter) exporter->finish();
    world_.exchange("exported");
  }

  // --- a step --------------------------------------------------------------------------------------

  void read_batch() {
    const auto ids = static_cast<std::size_t>(plan_.accumulation * plan_.micro_step().tokens());
    inputs_.resize(ids);
    targets_.resize(ids);
    const auto length = static_cast<std::size_t>(plan_.seq_len);
    for (std::int64_t m = 0, row = 0; m < plan_.accumulation; ++m) {
      for (std::int64_t r = 0; r < plan_.micro_batch; ++r, ++row) {
        const std::int64_t sample = sample_in_batch(m, plan_.micro_batch, r, world_.rank(), plan_.ranks);
        const std::size_t at = static_cast<std::size_t>(row) * length;
        data_.batch(done_, sample, std::span(inputs_).subspan(at, length), std::span(targets_).subspan(at, length));
      }
    }
  }

  AdamSettings settings() const {
    AdamSettings adam = options_.adam;
    if (options_.warmup_steps > 0) {
      const double share = static_cast<double>(updates_ + 1) / static_cast<double>(options_.warmup_steps);
      adam.learning_rate *= std::min(1.0, share);
    }
    return adam;
  }

  void one_step() {
    read_batch();
    const StepOutput out = executor_.step({inputs_, targets_, settings(), updates_ + 1, scale_.scale});
    StepReport report;
    report.step = ++done_;
    report.gradient_norm = out.gradient_norm;
    report.loss_scale = scale_.scale;
    report.skipped = out.skipped;
    report.seconds = executor_.step_seconds();
    report.loss = mean_loss(out);
    if (!out.skipped) ++updates_;
    record(report);
    if (plan_.loss_scaling == LossScaling::dynamic) {
      next_scale(report);
    } else if (out.skipped || !std::isfinite(report.loss)) {
      throw DeviceError(fmt::format(
          "training diverged at step {}: loss {}, gradient norm {}; {}", report.step, report.loss, report.gradient_norm,
          out.skipped ? "the weights are those of the step before" : "the step was taken: go back to a checkpoint"));
    }
  }

  void next_scale(const StepReport& report) {
    try {
      update_loss_scale(scale_, options_.loss_scaling, report.skipped);
    } catch (const DeviceError& e) {
      throw DeviceError(fmt::format("{}, at step {}; the weights are those of the last step that was not skipped",
                                    e.what(), report.step));
    }
  }

  // Summed in the order of the samples, whoever computed them: the same bits on one rank and on eight.
  double mean_loss(const StepOutput& out) {
    std::string mine;
    for (const double loss : out.losses) mine += hex(loss) + ' ';
    const auto all = world_.exchange(mine);
    std::vector<const char*> next;
    for (const std::string& text : all) next.push_back(text.c_str());
    double sum = 0;
    for (std::int64_t m = 0; m < plan_.accumulation; ++m) {
      for (const char*& at : next) {
        char* end = nullptr;
        sum += std::strtod(at, &end);
        at = end;
      }
    }
    return sum / (static_cast<double>(plan_.global_batch()) * static_cast<double>(plan_.seq_len));
  }

  // --- measurement ---------------------------------------------------------------------------------

  void begin_measurement() {
    Measured& m = result_.measured;
    m.engine = "zeroplan";
    m.backend = "host";
    m.plan = plan_identity(file_);
    m.ranks = plan_.ranks;
    m.cpu = file_.machine.host_device ? file_.machine.cpu : "";
    m.cores = options_.cores;
    m.threads_per_rank = host_threads_per_rank(options_.cores, options_.ranks_here);
    m.paths.emplace_back("adam", to_string(adam_paths().back()));
    if (executor_.memory().has_disk()) m.paths.emplace_back("disk", to_string(executor_.memory().disk().engine()));
    read_bytes_ = disk_bytes(&DiskFile::bytes_read);
    written_bytes_ = disk_bytes(&DiskFile::bytes_written);
  }

  std::int64_t disk_bytes(std::int64_t (DiskFile::*count)() const) const {
    return executor_.memory().has_disk() ? (executor_.memory().disk().*count)() : 0;
  }

  void record(const StepReport& report) {
    result_.steps.push_back(report);
    if (world_.rank() != 0) return;
    Measured& m = result_.measured;
    m.losses.push_back(report.loss);
    m.step_seconds.push_back(Seconds(report.seconds));
    traced_.push_back(executor_.times());
    const auto ops = static_cast<std::int64_t>(executor_.schedule().ops().size());
    const std::int64_t most = std::clamp(kTracedOps / std::max<std::int64_t>(1, ops), kLeastTraced, kMostTraced);
    if (static_cast<std::int64_t>(traced_.size()) > most) traced_.erase(traced_.begin());
    if (on_step_) on_step_(report);
  }

  void end_measurement() {
    Measured& m = result_.measured;
    m.steps = options_.steps;
    measure_memory();
    m.traffic = traffic_of(executor_.schedule());
    // What the disk counted, not what was planned.
    m.traffic.nvme_read = (disk_bytes(&DiskFile::bytes_read) - read_bytes_) / options_.steps;
    m.traffic.nvme_write = (disk_bytes(&DiskFile::bytes_written) - written_bytes_) / options_.steps;
    m.traffic.sent = executor_.bytes_sent();
    m.traffic.received = executor_.bytes_received();
    if (world_.rank() == 0) set_op_times(m, executor_.schedule(), traced_, kMeasureWarmup);
  }

  // Host and NVMe count for all ranks of a node.
  void measure_memory() {
    const RankMemory& mine = executor_.memory();
    const auto host = [&](auto count) { return count(Memory::pinned) + count(Memory::dram); };
    const auto planned = [&](Memory memory) { return mine.planned(memory); };
    const auto used = [&](Memory memory) { return mine.used(memory); };
    const auto all = world_.exchange(
        fmt::format("{} {} {} {}", host(planned), host(used), mine.planned(Memory::nvme), mine.used(Memory::nvme)));
    MeasuredTier gpu{Tier::hbm, mine.planned(Memory::hbm), mine.used(Memory::hbm)};
    MeasuredTier host_tier{Tier::host, 0, 0}, nvme{Tier::nvme, 0, 0};
    const auto node = std::min<std::size_t>(all.size(), static_cast<std::size_t>(file_.machine.gpus_per_node));
    for (std::size_t r = 0; r < node; ++r) {
      char* at = const_cast<char*>(all[r].c_str());
      for (std::int64_t* sum : {&host_tier.planned, &host_tier.used, &nvme.planned, &nvme.used}) {
        *sum += std::strtoll(at, &at, 10);
      }
    }
    for (const MeasuredTier& tier : {gpu, host_tier, nvme}) {
      if (tier.planned > 0 || tier.used > 0) result_.measured.memory.push_back(tier);
    }
  }

  const PlanFile& file_;
  const Plan& plan_;
  const ModelSpec& model_;
  World& world_;
  const TrainOptions& options_;
  const std::function<void(const StepReport&)>& on_step_;
  std::filesystem::path checkpoints_;  // where they go; empty: nowhere
  std::optional<DirectoryLock> lock_;  // rank 0's
  TokenData data_;
  HostExecutor executor_;
  LossScaleState scale_;
  std::int64_t done_ = 0, updates_ = 0;
  std::optional<std::uint64_t> weights_seed_;  // of the run that began
  std::vector<std::int32_t> inputs_, targets_;
  std::vector<StepTimes> traced_;
  std::int64_t read_bytes_ = 0, written_bytes_ = 0;
  TrainResult result_;
};

}  // namespace

TrainResult train(const PlanFile& file, World& world, const TrainOptions& options,
                  const std::function<void(const StepReport&)>& on_step) {
  if (options.steps < 1) throw InputError("steps: expected at least 1");
  std::optional<Trainer> trainer;  // gone after abort(): peers hear the reason before they see this rank leave
  try {
    trainer.emplace(file, world, options, on_step);
    return trainer->run();
  } catch (const std::bad_alloc&) {
    const std::string what = fmt::format("rank {}: out of memory outside the plan's arenas", world.rank());
    world.abort(what);
    throw DeviceError(what);
  } catch (const std::exception& e) {
    world.abort(e.what());  // peers must not wait for a rank that has left
    throw;
  } catch (...) {
    world.abort("an exception of unknown type");
    throw;
  }
}

}  // namespace zeroplan
