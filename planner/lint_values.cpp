// One value against its key.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "models/json_text.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

using Kind = ConfigNode::Kind;

std::string_view name_of(ConfigType type) {
  switch (type) {
    case ConfigType::boolean:
      return "true or false";
    case ConfigType::integer:
      return "an integer";
    case ConfigType::size:
      return "a number of elements";
    case ConfigType::real:
      return "a number";
    case ConfigType::text:
      return "text";
    case ConfigType::choice:
      return "one of its words";
    case ConfigType::list:
      return "a list";
    case ConfigType::object:
      return "an object";
    case ConfigType::any:
      return "anything";
  }
  return "";
}

class ValueCheck {
 public:
  ValueCheck(Linter& lint, const DeepspeedKey& key, const std::string& path, const ConfigMember& member,
             UnknownKey policy)
      : lint_(lint),
        key_(key),
        path_(path),
        member_(member),
        node_(member.value),
        shown_(lint.file.excerpt(member.value)),
        guarded_(policy == UnknownKey::refused) {}

  void run() {
    if (node_.is_auto() && key_.auto_filled != AutoFilled::as_value && key_.type != ConfigType::object) {
      return automatic();
    }
    if (node_.is_auto() && key_.auto_filled == AutoFilled::as_value) return;
    if (node_.kind == Kind::null) return null();
    switch (key_.type) {
      case ConfigType::boolean:
        return boolean();
      case ConfigType::integer:
      case ConfigType::size:
        return integer();
      case ConfigType::real:
        return real();
      case ConfigType::text:
        if (node_.kind != Kind::text) wrong_type();
        return;
      case ConfigType::choice:
        return choice();
      case ConfigType::list:
        if (node_.kind != Kind::array) wrong_type();
        return;
      case ConfigType::object:
        return object();
      case ConfigType::any:
        return;
    }
  }

 private:
  Finding& report(std::string_view rule, std::string message, std::string fix = "") {
    return lint_.report_at(rule, path_, member_.line, std::move(message), std::move(fix));
  }
  Finding& report_with(std::string_view rule, std::string message, std::string value) {
    Finding& finding = report(rule, std::move(message), fmt::format("\"{}\": {}", leaf_of(path_), value));
    lint_.replace(finding, node_, std::move(value));
    return finding;
  }
  std::string_view refused() const {
    return guarded_ ? "DeepSpeed refuses to start with a ValidationError"
                    : "nothing checks it, and it fails with a TypeError where it is used";
  }
  std::string default_text() const { return key_.default_text.empty() ? "its default" : key_.default_text; }

  void wrong_type() {
    report("wrong-type",
           fmt::format("{} is {}, expected {}: {}.", leaf_of(path_), shown_, name_of(key_.type), refused()),
           fmt::format("\"{}\": {}{}", leaf_of(path_), name_of(key_.type),
                       key_.default_text.empty() ? "" : fmt::format(" (the default is {})", key_.default_text)));
  }

  // "auto" -----------------------------------------------------------------------------------------

  void automatic() {
    if (key_.path == "zero_optimization.stage") {
      report("auto-stage",
             "DeepSpeed drops \"auto\" here and silently takes stage 0, where nothing is sharded. Only Accelerate "
             "fills it, "
             "from zero_stage of its own file.",
             "\"stage\": a number from 0 to 3");
      return;
    }
    if (path_ != key_.path) {
      Finding& finding =
          report("auto-alias",
                 fmt::format("the Trainer fills \"auto\" of {} only: under the short name it is dropped and "
                             "the default, {}, is used; Accelerate stops with a ValueError (not found in kwargs).",
                             key_.leaf(), default_text()),
                 fmt::format("\"{}\": \"auto\"", key_.leaf()));
      const ConfigNode* object = lint_.value(section_of(path_));
      if (object != nullptr) lint_.rename(finding, *object, member_, key_.leaf());
      return;
    }
    if (key_.auto_filled == AutoFilled::trainer) return;  // one note for all of them: lint_batch
    if (guarded_) {
      Finding& finding =
          report("auto-dropped",
                 fmt::format("the Trainer does not fill this \"auto\"{}: DeepSpeed drops it and takes {}.",
                             key_.auto_filled == AutoFilled::accelerate ? " (Accelerate does, from its own file)" : "",
                             default_text()),
                 key_.default_text.empty() ? "a value, or remove it"
                                           : fmt::format("\"{}\": {}", leaf_of(path_), key_.default_text));
      if (!key_.default_text.empty() && key_.auto_filled == AutoFilled::nobody) {
        lint_.replace(finding, node_, key_.default_text);
      }
      return;
    }
    if (key_.type == ConfigType::text || key_.type == ConfigType::any) return;
    report("auto-literal",
           fmt::format("nobody fills \"auto\" here, and this section is not validated: the text itself {}.",
                       key_.type == ConfigType::boolean ? "counts as true" : "is used and fails there, late"),
           key_.default_text.empty() ? "a value, or remove it"
                                     : fmt::format("\"{}\": {}", leaf_of(path_), key_.default_text));
  }

  // Types ------------------------------------------------------------------------------------------

  void null() {
    if (key_.null) return;
    if (key_.type == ConfigType::object) return object();
    Finding& finding = report("null-value", fmt::format("null where {} belongs: {}.", name_of(key_.type), refused()),
                              fmt::format("remove it: the default is {}", default_text()));
    lint_.remove(finding, member_);
  }

  void boolean() {
    if (node_.kind == Kind::boolean) return;
    const auto read = coerced_bool(node_);
    const std::string word = read.value_or(false) ? "true" : "false";
    if (node_.kind == Kind::text && !guarded_) {
      Finding& finding =
          report("bool-as-text",
                 fmt::format("{} in quotes: this section is not validated, and any text counts as true.", shown_),
                 fmt::format("\"{}\": {}", leaf_of(path_), word));
      if (read) lint_.replace(finding, node_, word);
    } else if (read) {
      report_with("bool-as-text-read", fmt::format("{} is read as {}.", shown_, word), word);
    } else {
      wrong_type();
    }
  }

  void integer() {
    if (node_.kind == Kind::boolean) {
      const std::string number = node_.flag ? "1" : "0";
      report_with("bool-as-number", fmt::format("{} is read as {}.", shown_, number), number);
      return;
    }
    if (node_.kind == Kind::text) return number_in_quotes(true);
    if (!node_.is_number()) return wrong_type();
    if (node_.kind == Kind::real && !std::isfinite(node_.number)) return;  // number-unreadable says it
    if (!node_.integer()) return fraction();
    if (beyond_64_bits() && !is_batch()) {
      report(
          "integer-beyond-64-bits",
          fmt::format("{} needs more than 64 bits: DeepSpeed takes it, Python's integers have no bound, but torch and "
                      "C++ code stop with an overflow where they get it as a size.",
                      shown_),
          fmt::format("\"{}\": at most 9223372036854775807", leaf_of(path_)));
    }
    range(node_.number);
  }

  /// Digits alone, too many for an integer of 64 bits: told by the text, a double is not that exact.
  bool beyond_64_bits() const {
    if (node_.kind != Kind::integer) return false;
    const std::string raw = lint_.file.text().substr(node_.begin, node_.end - node_.begin);
    std::int64_t value = 0;
    return std::from_chars(raw.data(), raw.data() + raw.size(), value).ec == std::errc::result_out_of_range;
  }

  /// Too large a batch has a rule of its own.
  bool is_batch() const {
    return path_ == "train_batch_size" || path_ == "train_micro_batch_size_per_gpu" ||
           path_ == "gradient_accumulation_steps";
  }

  /// Numbers as hjson and pydantic read them (tried: hjson 3.1.0, pydantic 2.13.4, torch 2.15's DataLoader): with a
  /// point or an exponent it is a float unless it is whole and below 1e10, and pydantic makes an integer of a whole
  /// float below 2^63.
  void fraction() {
    const bool whole = std::floor(node_.number) == node_.number;
    if (whole && is_batch()) return;
    const std::string_view happens =
        guarded_ ? refused()
                 : "nothing checks it, DeepSpeed calculates with a float, and what needs an integer (a DataLoader, C++ "
                   "code) stops where it gets it";
    Finding& finding =
        report("fractional-integer",
               whole ? fmt::format("{} does not fit an integer of 64 bits: {}.", shown_, happens)
                     : fmt::format("{} is no integer: {}.", shown_, happens),
               whole ? "a smaller number" : fmt::format("\"{}\": {:.0f}", leaf_of(path_), std::floor(node_.number)));
    if (!whole && !(key_.low && std::floor(node_.number) < *key_.low)) {
      lint_.replace(finding, node_, fmt::format("{:.0f}", std::floor(node_.number)));
    }
  }

  void number_in_quotes(bool integral) {
    const auto number = coerced_real(node_);
    const bool converts = guarded_ && (integral ? coerced_integer(node_).has_value() : number.has_value());
    if (!number || !std::isfinite(*number)) return wrong_type();
    const bool usable = !integral || std::floor(*number) == *number;
    const bool digits = node_.text.find_first_not_of("0123456789") == std::string::npos && !node_.text.starts_with('0');
    const std::string plain = digits ? node_.text : json_number(usable ? *number : std::floor(*number));
    if (converts) {
      report_with("number-as-text-read", fmt::format("{} in quotes is converted.", shown_), plain);
    } else {
      report_with("number-as-text", fmt::format("{} is text, expected {}: {}.", shown_, name_of(key_.type), refused()),
                  plain);
    }
  }

  void real() {
    if (node_.kind == Kind::boolean) {
      if (key_.path == "fp16.loss_scale") return wrong_type();
      report_with("bool-as-number", fmt::format("{} is read as {}.", shown_, node_.flag ? 1 : 0),
                  node_.flag ? "1" : "0");
      return;
    }
    if (node_.kind == Kind::text) return number_in_quotes(false);
    if (!node_.is_number()) return wrong_type();
    if (!std::isfinite(node_.number)) return;  // number-unreadable says it
    range(node_.number);
  }

  void range(double number) {
    const bool below = key_.low && number < *key_.low, above = key_.high && number > *key_.high;
    if (!below && !above) return;
    const std::string limits = key_.low && key_.high
                                   ? fmt::format("{} to {}", json_number(*key_.low), json_number(*key_.high))
                               : key_.low ? fmt::format("at least {}", json_number(*key_.low))
                                          : fmt::format("at most {}", json_number(*key_.high));
    report("out-of-range",
           fmt::format("{} is {}, expected {}: {}.", leaf_of(path_), shown_, limits,
                       guarded_ ? "DeepSpeed refuses to start with a ValidationError"
                                : "DeepSpeed stops, at an assertion or where the number is used"),
           fmt::format("\"{}\": {}", leaf_of(path_), limits));
  }

  void choice() {
    if (node_.kind != Kind::text) return wrong_type();
    const auto equal = [&](const std::string& word) {
      return word == node_.text || (key_.any_case && same_but_case(word, node_.text));
    };
    if (std::ranges::any_of(key_.values, equal)) return;
    std::string nearest;
    for (const std::string& word : key_.values) {
      if (same_but_case(word, node_.text)) nearest = word;
    }
    if (nearest.empty()) nearest = slip_of(node_.text, key_.values);
    Finding& finding = report("bad-choice",
                              fmt::format("{} is none of {}: {}.", shown_, fmt::join(key_.values, ", "),
                                          guarded_ ? "DeepSpeed refuses to start with a ValidationError"
                                                   : "DeepSpeed stops with an error at start"),
                              nearest.empty() ? fmt::format("one of {}", fmt::join(key_.values, ", "))
                                              : fmt::format("\"{}\": \"{}\"", leaf_of(path_), nearest));
    if (!nearest.empty()) lint_.replace(finding, node_, fmt::format("\"{}\"", nearest));
  }

  // Sections ---------------------------------------------------------------------------------------

  void object() {
    if (node_.is_object()) return;
    if (path_ == "zero_optimization" && node_.kind == Kind::boolean) {
      report_with(
          "zero-as-bool",
          fmt::format("{} is a deprecated shorthand for stage {}; \"allgather_size\" at the top level is then read "
                      "as allgather_bucket_size.",
                      shown_, node_.flag ? 1 : 0),
          fmt::format("{{\"stage\": {}}}", node_.flag ? 1 : 0));
      return;
    }
    const bool offload = leaf_of(path_).starts_with("offload_");
    const std::string_view error = guarded_ ? "a ValidationError" : "a TypeError";
    Finding& finding = report(
        "section-not-object",
        fmt::format("{} must be an object, got {}: DeepSpeed stops with {} at start.", leaf_of(path_), shown_, error));
    const auto on = coerced_bool(node_);
    const bool precision = path_ == "fp16" || path_ == "bf16" || path_ == "bfloat16";
    const std::string value = offload ? "{\"device\": \"cpu\"}" : "{\"enabled\": true}";
    if ((precision || offload) && on.value_or(false)) {
      finding.fix = fmt::format("\"{}\": {}", leaf_of(path_), value);
      lint_.replace(finding, node_, value);
    } else if ((precision || offload) && (on || node_.kind == Kind::null)) {
      finding.fix = "remove it";
      lint_.remove(finding, member_);
    } else {
      finding.fix = path_ == "zero_optimization" ? "\"zero_optimization\": {\"stage\": 2}, or remove it for stage 0"
                                                 : "an object, or remove it";
    }
  }

  Linter& lint_;
  const DeepspeedKey& key_;
  const std::string& path_;
  const ConfigMember& member_;
  const ConfigNode& node_;
  std::string shown_;
  bool guarded_;
};

}  // namespace

void lint_value(Linter& lint, const DeepspeedKey& key, const std::string& path, const ConfigMember& member,
                UnknownKey policy) {
  ValueCheck(lint, key, path, member, policy).run();
}

}  // namespace zeroplan
