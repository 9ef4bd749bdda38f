#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "models/error.h"
#include "models/json_reader.h"
#include "runtime/export_weights.h"
#include "runtime/numeric.h"
#include "runtime/safetensors.h"
#include "runtime/tensor_parts.h"
#include "runtime/weight_files.h"

namespace zeroplan {
namespace {

namespace fs = std::filesystem;

/// Masks and frequencies that older transformers stored beside the parameters.
constexpr std::array<std::string_view, 3> kBuffers = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};

/// The files of a folder, or the one file.
std::vector<fs::path> files_of(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  if (fs::exists(path / kWeightsName, error)) return {path / kWeightsName};
  if (!fs::exists(path / kWeightsIndexName, error)) {
    throw InputError(fmt::format("{}: holds neither {} nor {}", path.string(), kWeightsName, kWeightsIndexName));
  }
  const JsonDocument index = JsonDocument::read(path / kWeightsIndexName, JsonSyntax::strict);
  std::vector<fs::path> files;
  for (const auto& [tensor, file] : index.root().at("weight_map").members()) {
    if (file.as_string().find('/') != std::string::npos) file.fail("the name of a file beside the index");
    files.push_back(path / file.as_string());
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

/// "transformer.wte.weight" is "wte.weight" in files of the bare model.
std::string without_prefix(const std::string& name) {
  const std::size_t dot = name.find('.');
  return dot == std::string::npos ? name : name.substr(dot + 1);
}

bool may_be_extra(const std::string& name, const std::vector<std::string>& tied) {
  if (std::any_of(tied.begin(), tied.end(),
                  [&](const std::string& other) { return name == other || name == without_prefix(other); })) {
    return true;
  }
  return std::any_of(kBuffers.begin(), kBuffers.end(), [&](std::string_view end) { return name.ends_with(end); });
}

void widen_all(DType type, std::span<const std::byte> bytes, std::span<float> out) {
  with_storage(type, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const std::span in(reinterpret_cast<const T*>(bytes.data()), out.size());
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = widen(in[i]);
  });
}

}  // namespace

struct WeightImporter::State {
  struct Source {
    WeightTensor tensor;
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };
  const ModelSpec* model = nullptr;
  std::vector<SafetensorsFile> files;
  std::map<std::pair<int, int>, Source> sources;  // by block and tensor

  void connect(const fs::path& path);
  std::vector<float> load(const Source& source, std::int64_t begin, std::int64_t count) const;
  void read_part(const Source& source, std::int64_t begin, std::span<float> out) const;
};

void WeightImporter::State::connect(const fs::path& path) {
  std::map<std::string, Source> found;
  for (const SafetensorsFile& file : files) {
    for (const SafetensorsEntry& entry : file.entries()) {
      if (!found.emplace(entry.name, Source{{}, &file, &entry}).second) {
        throw InputError(fmt::format("{}: tensor {} is in another file as well", file.path().string(), entry.name));
      }
    }
  }
  for (WeightTensor& tensor : weight_tensors(*model)) {
    auto at = found.find(tensor.name);
    if (at == found.end()) at = found.find(without_prefix(tensor.name));
    if (at == found.end()) throw InputError(fmt::format("{}: tensor {} is missing", path.string(), tensor.name));
    const SafetensorsEntry& entry = *at->second.entry;
    const bool number = entry.dtype == DType::bf16 || entry.dtype == DType::fp16 || entry.dtype == DType::fp32;
    if (entry.shape != tensor.shape || !number) {
      throw InputError(fmt::format("{}: tensor {}: expected [{}] of BF16, F16 or F32, found [{}] of {}",
                                   at->second.file->path().string(), entry.name, fmt::join(tensor.shape, ", "),
                                   fmt::join(entry.shape, ", "), to_string(entry.dtype)));
    }
    const std::pair key(tensor.block, tensor.tensor);
    sources[key] = {std::move(tensor), at->second.file, &entry};
    found.erase(at);
  }
  const std::vector<std::string> tied = tied_names(*model);
  for (const auto& [name, source] : found) {
    if (!may_be_extra(name, tied)) {
      throw InputError(
          fmt::format("{}: tensor {} is none of model {}", source.file->path().string(), name, model->name));
    }
  }
}

/// Elements as stored.
std::vector<float> WeightImporter::State::load(const Source& source, std::int64_t begin, std::int64_t count) const {
  const std::int64_t size = size_of(source.entry->dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count * size));
  source.file->read(*source.entry, begin * size, bytes);
  std::vector<float> values(static_cast<std::size_t>(count));
  widen_all(source.entry->dtype, bytes, values);
  return values;
}

/// Elements from `begin` on in our orientation. A turned tensor is loaded whole: its elements stand far apart.
void WeightImporter::State::read_part(const Source& source, std::int64_t begin, std::span<float> out) const {
  if (!source.tensor.transposed) {
    const std::vector<float> values = load(source, begin, std::ssize(out));
    std::copy(values.begin(), values.end(), out.begin());
    return;
  }
  const std::int64_t in = source.tensor.shape[0];
  const std::int64_t rows = source.tensor.shape[1];
  const std::vector<float> values = load(source, 0, source.tensor.elements());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::int64_t element = begin + static_cast<std::int64_t>(i);
    out[i] = values[static_cast<std::size_t>(element % in * rows + element / in)];
  }
}

WeightImporter::WeightImporter(const ModelSpec& model, const fs::path& path) : state_(std::make_unique<State>()) {
  state_->model = &model;
  for (const fs::path& file : files_of(path)) state_->files.emplace_back(file);
  state_->connect(path);
}

WeightImporter::~WeightImporter() = default;

void WeightImporter::read(const FlatRange& range, DType type, std::span<float> out) const {
  if (std::ssize(out) != range.count()) throw std::logic_error("import: range and span differ");
  std::fill(out.begin(), out.end(), 0.0f);
  const ModelSpec& model = *state_->model;
  const int kind = model.sequence.at(static_cast<std::size_t>(range.block));
  for (const TensorPart& part :
       tensor_parts(model.kinds[static_cast<std::size_t>(kind)], type, range.begin, range.end)) {
    state_->read_part(
        state_->sources.at({range.block, part.tensor}), part.begin,
        out.subspan(static_cast<std::size_t>(part.flat - range.begin), static_cast<std::size_t>(part.count)));
  }
}

}  // namespace zeroplan
