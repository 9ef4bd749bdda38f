#pragma once
// From a config.json to the numbers that the builder needs: keys looked up by family, defaults noted, ranges checked.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/families.h"
#include "models/json_reader.h"

namespace zeroplan {

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

struct MlaDims {
  std::int64_t q_rank = 0;  // 0: queries in one step
  std::int64_t kv_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
};

/// What may differ from layer to layer.
struct LayerTraits {
  bool moe = false;
  std::int64_t window = 0;  // 0: none
  bool chunked = false;
  friend bool operator==(const LayerTraits&, const LayerTraits&) = default;
};

/// A family row as this file sets it, with its sizes.
struct Architecture {
  Family family;
  std::int64_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;
  MlaDims mla;
  std::int64_t width = 0;  // dense MLP, one of gate and up
  std::int64_t experts = 0, experts_per_token = 0, expert_width = 0;
  std::int64_t shared_width = 0;  // all shared experts together; 0: none
  std::int64_t vocab = 0, max_positions = 0;
  std::int64_t position_rows = 0, token_types = 0;
  std::int64_t patch_inputs = 0;  // channels x patch x patch
  std::int64_t patch_size = 0, channels = 0;
  std::int64_t relative_buckets = 0;
  bool tied = false;
  bool final_norm = true;
  std::string activation;
  std::vector<LayerTraits> layers;  // the decoder's, or the encoder's of an encoder_decoder
  std::int64_t decoder_layers = 0;  // encoder_decoder only
};

/// Throws InputError at the first key that is missing, out of range or contradicts another.
Architecture read_architecture(const Family& family, ConfigReader& reader);

}  // namespace zeroplan
