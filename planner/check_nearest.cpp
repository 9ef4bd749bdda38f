// The nearest configuration that fits, or that is faster: sets of settings, fewest first, each verified by prediction.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "planner/check_parts.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

constexpr int kMostPredictions = 150;            // of memory: each takes milliseconds to tenths of a second
constexpr std::size_t kMostTimed = 4000;         // sets whose step time is looked at: microseconds each
constexpr std::size_t kLargestFile = 256 << 10;  // bytes; a person's configuration has a few thousand
constexpr double kWorthwhile = 0.95;             // of the step time: 5 % faster
std::set<std::string_view> errors_of(const CheckAnswer& answer) {
  std::set<std::string_view> ids;
  for (const Finding& f : answer.findings) {
    if (f.rule->severity == Severity::error) ids.insert(f.rule->id);
  }
  return ids;
}

class NearestSearch {
 public:
  NearestSearch(const NearestSubject& subject, CheckPredictor& predictor)
      : subject_(subject),
        predictor_(predictor),
        config_(read_deepspeed_config(subject.file, subject.input.model->hidden)),
        start_{ConfigDraft(subject.file), subject.run.workload, config_, {}, {}, {}},
        errors_(errors_of(lint(subject.file))) {}

  NearestConfig fitting() {
    NearestConfig result;
    result.aim = NearestAim::fits;
    std::optional<Variant> best = one_setting();
    if (!best) best = several_settings();
    return filled(result, best);
  }

  std::optional<NearestConfig> faster() {
    std::optional<Variant> best;
    Seconds limit = subject_.run.time->step * kWorthwhile;
    const auto sets = sets_by_size(faster_settings());
    for (const auto& [size, list] : sets) {
      std::vector<Variant> quick;
      for (const std::vector<Setting>& settings : list) {
        std::optional<Variant> v = timed(settings);
        if (v && v->time && v->time->step < limit) quick.push_back(std::move(*v));
      }
      std::stable_sort(quick.begin(), quick.end(),
                       [](const Variant& a, const Variant& b) { return a.time->step < b.time->step; });
      for (Variant& v : quick) {
        if (tried_ >= kMostPredictions) break;
        if (!fits(v)) continue;
        limit = v.time->step * kWorthwhile;  // one more change has to be worth it again
        best = std::move(v);
        break;
      }
    }
    if (!best) return std::nullopt;
    NearestConfig result;
    result.aim = NearestAim::faster;
    return filled(result, best);
  }

 private:
  CheckAnswer lint(const ConfigText& file) const {
    return check_deepspeed(
        {file, subject_.run.workload.lora_rank > 0 ? nullptr : subject_.input.model, subject_.input.machine});
  }

  NearestConfig filled(NearestConfig result, std::optional<Variant>& best) const {
    result.tried = tried_;
    if (!best) return result;
    result.changes = best->changes();
    result.result = std::move(best->run);
    return result;
  }

  // --- settings ------------------------------------------------------------------------------------

  std::optional<Variant> variant(const std::vector<Setting>& settings) const {
    return with_settings(start_, settings, subject_.file, subject_.input.model->hidden);
  }

  std::optional<Variant> timed(const std::vector<Setting>& settings) const {
    std::optional<Variant> v = variant(settings);
    std::string why;
    if (v) v->time = predictor_.time(v->config, v->workload, why);
    return v;
  }

  /// By bounds that need no replay: states alone, without activations and gathered layers.
  bool hopeless(const DeepSpeedConfig& config) const {
    if (subject_.run.workload.lora_rank > 0) return false;  // they count everything as trained
    const ModelSpec& model = *subject_.input.model;
    const MachineSpec& machine = *subject_.input.machine;
    const GpuStates states = gpu_states(config, model.parameters(), sharding_ranks(config, machine.ranks()));
    return states.bytes > machine.gpu.memory ||
           offloaded_host_bytes(config, model, machine).exact > machine.usable_dram();
  }

  /// Predicts its memory; fits well, and the lint finds no error that the user's file has not.
  bool fits(Variant& v) {
    if (hopeless(v.config)) return false;
    ++tried_;
    v.run = predictor_.predict(v.config, v.workload);
    if (!v.run.fits_well()) return false;
    return std::ranges::includes(errors_, errors_of(lint(v.draft.text())));
  }

  // --- that fits -----------------------------------------------------------------------------------

  /// Larger ones first.
  std::vector<Setting> micro_batches() const {
    std::vector<Setting> list;
    const std::int64_t all = subject_.run.workload.tokens.batch * subject_.run.workload.accumulation;
    for (std::int64_t batch = subject_.run.workload.tokens.batch / 2; batch >= 1; batch /= 2) {
      if (all % batch == 0) list.push_back({Knob::micro_batch, batch});
    }
    return list;
  }

  std::vector<Setting> smaller_settings() const {
    std::vector<Setting> list{{Knob::bucket, kSmallBucket}, {Knob::gathers, 0}, {Knob::overlap, 0}};
    for (const Setting& s : micro_batches()) list.push_back(s);
    list.push_back({Knob::checkpointing, 1});
    for (int stage = config_.stage + 1; stage <= 3; ++stage) list.push_back({Knob::stage, stage});
    for (const Knob knob : {Knob::optimizer, Knob::parameters}) list.push_back({knob, 1});
    if (subject_.input.machine->nvme.drives > 0) {
      for (const Knob knob : {Knob::optimizer, Knob::parameters}) list.push_back({knob, 2});
    }
    // When it is the host that is too small.
    if (!subject_.run.memory->host_fits()) {
      for (const Knob knob : {Knob::pinned, Knob::optimizer, Knob::parameters}) list.push_back({knob, 0});
    }
    return list;
  }

  static bool faster_than(const Variant& a, const Variant& b) {
    return a.run.time && b.run.time && a.run.time->step < b.run.time->step;
  }

  std::optional<Variant> one_setting() {
    std::optional<Variant> best;
    bool micro_batch_found = false;  // smaller ones fit too, and are slower
    for (const Setting& s : smaller_settings()) {
      if (s.knob == Knob::micro_batch && micro_batch_found) continue;
      std::optional<Variant> v = variant({s});
      if (!v || !fits(*v)) continue;
      micro_batch_found = micro_batch_found || s.knob == Knob::micro_batch;
      if (!best || faster_than(*v, *best)) best = std::move(v);
    }
    return best;
  }

  /// The fastest of the smallest sets. Of micro-batches only the least is tried, then made larger.
  std::optional<Variant> several_settings() {
    std::vector<Setting> single = smaller_settings();
    const std::vector<Setting> batches = micro_batches();
    std::erase_if(single,
                  [&](const Setting& s) { return s.knob == Knob::micro_batch && s.value != batches.back().value; });
    if (!may_fit()) return std::nullopt;
    for (const auto& [size, list] : sets_by_size(single)) {
      if (size < 2) continue;
      std::optional<Variant> best;
      for (const std::vector<Setting>& settings : list) {
        if (tried_ >= kMostPredictions) break;
        std::optional<Variant> v = variant(settings);
        if (!v || !fits(*v)) continue;
        v = enlarged(settings, std::move(*v));
        if (!best || faster_than(*v, *best)) best = std::move(v);
      }
      if (best) return best;
    }
    return std::nullopt;
  }

  /// With everything that takes memory off the GPU: when not even that fits there, nothing does.
  bool may_fit() {
    for (const bool small_buckets : {false, true}) {
      std::vector<Setting> wanted{
          {Knob::stage, 3}, {Knob::checkpointing, 1}, {Knob::optimizer, 1}, {Knob::parameters, 1}};
      if (!micro_batches().empty()) wanted.push_back(micro_batches().back());
      if (small_buckets) {
        for (const Setting& s :
             {Setting{Knob::bucket, kSmallBucket}, Setting{Knob::gathers, 0}, Setting{Knob::overlap, 0}}) {
          wanted.push_back(s);
        }
      }
      std::vector<Setting> settings;
      for (const Setting& s : wanted) {  // what the configuration does not have yet
        settings.push_back(s);
        if (!variant(settings)) settings.pop_back();
      }
      const std::optional<Variant> all = variant(settings);
      ++tried_;
      std::string why;
      const std::optional<EngineFit> fit = predictor_.memory(all->config, all->workload, why);
      if (fit && fit->gpu != GpuVerdict::does_not_fit) return true;
    }
    return false;
  }

  Variant enlarged(std::vector<Setting> settings, Variant smallest) {
    const auto batch = std::ranges::find(settings, Knob::micro_batch, &Setting::knob);
    if (batch == settings.end()) return smallest;
    for (const Setting& larger : micro_batches()) {
      if (larger.value <= smallest.workload.tokens.batch || tried_ >= kMostPredictions) break;
      *batch = larger;
      std::optional<Variant> v = variant(settings);
      if (v && fits(*v)) return std::move(*v);
    }
    return smallest;
  }

  // --- that is faster ------------------------------------------------------------------------------

  std::vector<Setting> faster_settings() const {
    std::vector<Setting> list;
    const std::int64_t batch = subject_.run.workload.tokens.batch;
    const std::int64_t all = batch * subject_.run.workload.accumulation;
    for (std::int64_t larger = batch * 2; larger <= all; larger *= 2) list.push_back({Knob::micro_batch, larger});
    list.push_back({Knob::checkpointing, 0});
    for (int stage = 0; stage <= 3; ++stage) {
      if (stage != config_.stage) list.push_back({Knob::stage, stage});
    }
    list.push_back({Knob::optimizer, 0});
    list.push_back({Knob::parameters, 0});
    list.push_back({Knob::pinned, 1});
    return list;
  }

  /// Every set of settings of different knobs, by its size.
  static std::map<std::size_t, std::vector<std::vector<Setting>>> sets_by_size(const std::vector<Setting>& single) {
    std::map<std::size_t, std::vector<std::vector<Setting>>> sets;
    std::vector<std::vector<Setting>> all{{}};
    for (const Setting& s : single) {
      const std::size_t before = all.size();
      for (std::size_t i = 0; i < before && all.size() < kMostTimed; ++i) {
        if (std::ranges::find(all[i], s.knob, &Setting::knob) != all[i].end()) continue;
        all.push_back(all[i]);
        all.back().push_back(s);
      }
    }
    for (std::vector<Setting>& set : all) {
      if (!set.empty()) sets[set.size()].push_back(std::move(set));
    }
    return sets;
  }

  const NearestSubject& subject_;
  CheckPredictor& predictor_;
  DeepSpeedConfig config_;
  Variant start_;
  std::set<std::string_view> errors_;
  int tried_ = 0;
};

}  // namespace

std::optional<NearestConfig> nearest_config(const NearestSubject& subject, CheckPredictor& predictor) {
  if (!subject.run.memory || subject.file.text().size() > kLargestFile) return std::nullopt;
  NearestSearch search(subject, predictor);
  if (!subject.run.fits_well()) return search.fitting();
  if (!subject.run.time) return std::nullopt;
  return search.faster();
}

}  // namespace zeroplan
