#include "models/model_reader.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include <fmt/format.h>

#include "models/error.h"
#include "models/families.h"
#include "models/model_builder.h"
#include "models/model_config.h"

namespace zeroplan {
namespace {

void append_text(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(byte));
    } else {
      out += c;
    }
  }
  out += '"';
}

void append_json(std::string& out, const JsonValue& value) {
  switch (value.kind()) {
    case JsonValue::Kind::null:
      out += "null";
      return;
    case JsonValue::Kind::boolean:
      out += value.as_bool() ? "true" : "false";
      return;
    case JsonValue::Kind::integer: {
      using Limits = std::numeric_limits<std::int64_t>;
      out += fmt::format("{}", value.as_int(Limits::min(), Limits::max()));
      return;
    }
    case JsonValue::Kind::real: {
      using Limits = std::numeric_limits<double>;
      out += fmt::format("{}", value.as_real(Limits::lowest(), Limits::max()));
      return;
    }
    case JsonValue::Kind::string:
      append_text(out, value.as_string());
      return;
    case JsonValue::Kind::array: {
      out += '[';
      std::string_view separator;
      for (const JsonValue& item : value.items()) {
        out += separator;
        append_json(out, item);
        separator = ", ";
      }
      out += ']';
      return;
    }
    case JsonValue::Kind::object: {
      out += '{';
      std::string_view separator;
      for (const auto& [key, member] : value.members()) {
        out += separator;
        append_text(out, key);
        out += ": ";
        append_json(out, member);
        separator = ", ";
      }
      out += '}';
      return;
    }
  }
}

const Family& family_of(const JsonValue& object) {
  const JsonValue* type = object.find("model_type");
  if (type == nullptr) {
    object.fail_with(
        fmt::format("expected key model_type with one of {}; the file has none", fmt::join(family_names(), ", ")));
  }
  if (const Family* family = find_family(type->as_string())) return *family;
  const std::vector<std::string> names = family_names();
  type->fail_with(fmt::format("expected a supported model_type, got {}; {} (supported: {})", type->short_form(),
                              did_you_mean(type->as_string(), names), fmt::join(names, ", ")));
}

/// Multimodal files (Llama 4, Gemma 3) nest the language model in text_config; a plain file is its own.
const JsonValue& language_part(const JsonValue& root) {
  const JsonValue* type = root.find("model_type");
  const bool plain = type != nullptr && type->is_string() && find_family(type->as_string()) != nullptr;
  const JsonValue* text = root.find("text_config");
  return !plain && text != nullptr && text->is_object() ? *text : root;
}

/// Totals are compared as doubles first: products of allowed sizes may leave int64, and byte counts are exact only
/// below 2^53.
void check_total(const ModelSpec& model, const JsonValue& object) {
  constexpr double kLimit = 9007199254740992.0;  // 2^53
  double total = 0;
  for (int index : model.sequence) {
    for (const TensorSpec& tensor : model.kinds[static_cast<std::size_t>(index)].tensors) {
      double elements = static_cast<double>(tensor.copies);
      for (std::int64_t size : tensor.shape) elements *= static_cast<double>(size);
      total += elements;
      if (total >= kLimit) {
        object.fail_with(
            fmt::format("expected fewer than 2^53 parameters in all; {} alone makes {:.3g}", tensor.name, elements));
      }
    }
  }
}

}  // namespace

std::string one_line_json(const JsonValue& value) {
  std::string out;
  append_json(out, value);
  return out;
}

std::string model_name_of(const std::string& file_name) {
  const std::filesystem::path path(file_name);
  const std::string stem = path.stem().string();
  if (stem != "config") return stem;
  const std::string folder = path.parent_path().filename().string();
  return folder.empty() || folder == "." ? stem : folder;
}

ModelSpec model_from_json(const JsonValue& root, std::string name, std::string source) {
  if (!root.is_object()) root.fail("an object (the content of a Hugging Face config.json)");
  const JsonValue& object = language_part(root);
  const Family& family = family_of(object);
  ConfigReader reader(object, family.model_type, &object != &root ? &root : nullptr);
  const Architecture architecture = read_architecture(family, reader);
  reader.note_dropout();
  for (const std::string& key : reader.unknown_keys()) {
    reader.warnings.push_back(fmt::format("{} is not known for family {} and was not used", key, family.model_type));
  }
  if (&object != &root) {
    reader.assume("model part", "text_config", "only the language model is modelled, other parts are left out");
  }
  ModelSpec model;
  model.name = std::move(name);
  model.source = std::move(source);
  model.config = one_line_json(root);
  if (const JsonValue* classes = root.find("architectures");
      classes != nullptr && classes->is_array() && !classes->items().empty() && classes->items()[0].is_string()) {
    model.title = classes->items()[0].as_string();
  }
  build_blocks(architecture, model);
  check_total(model, object);
  model.assumptions = std::move(reader.assumptions);
  model.warnings = std::move(reader.warnings);
  return model;
}

ModelSpec read_model(std::string_view text, const std::string& file_name) {
  const JsonDocument document = JsonDocument::parse(text, file_name, JsonSyntax::comments);
  return model_from_json(document.root(), model_name_of(file_name), file_name);
}

}  // namespace zeroplan
