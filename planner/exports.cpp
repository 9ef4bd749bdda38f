#include "planner/exports.h"

#include <algorithm>

#include "planner/export_fit.h"
#include "planner/export_parts.h"

namespace zeroplan {

int ExportSubject::ranks_per_node() const { return std::min(machine.gpus_per_node, plan.ranks); }

namespace {

void add_tensor(const TensorSpec& tensor, ModelShape& shape) {
  const std::int64_t elements = tensor.elements();
  if (tensor.tied || elements == 0) return;
  // transformers 5 keeps the experts of a layer as two parameters: gate and up together, and down.
  const bool experts = tensor.kind == TensorKind::expert;
  shape.largest_tensor = std::max(shape.largest_tensor, experts ? 2 * elements : elements);
  if (tensor.shape.size() != 1 || experts) return;
  shape.largest_vector = std::max(shape.largest_vector, tensor.shape[0]);
  shape.all_vectors += elements;
}

ExportSubject subject_of(const Candidate& candidate, const Answer& answer, const ModelSpec& trained) {
  return {candidate.plan, trained, answer.request.machine, candidate.prediction, answer.request.margin};
}
ModelSpec trained_of(const Answer& answer) { return adapted_model(answer.request.model, answer.request.lora_rank); }

}  // namespace

ModelShape shape_of(const ModelSpec& model) {
  ModelShape shape;
  shape.parameters = model.parameters();
  shape.trained = model.trainable_parameters();
  for (const int k : model.sequence) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(k)];
    for (const TensorSpec& tensor : kind.tensors) add_tensor(tensor, shape);
    if (kind.role != BlockRole::layer || kind.parameters() <= shape.largest_layer) continue;
    shape.largest_layer = kind.parameters();
    shape.layer_tensors = static_cast<std::int64_t>(kind.tensors.size());
  }
  return shape;
}

double share_of_first(const ModelSpec& model, int blocks) {
  double first = 0, all = 0;
  for (std::size_t i = 0; i < model.sequence.size(); ++i) {
    const auto count = static_cast<double>(model.kinds[static_cast<std::size_t>(model.sequence[i])].parameters());
    all += count;
    if (static_cast<int>(i) < blocks) first += count;
  }
  return all > 0 ? first / all : 0;
}

std::string comment_text(std::string_view text, std::size_t longest) {
  std::string safe;
  for (const char c : text.substr(0, longest)) safe += c >= ' ' && c <= '~' ? c : '?';
  if (text.size() > longest) safe += "...";
  return safe;
}

std::string shell_quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += byte < 0x20 || byte == 0x7f ? ' ' : c;
    }
  }
  return quoted + "'";
}

namespace {

std::vector<ExportFile> files_of(const ExportSubject& subject, DeepspeedExport deepspeed, FsdpExport fsdp) {
  std::string launch = export_launch(subject, deepspeed, fsdp);
  std::vector<ExportFile> files;
  files.push_back({"plan.json", write_plan({subject.plan, subject.model, subject.machine})});
  files.push_back({"deepspeed.json", std::move(deepspeed.json)});
  if (!fsdp.yaml.empty()) files.push_back({"accelerate_fsdp.yaml", std::move(fsdp.yaml)});
  files.push_back({"launch.sh", std::move(launch), true});
  return files;
}

std::vector<std::string> notes_of(const DeepspeedExport& deepspeed, const FsdpExport& fsdp) {
  std::vector<std::string> notes = deepspeed.notes;
  notes.insert(notes.end(), fsdp.notes.begin(), fsdp.notes.end());
  return notes;
}

}  // namespace

std::vector<ExportFile> export_files(const Candidate& candidate, const Answer& answer) {
  const ModelSpec trained = trained_of(answer);
  const ExportSubject subject = subject_of(candidate, answer, trained);
  return files_of(subject, export_deepspeed(subject), export_fsdp(subject));
}

ExportSet export_fitted(const Candidate& candidate, const Answer& answer) {
  const ModelSpec trained = trained_of(answer);
  const ExportSubject subject = subject_of(candidate, answer, trained);
  EngineFitter fitter(answer.request.model, subject.machine, subject.margin);
  DeepspeedFit deepspeed = deepspeed_that_fits(subject, fitter);
  const FsdpExport fsdp = export_fsdp(subject);
  ExportSet set;
  set.notes = notes_of(deepspeed.exported, fsdp);
  set.under_deepspeed = deepspeed.as_planned;
  set.files = files_of(subject, std::move(deepspeed.exported), fsdp);
  return set;
}

std::string under_deepspeed(const Candidate& candidate, const Answer& answer) {
  const ModelSpec trained = trained_of(answer);
  const ExportSubject subject = subject_of(candidate, answer, trained);
  EngineFitter fitter(answer.request.model, subject.machine, subject.margin);
  return deepspeed_as_planned(subject, fitter).as_planned;
}

std::vector<std::string> export_notes(const Candidate& candidate, const Answer& answer) {
  const ModelSpec trained = trained_of(answer);
  const ExportSubject subject = subject_of(candidate, answer, trained);
  return notes_of(export_deepspeed(subject), export_fsdp(subject));
}

std::string noted_gib(Bytes amount) {
  constexpr Bytes kShown = 0.05_GiB;
  return amount > Bytes() && amount < kShown ? "less than 0.1 GiB" : format_gib(amount);
}

}  // namespace zeroplan
