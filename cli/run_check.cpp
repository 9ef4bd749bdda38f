// zeroplan check DS_CONFIG.json: the lint of a DeepSpeed configuration, and what it does on a machine.

#include <optional>
#include <utility>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/terminal.h"
#include "cli/values.h"
#include "cli/workload.h"
#include "models/error.h"
#include "models/text_file.h"
#include "planner/check_prediction.h"
#include "planner/check_prediction_report.h"
#include "planner/lint_report.h"
#include "sim/caching_allocator.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kLongest = std::int64_t{1} << 26;       // tokens, as `plan` takes them
constexpr std::int64_t kLargestBatch = std::int64_t{1} << 20;  // sequences

/// What the prediction needs and the file does not say.
struct RunFlags {
  std::string seq_len, micro_batch, global_batch, recompute, trainable, alloc_conf, margin, release;

  void add_to(CommandLine& line) {
    line.group("What is trained (for the prediction)");
    line.value("--seq-len", "TOKENS", "Tokens of a sequence [the smaller of 4096 and the model's maximum]", seq_len);
    line.value("--micro-batch", "SEQUENCES", "Where the file has none, or \"auto\" [1]", micro_batch);
    line.value("--global-batch", "SEQUENCES", "Where the file has none, or \"auto\"", global_batch);
    line.value("--recompute", "WHAT", "Gradient checkpointing of the training script: none or full [none]", recompute);
    line.value("--trainable", "WHAT", "all, or lora:r=16 [all]", trainable);
    line.value("--alloc-conf", "CONF",
               "PYTORCH_CUDA_ALLOC_CONF of the run: expandable_segments:True [PyTorch's defaults]", alloc_conf);
    line.value("--margin", "PERCENT", "Part of GPU and host memory that stays free [5%]", margin);
    line.value("--release", "YYYY-MM", "Month of the DeepSpeed release: what it takes otherwise than 0.19", release);
  }

  /// The first flag that was given, or "".
  std::string_view given() const {
    const std::pair<std::string_view, const std::string*> flags[] = {
        {"--seq-len", &seq_len},     {"--micro-batch", &micro_batch}, {"--global-batch", &global_batch},
        {"--recompute", &recompute}, {"--trainable", &trainable},     {"--margin", &margin},
        {"--release", &release},     {"--alloc-conf", &alloc_conf}};
    for (const auto& [name, value] : flags) {
      if (!value->empty()) return name;
    }
    return "";
  }

  CheckWorkload workload() const {
    CheckWorkload w;
    if (!seq_len.empty()) w.seq_len = parse_integer(seq_len, "--seq-len", 1, kLongest);
    if (!micro_batch.empty()) w.micro_batch = parse_integer(micro_batch, "--micro-batch", 1, kLargestBatch);
    if (!global_batch.empty()) w.global_batch = parse_integer(global_batch, "--global-batch", 1, kLargestBatch);
    if (!recompute.empty()) w.checkpointing = checkpointing();
    if (!trainable.empty()) w.lora_rank = parse_trainable(trainable, "--trainable");
    if (!alloc_conf.empty()) {
      parse_allocator_options(alloc_conf);
      w.allocator_conf = alloc_conf;
    }
    if (!margin.empty()) w.margin = parse_margin(margin, "--margin");
    if (!release.empty()) w.release = parse_release_month(release, "--release");
    return w;
  }

 private:
  bool checkpointing() const {
    const Recompute mode = parse_recompute(recompute, "--recompute");
    if (mode == Recompute::selective) {
      throw InputError("--recompute selective: Hugging Face models checkpoint whole layers: none or full");
    }
    return mode == Recompute::full;
  }
};

struct CheckFlags {
  std::string path, model, out;
  MachineFlags machine;
  RunFlags run;
  bool fix = false, json = false, force = false;

  void add_to(CommandLine& line) {
    line.positional("DS_CONFIG.json", "The configuration that DeepSpeed gets; required", path);
    line.value("--model", "MODEL", "Catalog name, size (70B), config.json or its directory: adds the rules of sizes",
               model);
    machine.add_to(line);
    run.add_to(line);
    line.group("Output");
    line.toggle("--fix", "Prints the corrected file instead of the findings; what no finding touches keeps its form",
                fix);
    line.value("--out", "FILE", "With --fix: writes the corrected file there", out);
    line.toggle("--force", "Overwrites the file of --out", force);
    line.toggle("--json", "JSON with stable keys on stdout", json);
  }

  bool machine_given() const { return !machine.gpus.empty() || !machine.machine.empty(); }
};

/// The corrected file on stdout or in --out; what is left to do on stderr.
Outcome fixed(const CheckFlags& flags, const CheckInput& input) {
  const FixedText corrected = fix_deepspeed(input);
  const ConfigText file = ConfigText::parse(corrected.text, flags.path);
  const CheckAnswer left = check_deepspeed({file, input.model, input.machine});
  Outcome outcome;
  outcome.exit_code = left.has_errors() ? kNothingFits : kDone;
  outcome.notes.push_back(std::to_string(corrected.corrections.size()) + " corrected");
  for (const std::string& correction : corrected.corrections)
    outcome.notes.push_back("corrected: " + printable_line(correction));
  for (const Finding& finding : left.findings) {
    if (finding.rule->severity == Severity::note) continue;
    outcome.notes.push_back(finding_line(file, finding));
  }
  if (flags.out.empty()) {
    outcome.out = corrected.text;
  } else {
    OutputFile out(flags.out, flags.force, "--out");
    out.write(corrected.text);
    for (std::string& note : out.notes()) outcome.notes.push_back(std::move(note));
  }
  return outcome;
}

/// The lint, then what the configuration does on the machine.
Outcome checked(const CheckFlags& flags, const CheckInput& input) {
  const CheckWorkload workload = flags.run.workload();
  // Rules of sizes count every parameter as trained; the prediction does not.
  const bool adapters = workload.lora_rank > 0;
  const CheckInput linted{input.file, adapters ? nullptr : input.model, input.machine};
  const CheckAnswer answer = check_deepspeed(linted);
  std::optional<CheckPrediction> prediction;
  if (input.model != nullptr && input.machine != nullptr) prediction = predict_check(input, answer, workload);
  Outcome outcome;
  if (adapters)
    outcome.notes.emplace_back("--trainable: rules of sizes count every parameter as trained and are not run");
  const bool bad = answer.has_errors() || (prediction && prediction->run.does_not_fit());
  outcome.exit_code = bad ? kNothingFits : kDone;
  if (flags.json) {
    outcome.out = check_json(linted, answer, prediction ? &*prediction : nullptr);
    return outcome;
  }
  outcome.out = report_check(linted, answer, stdout_style());
  if (prediction) outcome.out += report_prediction(*prediction, *input.machine, stdout_style());
  return outcome;
}

}  // namespace

Outcome run_check(const Arguments& arguments) {
  CommandLine line(
      "check",
      "What DeepSpeed 0.19 does with each wrong, dead or contradictory key of a configuration, and the corrected text; "
      "with a model and a machine also its memory, its step time, and the nearest configuration that fits or is "
      "faster.",
      "Example:\n  zeroplan check ds_config.json --model 70B --gpus 8xA100-80G\n"
      "  zeroplan check ds_config.json --fix > fixed.json");
  CheckFlags flags;
  flags.add_to(line);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (flags.path.empty()) throw InputError("zeroplan check: expected DS_CONFIG.json, got nothing; see --help");
  if (!flags.out.empty() && !flags.fix) throw InputError("--out: has no meaning without --fix");
  if (flags.force && flags.out.empty()) throw InputError("--force: has no meaning without --out");
  if (flags.json && flags.fix) throw InputError("--json: has no meaning with --fix, which prints the file");
  const ConfigText file = ConfigText::parse(read_text_file(flags.path), flags.path);
  std::optional<ModelSpec> model;
  if (!flags.model.empty()) model = find_model(flags.model);
  std::optional<MachineSpec> machine;
  const MachineFlags& m = flags.machine;
  if (flags.machine_given()) {
    machine = m.resolve();
  } else if (!m.nodes.empty() || !m.host_memory.empty() || !m.nvme.empty()) {
    throw InputError("--gpus: expected NxGPU such as 4xA100-80G beside --nodes, --host-memory and --nvme, got nothing");
  }
  const CheckInput input{file, model ? &*model : nullptr, machine ? &*machine : nullptr};
  const std::string given(flags.run.given());
  if (!given.empty() && flags.fix) throw InputError(given + ": has no meaning with --fix, which prints the file");
  if (!given.empty() && (input.model == nullptr || input.machine == nullptr)) {
    throw InputError(given + ": has no meaning without --model and --gpus, which the prediction needs");
  }
  if (flags.fix) return fixed(flags, input);
  return checked(flags, input);
}

}  // namespace zeroplan
