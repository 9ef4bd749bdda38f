#include "planner/check_explained_report.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "planner/lint_report.h"
#include "planner/report_layout.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

std::string line_of(std::string_view name, const std::string& value) {
  return fmt::format("  {:<22} {}\n", name, value);
}

std::string owners_text(const EnginePrediction& prediction) {
  std::vector<std::string> parts;
  for (int i = 0; i < kNumOwners; ++i) {
    const Bytes held = prediction.peak.owners[static_cast<std::size_t>(i)];
    if (held.base() < 0.05 * kGiB) continue;
    parts.push_back(fmt::format("{} {}", to_string(static_cast<Owner>(i)), format_gib(held)));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

/// Whole messages, as PyTorch's calls have them.
std::string traffic_text(const Traffic& t) {
  std::vector<std::string> parts;
  const std::pair<std::string_view, Bytes> kinds[] = {
      {"all-gather", t.all_gather},  {"reduce-scatter", t.reduce_scatter},
      {"all-reduce", t.all_reduce},  {"to the GPU", t.h2d},
      {"to the host", t.d2h},        {"NVMe read", t.nvme_read},
      {"NVMe written", t.nvme_write}};
  for (const auto& [name, bytes] : kinds) {
    if (bytes.base() >= 1e6) parts.push_back(fmt::format("{} {:.2f} GB", name, bytes.base() / 1e9));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string stages_text(const CheckPrediction& p, const ReportStyle& style) {
  if (p.stages.size() < 2) return "";
  TextTable table({{"stage"}, {"allocated"}, {"device used"}, {"host"}, {"step"}, {"", Align::left}});
  for (const StageRow& row : p.stages) {
    const EngineFit& fit = *row.run.memory;
    table.add({std::to_string(row.stage), format_gib(fit.allocated), format_gib(fit.reserved_low + fit.overhead),
               format_gib(fit.host), row.run.time ? format_seconds(row.run.time->step) : "-",
               fit.fits_in_step() ? "fits"
               : fit.fits()       ? "fits after flushes"
                                  : "does not fit"});
  }
  return "\n" + inked("The same file at each stage", Ink::bold, style) + "\n" + table.text();
}

std::string gains_text(const CheckPrediction& p, const ReportStyle& style) {
  if (p.gains.empty()) return "";
  TextTable table({{"allocated"}, {"reserved"}, {"host"}, {"turned alone", Align::left}});
  const auto less = [](Bytes gain) {
    const double gib = -gain.base() / kGiB;
    return fmt::format("{:+.1f} GiB", std::abs(gib) < 0.05 ? 0.0 : gib);  // no "-0.0"
  };
  for (const Gain& gain : p.gains) {
    std::vector<std::string> changes;
    for (const KeyChange& change : gain.changes) changes.push_back(fmt::format("{}: {}", change.key, change.to));
    table.add({less(gain.allocated), less(gain.reserved), less(gain.host),
               printable_line(fmt::format("{}", fmt::join(changes, ", ")))});
  }
  return "\n" + inked("What each change takes", Ink::bold, style) + "\n" + table.text();
}

std::string storage_text(const CheckPrediction& p, const ReportStyle& style) {
  const StorageNeeds& s = *p.storage;
  std::string text = "\n" + inked("Loading and saving, beside the step", Ink::bold, style) + "\n";
  text += line_of("load, host of a node",
                  fmt::format("{} when each rank loads ({} in fp32), {} when one does, in fp32",
                              format_gib(s.load_each), format_gib(s.load_each_fp32), format_gib(s.load_one_fp32)));
  if (s.load_gpu > Bytes()) {
    text += line_of("load, each GPU", format_gib(s.load_gpu) + " without deepspeed.zero.Init");
  }
  text += line_of("checkpoint",
                  fmt::format("{} of weights, {} of masters and states{}", format_gib(s.weights), format_gib(s.states),
                              s.write ? fmt::format(", {} to the drives", format_seconds(*s.write)) : ""));
  if (s.gather > Bytes()) text += line_of("gather to save", format_gib(s.gather) + " of rank 0's host memory");
  if (s.resume > Bytes()) {
    text +=
        line_of("resume on other ranks", format_gib(s.resume) + " of a node's host memory: each rank reads all states");
  }
  return text;
}

std::string releases_text(const CheckPrediction& p, const ReportStyle& style) {
  if (p.releases.empty()) return "";
  std::string text = "\n" + inked("Other DeepSpeed releases", Ink::bold, style) + "\n";
  for (const ReleaseDifference& d : p.releases) {
    std::string more;
    if (d.gpu > Bytes()) more += fmt::format(", {} more on each GPU", format_gib(d.gpu));
    if (d.pinned > Bytes()) more += fmt::format(", {} a node", format_gib(d.pinned));
    const std::string when = d.from.year == 0 ? fmt::format("before {}", to_string(d.to))
                                              : fmt::format("{} to {}", to_string(d.from), to_string(d.to));
    text += fmt::format("  {}: {}{} ({})\n", when, d.what, more, d.source);
  }
  return text;
}

std::string remarks_text(const CheckPrediction& p, const ReportStyle& style) {
  if (p.remarks.empty()) return "";
  std::string text = "\n" + inked("Remarks", Ink::bold, style) + "\n";
  for (const std::string& remark : p.remarks) text += "  - " + filled_lines(remark, "    ").substr(4);
  return text;
}

std::string estimator_text(const EstimatorLine& line) {
  return line_of("DeepSpeed's estimator",
                 fmt::format("{} a GPU, {} of host a node ({}, states only)", format_gib(line.bytes.gpu),
                             format_gib(line.bytes.host), line.name));
}

// --- JSON --------------------------------------------------------------------------------------------

std::int64_t bytes(Bytes value) { return std::llround(value.base()); }

Json traffic_json(const Traffic& t) {
  return {{"all_gather_bytes", bytes(t.all_gather)},
          {"reduce_scatter_bytes", bytes(t.reduce_scatter)},
          {"all_reduce_bytes", bytes(t.all_reduce)},
          {"h2d_bytes", bytes(t.h2d)},
          {"d2h_bytes", bytes(t.d2h)},
          {"nvme_read_bytes", bytes(t.nvme_read)},
          {"nvme_write_bytes", bytes(t.nvme_write)}};
}

Json stages_json(const std::vector<StageRow>& rows) {
  Json list = Json::array();
  for (const StageRow& row : rows) {
    const EngineFit& fit = *row.run.memory;
    Json one{{"stage", row.stage},
             {"allocated", bytes(fit.allocated)},
             {"device_used", bytes(fit.reserved_low + fit.overhead)},
             {"host", bytes(fit.host)},
             {"fits", fit.fits()}};
    if (row.run.time) one["step_seconds"] = row.run.time->step.base();
    list.push_back(std::move(one));
  }
  return list;
}

Json gains_json(const std::vector<Gain>& gains) {
  Json list = Json::array();
  for (const Gain& gain : gains) {
    Json changes = Json::array();
    for (const KeyChange& change : gain.changes) {
      changes.push_back({{"key", change.key}, {"to", Json::parse(change.to)}});
    }
    list.push_back({{"changes", std::move(changes)},
                    {"allocated", bytes(gain.allocated)},
                    {"reserved", bytes(gain.reserved)},
                    {"host", bytes(gain.host)}});
  }
  return list;
}

/// What is zero does not apply and is left out.
Json storage_json(const StorageNeeds& s) {
  Json j;
  const std::pair<const char*, Bytes> sizes[] = {{"load_each", s.load_each},
                                                 {"load_each_fp32", s.load_each_fp32},
                                                 {"load_one_fp32", s.load_one_fp32},
                                                 {"load_gpu", s.load_gpu},
                                                 {"weights", s.weights},
                                                 {"states", s.states},
                                                 {"gather", s.gather},
                                                 {"resume", s.resume}};
  for (const auto& [name, size] : sizes) {
    if (size > Bytes()) j[name] = bytes(size);
  }
  if (s.write) j["write_seconds"] = s.write->base();
  return j;
}

Json releases_json(const std::vector<ReleaseDifference>& releases) {
  Json list = Json::array();
  for (const ReleaseDifference& d : releases) {
    Json one{{"what", d.what}, {"source", d.source}, {"to", to_string(d.to)}};
    if (d.from.year != 0) one["from"] = to_string(d.from);
    if (d.gpu > Bytes()) one["gpu"] = bytes(d.gpu);
    if (d.pinned > Bytes()) one["pinned"] = bytes(d.pinned);
    list.push_back(std::move(one));
  }
  return list;
}

/// Who holds what at the highest moment, and what a step moves.
void add_run(const EnginePrediction& e, Json& j) {
  for (int i = 0; i < kNumOwners; ++i) {
    const Bytes held = e.peak.owners[static_cast<std::size_t>(i)];
    if (held > Bytes()) j["breakdown"][std::string(to_string(static_cast<Owner>(i)))] = bytes(held);
  }
  j["traffic"] = traffic_json(e.traffic);
  j["traffic"]["sent_bytes"] = bytes(e.sent);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> memory_details(const EnginePrediction& prediction) {
  std::vector<std::pair<std::string, std::string>> lines{{"at the highest moment", owners_text(prediction)}};
  std::string moved = traffic_text(prediction.traffic);
  if (!moved.empty()) lines.emplace_back("messages of a step", std::move(moved));
  if (prediction.sent.base() >= 1e6) {
    lines.emplace_back("each rank sends", fmt::format("{:.2f} GB of them when collectives go round as rings",
                                                      prediction.sent.base() / 1e9));
  }
  return lines;
}

std::string explained_text(const CheckPrediction& p, const ReportStyle& style) {
  std::string text = stages_text(p, style);
  if (p.estimator) text += estimator_text(*p.estimator);
  text += gains_text(p, style);
  if (p.storage) text += storage_text(p, style);
  return text + releases_text(p, style) + remarks_text(p, style);
}

std::string explained_json(const CheckPrediction& p) {
  Json j;
  if (p.run.memory) add_run(p.run.memory->prediction, j);
  j["stages"] = stages_json(p.stages);
  j["gains"] = gains_json(p.gains);
  if (p.storage) j["storage"] = storage_json(*p.storage);
  if (p.estimator) {
    const EstimatorBytes& estimate = p.estimator->bytes;
    j["estimator"] = {{"name", p.estimator->name}, {"gpu", bytes(estimate.gpu)}, {"host", bytes(estimate.host)}};
  }
  j["releases"] = releases_json(p.releases);
  j["remarks"] = p.remarks;
  return j.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace zeroplan
