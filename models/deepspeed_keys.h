#pragma once
// Which keys DeepSpeed reads, from models/catalog/deepspeed_keys.json: data with its source, no code.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

/// What DeepSpeed does with a key it does not know, by section.
enum class UnknownKey : std::uint8_t {
  ignored,   // silently: a plain dictionary
  refused,   // pydantic's ValidationError (extra_forbidden) before any work
  unlisted,  // passed on or read elsewhere: its keys are not in the catalog
};

enum class ConfigType : std::uint8_t { boolean, integer, size, real, text, choice, list, object, any };

/// Who replaces the text "auto".
enum class AutoFilled : std::uint8_t {
  nobody,
  trainer,     // Hugging Face's Trainer, and Accelerate
  accelerate,  // Accelerate only, from its own configuration
  as_value,    // "auto" is a value of the key itself
};

struct DeepspeedKey {
  std::string path;  // "zero_optimization.stage3_max_live_parameters"
  ConfigType type = ConfigType::any;
  std::optional<double> low, high;  // inclusive
  std::vector<std::string> values;  // of a choice
  bool any_case = false;            // of its values
  bool null = false;                // null is accepted
  int first_stage = 0, last_stage = 3;
  std::string default_text;  // as JSON; empty: none
  std::string alias;         // the other name of the last part, "max_live_parameters"
  std::string instead;       // deprecated: the path that replaces it
  bool unread = false;       // parsed, never used
  AutoFilled auto_filled = AutoFilled::nobody;

  std::string_view leaf() const;
  std::string_view section() const;  // "" at the top
};

/// A key that people write and DeepSpeed never had, or has no more.
struct WrongKey {
  std::string path, rule, use, why;  // `use`: the right path, empty when there is none
};

class DeepspeedKeys {
 public:
  /// The embedded catalog, read once. std::logic_error when it is damaged.
  static const DeepspeedKeys& catalog();

  /// "0.19.6"
  const std::string& version() const { return version_; }
  std::span<const DeepspeedKey> keys() const { return keys_; }
  /// By full path, alias included; nullptr when unknown.
  const DeepspeedKey* find(std::string_view path) const;
  const WrongKey* find_wrong(std::string_view path) const;
  /// Nothing when the path is no section (a plain value, or an unknown object).
  std::optional<UnknownKey> section(std::string_view path) const;
  /// Keys directly in that section.
  std::vector<const DeepspeedKey*> in_section(std::string_view path) const;
  /// Keys whose last part (or alias) is this.
  std::vector<const DeepspeedKey*> with_leaf(std::string_view leaf) const;

 private:
  std::string version_;
  std::vector<std::pair<std::string, UnknownKey>> sections_;
  std::vector<DeepspeedKey> keys_;
  std::vector<WrongKey> wrong_;
};

/// "a.b.c" -> "c"; "a.b.c" -> "a.b", "" without a dot.
std::string_view leaf_of(std::string_view path);
std::string_view section_of(std::string_view path);
std::string joined(std::string_view section, std::string_view key);

}  // namespace zeroplan
