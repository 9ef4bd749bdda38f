#include "models/measured.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>

#include "models/json_reader.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchema = 1;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 53;  // exact as a double, beyond any machine
constexpr double kMostSeconds = 1e9;
constexpr std::int64_t kMostSteps = 1'000'000;

/// The lower median, which is one of the values.
template <class T>
T median(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// --- identity ---------------------------------------------------------------------------------------

/// FNV-1a, 64 bits (Fowler, Noll, Vo; RFC 9923): for telling files apart, not against attackers.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace

std::string plan_identity(const PlanFile& file) {
  const std::string config = Json::parse(file.model.config).dump();
  return fmt::format("{:016x}", hash_of(plan_keys_json(file.plan, -1) + "\n" + config));
}

// --- times ------------------------------------------------------------------------------------------

Seconds Measured::step() const {
  return median(std::vector<Seconds>(step_seconds.begin() + warmup_steps, step_seconds.end()));
}

namespace {

void check_sizes(const Measured& m, const Schedule& flat, std::span<const StepTimes> traced) {
  const std::size_t ops = flat.ops().size();
  bool fits = !traced.empty() && m.steps >= static_cast<std::int64_t>(traced.size()) &&
              m.step_seconds.size() == static_cast<std::size_t>(m.steps);
  for (const StepTimes& step : traced) {
    fits = fits && step.trace.ops.size() == ops && (step.transfer_starts.empty() || step.transfer_starts.size() == ops);
  }
  if (!fits) throw std::logic_error("measured: traced steps do not fit the schedule or the number of steps");
}

MeasuredOp measured_op(std::size_t op, bool collective, std::span<const StepTimes> steps, const StepTimes& shown) {
  const auto transfer_start = [&](const StepTimes& step) {
    const Span& span = step.trace.ops[op];
    if (!collective || step.transfer_starts.empty()) return span.start;
    return std::clamp(step.transfer_starts[op], span.start, span.end);
  };
  MeasuredOp result;
  result.span = shown.trace.ops[op];
  if (collective) result.transfer_start = transfer_start(shown);
  std::vector<Seconds> durations;
  for (const StepTimes& step : steps) durations.push_back(step.trace.ops[op].end - transfer_start(step));
  result.seconds = median(std::move(durations));
  return result;
}

}  // namespace

void set_op_times(Measured& measured, const Schedule& flat, std::span<const StepTimes> traced,
                  std::int64_t warmup_steps) {
  check_sizes(measured, flat, traced);
  measured.warmup_steps = std::clamp<std::int64_t>(warmup_steps, 0, measured.steps - 1);
  const std::int64_t first_traced = measured.steps - static_cast<std::int64_t>(traced.size());
  const std::int64_t first = std::max(measured.warmup_steps, first_traced);
  const auto used = traced.subspan(static_cast<std::size_t>(first - first_traced));
  std::vector<std::pair<Seconds, std::int64_t>> durations;  // equal ones: the earlier step
  for (std::int64_t step = first; step < measured.steps; ++step) {
    durations.emplace_back(measured.step_seconds[static_cast<std::size_t>(step)], step);
  }
  measured.median_step = median(std::move(durations)).second;
  const StepTimes& shown = traced[static_cast<std::size_t>(measured.median_step - first_traced)];
  measured.ops.clear();
  for (std::size_t op = 0; op < flat.ops().size(); ++op) {
    const bool collective = std::holds_alternative<Collective>(flat.work(flat.ops()[op]));
    measured.ops.push_back(measured_op(op, collective, used, shown));
  }
}

// --- writing ----------------------------------------------------------------------------------------

namespace {

Json loss_json(double loss) {
  if (std::isnan(loss)) return "nan";
  if (std::isinf(loss)) return loss > 0 ? "inf" : "-inf";
  return loss;
}

Json machine_json(const Measured& m) {
  Json j;
  if (!m.cpu.empty()) j["cpu"] = m.cpu;
  j["cores"] = m.cores;
  j["threads_per_rank"] = m.threads_per_rank;
  j["paths"] = Json::object();
  for (const auto& [name, path] : m.paths) j["paths"][name] = path;
  return j;
}

/// The keys of `traffic` with their numbers, for reading and writing alike.
template <class Traffic>
auto traffic_fields(Traffic& t) {
  return std::array{std::pair{std::string_view("all_gather_bytes"), &t.all_gather},
                    std::pair{std::string_view("reduce_scatter_bytes"), &t.reduce_scatter},
                    std::pair{std::string_view("all_reduce_bytes"), &t.all_reduce},
                    std::pair{std::string_view("h2d_bytes"), &t.h2d},
                    std::pair{std::string_view("d2h_bytes"), &t.d2h},
                    std::pair{std::string_view("nvme_read_bytes"), &t.nvme_read},
                    std::pair{std::string_view("nvme_write_bytes"), &t.nvme_write},
                    std::pair{std::string_view("sent_bytes"), &t.sent},
                    std::pair{std::string_view("received_bytes"), &t.received}};
}

std::string op_text(const MeasuredOp& op) {
  Json j;
  j["start"] = op.span.start.base();
  j["end"] = op.span.end.base();
  if (op.transfer_start) j["transfer_start"] = op.transfer_start->base();
  j["seconds"] = op.seconds.base();
  return j.dump();
}

}  // namespace

std::string write_measured(const Measured& m) {
  Json j;
  j["schema"] = kSchema;
  j["engine"] = m.engine;
  j["backend"] = m.backend;
  j["plan"] = m.plan;
  j["ranks"] = m.ranks;
  j["machine"] = machine_json(m);
  j["steps"] = m.steps;
  j["warmup_steps"] = m.warmup_steps;
  j["median_step"] = m.median_step;
  j["losses"] = Json::array();
  for (const double loss : m.losses) j["losses"].push_back(loss_json(loss));
  j["step_seconds"] = Json::array();
  for (const Seconds step : m.step_seconds) j["step_seconds"].push_back(step.base());
  j["memory"] = Json::array();
  for (const MeasuredTier& t : m.memory) {
    j["memory"].push_back(
        Json{{"tier", std::string(to_string(t.tier))}, {"planned_bytes", t.planned}, {"used_bytes", t.used}});
  }
  for (const auto& [key, bytes] : traffic_fields(m.traffic)) j["traffic"][std::string(key)] = *bytes;
  std::string text = j.dump(2, ' ', false, Json::error_handler_t::replace);
  // One op a line: thousands of them.
  text.replace(text.size() - 2, 2, ",\n  \"ops\": [");
  for (std::size_t i = 0; i < m.ops.size(); ++i) text += (i == 0 ? "\n    " : ",\n    ") + op_text(m.ops[i]);
  text += "\n  ]\n}\n";
  if (text.size() > kMaxJsonBytes) {
    throw InputError(
        fmt::format("measured.json: {} ops are more than a file of {} MiB can hold; measure a plan with "
                    "less accumulation",
                    m.ops.size(), kMaxJsonBytes >> 20));
  }
  return text;
}

// --- reading ----------------------------------------------------------------------------------------

namespace {

std::string text_of(const JsonValue& value) {
  if (value.as_string().empty()) value.fail("a text that is not empty");
  return value.as_string();
}

Seconds seconds_of(const JsonValue& value) { return Seconds(value.as_real(0, kMostSeconds)); }

double loss_of(const JsonValue& value) {
  constexpr double kMost = std::numeric_limits<double>::max();
  if (!value.is_string()) return value.as_real(-kMost, kMost);
  if (value.as_string() == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (value.as_string() == "inf") return std::numeric_limits<double>::infinity();
  if (value.as_string() == "-inf") return -std::numeric_limits<double>::infinity();
  value.fail("a number, \"nan\", \"inf\" or \"-inf\"");
}

std::string identity_of(const JsonValue& value) {
  const std::string& text = value.as_string();
  const bool hex = std::ranges::all_of(text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (text.size() != 16 || !hex) value.fail("16 hexadecimal digits");
  return text;
}

void read_machine_part(const JsonValue& j, Measured& m) {
  constexpr int kMostCores = 1 << 20;
  j.require_only({"cpu", "cores", "threads_per_rank", "paths"});
  if (const JsonValue* cpu = j.find("cpu")) m.cpu = text_of(*cpu);
  m.cores = static_cast<int>(j.at("cores").as_int(1, kMostCores));
  m.threads_per_rank = static_cast<int>(j.at("threads_per_rank").as_int(1, kMostCores));
  for (const auto& [name, path] : j.at("paths").members()) m.paths.emplace_back(name, text_of(path));
}

MeasuredTier tier_of(const JsonValue& j) {
  j.require_only({"tier", "planned_bytes", "used_bytes"});
  MeasuredTier t;
  const std::string& name = j.at("tier").as_string();
  bool known = false;
  for (const Tier tier : {Tier::hbm, Tier::host, Tier::nvme}) {
    if (to_string(tier) == name) t.tier = tier, known = true;
  }
  if (!known) j.at("tier").fail("one of \"gpu\", \"host\", \"nvme\"");
  t.planned = j.at("planned_bytes").as_int(0, kMostBytes);
  t.used = j.at("used_bytes").as_int(0, kMostBytes);
  return t;
}

std::vector<MeasuredTier> tiers_of(const JsonValue& array) {
  std::vector<MeasuredTier> tiers;
  for (const JsonValue& item : array.items()) {
    const MeasuredTier tier = tier_of(item);
    for (const MeasuredTier& other : tiers) {
      if (other.tier == tier.tier) item.at("tier").fail("each tier once");
    }
    tiers.push_back(tier);
  }
  return tiers;
}

MeasuredTraffic traffic_of(const JsonValue& j) {
  MeasuredTraffic traffic;
  std::vector<std::string_view> keys;
  for (const auto& [key, bytes] : traffic_fields(traffic)) {
    keys.push_back(key);
    *bytes = j.at(key).as_int(0, kMostBytes);
  }
  j.require_only(keys);
  return traffic;
}

MeasuredOp op_of(const JsonValue& j) {
  j.require_only({"start", "end", "transfer_start", "seconds"});
  MeasuredOp op;
  op.span = {seconds_of(j.at("start")), seconds_of(j.at("end"))};
  if (op.span.end < op.span.start) j.at("end").fail("no time before \"start\"");
  if (const JsonValue* transfer = j.find("transfer_start")) {
    op.transfer_start = seconds_of(*transfer);
    if (*op.transfer_start < op.span.start || *op.transfer_start > op.span.end) {
      transfer->fail("a time between \"start\" and \"end\"");
    }
  }
  op.seconds = seconds_of(j.at("seconds"));
  return op;
}

void read_steps(const JsonValue& root, Measured& m) {
  m.steps = root.at("steps").as_int(1, kMostSteps);
  m.warmup_steps = root.at("warmup_steps").as_int(0, m.steps - 1);
  m.median_step = root.at("median_step").as_int(m.warmup_steps, m.steps - 1);
  for (const JsonValue& item : root.at("losses").items()) m.losses.push_back(loss_of(item));
  for (const JsonValue& item : root.at("step_seconds").items()) m.step_seconds.push_back(seconds_of(item));
  for (const auto& [key, count] :
       {std::pair{"losses", m.losses.size()}, std::pair{"step_seconds", m.step_seconds.size()}}) {
    if (count != static_cast<std::size_t>(m.steps)) {
      root.at(key).fail_with(fmt::format("expected one for each of the {} steps, got {}", m.steps, count));
    }
  }
}

}  // namespace

Measured read_measured(std::string_view text, const std::string& file_name) {
  const JsonDocument document = JsonDocument::parse(text, file_name);
  const JsonValue& root = document.root();
  root.require_only({"schema", "engine", "backend", "plan", "ranks", "machine", "steps", "warmup_steps", "median_step",
                     "losses", "step_seconds", "memory", "traffic", "ops"});
  if (root.at("schema").as_int(INT64_MIN, INT64_MAX) != kSchema) root.at("schema").fail("schema 1");
  Measured m;
  m.engine = text_of(root.at("engine"));
  m.backend = text_of(root.at("backend"));
  m.plan = identity_of(root.at("plan"));
  m.ranks = static_cast<int>(root.at("ranks").as_int(1, 1 << 20));
  read_machine_part(root.at("machine"), m);
  read_steps(root, m);
  m.memory = tiers_of(root.at("memory"));
  m.traffic = traffic_of(root.at("traffic"));
  for (const JsonValue& item : root.at("ops").items()) m.ops.push_back(op_of(item));
  return m;
}

}  // namespace zeroplan
