#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "planner/engine_simulation.h"
#include "planner/report_json.h"
#include "planner/report_layout.h"

namespace zeroplan {
namespace {

std::string phases_section(const PlanFile& file, const EngineSimulation& r) {
  // FSDP2's rows are measured so: peaks are not reset within a step (PeakCounting).
  const char* counted = file.plan.engine == Engine::fsdp2 ? " (since the step began)" : "";
  return fmt::format(
      "       GPU, allocated at most: {} in initialize; in the steady step {} forward, {} backward, {} update{}\n",
      format_gib(r.initialize), format_gib(r.forward), format_gib(r.backward), format_gib(r.update), counted);
}

/// The two models of a step side by side: what the plan says, and what its ops give when they are played.
std::string two_models(const EngineSimulation& r, const ReportStyle& style) {
  const TimeBreakdown &said = r.prediction.time, &played = r.played;
  TextTable rows({{"", Align::left}, {"as planned"}, {"played"}});
  const auto row = [&](std::string_view name, Seconds a, Seconds b) {
    if (a > Seconds() || b > Seconds()) rows.add({std::string(name), format_seconds(a), format_seconds(b)});
  };
  row("step", r.prediction.step, r.played_step);
  row("forward and backward", said.compute, played.compute);
  row("waiting for collectives", said.exposed_communication, played.exposed_communication);
  row("waiting for offload", said.exposed_offload, played.exposed_offload);
  row("optimizer", said.optimizer, played.optimizer);
  row("host, idle", said.idle, played.idle);
  std::string text = inked("The same step played op by op", Ink::bold, style) + "\n" + rows.text();
  std::vector<std::string> stretched;
  const auto part = [&](std::string_view name, double by) {
    if (by > 0) stretched.push_back(fmt::format("{} {:.2f} times", name, by));
  };
  part("kernels", r.stretch.kernels);
  part("optimizer kernels", r.stretch.update);
  part("Adam on the host", r.stretch.host_update);
  text += fmt::format("  played ops take as long in sum as planned: {} our own engine's\n", fmt::join(stretched, ", "));
  return text +
         "  they differ in what hides: played by edges and streams, planned as measured steps hide it; an update on "
         "the "
         "host counts as\n  optimizer when played, as offload when planned; the host's own time has no op "
         "(docs/step-time.md)\n";
}

}  // namespace

std::string report_engine_simulation(const PlanFile& file, const EngineSimulation& r, const ReportStyle& style) {
  const Prediction& p = r.prediction;
  std::string text = fmt::format(
      "{} on {}: {}\n  {}, under {}\n  {} a step, {}, as zeroplan plan says; {} with its ops played\n\n",
      file.model.name, file.machine.name, gpus_text(file.machine), describe(file.plan), to_string(file.plan.engine),
      format_seconds(p.step), format_speed(p.tokens_per_second), format_seconds(r.played_step));
  text += overflow_section(p) + memory_section(p, style) + phases_section(file, r) + "\n" + time_section(p, style) +
          "\n" + two_models(r, style) + "\n";
  if (r.micro_steps < file.plan.accumulation) {
    text += fmt::format("Below: a step of {} of the {} micro-steps, {}; the others are like the second\n",
                        r.micro_steps, file.plan.accumulation, format_seconds(r.simulation.step));
  }
  return text + phase_section(r.table, r.simulation.step, style) + "\n" +
         streams_section(r.simulation, r.simulation.step, style) + "\n" + busiest_section(r.simulation, style) + "\n" +
         simulated_line(r.simulation);
}

std::string engine_simulation_json(const PlanFile& file, const EngineSimulation& r) {
  using Json = nlohmann::ordered_json;
  Json json = Json::parse(simulation_json(file, r.prediction, r.simulation, r.table.estimate.step, {}, r.assumptions));
  json.erase("load_and_save");
  json.erase("estimated_step_seconds");
  Json stretch = Json::object();
  if (r.stretch.kernels > 0) stretch["kernels"] = r.stretch.kernels;
  if (r.stretch.update > 0) stretch["optimizer"] = r.stretch.update;
  if (r.stretch.host_update > 0) stretch["host_optimizer"] = r.stretch.host_update;
  json["played"] = {{"step_seconds", r.played_step.base()},
                    {"time", Json::parse(time_json(r.played))},
                    {"stretch", std::move(stretch)},
                    {"micro_steps", r.micro_steps},
                    {"micro_steps_seconds", r.simulation.step.base()}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace zeroplan
