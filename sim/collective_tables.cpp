#include "sim/collective_tables.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "models/catalog.h"
#include "models/json_reader.h"

namespace zeroplan {

namespace {

constexpr std::string_view kFile = "fits/collectives.json";
constexpr int kMaxRanks = 1 << 20;
constexpr double kMaxBytes = 1e15;
constexpr double kMaxGBps = 1e5;

CollectiveRamp::Point read_point(const JsonValue& value) {
  if (value.items().size() != 2) value.fail("a pair [bytes, GB/s]");
  return {Bytes(value.items()[0].as_real(1, kMaxBytes)),
          BytesPerSecond(value.items()[1].as_real(1e-3, kMaxGBps) * 1e9)};
}

/// Noise makes a few larger messages faster than smaller ones. The smaller one is then taken to be as fast, so that
/// time never falls with size.
void make_time_monotone(std::vector<CollectiveRamp::Point>& points) {
  for (std::size_t i = points.size() - 1; i-- > 0;) {
    const CollectiveRamp::Point& above = points[i + 1];
    points[i].bandwidth = std::max(points[i].bandwidth, above.bandwidth * (points[i].size / above.size));
  }
}

CollectiveRamp read_ramp(const JsonValue& value) {
  value.require_only({"arch", "ranks", "nodes", "network", "calls", "asymptote", "points", "source"});
  CollectiveRamp ramp;
  ramp.arch = value.at("arch").as_string();
  ramp.ranks = static_cast<int>(value.at("ranks").as_int(2, kMaxRanks));
  ramp.nodes = static_cast<int>(value.at("nodes").as_int(1, kMaxRanks));
  if (ramp.nodes > 1) ramp.network = value.at("network").as_string();
  const std::string calls = value.at("calls").as_string();
  if (calls != "queued" && calls != "isolated") value.at("calls").fail("\"queued\" or \"isolated\"");
  ramp.queued = calls == "queued";
  ramp.asymptote = value.at("asymptote").as_rate();
  for (const JsonValue& item : value.at("points").items()) {
    const CollectiveRamp::Point point = read_point(item);
    if (!ramp.points.empty() && point.size <= ramp.points.back().size) item.fail("rising sizes");
    ramp.points.push_back(point);
  }
  if (ramp.points.size() < 2) value.at("points").fail("two or more points");
  make_time_monotone(ramp.points);
  ramp.source = value.at("source").as_string();
  return ramp;
}

CollectiveLaw read_law(const JsonValue& value) {
  value.require_only({"arch", "bandwidth", "link", "source"});
  return {value.at("arch").as_string(), value.at("bandwidth").as_rate(), value.at("link").as_rate(),
          value.at("source").as_string()};
}

RingLaw read_ring(const JsonValue& value) {
  value.require_only({"channels", "channel", "ll_channel", "corner", "ramp_loss", "ramp_exponent", "skew", "source"});
  RingLaw law;
  law.channels = static_cast<int>(value.at("channels").as_int(1, 64));
  law.channel = value.at("channel").as_real(1e-3, 1);
  law.ll_channel = value.at("ll_channel").as_real(1e-3, 1);
  law.corner = value.at("corner").as_real(1, 20);
  law.ramp_loss = value.at("ramp_loss").as_real(0, 1);
  law.ramp_exponent = value.at("ramp_exponent").as_real(0, 0.99);  // below 1, or time would fall with size
  law.skew = value.at("skew").as_seconds();
  law.source = value.at("source").as_string();
  return law;
}

PipelineLaw read_pipeline(const JsonValue& value) {
  value.require_only({"fill", "pipe", "source"});
  return {value.at("fill").as_real(0, 100), value.at("pipe").as_bytes(), value.at("source").as_string()};
}

InSwitchLaw read_in_switch(const JsonValue& value) {
  value.require_only({"fill", "chunk", "arrival", "source"});
  return {value.at("fill").as_real(0, 100), value.at("chunk").as_bytes(), value.at("arrival").as_seconds(),
          value.at("source").as_string()};
}

NvlsGain read_gain(const JsonValue& value) {
  value.require_only({"arch", "ranks", "gain", "source"});
  return {value.at("arch").as_string(), static_cast<int>(value.at("ranks").as_int(2, kMaxRanks)),
          value.at("gain").as_real(1, 2), value.at("source").as_string()};
}

}  // namespace

double CollectiveRamp::relative(Bytes size) const {
  if (size <= points.front().size) return points.front().bandwidth / asymptote * (size / points.front().size);
  if (size >= points.back().size) return points.back().bandwidth / asymptote;
  const auto above = std::ranges::upper_bound(points, size, {}, &Point::size);
  const auto below = above - 1;
  const double part = std::log(size / below->size) / std::log(above->size / below->size);
  return below->bandwidth / asymptote * std::pow(above->bandwidth / below->bandwidth, part);
}

CollectiveTables read_collective_tables(std::string_view json) {
  const JsonDocument document = JsonDocument::parse(json, std::string(kFile));
  const JsonValue& root = document.root();
  root.require_only({"schema", "ramps", "laws", "ring", "network", "in_switch", "nvls"});
  root.at("schema").as_int(1, 1);
  CollectiveTables tables;
  for (const JsonValue& item : root.at("ramps").items()) tables.ramps.push_back(read_ramp(item));
  for (const JsonValue& item : root.at("laws").items()) tables.laws.push_back(read_law(item));
  tables.ring = read_ring(root.at("ring"));
  tables.network = read_pipeline(root.at("network"));
  tables.in_switch = read_in_switch(root.at("in_switch"));
  for (const JsonValue& item : root.at("nvls").items()) tables.nvls.push_back(read_gain(item));
  return tables;
}

const CollectiveTables& builtin_collective_tables() {
  static const CollectiveTables tables = [] {
    const CatalogFile* file = find_catalog_file(kFile);
    if (file == nullptr) throw std::logic_error("no embedded catalog file fits/collectives.json");
    return read_collective_tables(file->text);
  }();
  return tables;
}

}  // namespace zeroplan
