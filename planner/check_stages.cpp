// The file at every stage, and what each setting gives back alone.

#include <algorithm>

#include "planner/check_parts.h"

namespace zeroplan {
namespace {

/// PyTorch's allocator gives cached memory back, at a standstill, when a request finds no room: from about here on a
/// report of slow steps with "cache flushes" is likely (DeepSpeedExamples issue 172).
constexpr double kTightPart = 0.9;
constexpr std::size_t kLargestFile = 256 << 10;  // as check_nearest.cpp

class Turns {
 public:
  Turns(const NearestSubject& subject, CheckPredictor& predictor)
      : subject_(subject),
        predictor_(predictor),
        start_{ConfigDraft(subject.file),
               subject.run.workload,
               read_deepspeed_config(subject.file, subject.input.model->hidden),
               {},
               {},
               {}} {}

  int stage() const { return start_.config.stage; }

  std::optional<RunPrediction> at_stage(int stage) {
    const std::optional<Variant> v = turned({Knob::stage, stage});
    if (!v) return std::nullopt;
    return predictor_.predict(v->config, v->workload);
  }

  std::optional<Gain> gain(const Setting& setting) {
    const std::optional<Variant> v = turned(setting);
    if (!v) return std::nullopt;
    std::string why;
    const std::optional<EngineFit> fit = predictor_.memory(v->config, v->workload, why);
    if (!fit) return std::nullopt;
    const EngineFit& now = *subject_.run.memory;
    return Gain{v->changes(), now.allocated - fit->allocated, now.reserved_low - fit->reserved_low,
                now.host - fit->host};
  }

  std::vector<Setting> settings() const {
    std::vector<Setting> list{
        {Knob::bucket, kSmallBucket}, {Knob::gathers, 0}, {Knob::overlap, 0}, {Knob::contiguous, 0}};
    const EngineWorkload& w = subject_.run.workload;
    const std::int64_t all = w.tokens.batch * w.accumulation;
    if (w.tokens.batch > 1 && all % (w.tokens.batch / 2) == 0) list.push_back({Knob::micro_batch, w.tokens.batch / 2});
    list.push_back({Knob::checkpointing, 1});
    for (const Knob knob : {Knob::optimizer, Knob::parameters}) {
      list.push_back({knob, 1});
      if (!subject_.run.memory->host_fits()) list.push_back({knob, 0});
    }
    list.push_back({Knob::pinned, 0});
    return list;
  }

 private:
  std::optional<Variant> turned(const Setting& setting) const {
    return with_settings(start_, {setting}, subject_.file, subject_.input.model->hidden);
  }

  const NearestSubject& subject_;
  CheckPredictor& predictor_;
  Variant start_;
};

}  // namespace

bool is_tight(const EngineFit& fit) {
  const Bytes card = fit.capacity;  // the margin is off already
  return !fit.fits_in_step() || fit.reserved_low + fit.overhead > card * kTightPart ||
         fit.host > fit.host_capacity * kTightPart;
}

std::vector<StageRow> stage_rows(const NearestSubject& subject, CheckPredictor& predictor) {
  std::vector<StageRow> rows;
  if (!subject.run.memory || subject.file.text().size() > kLargestFile) return rows;
  Turns turns(subject, predictor);
  for (int stage = 0; stage <= 3; ++stage) {
    if (stage == turns.stage()) {
      rows.push_back({stage, subject.run});
    } else if (std::optional<RunPrediction> run = turns.at_stage(stage); run && run->memory) {
      rows.push_back({stage, std::move(*run)});
    }
  }
  return rows;
}

std::vector<Gain> gains(const NearestSubject& subject, CheckPredictor& predictor) {
  std::vector<Gain> list;
  if (!subject.run.memory || !is_tight(*subject.run.memory) || subject.file.text().size() > kLargestFile) return list;
  Turns turns(subject, predictor);
  for (const Setting& setting : turns.settings()) {
    if (std::optional<Gain> gain = turns.gain(setting)) list.push_back(std::move(*gain));
  }
  const bool host = !subject.run.memory->host_fits();
  std::ranges::stable_sort(
      list, [host](const Gain& a, const Gain& b) { return host ? a.host > b.host : a.allocated > b.allocated; });
  return list;
}

}  // namespace zeroplan
