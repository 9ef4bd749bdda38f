// zeroplan simulate PLAN.json: one plan on the machine that the file holds.

#include <fmt/format.h>

#include <utility>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/terminal.h"
#include "models/error.h"
#include "models/lower.h"
#include "models/text_file.h"
#include "planner/engine_simulation.h"
#include "planner/plan_trace.h"
#include "planner/report.h"
#include "planner/report_json.h"
#include "planner/transients.h"

namespace zeroplan {
namespace {

struct Flags {
  std::string path, ranks, trace;
  bool estimate = false, json = false, overwrite = false;
};

SimulatedRanks ranks_of(const std::string& text) {
  if (text.empty() || text == "folded") return SimulatedRanks::folded;
  if (text == "all") return SimulatedRanks::all;
  throw InputError("--ranks: expected all or folded, got \"" + text + "\"");
}

/// The note on what of the step it holds; empty when that is all.
void write_trace(const Flags& flags, const PlanFile& file, const PlanTrace& trace, std::vector<std::string>& notes) {
  refuse_input_file(flags.trace, flags.path, "plan", "--trace");
  OutputFile out(flags.trace, flags.overwrite, "--trace");
  out.write(trace.text);
  for (std::string& note : out.notes()) notes.push_back(std::move(note));
  if (const std::string note = trace_note(trace, file.plan); !note.empty()) {
    notes.push_back(fmt::format("note: --trace: {} {}", flags.trace, note));
  }
}

/// The margin of a search does not apply to a plan that somebody states: it fits what is there, or not.
int exit_code_of(const Prediction& prediction) { return fits(prediction, 0) ? kDone : kNothingFits; }

Outcome simulated(const Flags& flags, const PlanFile& file) {
  Predictor predictor(file.model, file.machine);
  Prediction prediction = predictor.predict(file.plan, Detail::laid_out);
  SimulateOptions options;
  options.ranks = ranks_of(flags.ranks);
  const Simulation simulation = predictor.simulate(file.plan, options);
  const Seconds estimated = prediction.step;
  use_played_step(prediction, played_step(simulation), file.machine);
  const std::vector<TransientUse> transients = transient_uses(file, prediction);
  Outcome outcome;
  outcome.exit_code = exit_code_of(prediction);
  if (!flags.trace.empty()) write_trace(flags, file, trace_of_plan(file, options.ranks), outcome.notes);
  outcome.out = flags.json ? simulation_json(file, prediction, simulation, estimated, transients,
                                             predictor.assumptions(file.plan))
                           : report_simulation(file, prediction, simulation, estimated, stdout_style()) + "\n" +
                                 report_transients(transients, stdout_style());
  return outcome;
}

Outcome estimated(const Flags& flags, const PlanFile& file) {
  if (!flags.ranks.empty()) throw InputError("--ranks: has no meaning with --estimate");
  if (!flags.trace.empty()) throw InputError("--trace: has no meaning with --estimate");
  Predictor predictor(file.model, file.machine);
  const Prediction prediction = predictor.predict(file.plan, Detail::laid_out);
  const MachineCostModel cost(file.machine, file.plan.shard_ranks, file.plan.precision.weights, &file.model);
  const StepTable table = step_table(lower(file.model, file.plan, Folding::layers), cost, file.model);
  if (flags.json)
    return {step_json(file, prediction, table, predictor.assumptions(file.plan)), {}, exit_code_of(prediction)};
  return {report_step(file, prediction, table, stdout_style()), {}, exit_code_of(prediction)};
}

/// A plan of DeepSpeed or FSDP2.
Outcome engine_simulated(const Flags& flags, const PlanFile& file) {
  if (flags.estimate) {
    throw InputError(fmt::format(
        "--estimate: expected a plan of the zeroplan engine, got one of {} in {}: its step time comes with simulate "
        "alone, beside the played one",
        to_string(file.plan.engine), flags.path));
  }
  const bool traced = !flags.trace.empty();
  SimulateOptions options;
  options.ranks = ranks_of(flags.ranks);
  options.with_trace = traced;
  const EngineSimulation result = simulate_engine(file, options);
  Outcome outcome;
  outcome.exit_code = exit_code_of(result.prediction);
  if (traced) write_trace(flags, file, trace_of_engine(file, result), outcome.notes);
  outcome.out =
      flags.json ? engine_simulation_json(file, result) : report_engine_simulation(file, result, stdout_style());
  return outcome;
}

}  // namespace

Outcome run_simulate(const Arguments& arguments) {
  CommandLine line("simulate",
                   "One plan on its machine, played by discrete events with shared links, memory and cores.",
                   "Example:\n  zeroplan simulate plan70b/plan.json --trace step.json    # opens in Perfetto\n"
                   "  zeroplan simulate plan70b/plan.json --estimate");
  Flags flags;
  line.positional("PLAN.json", "What plan --out wrote; required", flags.path);
  line.value("--ranks", "all|folded", "folded: one node stands for its equals (the default); all: every rank",
             flags.ranks);
  line.value(
      "--trace", "FILE",
      "Writes a Chrome trace of rank 0: streams, edges, memory, load of the links; of a step beyond 400,000 ops fewer "
      "micro-steps",
      flags.trace);
  line.toggle("--estimate", "Longest path instead: every op as if alone", flags.estimate);
  line.toggle("--json", "JSON with stable keys on stdout", flags.json);
  line.toggle("--force", "Overwrites the trace file", flags.overwrite);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (flags.path.empty()) throw InputError("zeroplan simulate: expected PLAN.json, got nothing; see --help");
  ranks_of(flags.ranks);
  const PlanFile file = read_plan(read_text_file(flags.path), flags.path);
  if (file.plan.engine != Engine::zeroplan) return engine_simulated(flags, file);
  return flags.estimate ? estimated(flags, file) : simulated(flags, file);
}

}  // namespace zeroplan
