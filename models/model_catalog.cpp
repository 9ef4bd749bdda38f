#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <optional>

#include <fmt/format.h>

#include "models/catalog.h"
#include "models/error.h"
#include "models/model_reader.h"
#include "models/model_spec.h"

namespace zeroplan {
namespace {

constexpr std::string_view kFolder = "models/";
constexpr std::string_view kExtension = ".json";

/// Sizes with one meaning (spec section 3).
struct SizeAlias {
  std::string_view size;
  std::string_view model;
};
constexpr std::array<SizeAlias, 5> kSizes = {{{"7b", "llama-2-7b"},
                                              {"13b", "llama-2-13b"},
                                              {"70b", "llama-2-70b"},
                                              {"8b", "llama-3.1-8b"},
                                              {"405b", "llama-3.1-405b"}}};

/// What hub names add to the names of the catalog.
constexpr std::array<std::string_view, 7> kSuffixes = {"-hf", "-chat-hf", "-chat", "-instruct", "-base", "-it", "-pt"};

std::string lower(std::string_view text) {
  std::string out;
  for (const char c : text) out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string without_separators(std::string_view text) {
  std::string out = lower(text);
  std::erase_if(out, [](char c) { return c == '-' || c == '_' || c == ' '; });
  return out;
}

/// "70B" or "1.5b" -> the number of parameters; nothing for other texts.
std::optional<double> parameters_named(std::string_view text) {
  if (text.size() < 2 || std::isdigit(static_cast<unsigned char>(text.front())) == 0) return std::nullopt;
  double value = 0;
  double scale = 0;  // of the next digit after the point
  for (const char c : text.substr(0, text.size() - 1)) {
    if (c == '.' && scale == 0) {
      scale = 0.1;
    } else if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
      value = scale > 0 ? value + scale * (c - '0') : value * 10 + (c - '0');
      scale /= 10;
    } else {
      return std::nullopt;
    }
  }
  const char unit = static_cast<char>(std::tolower(static_cast<unsigned char>(text.back())));
  if (unit == 'b') return value * 1e9;
  if (unit == 'm') return value * 1e6;
  if (unit == 't') return value * 1e12;
  return std::nullopt;
}

/// The size in a catalog name: "qwen2.5-32b" -> 32e9.
std::optional<double> size_in_name(std::string_view name) {
  while (!name.empty()) {
    const std::size_t end = name.find('-');
    if (const auto size = parameters_named(name.substr(0, end))) return size;
    if (end == std::string_view::npos) break;
    name.remove_prefix(end + 1);
  }
  return std::nullopt;
}

std::optional<std::string> match(std::string_view text, const std::vector<std::string>& names) {
  const std::string wanted = without_separators(text);
  for (const std::string& name : names) {
    if (without_separators(name) == wanted) return name;
  }
  return std::nullopt;
}

/// Hub spellings: "meta-llama/Llama-2-70b-hf", "Meta-Llama-3-8B-Instruct".
std::optional<std::string> match_hub_name(std::string_view text, const std::vector<std::string>& names) {
  std::string name = lower(text);
  if (const std::size_t slash = name.find('/'); slash != std::string::npos) {
    if (name.find('/', slash + 1) != std::string::npos) return std::nullopt;
    name.erase(0, slash + 1);
  }
  if (name.starts_with("meta-")) name.erase(0, 5);
  if (auto found = match(name, names)) return found;
  for (const std::string_view suffix : kSuffixes) {
    if (!name.ends_with(suffix)) continue;
    if (auto found = match(std::string_view(name).substr(0, name.size() - suffix.size()), names)) return found;
  }
  return std::nullopt;
}

ModelSpec from_catalog(const std::string& name) {
  const CatalogFile* file = find_catalog_file(std::string(kFolder) + name + std::string(kExtension));
  if (file == nullptr) throw std::logic_error("no catalog model " + name);
  const JsonDocument document =
      JsonDocument::parse(file->text, fmt::format("catalog:{}", file->path), JsonSyntax::comments);
  return model_from_json(document.root(), name, "catalog: " + name);
}

ModelSpec from_file(const std::filesystem::path& path, const std::string& named) {
  const JsonDocument document = JsonDocument::read(path, JsonSyntax::comments);
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return model_from_json(document.root(), "piped", named);
  const auto absolute = std::filesystem::absolute(path, ignored).lexically_normal();
  return model_from_json(document.root(), model_name_of(absolute.string()), named);
}

/// The catalog's models whose name carries this size, or those with the nearest sizes.
[[noreturn]] void fail_on_size(const std::string& text, double size, const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 4;
  std::vector<std::pair<double, std::string>> by_distance;  // |log ratio|
  for (const std::string& name : names) {
    if (const auto own = size_in_name(name)) by_distance.emplace_back(std::abs(std::log(*own / size)), name);
  }
  std::ranges::stable_sort(by_distance, {}, &std::pair<double, std::string>::first);
  constexpr double kSame = 1e-9;
  std::vector<std::string> same;
  std::vector<std::string> near;
  for (const auto& [distance, name] : by_distance) {
    if (distance < kSame) same.push_back(name);
    if (near.size() < kShown) near.push_back(name);
  }
  if (!same.empty()) {
    throw InputError(fmt::format("--model: expected one model, got the size \"{}\", which may mean {}; give the name",
                                 text, fmt::join(same, ", ")));
  }
  throw InputError(
      fmt::format("--model: no model of the catalog is called \"{}\"; nearest sizes: {}", text, fmt::join(near, ", ")));
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const CatalogFile& file : catalog_files()) {
    if (!file.path.starts_with(kFolder) || !file.path.ends_with(kExtension)) continue;
    names.emplace_back(file.path.substr(kFolder.size(), file.path.size() - kFolder.size() - kExtension.size()));
  }
  std::ranges::sort(names);
  return names;
}

ModelSpec find_model(const std::string& text) {
  if (text.empty()) throw InputError("--model: expected a model name, a size or a path, got an empty text");
  const std::vector<std::string> names = model_names();
  if (std::ranges::binary_search(names, text)) return from_catalog(text);
  for (const SizeAlias& alias : kSizes) {
    if (lower(text) != alias.size) continue;
    ModelSpec model = from_catalog(std::string(alias.model));
    model.assumptions.insert(model.assumptions.begin(),
                             {"model", fmt::format("{} means {}", text, alias.model),
                              "the sizes with one meaning: 7B, 13B, 70B are Llama 2; 8B, 405B are Llama 3.1"});
    return model;
  }
  const std::filesystem::path path(text);
  std::error_code error;
  if (const auto status = std::filesystem::status(path, error); std::filesystem::exists(status)) {
    if (!std::filesystem::is_directory(status)) return from_file(path, text);
    const auto config = path / "config.json";
    if (std::filesystem::exists(config, error)) return from_file(config, config.string());
    if (!match_hub_name(text, names)) {
      throw InputError(fmt::format("{}: expected a config.json in this directory, found none", text));
    }
  }
  if (const auto name = match_hub_name(text, names)) {
    ModelSpec model = from_catalog(*name);
    model.assumptions.insert(model.assumptions.begin(),
                             {"model", fmt::format("{} means {}", text, *name), "the nearest catalog name"});
    return model;
  }
  if (const auto size = parameters_named(text); size && *size > 0) fail_on_size(text, *size, names);
  const std::string hint = did_you_mean(text, names);
  throw InputError(fmt::format("--model: no file and no model of the catalog is called \"{}\"{}{}", text,
                               hint.empty() ? "" : "; ", hint));
}

}  // namespace zeroplan
