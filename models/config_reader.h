#pragma once
// Keys of a config.json: looked up under their several names, ranges checked, defaults noted.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/json_reader.h"

namespace zeroplan {

/// Source of a default that a file leaves out.
inline constexpr std::string_view kTransformersDefault = "transformers default of the family";

/// "num_heads" of "num_heads|n_head".
inline std::string_view first_name(std::string_view keys) { return keys.substr(0, keys.find('|')); }

/// Reads keys of one object and remembers which were used and which defaults were taken.
/// Key lists are written as in ConfigKeys: "a|b", "a/b". A null counts as absent, but is no assumption: the file says
/// "derive it".
class ConfigReader {
 public:
  /// `wrapper`: the multimodal file around `object`, whose flags hold where `object` has none; or null.
  ConfigReader(const JsonValue& object, std::string_view family, const JsonValue* wrapper)
      : object_(object), family_(family), wrapper_(wrapper) {}

  /// The value, or nullptr when absent or null.
  const JsonValue* find(std::string_view keys);
  /// True when the key is there, null or not.
  bool mentions(std::string_view keys);
  /// Throws InputError when absent or outside [low, high].
  std::int64_t required(std::string_view keys, std::int64_t low, std::int64_t high);
  /// Absent: `fallback`, noted with `why` as its source.
  std::int64_t optional(std::string_view keys, std::int64_t low, std::int64_t high, std::int64_t fallback,
                        std::string_view why);
  bool flag(std::string_view keys, bool fallback);
  /// Absent: `fallback` without a note.
  std::string text(std::string_view keys, std::string_view fallback);

  void assume(std::string_view what, std::string value, std::string source);
  /// InputError at the value of `keys`, or at the object when it is absent.
  [[noreturn]] void fail(std::string_view keys, std::string_view message);
  /// Keys that nothing read and whose name says that they might change shapes.
  std::vector<std::string> unknown_keys() const;
  /// Notes keys such as "resid_pdrop": 0.1 that this engine replaces by 0.
  void note_dropout();

  const JsonValue& object() const { return object_; }
  std::vector<Assumption> assumptions;
  std::vector<std::string> warnings;

 private:
  const JsonValue* look_up(std::string_view keys);
  const JsonValue& object_;
  std::string_view family_;
  const JsonValue* wrapper_;
  std::vector<const JsonValue*> used_;
};

}  // namespace zeroplan
