// Keys: unknown, misspelt, in the wrong section, old. And the syntax around them.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "models/error.h"
#include "models/json_text.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

constexpr std::size_t kLongestShown = 60;

std::string in_quotes(std::string_view key) { return json_quoted(key, kLongestShown); }

/// Names that stand in many sections: their place says nothing about what was meant.
bool is_common(std::string_view leaf) {
  constexpr std::array<std::string_view, 22> kCommon = {
      "enabled",     "type",      "params",       "device",     "dtype", "version", "names",   "classes",
      "output_path", "job_name",  "project",      "profile",    "debug", "verbose", "offload", "mode",
      "passes",      "nvme_path", "buffer_count", "pin_memory", "ratio", "online"};
  return std::ranges::find(kCommon, leaf) != kCommon.end();
}

class KeyWalk {
 public:
  explicit KeyWalk(Linter& lint) : lint_(lint) {}

  void walk(const ConfigNode& object, const std::string& section, UnknownKey policy) {
    for (const ConfigMember& member : object.members) {
      if (lint_.full()) return;
      const std::string path = joined(section, member.key);
      if (member.repeated) {
        report_repeated(object, member, path);
        continue;
      }
      const bool plain = member.key.find('.') == std::string::npos;
      if (const DeepspeedKey* key = plain ? lint_.keys.find(path) : nullptr) {
        known(object, member, path, *key, policy);
      } else if (policy != UnknownKey::unlisted && !is_remark(member.key, policy)) {
        unknown(object, member, path, section, policy);
      }
    }
  }

 private:
  /// "_comment": people leave remarks where nobody objects to them.
  static bool is_remark(std::string_view key, UnknownKey policy) {
    return policy == UnknownKey::ignored && (key.starts_with('_') || key.starts_with("x-") || key.starts_with("//") ||
                                             key.starts_with('#') || key == "comment" || key == "comments");
  }

  static std::string_view happens(UnknownKey policy) {
    return policy == UnknownKey::refused ? "DeepSpeed refuses to start: pydantic's ValidationError (extra_forbidden)"
                                         : "DeepSpeed ignores it silently";
  }
  static std::string by_policy(std::string_view rule, UnknownKey policy) {
    return fmt::format("{}-{}", rule, policy == UnknownKey::refused ? "refused" : "ignored");
  }

  void report_repeated(const ConfigNode& object, const ConfigMember& member, const std::string& path) {
    const ConfigMember& first = *object.find(member.key);
    const auto raw = [&](const ConfigNode& node) {
      return std::string_view(lint_.file.text()).substr(node.begin, node.end - node.begin);
    };
    const bool equal = raw(first.value) == raw(member.value);
    Finding& finding = lint_.report_at(
        "duplicate-key", path, member.line,
        fmt::format("{} stands twice here, first on line {}: DeepSpeed stops with a ValueError that lists it.",
                    in_quotes(member.key), first.line),
        equal ? "remove this line: both say the same" : "keep one of the two");
    if (equal) lint_.remove(finding, member);
  }

  void known(const ConfigNode& object, const ConfigMember& member, const std::string& path, const DeepspeedKey& key,
             UnknownKey policy) {
    if (path != key.path) aliased(object, member, path, key);
    if (!key.instead.empty()) deprecated(object, member, path, key);
    if (key.unread && key.instead.empty()) unread(member, path, key);
    lint_value(lint_, key, path, member, policy);
    if (key.type != ConfigType::object || !member.value.is_object()) return;
    const auto inner = lint_.keys.section(key.path);
    if (!inner) return;
    if (*inner == UnknownKey::unlisted && section_of(path).empty()) lint_.unchecked.push_back(path);
    walk(member.value, path, *inner);
  }

  void aliased(const ConfigNode& object, const ConfigMember& member, const std::string& path, const DeepspeedKey& key) {
    if (object.find(key.leaf()) != nullptr) {
      Finding& finding =
          lint_.report_at("alias-pair", path, member.line,
                          fmt::format("{} and {} are two names of one key: DeepSpeed refuses to start with "
                                      "a ValidationError on {}.",
                                      key.leaf(), key.alias, key.alias),
                          fmt::format("remove {}", key.alias));
      lint_.remove(finding, member);
      return;
    }
    if (member.value.is_auto()) return;  // auto-alias says it
    Finding& finding = lint_.report_at(
        "alias-name", path, member.line,
        fmt::format("DeepSpeed takes {} for {}; the Trainer and Accelerate look for the long name only.", key.alias,
                    key.leaf()),
        fmt::format("\"{}\"", key.leaf()));
    lint_.rename(finding, object, member, key.leaf());
  }

  void deprecated(const ConfigNode& object, const ConfigMember& member, const std::string& path,
                  const DeepspeedKey& key) {
    if (member.value.kind == ConfigNode::Kind::null) return;
    const std::string_view instead = leaf_of(key.instead);
    const bool on = coerced_bool(member.value).value_or(false);
    if (object.find(instead) != nullptr && !key.unread) {
      Finding& finding = lint_.report_at(
          "deprecated-with-new", path, member.line,
          fmt::format("{} is the old name of {}, which stands here too: AssertionError at start.", key.leaf(), instead),
          fmt::format("remove {}", key.leaf()));
      lint_.remove(finding, member);
      return;
    }
    Finding& finding =
        lint_.report_at("deprecated-key", path, member.line,
                        key.unread ? fmt::format("{} has no effect any more (a warning at start).", key.leaf())
                                   : fmt::format("{} is deprecated: DeepSpeed {} still reads it, with a warning.",
                                                 key.leaf(), lint_.keys.version()));
    if (key.unread) {
      finding.fix = fmt::format("remove it; pin_memory of the offload section does it now");
      lint_.remove(finding, member);
    } else if (lint_.keys.section(key.instead)) {
      finding.fix = on ? fmt::format("\"{}\": {{\"device\": \"cpu\"}}", instead) : "remove it";
      if (on) {
        if (lint_.rename(finding, object, member, instead)) {
          lint_.replace(finding, member.value, "{\"device\": \"cpu\"}");
        }
      } else {
        lint_.remove(finding, member);
      }
    } else {
      finding.fix = fmt::format("\"{}\"", instead);
      lint_.rename(finding, object, member, instead);
    }
  }

  void unread(const ConfigMember& member, const std::string& path, const DeepspeedKey& key) {
    const bool bucket = key.leaf() == "allgather_bucket_size";
    const bool at_default = bucket || lint_.file.excerpt(member.value) == key.default_text;
    lint_.report_at(
        at_default ? "unread-key-default" : "unread-key", path, member.line,
        bucket ? fmt::format("{} has no effect at stage {}: current torch gathers a whole flat group in one call.",
                             key.leaf(), lint_.config.stage)
               : fmt::format("{} is accepted and has no effect: nothing in DeepSpeed {} reads it.", key.leaf(),
                             lint_.keys.version()),
        at_default ? "" : "remove it");
  }

  void unknown(const ConfigNode& object, const ConfigMember& member, const std::string& path,
               const std::string& section, UnknownKey policy) {
    if (const WrongKey* wrong = lint_.keys.find_wrong(path)) return listed(object, member, path, *wrong, policy);
    if (path == "allgather_size" && (lint_.is_true("zero_optimization") || lint_.is_false("zero_optimization")))
      return;  // zero-as-bool says what reads it
    if (dotted(member, path)) return;
    if (prefixed(object, member, path, section)) return;
    if (other_letters(object, member, path, section, policy)) return;
    if (misplaced(member, path, section, policy)) return;
    const std::vector<std::string> meant = meant_keys(member, section, policy);
    if (meant.size() == 1) return misspelt(object, member, path, meant.front(), policy);
    Finding& finding = lint_.report_at(by_policy("unknown-key", policy), path, member.line,
                                       fmt::format("{} is no key {}DeepSpeed {}: {}.", in_quotes(member.key),
                                                   section.empty() ? "of " : fmt::format("of {} in ", section),
                                                   lint_.keys.version(), happens(policy)));
    const std::string names = fmt::format("{}", fmt::join(meant, " or "));
    if (policy == UnknownKey::ignored) {
      finding.fix = meant.empty() ? "remove it, unless a script of yours reads it"
                                  : fmt::format("{}, unless a script of yours reads it", names);
    } else if (meant.empty()) {
      finding.fix = "remove it";
      lint_.remove(finding, member);
    } else {
      finding.fix = fmt::format("{}, or remove it", names);  // which, a person has to say
    }
  }

  void listed(const ConfigNode& object, const ConfigMember& member, const std::string& path, const WrongKey& wrong,
              UnknownKey policy) {
    const std::string rule = wrong.rule == "renamed-key"           ? wrong.rule
                             : wrong.rule == "retired-key-ignored" ? wrong.rule
                                                                   : by_policy(wrong.rule, policy);
    const std::string why = wrong.why.empty() ? "" : "; " + wrong.why;
    Finding& finding = lint_.report_at(
        rule, path, member.line, fmt::format("{} is no key here: {}{}.", in_quotes(member.key), happens(policy), why));
    if (wrong.use.empty()) {
      finding.fix = "remove it";
      if (policy == UnknownKey::refused) lint_.remove(finding, member);
      return;
    }
    finding.message += fmt::format(" Meant is {}.", leaf_of(wrong.use));
    finding.fix = fmt::format("\"{}\"", leaf_of(wrong.use));
    lint_.rename(finding, object, member, leaf_of(wrong.use));
  }

  bool dotted(const ConfigMember& member, const std::string& path) {
    if (member.key.find('.') == std::string::npos || lint_.keys.find(member.key) == nullptr) return false;
    Finding& finding = lint_.report_at(
        "dotted-key", path, member.line,
        fmt::format("{} is one key with dots: DeepSpeed ignores it silently, sections are nested objects.",
                    in_quotes(member.key)),
        fmt::format("{} inside {}", in_quotes(leaf_of(member.key)), in_quotes(section_of(member.key))));
    lint_.move(finding, member, member.key);
    return true;
  }

  bool prefixed(const ConfigNode& object, const ConfigMember& member, const std::string& path,
                const std::string& section) {
    constexpr std::string_view kPrefix = "stage3_";
    if (section != "zero_optimization" || !member.key.starts_with(kPrefix)) return false;
    const std::string bare = member.key.substr(kPrefix.size());
    const DeepspeedKey* key = lint_.keys.find(joined(section, bare));
    if (key == nullptr) return false;
    Finding& finding = lint_.report_at(
        "stage3-prefix", path, member.line,
        fmt::format(
            "{} has no stage3_ prefix in DeepSpeed: it refuses to start with a ValidationError (extra_forbidden).",
            bare),
        fmt::format("\"{}\": {}", bare, lint_.file.excerpt(member.value)));
    lint_.rename(finding, object, member, bare);
    return true;
  }

  bool other_letters(const ConfigNode& object, const ConfigMember& member, const std::string& path,
                     const std::string& section, UnknownKey policy) {
    for (const DeepspeedKey* key : lint_.keys.in_section(section)) {
      if (!same_but_case(member.key, key->leaf())) continue;
      Finding& finding = lint_.report_at("wrong-case-key", path, member.line,
                                         fmt::format("keys are compared letter by letter, so {} is unknown: {}.",
                                                     in_quotes(member.key), happens(policy)),
                                         fmt::format("\"{}\"", key->leaf()));
      lint_.rename(finding, object, member, key->leaf());
      return true;
    }
    return false;
  }

  bool misplaced(const ConfigMember& member, const std::string& path, const std::string& section, UnknownKey policy) {
    if (is_common(member.key)) return false;
    std::vector<const DeepspeedKey*> homes = lint_.keys.with_leaf(member.key);
    std::erase_if(homes,
                  [&](const DeepspeedKey* key) { return key->section() == "bfloat16" || !key->instead.empty(); });
    if (homes.empty()) return false;
    const std::string to(joined(homes.front()->section(), member.key));
    std::string all = to;
    for (std::size_t i = 1; i < homes.size(); ++i) all += " or " + homes[i]->path;
    const bool nested = member.key.starts_with("offload_") && section.find("offload_") != std::string::npos;
    std::string lost;
    if (policy != UnknownKey::refused) {
      lost = member.key.starts_with("offload_") ? ", no offload happens" : ", the setting has its default";
    }
    Finding& finding = lint_.report_at(
        nested ? "offload-nested" : by_policy("misplaced-key", policy), path, member.line,
        fmt::format("{} belongs to {}, not {}: {}{}.{}", in_quotes(member.key), place(all), place_of(section),
                    happens(policy), lost,
                    nested ? " offload_optimizer and offload_param are siblings inside zero_optimization." : ""),
        fmt::format("move it to {}", all));
    if (homes.size() == 1) lint_.move(finding, member, to);
    return true;
  }

  static std::string place(const std::string& path) {
    const std::string_view section = section_of(path);
    return section.empty() ? "the top level" : std::string(section);
  }
  static std::string place_of(const std::string& section) { return section.empty() ? "the top level" : section; }

  void misspelt(const ConfigNode& object, const ConfigMember& member, const std::string& path, const std::string& name,
                UnknownKey policy) {
    Finding& finding = lint_.report_at(
        by_policy("misspelt-key", policy), path, member.line,
        fmt::format("{} is no key here: {}. Meant is {}.", in_quotes(member.key), happens(policy), name),
        fmt::format("\"{}\": {}", name, lint_.file.excerpt(member.value)));
    lint_.rename(finding, object, member, name);
  }

  /// The keys of a section that a text may mean, by their long names, without old ones of which the new one is there
  /// too. Where DeepSpeed ignores keys they may be a script's own: a "date" that is a text is no section cut short.
  std::vector<std::string> meant_keys(const ConfigMember& member, const std::string& section, UnknownKey policy) const {
    const std::string& text = member.key;
    const bool no_section = policy == UnknownKey::ignored && !member.value.is_object();
    std::vector<std::string> names, meant;
    for (const DeepspeedKey* key : lint_.keys.in_section(section)) {
      names.emplace_back(key->leaf());
      if (!key->alias.empty()) names.push_back(key->alias);
    }
    for (const std::string& name : meant_names(text, names)) {
      const DeepspeedKey* key = lint_.keys.find(joined(section, name));
      if (no_section && key->type == ConfigType::object && slip_of(text, {name}).empty()) continue;
      const std::string_view leaf = key->leaf();
      if (std::ranges::find(meant, leaf) == meant.end()) meant.emplace_back(leaf);
    }
    std::erase_if(meant, [&](const std::string& name) {
      const std::string_view instead = leaf_of(lint_.keys.find(joined(section, name))->instead);
      return std::ranges::find(meant, instead) != meant.end();
    });
    return meant;
  }

  Linter& lint_;
};

}  // namespace

namespace {

/// Numbers at which Python stops while it reads the file: hjson 3.1.0 makes an integer of every whole float, which
/// infinity is not, and Python reads 4300 digits.
void lint_numbers(Linter& lint, const ConfigNode& node, const std::string& path) {
  if (lint.full()) return;
  constexpr std::size_t kMostDigits = 4300;
  const std::size_t digits = node.end - node.begin - (lint.file.text()[node.begin] == '-' ? 1 : 0);
  if (node.kind == ConfigNode::Kind::real && !std::isfinite(node.number)) {
    lint.report_at("number-unreadable", path, node.line,
                   fmt::format("{} is beyond what a float holds: an OverflowError while DeepSpeed reads the file; the "
                               "Trainer's json takes it for infinity.",
                               lint.file.excerpt(node)),
                   "a finite number");
  } else if (node.kind == ConfigNode::Kind::integer && digits > kMostDigits) {
    lint.report_at(
        "number-unreadable", path, node.line,
        fmt::format("{} digits: Python reads at most {}, a ValueError while the file is read.", digits, kMostDigits),
        "a smaller number");
  }
  for (const ConfigMember& member : node.members) lint_numbers(lint, member.value, joined(path, member.key));
  for (const ConfigNode& item : node.items) lint_numbers(lint, item, path);
}

}  // namespace

void lint_syntax(Linter& lint) {
  lint_numbers(lint, lint.file.root(), "");
  const ConfigText& file = lint.file;
  if (!file.comments().empty()) {
    lint.report_at(
        "comment", "", file.comments().front().line,
        fmt::format("{} comment{}: DeepSpeed reads Hjson and passes over {}; the Trainer and Accelerate read "
                    "the file as plain JSON and stop.",
                    file.comments().size(), file.comments().size() == 1 ? "" : "s",
                    file.comments().size() == 1 ? "it" : "them"),
        "keep them only if the path goes to deepspeed.initialize()");
  }
  for (const ConfigText::Position& comma : file.trailing_commas()) {
    if (lint.full()) break;
    Finding& finding = lint.report_at("trailing-comma", "", comma.line,
                                      "a comma behind the last member: DeepSpeed (Hjson) accepts it, the Trainer and "
                                      "Accelerate (plain JSON) stop.",
                                      "remove the comma");
    finding.edits.push_back({comma.offset, comma.offset + 1, ""});
  }
  if (!file.root().is_object()) {
    lint.report_at("top-level-shape", "", file.root().line,
                   fmt::format("the file is {}, expected an object: DeepSpeed stops while it reads the configuration.",
                               file.excerpt(file.root())),
                   "{\"train_micro_batch_size_per_gpu\": 1, ...}");
  }
}

void lint_keys(Linter& lint) {
  KeyWalk(lint).walk(lint.file.root(), "", UnknownKey::ignored);
  if (lint.has("bf16") && lint.has("bfloat16") && lint.value("bf16")->kind != ConfigNode::Kind::null) {
    Finding& finding =
        lint.report("bfloat16-and-bf16", "bfloat16",
                    "bfloat16 is the old name of bf16 and is ignored silently when both are there.", "remove bfloat16");
    lint.remove(finding, "bfloat16");
  }
  for (const std::string& section : lint.unchecked) {
    lint.report("unlisted-section", section,
                fmt::format("the keys of {} are passed on or read elsewhere: they are not checked here.", section));
  }
}

}  // namespace zeroplan
