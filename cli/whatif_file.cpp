#include "cli/whatif_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "cli/values.h"
#include "cli/whatif_hardware.h"
#include "cli/whatif_values.h"
#include "models/error.h"
#include "models/json_reader.h"
#include "models/text_file.h"
#include "planner/on_premise.h"

namespace zeroplan {
namespace {

constexpr std::size_t kMostWorkloads = 64;

enum class Form : std::uint8_t { text, count, text_or_count, path };

/// A key of a workload, the flag that says the same, and where its value stands.
struct Key {
  std::string_view key, flag;
  std::string WorkloadFlags::*workload;  // nullptr: budget and deadline
  std::string WhatifFlags::*own;
  Form form;
};

constexpr std::array kKeys = {
    Key{"model", "--model", &WorkloadFlags::model, nullptr, Form::path},
    Key{"tokens", "--tokens", &WorkloadFlags::tokens, nullptr, Form::text},
    Key{"budget", "--budget", nullptr, &WhatifFlags::budget, Form::text},
    Key{"deadline", "--deadline", nullptr, &WhatifFlags::deadline, Form::text},
    Key{"objective", "--objective", &WorkloadFlags::objective, nullptr, Form::text},
    Key{"seq_len", "--seq-len", &WorkloadFlags::seq_len, nullptr, Form::count},
    Key{"global_batch", "--global-batch", &WorkloadFlags::global_batch, nullptr, Form::count},
    Key{"micro_batch", "--micro-batch", &WorkloadFlags::micro_batch, nullptr, Form::count},
    Key{"precision", "--precision", &WorkloadFlags::precision, nullptr, Form::text},
    Key{"trainable", "--trainable", &WorkloadFlags::trainable, nullptr, Form::text},
    Key{"zero", "--zero", &WorkloadFlags::zero, nullptr, Form::text_or_count},
    Key{"offload", "--offload", &WorkloadFlags::offload, nullptr, Form::text},
    Key{"recompute", "--recompute", &WorkloadFlags::recompute, nullptr, Form::text},
    Key{"engine", "--engine", &WorkloadFlags::engine, nullptr, Form::text},
    Key{"adam", "--adam", &WorkloadFlags::adam, nullptr, Form::text},
    Key{"alloc_conf", "--alloc-conf", &WorkloadFlags::alloc_conf, nullptr, Form::text},
    Key{"margin", "--margin", &WorkloadFlags::margin, nullptr, Form::text},
};
/// Those that the file may say once for all.
constexpr std::array<std::string_view, 3> kShared = {"budget", "deadline", "objective"};

std::string place_of(const JsonValue& value) {
  return fmt::format("{}:{}: {}", value.file(), value.line(), value.pointer());
}

/// What paths in the file are relative to: its folder, or where the program runs when a pipe brings it.
std::filesystem::path folder_of(const std::filesystem::path& file) {
  std::error_code ignored;
  const bool descriptor = file.native().starts_with("/dev/") || file.native().starts_with("/proc/");
  return descriptor || !std::filesystem::is_regular_file(file, ignored) ? std::filesystem::path() : file.parent_path();
}

std::string resolved(const std::string& path, const std::filesystem::path& folder) {
  return is_path(path) ? (folder / path).string() : path;
}

/// What runs, its InputErrors with the place of the value before them.
template <class Call>
auto placed_at(const JsonValue& value, Call call) {
  try {
    return call();
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", place_of(value), error.what()));
  }
}

/// What the answer calls it: it is printed on terminals and becomes a folder.
std::string name_of(const JsonValue& value) {
  constexpr std::size_t kLongest = 100;
  const std::string& name = value.as_string();
  const bool plain = std::ranges::none_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  if (name.empty() || name.size() > kLongest || !plain) {
    value.fail(fmt::format("a name of 1 to {} printable characters", kLongest));
  }
  return name;
}

class FileReader {
 public:
  explicit FileReader(const std::string& path)
      : folder_(folder_of(path)), document_(JsonDocument::parse(read_text_file(path), path)) {}

  WhatifFile read() {
    const JsonValue& root = document_.root();
    root.require_only({"schema", "workloads", "machines", kShared[0], kShared[1], kShared[2]});
    root.at("schema").as_int(1, 1);
    WhatifFile file;
    for (const Key& key : kKeys) {
      if (std::ranges::find(kShared, key.key) != kShared.end()) take(root, key, file.shared);
    }
    if (const JsonValue* workloads = root.find("workloads")) read_workloads(*workloads, file);
    if (const JsonValue* machines = root.find("machines")) read_machines(*machines, file);
    if (file.workloads.empty() && file.machines.empty()) root.fail_with("expected \"workloads\", \"machines\" or both");
    return file;
  }

 private:
  void take(const JsonValue& object, const Key& key, WhatifFile::Workload& workload) const {
    const JsonValue* value = object.find(key.key);
    if (value == nullptr) return;
    constexpr std::int64_t kMostCount = std::int64_t{1} << 53;
    const bool counted = key.form == Form::count || (key.form == Form::text_or_count && value->is_number());
    std::string text = counted ? std::to_string(value->as_int(0, kMostCount)) : value->as_string();
    if (text.empty()) value->fail("a text that is not empty");
    if (key.form == Form::path) text = resolved(text, folder_);
    workload.values[std::string(key.flag)] = {std::move(text), place_of(*value)};
  }

  void read_workloads(const JsonValue& list, WhatifFile& file) const {
    if (list.items().empty() || list.items().size() > kMostWorkloads) {
      list.fail(fmt::format("1 to {} workloads", kMostWorkloads));
    }
    std::vector<std::string_view> known{"name"};
    for (const Key& key : kKeys) known.push_back(key.key);
    for (const JsonValue& item : list.items()) {
      item.require_only(known);
      WhatifFile::Workload workload;
      item.at("model");
      for (const Key& key : kKeys) take(item, key, workload);
      const JsonValue* name = item.find("name");
      workload.name = name != nullptr ? name_of(*name) : item.at("model").as_string();
      for (const WhatifFile::Workload& other : file.workloads) {
        if (other.name == workload.name) item.fail_with(fmt::format("a second workload named \"{}\"", workload.name));
      }
      file.workloads.push_back(std::move(workload));
    }
  }

  void read_machines(const JsonValue& list, WhatifFile& file) const {
    if (list.items().empty() || list.items().size() > kMostAlternatives) {
      list.fail(fmt::format("1 to {} machines", kMostAlternatives));
    }
    file.machines_place = place_of(list);
    for (const JsonValue& item : list.items()) {
      Alternative alternative = read_machine(item);
      for (const Alternative& other : file.machines) {
        if (other.name == alternative.name) {
          item.fail_with(fmt::format("a second machine named \"{}\": give one of them a \"name\"", other.name));
        }
      }
      file.machines.push_back(std::move(alternative));
    }
  }

  Alternative read_machine(const JsonValue& item) const {
    item.require_only(
        {"name", "hardware", "nodes", "host_memory", "nvme", "price", "price_date", "price_source", "on_premise"});
    const JsonValue& hardware = item.at("hardware");
    const std::string& text = hardware.as_string();
    if (text.find('@') != std::string::npos) hardware.fail("a machine without a price; \"price\" is a key of its own");
    Alternative alternative = placed_at(hardware, [&] { return alternative_of(resolved(text, folder_), ""); });
    alternative.from_file = true;
    const bool counted = alternative.unit != alternative.name;  // "4x8xH100"
    set_size(item, alternative, counted);
    const JsonValue* name = item.find("name");
    alternative.name = alternative.unit = name != nullptr ? name_of(*name) : text;
    if (item.find("price") != nullptr && item.find("on_premise") != nullptr) {
      item.at("on_premise").fail_with("expected \"price\" or \"on_premise\", got both");
    }
    if (const auto price = price_of_item(item)) alternative.machine.price = *price;
    return alternative;
  }

  /// `counted`: "hardware" says the number of nodes.
  static void set_size(const JsonValue& item, Alternative& alternative, bool counted) {
    MachineSpec& machine = alternative.machine;
    if (const JsonValue* nodes = item.find("nodes")) {
      const std::int64_t count = nodes->as_int(1, machine.host_device ? 1 : kMostNodes);
      if (counted && count != machine.nodes) {
        nodes->fail(fmt::format("{}, the nodes of \"hardware\", or no such key", machine.nodes));
      }
      if (count != machine.nodes) set_nodes(machine, static_cast<int>(count));
      alternative.nodes_given = true;
    }
    if (const JsonValue* memory = item.find("host_memory")) {
      const Bytes size = memory->as_bytes();
      if (size < 1_MiB || size > Bytes(1024 * kTiB)) memory->fail("1MiB to 1024TiB");
      set_host_memory(machine, size);
    }
    if (const JsonValue* nvme = item.find("nvme")) set_nvme(machine, nvme->as_string(), place_of(*nvme));
  }

  static std::optional<PriceSpec> price_of_item(const JsonValue& item) {
    for (const std::string_view key : {"price_date", "price_source"}) {
      if (item.find(key) != nullptr && item.find("price") == nullptr)
        item.at(key).fail_with("has no \"price\" beside it");
    }
    if (const JsonValue* price = item.find("price")) {
      PriceSpec spec;
      spec.usd_per_hour = parse_hourly_price(price->as_string(), place_of(*price));
      if (const JsonValue* date = item.find("price_date")) spec.date = date->as_string();
      const JsonValue* source = item.find("price_source");
      spec.source = source != nullptr ? source->as_string() : fmt::format("{}:{}", price->file(), price->line());
      return spec;
    }
    if (const JsonValue* owned = item.find("on_premise")) return price_of(read_on_premise(*owned));
    return std::nullopt;
  }

  static OnPremise read_on_premise(const JsonValue& object) {
    object.require_only({"capital", "lifetime", "power", "electricity", "utilisation", "source"});
    const auto read = [&](std::string_view key, double (*parse)(std::string_view, std::string_view)) {
      const JsonValue& value = object.at(key);
      return parse(value.as_string(), place_of(value));
    };
    OnPremise terms;
    terms.capital_usd = read("capital", parse_capital);
    terms.years = read("lifetime", parse_years);
    terms.kilowatts = read("power", parse_power);
    terms.usd_per_kwh = read("electricity", parse_electricity);
    terms.utilisation = read("utilisation", parse_utilisation);
    if (const JsonValue* source = object.find("source")) terms.source = source->as_string();
    constexpr double kMostUsdPerHour = 1e6;
    if (!(owned_hour(terms).usd() <= kMostUsdPerHour)) object.fail_with("expected at most 1,000,000 USD an hour");
    if (!(owned_hour(terms).usd() > 0))
      object.fail_with("expected a price above 0: no capital and no electricity are given");
    return terms;
  }

  std::filesystem::path folder_;
  JsonDocument document_;
};

/// The workload's own value, else the file's for all.
const WhatifFile::Value* value_of(const WhatifFile& file, const WhatifFile::Workload& workload, std::string_view flag) {
  for (const WhatifFile::Workload* w : {&workload, &file.shared}) {
    if (const auto found = w->values.find(flag); found != w->values.end()) return &found->second;
  }
  return nullptr;
}

}  // namespace

std::string* WhatifFlags::find(std::string_view flag) {
  for (const Key& key : kKeys) {
    if (key.flag == flag) return key.workload != nullptr ? &(workload.*key.workload) : &(this->*key.own);
  }
  return nullptr;
}

WhatifLimits WhatifFlags::limits() const {
  WhatifLimits limits;
  limits.tokens = workload.num_tokens();
  if (!budget.empty()) limits.budget_usd = parse_budget(budget, "--budget");
  if (!deadline.empty()) limits.deadline = parse_deadline(deadline, "--deadline");
  if (!workload.objective.empty() && parse_objective(workload.objective, "--objective") == Objective::time) {
    limits.prefer = Prefer::fastest;
  }
  return limits;
}

WhatifFile read_whatif_file(const std::string& path) { return FileReader(path).read(); }

WhatifFlags merged(const WhatifFlags& given, const WhatifFile& file, const WhatifFile::Workload& workload,
                   std::vector<std::string>& notes) {
  WhatifFlags all = given;
  for (const Key& key : kKeys) {
    const WhatifFile::Value* value = value_of(file, workload, key.flag);
    if (value == nullptr) continue;
    std::string& target = *all.find(key.flag);
    if (target.empty()) {
      target = value->text;
    } else if (target != value->text) {
      notes.push_back(
          fmt::format("note: {} {} is taken instead of {} ({})", key.flag, target, value->text, value->place));
    }
  }
  return all;
}

std::string placed(const std::string& message, const WhatifFlags& given, const WhatifFile& file,
                   const WhatifFile::Workload& workload) {
  const std::string flag = message.substr(0, message.find_first_of(": "));
  WhatifFlags flags = given;
  const std::string* text = flags.find(flag);
  const WhatifFile::Value* value = value_of(file, workload, flag);
  if (text == nullptr || !text->empty() || value == nullptr) return message;
  return value->place + message.substr(flag.size());
}

}  // namespace zeroplan
