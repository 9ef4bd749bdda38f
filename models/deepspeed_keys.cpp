#include "models/deepspeed_keys.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "models/catalog.h"
#include "models/json_reader.h"

namespace zeroplan {
namespace {

constexpr double kAny = std::numeric_limits<double>::max();

template <class T, std::size_t N>
T named(const JsonValue& value, const std::array<std::pair<std::string_view, T>, N>& names) {
  for (const auto& [name, meaning] : names) {
    if (value.as_string() == name) return meaning;
  }
  value.fail("a name of the catalog's");
}

constexpr std::array<std::pair<std::string_view, UnknownKey>, 3> kSections = {
    {{"ignored", UnknownKey::ignored}, {"refused", UnknownKey::refused}, {"unlisted", UnknownKey::unlisted}}};
constexpr std::array<std::pair<std::string_view, ConfigType>, 9> kTypes = {{{"bool", ConfigType::boolean},
                                                                            {"int", ConfigType::integer},
                                                                            {"size", ConfigType::size},
                                                                            {"float", ConfigType::real},
                                                                            {"text", ConfigType::text},
                                                                            {"choice", ConfigType::choice},
                                                                            {"list", ConfigType::list},
                                                                            {"object", ConfigType::object},
                                                                            {"any", ConfigType::any}}};
constexpr std::array<std::pair<std::string_view, AutoFilled>, 3> kFillers = {
    {{"trainer", AutoFilled::trainer}, {"accelerate", AutoFilled::accelerate}, {"value", AutoFilled::as_value}}};

bool flag_of(const JsonValue& entry, std::string_view key) {
  const JsonValue* value = entry.find(key);
  return value != nullptr && value->as_bool();
}

std::string text_of(const JsonValue& entry, std::string_view key) {
  const JsonValue* value = entry.find(key);
  return value == nullptr ? "" : value->as_string();
}

/// "3" or "1-2".
void read_stages(const JsonValue& value, DeepspeedKey& key) {
  const std::string& text = value.as_string();
  if (text.size() != 1 && (text.size() != 3 || text[1] != '-')) value.fail("stages such as 1-3");
  key.first_stage = text.front() - '0';
  key.last_stage = text.back() - '0';
}

DeepspeedKey read_key(const JsonValue& entry) {
  entry.require_only({"path", "type", "low", "high", "values", "default", "stages", "null", "any_case", "alias",
                      "instead", "unread", "auto"});
  DeepspeedKey key;
  key.path = entry.at("path").as_string();
  key.type = named(entry.at("type"), kTypes);
  if (const JsonValue* low = entry.find("low")) key.low = low->as_real(-kAny, kAny);
  if (const JsonValue* high = entry.find("high")) key.high = high->as_real(-kAny, kAny);
  if (const JsonValue* values = entry.find("values")) {
    for (const JsonValue& value : values->items()) key.values.push_back(value.as_string());
  }
  if (const JsonValue* value = entry.find("default")) key.default_text = value->short_form();
  if (const JsonValue* stages = entry.find("stages")) read_stages(*stages, key);
  if (const JsonValue* filler = entry.find("auto")) key.auto_filled = named(*filler, kFillers);
  key.alias = text_of(entry, "alias");
  key.instead = text_of(entry, "instead");
  key.any_case = flag_of(entry, "any_case");
  key.null = flag_of(entry, "null");
  key.unread = flag_of(entry, "unread");
  return key;
}

}  // namespace

std::string_view leaf_of(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string_view section_of(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

std::string joined(std::string_view section, std::string_view key) {
  return section.empty() ? std::string(key) : std::string(section) + "." + std::string(key);
}

std::string_view DeepspeedKey::leaf() const { return leaf_of(path); }
std::string_view DeepspeedKey::section() const { return section_of(path); }

const DeepspeedKeys& DeepspeedKeys::catalog() {
  static const DeepspeedKeys keys = [] {
    const CatalogFile* file = find_catalog_file("deepspeed_keys.json");
    if (file == nullptr) throw std::logic_error("the catalog has no deepspeed_keys.json");
    const JsonDocument document = JsonDocument::parse(file->text, "catalog/deepspeed_keys.json");
    const JsonValue& root = document.root();
    root.require_only({"version", "source", "sections", "keys", "wrong"});
    DeepspeedKeys read;
    const std::string& version = root.at("version").as_string();  // "0.19.6 (git edaa722, 2026-08-22)"
    read.version_ = version.substr(0, version.find(' '));
    for (const JsonValue& entry : root.at("sections").items()) {
      read.sections_.emplace_back(entry.at("path").as_string(), named(entry.at("unknown"), kSections));
    }
    for (const JsonValue& entry : root.at("keys").items()) read.keys_.push_back(read_key(entry));
    for (const JsonValue& entry : root.at("wrong").items()) {
      read.wrong_.push_back({entry.at("key").as_string(), entry.at("rule").as_string(), entry.at("use").as_string(),
                             entry.at("why").as_string()});
    }
    return read;
  }();
  return keys;
}

const DeepspeedKey* DeepspeedKeys::find(std::string_view path) const {
  for (const DeepspeedKey& key : keys_) {
    if (key.path == path) return &key;
    if (!key.alias.empty() && leaf_of(path) == key.alias && section_of(path) == key.section()) return &key;
  }
  return nullptr;
}

const WrongKey* DeepspeedKeys::find_wrong(std::string_view path) const {
  const auto found = std::ranges::find(wrong_, path, &WrongKey::path);
  return found == wrong_.end() ? nullptr : &*found;
}

std::optional<UnknownKey> DeepspeedKeys::section(std::string_view path) const {
  for (const auto& [name, unknown] : sections_) {
    if (name == path) return unknown;
  }
  return std::nullopt;
}

std::vector<const DeepspeedKey*> DeepspeedKeys::in_section(std::string_view path) const {
  std::vector<const DeepspeedKey*> found;
  for (const DeepspeedKey& key : keys_) {
    if (key.section() == path) found.push_back(&key);
  }
  return found;
}

std::vector<const DeepspeedKey*> DeepspeedKeys::with_leaf(std::string_view leaf) const {
  std::vector<const DeepspeedKey*> found;
  for (const DeepspeedKey& key : keys_) {
    if (key.leaf() == leaf || (!key.alias.empty() && key.alias == leaf)) found.push_back(&key);
  }
  return found;
}

}  // namespace zeroplan
