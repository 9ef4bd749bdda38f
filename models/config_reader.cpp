#include "models/config_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace zeroplan {
namespace {

// An unknown key with one of these words may change shapes ...
constexpr std::array<std::string_view, 27> kSuspicious = {
    "expert", "proj",     "head", "layer", "rank",  "vocab",  "intermediate", "hidden", "width",
    "dim",    "channels", "ffn",  "inner", "group", "window", "chunk",        "bias",   "moe",
    "mlp",    "embed",    "ssm",  "mamba", "conv",  "quant",  "d_model",      "lora",   "cross_attention"};

// ... unless it has one of these: numerics, dropout, generation, bookkeeping.
constexpr std::array<std::string_view, 38> kHarmless = {"dropout",     "pdrop",       "layerdrop",
                                                        "eps",         "rope",        "rotary",
                                                        "token_id",    "initializer", "init_",
                                                        "cache",       "loss",        "aux_",
                                                        "scal",        "softcap",     "clip",
                                                        "temperature", "norm_topk",   "torch",
                                                        "dtype",       "tokenizer",   "label",
                                                        "return_dict", "output_",     "gradient_checkpointing",
                                                        "n_group",     "topk",        "query_pre_attn",
                                                        "swiglu",      "fp32",        "attn_impl",
                                                        "attn_uses",   "is_decoder",  "max_window_layers",
                                                        "alibi",       "normalize",   "max_position",
                                                        "fraction",    "mlp_type"};

template <std::size_t N>
bool contains_any(std::string_view text, const std::array<std::string_view, N>& words) {
  return std::ranges::any_of(words, [&](std::string_view word) { return text.find(word) != std::string_view::npos; });
}

/// Calls `visit` with each part of `text` between `separator`s until it returns true.
template <class Visit>
bool any_part(std::string_view text, char separator, Visit visit) {
  while (true) {
    const std::size_t end = text.find(separator);
    if (visit(text.substr(0, end))) return true;
    if (end == std::string_view::npos) return false;
    text.remove_prefix(end + 1);
  }
}

}  // namespace

const JsonValue* ConfigReader::look_up(std::string_view keys) {
  const JsonValue* result = nullptr;
  any_part(keys, '|', [&](std::string_view path) {
    const JsonValue* at = &object_;
    any_part(path, '/', [&](std::string_view key) {
      if (!at->is_object()) at->fail("an object");
      at = at->find(key);
      if (at != nullptr) used_.push_back(at);
      return at == nullptr || at->is_null();
    });
    if (at == nullptr) return false;
    if (result == nullptr || result->is_null()) {
      result = at;
    } else if (result->kind() == JsonValue::Kind::integer && at->is_number()) {
      const std::int64_t first = result->as_int(INT64_MIN, INT64_MAX);
      if (at->as_int(INT64_MIN, INT64_MAX) != first) {
        at->fail(fmt::format("{} as in {}, another name of the same key", first, result->pointer()));
      }
    }
    return false;
  });
  return result;
}

const JsonValue* ConfigReader::find(std::string_view keys) {
  if (keys.empty()) return nullptr;
  const JsonValue* value = look_up(keys);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

bool ConfigReader::mentions(std::string_view keys) { return !keys.empty() && look_up(keys) != nullptr; }

std::int64_t ConfigReader::required(std::string_view keys, std::int64_t low, std::int64_t high) {
  if (const JsonValue* value = find(keys)) return value->as_int(low, high);
  fail({}, fmt::format("expected key {} (integer from {} to {}), which family {} needs; the file has none",
                       first_name(keys), low, high, family_));
}

std::int64_t ConfigReader::optional(std::string_view keys, std::int64_t low, std::int64_t high, std::int64_t fallback,
                                    std::string_view why) {
  if (const JsonValue* value = find(keys)) return value->as_int(low, high);
  if (!mentions(keys)) assume(first_name(keys), fmt::format("{}", fallback), std::string(why));
  return fallback;
}

bool ConfigReader::flag(std::string_view keys, bool fallback) {
  if (const JsonValue* value = find(keys)) return value->as_bool();
  const JsonValue* outer = wrapper_ != nullptr ? wrapper_->find(keys) : nullptr;
  if (outer != nullptr && !outer->is_null()) return outer->as_bool();
  if (!mentions(keys)) assume(first_name(keys), fallback ? "true" : "false", std::string(kTransformersDefault));
  return fallback;
}

std::string ConfigReader::text(std::string_view keys, std::string_view fallback) {
  const JsonValue* value = find(keys);
  return value != nullptr ? value->as_string() : std::string(fallback);
}

void ConfigReader::assume(std::string_view what, std::string value, std::string source) {
  assumptions.push_back({std::string(what), std::move(value), std::move(source)});
}

void ConfigReader::fail(std::string_view keys, std::string_view message) {
  const JsonValue* value = find(keys);
  (value != nullptr ? *value : object_).fail_with(message);
}

std::vector<std::string> ConfigReader::unknown_keys() const {
  std::vector<std::string> unknown;
  const auto scan = [&](const JsonValue& object, auto& self) -> void {
    for (const auto& [key, value] : object.members()) {
      const bool used = std::ranges::find(used_, &value) != used_.end();
      if (used && value.is_object()) self(value, self);
      if (used || !contains_any(key, kSuspicious) || contains_any(key, kHarmless)) continue;
      const bool off = value.is_null() || (value.kind() == JsonValue::Kind::boolean && !value.as_bool());
      if (!off) unknown.push_back(value.pointer());
    }
  };
  scan(object_, scan);
  return unknown;
}

void ConfigReader::note_dropout() {
  const auto scan = [&](const JsonValue& object, auto& self) -> void {
    for (const auto& [key, value] : object.members()) {
      if (value.is_object()) self(value, self);
      const bool rate = key.find("dropout") != std::string::npos || key.find("pdrop") != std::string::npos;
      if (!rate || !value.is_number()) continue;
      if (value.as_real(0, 1) > 0) {
        assume("dropout", "0",
               fmt::format("the zeroplan engine trains without dropout ({} says {})", key, value.short_form()));
        return;
      }
    }
  };
  scan(object_, scan);
}

}  // namespace zeroplan
