// zeroplan run PLAN.json: trains with the plan and measures it.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/terminal.h"
#include "models/error.h"
#include "models/measured.h"
#include "models/text_file.h"
#include "planner/prediction.h"
#include "runtime/host_memory.h"
#include "runtime/probe.h"
#include "runtime/process_communicator.h"
#include "runtime/rank_environment.h"
#include "runtime/train_report.h"

namespace zeroplan {
namespace {

struct Flags {
  std::string path, data, backend, ranks, steps, measure, checkpoint, checkpoint_every, export_to, weights, nvme;
  std::string learning_rate, warmup, weight_decay, seed, data_seed;
  bool resume = false, json = false, overwrite = false;
};

void add_to(CommandLine& line, Flags& f) {
  line.positional("PLAN.json", "What plan --out wrote; required", f.path);
  line.value("--data", "FILE|synthetic", "Token file (examples/make_tokens.py) or made-up sequences; required", f.data);
  line.value("--backend", "host", "host: threads as ranks and streams (the default; cuda is not built yet)", f.backend);
  line.value("--ranks", "N", "Must be the plan's ranks; a check, not a choice", f.ranks);
  line.value("--steps", "K", "Training steps from here on, after --resume too (default 10)", f.steps);
  line.value("--measure", "FILE", "Writes the times of every op and the memory used: for `zeroplan compare`",
             f.measure);
  line.value("--checkpoint", "DIR", "Writes checkpoints there, after the last step at least", f.checkpoint);
  line.value("--checkpoint-every", "K", "Also after every K steps", f.checkpoint_every);
  line.toggle("--resume", "Goes on from the newest checkpoint in --checkpoint; other ranks and stages are fine",
              f.resume);
  line.value("--weights", "PATH", "Starts from Hugging Face weights: a .safetensors file or its folder", f.weights);
  line.value("--export", "DIR", "Writes the trained weights as safetensors with Hugging Face names", f.export_to);
  line.value("--nvme-dir", "DIR", "Where states on NVMe live; required when the plan has some", f.nvme);
  line.value("--learning-rate", "X", "AdamW's (default 3e-4)", f.learning_rate);
  line.value("--warmup", "K", "Updates over which the learning rate grows linearly (default 0)", f.warmup);
  line.value("--weight-decay", "X", "AdamW's (default 0.1)", f.weight_decay);
  line.value("--seed", "N", "Of the initial weights (default 1)", f.seed);
  line.value("--data-seed", "N", "Of the order of the data (default 1)", f.data_seed);
  line.toggle("--json", "JSON with stable keys on stdout", f.json);
  line.toggle("--force", "Overwrites the measurement file", f.overwrite);
}

std::int64_t whole(const std::string& text, std::string_view flag, std::int64_t least, std::int64_t otherwise) {
  return text.empty() ? otherwise : parse_integer(text, flag, least, std::numeric_limits<std::int64_t>::max());
}

double positive(const std::string& text, std::string_view flag, bool zero_allowed, double otherwise) {
  if (text.empty()) return otherwise;
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (*end != '\0' || !std::isfinite(value) || value < 0 || (value == 0 && !zero_allowed)) {
    throw InputError(
        fmt::format("{}: expected a {} number, got \"{}\"", flag, zero_allowed ? "non-negative" : "positive", text));
  }
  return value;
}

TrainOptions options_of(const Flags& f, const PlanFile& file) {
  TrainOptions o;
  o.data = f.data;
  o.steps = whole(f.steps, "--steps", 1, 10);
  o.weights_seed = static_cast<std::uint64_t>(whole(f.seed, "--seed", 0, 1));
  o.data_seed = static_cast<std::uint64_t>(whole(f.data_seed, "--data-seed", 0, 1));
  o.adam.learning_rate = positive(f.learning_rate, "--learning-rate", false, o.adam.learning_rate);
  o.adam.weight_decay = positive(f.weight_decay, "--weight-decay", true, o.adam.weight_decay);
  o.warmup_steps = whole(f.warmup, "--warmup", 0, 0);
  o.weights = f.weights;
  o.checkpoints = f.checkpoint;
  o.checkpoint_every = whole(f.checkpoint_every, "--checkpoint-every", 1, 0);
  o.resume = f.resume;
  o.export_to = f.export_to;
  o.memory.nvme_directory = f.nvme;
  o.cores = host_facts().cores;
  o.ranks_here = std::min(file.plan.ranks, file.machine.gpus_per_node);
  if (f.checkpoint.empty() && f.resume) throw InputError("--resume: needs --checkpoint DIR to resume from");
  if (f.checkpoint.empty() && !f.checkpoint_every.empty())
    throw InputError("--checkpoint-every: needs --checkpoint DIR");
  if (!f.nvme.empty() && file.plan.parameters.nvme + file.plan.optimizer.nvme == 0)
    throw InputError(fmt::format("--nvme-dir {}: the plan keeps nothing on NVMe", f.nvme));
  if (f.resume && !f.weights.empty()) throw InputError("--weights: has no meaning with --resume");
  return o;
}

void check_flags(const Flags& f, const PlanFile& file) {
  if (!f.backend.empty() && f.backend != "host") {
    if (f.backend == "cuda") throw InputError("--backend: cuda is not built yet; expected host");
    throw InputError(fmt::format("--backend: expected host or cuda, got \"{}\"", f.backend));
  }
  if (file.plan.engine != Engine::zeroplan) {
    throw InputError(fmt::format("{}: plan/engine: expected zeroplan, which this runtime is; got {}", f.path,
                                 to_string(file.plan.engine)));
  }
  const std::int64_t ranks = whole(f.ranks, "--ranks", 1, file.plan.ranks);
  if (ranks != file.plan.ranks) {
    throw InputError(fmt::format("--ranks: expected {}, the ranks of {}, got {}; plan again for {} to change them",
                                 file.plan.ranks, f.path, ranks, ranks));
  }
}

/// The states of the ranks here, which all live in this host's memory, beside what is there: more would end with the
/// kernel killing the process.
void refuse_beyond_memory(const PlanFile& file, int ranks, const std::string& path) {
  const auto available = available_memory();
  if (!available) return;
  const auto states = Predictor(file.model, file.machine).resident_states(file.plan);
  const Bytes needed = static_cast<double>(ranks) *
                       (states[static_cast<std::size_t>(Memory::hbm)] + states[static_cast<std::size_t>(Memory::dram)]);
  if (needed <= *available) return;
  throw InputError(fmt::format(
      "{}: expected a plan whose states fit in this host, {} are available; found {} on {} ranks, activations apart",
      path, format_gib(*available), format_gib(needed), ranks));
}

/// A line on the terminal that is written over by the next.
void show_progress(const StepReport& r, std::int64_t last) {
  std::fputs(
      fmt::format("\r\033[Kstep {}/{}  loss {:.4f}  {}", r.step, last, r.loss, format_seconds(Seconds(r.seconds)))
          .c_str(),
      stderr);
  if (r.step == last) std::fputs("\r\033[K", stderr);
}

std::optional<std::string> environment(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

/// Ranks of a launcher are processes; without one every rank is a thread.
std::optional<TrainResult> trained(const PlanFile& file, const TrainOptions& options) {
  std::int64_t seen = 0;
  std::function<void(const StepReport&)> progress;
  if (::isatty(STDERR_FILENO) != 0) {
    progress = [&](const StepReport& r) { show_progress(r, r.step + options.steps - ++seen); };
  }
  const RankEnvironment launched = read_rank_environment(environment);
  if (launched.source == RankSource::one_process || (launched.size == 1 && file.plan.ranks != 1)) {
    return train_threads(file, options, progress);
  }
  if (launched.size != file.plan.ranks) {
    throw InputError(fmt::format("world size: expected {}, the ranks of the plan, got {} from {}", file.plan.ranks,
                                 launched.size, to_string(launched.source)));
  }
  ProcessWorldOptions world_options = process_world_options(launched);
  world_options.job_key = plan_identity(file) + launched.job;  // equal jobs beside each other must not mix
  world_options.wait_limit = kTrainingWaitLimit;
  const auto world = make_process_world(world_options);
  TrainResult result = train(file, *world, options, progress);
  if (launched.rank != 0) return {};
  return result;
}

/// The file of --measure, before any work is done. Rank 0 writes it; the others refuse what is there as it does, so as
/// not to wait for it.
void open_measured_file(const Flags& flags, std::optional<OutputFile>& file) {
  if (flags.measure.empty()) return;
  refuse_input_file(flags.measure, flags.path, "plan", "--measure");
  if (read_rank_environment(environment).rank == 0) {
    file.emplace(flags.measure, flags.overwrite, "--measure");
  } else {
    refuse_existing_file(flags.measure, flags.overwrite, "--measure");
  }
}

}  // namespace

Outcome run_run(const Arguments& arguments) {
  CommandLine line("run", "Trains with the plan and measures every op of it.",
                   "Example:\n  zeroplan run plan/plan.json --data synthetic --steps 20 --measure measured.json\n"
                   "  zeroplan compare plan/plan.json measured.json\n\n"
                   "Ranks are threads of this process, or under torchrun, mpirun or srun one process each.");
  Flags flags;
  add_to(line, flags);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (flags.path.empty()) throw InputError("zeroplan run: expected PLAN.json, got nothing; see --help");
  if (flags.data.empty()) throw InputError("zeroplan run: expected --data FILE or --data synthetic; see --help");
  const PlanFile file = read_plan(read_text_file(flags.path), flags.path);
  check_flags(flags, file);
  const TrainOptions options = options_of(flags, file);
  refuse_beyond_memory(file, options.ranks_here, flags.path);
  std::optional<OutputFile> measured;
  open_measured_file(flags, measured);
  const std::optional<TrainResult> result = trained(file, options);
  if (!result) return {{}, {}, kDone};
  Outcome outcome{flags.json ? training_json(file, *result) : report_training(file, *result), result->notes, kDone};
  if (measured) {
    measured->write(write_measured(result->measured));
    for (std::string& note : measured->notes()) outcome.notes.push_back(std::move(note));
  }
  return outcome;
}

}  // namespace zeroplan
