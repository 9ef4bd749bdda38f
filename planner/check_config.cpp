// A DeepSpeed configuration that is changed key by key, and what was changed.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "planner/check_parts.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

/// A value's own bytes are JSON where it is no object and no array; the file's liberties lie between values.
Json scalar(const ConfigText& file, const ConfigNode& node) {
  Json value = Json::parse(file.text().substr(node.begin, node.end - node.begin), nullptr, false);
  return value.is_discarded() ? Json() : value;
}

Json json_of(const ConfigText& file, const ConfigNode& node) {
  if (node.is_object()) {
    Json object = Json::object();
    for (const ConfigMember& member : node.members) {
      if (!member.repeated) object[member.key] = json_of(file, member.value);
    }
    return object;
  }
  if (node.kind != ConfigNode::Kind::array) return scalar(file, node);
  Json array = Json::array();
  for (const ConfigNode& item : node.items) array.push_back(json_of(file, item));
  return array;
}

std::vector<std::string> parts_of(const std::string& path) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t dot = std::min(path.find('.', at), path.size());
    parts.push_back(path.substr(at, dot - at));
    at = dot + 1;
  }
  return parts;
}

}  // namespace

struct ConfigDraft::Tree {
  Json json;
};

ConfigDraft::ConfigDraft(const ConfigText& file)
    : file_(std::make_shared<const ConfigText>(file)), tree_(new Tree{json_of(file, file.root())}) {}
ConfigDraft::~ConfigDraft() = default;
ConfigDraft::ConfigDraft(const ConfigDraft& other)
    : file_(other.file_), tree_(std::make_unique<Tree>(*other.tree_)), changes_(other.changes_) {}
ConfigDraft& ConfigDraft::operator=(const ConfigDraft& other) {
  file_ = other.file_;
  *tree_ = *other.tree_;
  changes_ = other.changes_;
  return *this;
}

bool ConfigDraft::set(const std::string& path, const std::string& value) {
  Json* at = &tree_->json;
  const std::vector<std::string> parts = parts_of(path);
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
    if (!at->is_object()) return false;
    at = &(*at)[parts[i]];
    if (at->is_null()) *at = Json::object();
  }
  if (!at->is_object()) return false;
  (*at)[parts.back()] = Json::parse(value);
  const auto same = std::ranges::find(changes_, path, &KeyChange::key);
  if (same != changes_.end()) {
    same->to = value;
    return true;
  }
  const ConfigMember* member = file_->find(path);
  changes_.push_back({path, member == nullptr ? "" : file_->excerpt(member->value), value, false});
  return true;
}

bool ConfigDraft::has(const std::string& path) const {
  const Json* at = &tree_->json;
  for (const std::string& part : parts_of(path)) {
    if (!at->is_object() || !at->contains(part)) return false;
    at = &(*at)[part];
  }
  return true;
}

ConfigText ConfigDraft::text() const {
  return ConfigText::parse(tree_->json.dump(2, ' ', false, Json::error_handler_t::replace), file_->name());
}

}  // namespace zeroplan
