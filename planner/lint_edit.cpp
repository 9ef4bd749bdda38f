// Corrections as edits of bytes, so that everything else keeps its form.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

bool is_blank(char c) { return c == ' ' || c == '\t'; }

std::size_t line_start(std::string_view text, std::size_t at) {
  const std::size_t newline = at == 0 ? std::string_view::npos : text.rfind('\n', at - 1);
  return newline == std::string_view::npos ? 0 : newline + 1;
}

/// The blanks before `at` when nothing else is before it on its line.
std::optional<std::string_view> indent_of(std::string_view text, std::size_t at) {
  const std::size_t start = line_start(text, at);
  const std::string_view before = text.substr(start, at - start);
  if (!std::ranges::all_of(before, is_blank)) return std::nullopt;
  return before;
}

/// Behind the blanks, a comment to the end of the line and the line break at `at`; nothing when something else is
/// there.
std::optional<std::size_t> rest_of_line(std::string_view text, std::size_t at) {
  while (at < text.size() && is_blank(text[at])) ++at;
  const std::string_view rest = text.substr(at);
  if (rest.starts_with("//") || rest.starts_with('#')) at = std::min(text.find('\n', at), text.size());
  if (text.substr(at).starts_with("\r\n")) return at + 2;
  if (at < text.size() && text[at] == '\n') return at + 1;
  return at == text.size() ? std::optional(at) : std::nullopt;
}

/// A value's text below another indentation: its own lines keep their place relative to the key.
std::string reindented(std::string_view value, std::string_view from, std::string_view to) {
  std::string result;
  for (std::size_t at = 0; at < value.size();) {
    const std::size_t newline = value.find('\n', at);
    const std::size_t end = newline == std::string_view::npos ? value.size() : newline + 1;
    std::string_view line = value.substr(at, end - at);
    if (at > 0 && line.starts_with(from)) {
      line.remove_prefix(from.size());
      result += to;
    }
    result += line;
    at = end;
  }
  return result;
}

std::string quoted(std::string_view key) { return "\"" + std::string(key) + "\""; }

TextEdit removal(std::string_view text, const ConfigMember& member) {
  std::size_t end = member.value.end;
  const std::size_t behind = skip_blanks(text, end);
  const bool last = behind == text.size() || text[behind] != ',';
  if (!last) end = behind + 1;
  if (const auto indent = indent_of(text, member.begin)) {
    if (const auto next = rest_of_line(text, end)) return {member.begin - indent->size(), *next, ""};
  }
  std::size_t begin = member.begin;
  if (last) {
    while (begin > 0 && is_blank(text[begin - 1])) --begin;
  } else {
    while (end < text.size() && is_blank(text[end])) ++end;
  }
  return {begin, end, ""};
}

}  // namespace

std::size_t skip_blanks(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    const std::string_view rest = text.substr(at);
    if (is_blank(text[at]) || text[at] == '\n' || text[at] == '\r') {
      ++at;
    } else if (rest.starts_with('#') || rest.starts_with("//")) {
      at = std::min(text.find('\n', at), text.size());
    } else if (rest.starts_with("/*")) {
      const std::size_t close = text.find("*/", at + 2);
      at = close == std::string_view::npos ? text.size() : close + 2;
    } else {
      break;
    }
  }
  return at;
}

void Linter::remove(Finding& finding, const ConfigMember& member) const {
  finding.edits.push_back(removal(file.text(), member));
}

void Linter::remove(Finding& finding, std::string_view path) const {
  if (const ConfigMember* member = find(path)) remove(finding, *member);
}

const ConfigMember* Linter::setting(const DeepspeedKeys& keys, const ConfigNode& object, std::string_view section,
                                    std::string_view name, const ConfigMember& but) {
  std::vector<std::string_view> names{name};
  if (const DeepspeedKey* key = keys.find(joined(section, name))) {
    names.insert(names.end(), {key->leaf(), key->alias});
    if (section_of(key->instead) == section) names.push_back(leaf_of(key->instead));
  }
  for (const ConfigMember& member : object.members) {
    if (&member != &but && !member.key.empty() && std::ranges::find(names, member.key) != names.end()) return &member;
  }
  return nullptr;
}

bool Linter::rename(Finding& finding, const ConfigNode& object, const ConfigMember& member,
                    std::string_view name) const {
  const std::string_view section =
      std::string_view(finding.key).substr(0, finding.key.size() - std::min(finding.key.size(), member.key.size() + 1));
  if (const ConfigMember* there = setting(keys, object, section, name, member)) {
    finding.fix = fmt::format("remove it: {} is set on line {}", there->key, there->line);
    remove(finding, member);
    return false;
  }
  finding.edits.push_back({member.begin, member.key_end, quoted(name)});
  finding.adds = fmt::format("{}@{}", name, object.begin);
  return true;
}

void Linter::replace(Finding& finding, const ConfigNode& node, std::string text) const {
  finding.edits.push_back({node.begin, node.end, std::move(text)});
}

void Linter::insert(Finding& finding, std::string_view section, std::string_view key, std::string value) const {
  const ConfigNode* object = &file.root();
  if (!section.empty()) {
    const ConfigMember* member = find(section);
    if (member == nullptr) return;
    object = &member->value;
  }
  if (!object->is_object() || object->find(key) != nullptr) return;
  const std::string_view text = file.text();
  const std::string pair = quoted(key) + ": " + value;
  if (object->members.empty()) {
    finding.edits.push_back({object->begin + 1, object->begin + 1, pair});
  } else {
    const ConfigMember& last = object->members.back();
    const auto indent = indent_of(text, last.begin);
    const std::string_view newline = text.find("\r\n") == std::string_view::npos ? "\n" : "\r\n";
    const std::string between = indent ? fmt::format(",{}{}", newline, *indent) : ", ";
    finding.edits.push_back({last.value.end, last.value.end, between + pair});
  }
  finding.adds = fmt::format("{}@{}", key, object->begin);
}

void Linter::move(Finding& finding, const ConfigMember& member, std::string_view to) const {
  const std::string_view text = file.text();
  const std::string_view section = section_of(to);
  const ConfigNode* object = section.empty() ? &file.root() : value(section);
  if (object == nullptr || !object->is_object()) return;
  if (const ConfigMember* there = setting(keys, *object, section, leaf_of(to), member)) {
    finding.fix = fmt::format("remove it: {} is set on line {}", joined(section, there->key), there->line);
    remove(finding, member);
    return;
  }
  // From this very object (a key with dots): only the name changes.
  if (std::ranges::any_of(object->members, [&](const ConfigMember& other) { return &other == &member; })) {
    rename(finding, *object, member, leaf_of(to));
    return;
  }
  const std::string_view raw = text.substr(member.value.begin, member.value.end - member.value.begin);
  const auto from = indent_of(text, member.begin);
  const auto below = object->members.empty() ? std::nullopt : indent_of(text, object->members.back().begin);
  insert(finding, section, leaf_of(to), from && below ? reindented(raw, *from, *below) : std::string(raw));
  finding.edits.push_back(removal(text, member));
}

std::string json_number(double value) {
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (std::floor(value) == value && std::abs(value) < kExact) return fmt::format("{:.0f}", value);
  return fmt::format("{}", value);
}

std::string edited(const ConfigText& file, std::vector<TextEdit> edits) {
  std::ranges::stable_sort(edits, {}, &TextEdit::begin);
  std::string text;
  std::size_t at = 0;
  for (const TextEdit& edit : edits) {
    text.append(file.text(), at, edit.begin - at);
    text += edit.text;
    at = edit.end;
  }
  text.append(file.text(), at, std::string::npos);
  const ConfigText parsed = ConfigText::parse(text, file.name());
  std::string tidy;
  at = 0;
  for (const ConfigText::Position& comma : parsed.trailing_commas()) {
    tidy.append(text, at, comma.offset - at);
    at = comma.offset + 1;
  }
  return tidy.append(text, at, std::string::npos);
}

}  // namespace zeroplan
