#include "models/host_kernels_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMostThreads = 1 << 20;
constexpr int kMostTile = 4096;
constexpr double kMostSeconds = 1e4;  // of one call, or one element: a wrong unit
constexpr double kMostBytes = 1e18;
constexpr double kLeastRate = 1e3, kMostRate = 1e18;

constexpr std::array kTypes{DType::bf16, DType::fp16, DType::fp32, DType::u8};
constexpr std::array<std::string_view, 3> kInstructions{"portable", "avx2", "avx512"};
constexpr std::array<std::string_view, 3> kCollectives{"all-gather", "reduce-scatter", "all-reduce"};
constexpr std::array<std::string_view, 2> kDirections{"read", "write"};

// --- reading ----------------------------------------------------------------------------------------

std::string quoted_list(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += fmt::format("{}\"{}\"", text.empty() ? "" : ", ", name);
  return text;
}

std::string read_choice(const JsonValue& value, std::span<const std::string_view> names) {
  if (std::ranges::find(names, value.as_string()) == names.end()) value.fail("one of " + quoted_list(names));
  return value.as_string();
}

DType read_type(const JsonValue& value) {
  for (const DType type : kTypes) {
    if (to_string(type) == value.as_string()) return type;
  }
  value.fail(R"(one of "bf16", "fp16", "fp32", "u8")");
}

Seconds read_time(const JsonValue& value) {
  const Seconds time = value.as_seconds();
  if (time.base() < 0 || time.base() > kMostSeconds) value.fail("a time from 0 to 10000 s");
  return time;
}

Bytes read_size(const JsonValue& value) {
  const Bytes size = value.as_bytes();
  if (!(size.base() > 0) || size.base() > kMostBytes) value.fail("a size above zero that a machine can have");
  return size;
}

BytesPerSecond read_rate(const JsonValue& value) {
  const BytesPerSecond rate = value.as_rate();
  if (rate.base() < kLeastRate || rate.base() > kMostRate) value.fail("a rate of at least 1 KB/s");
  return rate;
}

int read_count(const JsonValue& value) { return static_cast<int>(value.as_int(1, kMostThreads)); }

double read_factor(const JsonValue& value) {
  constexpr double kLeast = 1e-3;
  return value.as_real(kLeast, kMostThreads);
}

HostSpeedup read_speedup(const JsonValue& j) {
  j.require_only({"threads", "compute"});
  return {read_count(j.at("threads")), read_factor(j.at("compute"))};
}

HostMemoryRate read_memory_rate(const JsonValue& j) {
  j.require_only({"threads", "rate"});
  return {read_count(j.at("threads")), read_rate(j.at("rate"))};
}

HostKernelTime read_kernel(const JsonValue& j) {
  const HostKernelForm* form = find_host_kernel(j.at("kernel").as_string());
  if (form == nullptr) {
    std::vector<std::string> names;
    for (const HostKernelForm& known : host_kernel_forms()) names.emplace_back(known.name);
    j.at("kernel").fail("a kernel that is probed; " + did_you_mean(j.at("kernel").as_string(), names));
  }
  HostKernelTime time;
  time.kernel = form->name;
  time.type = read_type(j.at("type"));
  std::vector<std::string_view> keys{"kernel", "type"};
  for (const std::string_view term : terms_of(form->form)) {
    keys.push_back(term);
    time.terms.push_back(read_time(j.at(term)));
  }
  j.require_only(keys);
  return time;
}

HostCollectiveTime read_collective(const JsonValue& j) {
  j.require_only({"collective", "ranks", "type", "messages", "times"});
  HostCollectiveTime time;
  time.collective = read_choice(j.at("collective"), kCollectives);
  time.ranks = read_count(j.at("ranks"));
  if (time.ranks < 2) j.at("ranks").fail("2 or more");
  time.type = read_type(j.at("type"));
  for (const JsonValue& item : j.at("messages").items()) {
    time.messages.push_back(read_size(item));
    const std::size_t n = time.messages.size();
    if (n > 1 && time.messages[n - 1] <= time.messages[n - 2]) item.fail("a size above the one before");
  }
  for (const JsonValue& item : j.at("times").items()) time.times.push_back(read_time(item));
  if (time.messages.empty()) j.at("messages").fail("at least one size");
  if (time.messages.size() != time.times.size()) j.at("times").fail("one time for each of \"messages\"");
  return time;
}

HostDiskRate read_disk_rate(const JsonValue& j) {
  j.require_only({"direction", "block", "depth", "rate"});
  return {read_choice(j.at("direction"), kDirections), read_size(j.at("block")), read_count(j.at("depth")),
          read_rate(j.at("rate"))};
}

template <class T, class Read>
void read_list(const JsonValue& object, std::string_view key, std::vector<T>& to, Read read) {
  const JsonValue* list = object.find(key);
  if (list == nullptr) return;
  for (const JsonValue& item : list->items()) to.push_back(read(item));
}

void check_speedups(const JsonValue& value, const std::vector<HostSpeedup>& speedups) {
  const bool ascending = std::ranges::is_sorted(
      speedups, [](const HostSpeedup& a, const HostSpeedup& b) { return a.threads <= b.threads; });
  if (speedups.empty() || speedups[0].threads != 1 || !ascending) {
    value.fail("threads in ascending order, from 1 on");
  }
}

void check_kernels(const JsonValue& value, const std::vector<HostKernelTime>& kernels) {
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      if (kernels[k].kernel == kernels[i].kernel && kernels[k].type == kernels[i].type) {
        value.items()[i].fail_with(
            fmt::format("\"{}\" in {} is there twice", kernels[i].kernel, to_string(kernels[i].type)));
      }
    }
  }
}

// --- writing ----------------------------------------------------------------------------------------

Json kernel_json(const HostKernelTime& time) {
  Json j{{"kernel", time.kernel}, {"type", to_string(time.type)}};
  const auto terms = terms_of(find_host_kernel(time.kernel)->form);
  for (std::size_t i = 0; i < terms.size(); ++i) j[std::string(terms[i])] = to_text(time.terms[i]);
  return j;
}

Json collective_json(const HostCollectiveTime& time) {
  Json j{{"collective", time.collective}, {"ranks", time.ranks}, {"type", to_string(time.type)}};
  for (const Bytes message : time.messages) j["messages"].push_back(to_text(message));
  for (const Seconds seconds : time.times) j["times"].push_back(to_text(seconds));
  return j;
}

template <class T, class Write>
void put_list(Json& json, const std::string& key, const std::vector<T>& from, Write write) {
  for (const T& item : from) json[key].push_back(write(item));
}

}  // namespace

HostKernels read_host_kernels(const JsonValue& value) {
  if (!value.is_object()) value.fail("an object");
  value.require_only({"instructions", "tile_rows", "tile_columns", "near_memory", "shared_memory", "pool_wake",
                      "stream_wake", "speedups", "memory", "kernels", "collectives", "disk"});
  HostKernels host;
  host.instructions = read_choice(value.at("instructions"), kInstructions);
  host.tile_rows = static_cast<int>(value.at("tile_rows").as_int(1, kMostTile));
  host.tile_columns = static_cast<int>(value.at("tile_columns").as_int(1, kMostTile));
  host.near_memory = read_size(value.at("near_memory"));
  host.shared_memory = read_size(value.at("shared_memory"));
  if (host.shared_memory < host.near_memory) value.at("shared_memory").fail("at least \"near_memory\"");
  host.pool_wake = read_time(value.at("pool_wake"));
  host.stream_wake = read_time(value.at("stream_wake"));
  read_list(value, "speedups", host.speedups, read_speedup);
  check_speedups(value.at("speedups"), host.speedups);
  read_list(value, "memory", host.memory, read_memory_rate);
  read_list(value, "kernels", host.kernels, read_kernel);
  check_kernels(value.at("kernels"), host.kernels);
  read_list(value, "collectives", host.collectives, read_collective);
  read_list(value, "disk", host.disk, read_disk_rate);
  return host;
}

std::string write_host_kernels(const HostKernels& host) {
  Json j;
  j["instructions"] = host.instructions;
  j["tile_rows"] = host.tile_rows;
  j["tile_columns"] = host.tile_columns;
  j["near_memory"] = to_text(host.near_memory);
  j["shared_memory"] = to_text(host.shared_memory);
  j["pool_wake"] = to_text(host.pool_wake);
  j["stream_wake"] = to_text(host.stream_wake);
  put_list(j, "speedups", host.speedups, [](const HostSpeedup& s) {
    return Json{{"threads", s.threads}, {"compute", s.compute}};
  });
  put_list(j, "memory", host.memory, [](const HostMemoryRate& m) {
    return Json{{"threads", m.threads}, {"rate", to_text(m.rate)}};
  });
  put_list(j, "kernels", host.kernels, kernel_json);
  put_list(j, "collectives", host.collectives, collective_json);
  put_list(j, "disk", host.disk, [](const HostDiskRate& d) {
    return Json{{"direction", d.direction}, {"block", to_text(d.block)}, {"depth", d.depth}, {"rate", to_text(d.rate)}};
  });
  return j.dump();
}

}  // namespace zeroplan
