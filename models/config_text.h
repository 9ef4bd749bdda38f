#pragma once
// A configuration file of another program, as a person wrote it: a tree of values that know their bytes in the text, so
// that it can be corrected in place. Reads JSON, and of Hjson what people use: comments (// and /* */ and #), a comma
// behind the last member. A key may stand twice. (models/json_reader.h is for our own files: it refuses all of that.)

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

struct ConfigMember;

struct ConfigNode {
  enum class Kind : std::uint8_t { null, boolean, integer, real, text, array, object };

  Kind kind = Kind::null;
  int line = 1;
  std::size_t begin = 0, end = 0;  // the value's bytes in the file
  bool flag = false;               // boolean
  double number = 0;               // integer and real; infinite when out of range
  std::string text;                // of a text, decoded (UTF-8)
  std::vector<ConfigMember> members;
  std::vector<ConfigNode> items;

  bool is_object() const { return kind == Kind::object; }
  bool is_number() const { return kind == Kind::integer || kind == Kind::real; }
  /// Exactly the text "auto".
  bool is_auto() const { return kind == Kind::text && text == "auto"; }
  /// The number as an integer when it is one: 5e8 is, 1.5 and 1e300 are not. Digits alone are an integer however many
  /// there are (Python's have no bound): the nearest that there is here.
  std::optional<std::int64_t> integer() const;
  /// The first member of that name, or nullptr; nullptr when this is no object.
  const ConfigMember* find(std::string_view key) const;
};

struct ConfigMember {
  std::string key;
  int line = 1;
  std::size_t begin = 0;    // the key's opening quote
  std::size_t key_end = 0;  // behind its closing quote
  bool repeated = false;    // an earlier member of the same object has this key
  ConfigNode value;
};

/// A parsed file with its text.
class ConfigText {
 public:
  struct Position {
    std::size_t offset;
    int line;
  };

  /// Throws InputError "name:line: ..." for what is neither JSON nor one of the liberties above, for broken UTF-8, more
  /// than kMaxJsonDepth levels or kMaxJsonBytes.
  static ConfigText parse(std::string text, std::string name);

  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }
  const ConfigNode& root() const { return root_; }
  /// Where comments begin, in order.
  const std::vector<Position>& comments() const { return comments_; }
  /// Commas behind a last member or item, in order.
  const std::vector<Position>& trailing_commas() const { return trailing_commas_; }

  /// "zero_optimization.offload_param.device": the first member of each name, or nullptr.
  const ConfigMember* find(std::string_view path) const;
  /// The value's own text in the file, on one line and cut after `longest` bytes.
  std::string excerpt(const ConfigNode& node, std::size_t longest = 40) const;

 private:
  friend class ConfigParser;
  std::string text_, name_;
  ConfigNode root_;
  std::vector<Position> comments_, trailing_commas_;
};

/// True for well-formed UTF-8 (no surrogates, no overlong forms).
bool is_utf8(std::string_view text);

}  // namespace zeroplan
