#include "runtime/export_weights.h"

#include <array>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "models/lower.h"
#include "runtime/adam.h"
#include "runtime/kernels/kernels.h"
#include "runtime/numeric.h"
#include "runtime/safetensors.h"
#include "runtime/weight_files.h"

namespace zeroplan {
namespace {

namespace fs = std::filesystem;

/// Whole tensors in order, as many as fit; one that is larger than the limit has a file to itself.
std::vector<std::vector<WeightTensor>> split_into_files(std::vector<WeightTensor> tensors, DType stored,
                                                        std::int64_t max_file_bytes) {
  std::vector<std::vector<WeightTensor>> files(1);
  std::int64_t bytes = 0;
  for (WeightTensor& tensor : tensors) {
    const std::int64_t more = tensor.elements() * size_of(stored);
    if (bytes + more > max_file_bytes && !files.back().empty()) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += more;
    files.back().push_back(std::move(tensor));
  }
  return files;
}

std::string file_name(std::size_t index, std::size_t count) {
  if (count == 1) return std::string(kWeightsName);
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

/// transformers would prefer a model.safetensors that another export left over the index of this one.
void refuse_filled(const fs::path& directory) {
  std::error_code error;
  for (fs::directory_iterator it(directory, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name == kConfigName || name.ends_with(".safetensors") || name == kWeightsIndexName) {
      throw InputError(
          fmt::format("{}: holds {} already: remove it or choose another directory", directory.string(), name));
    }
  }
}

std::string torch_name(DType type) {
  switch (type) {
    case DType::bf16:
      return "bfloat16";
    case DType::fp16:
      return "float16";
    case DType::fp32:
      return "float32";
    case DType::u8:
    case DType::i32:
    case DType::i64:
      break;
  }
  refuse_storage(type);
}

/// The model's own configuration with the type of the stored weights.
std::string config_text(const ModelSpec& model, DType stored) {
  auto config = nlohmann::ordered_json::parse(model.config, nullptr, true, true);
  config.erase("_source");  // of our catalog
  config[config.contains("dtype") ? "dtype" : "torch_dtype"] = torch_name(stored);
  return config.dump(2) + "\n";
}

/// One tensor from the flat buffer, turned and rounded to its stored form.
template <class From, class To>
void store(std::span<const From> from, const WeightTensor& tensor, std::span<To> to) {
  std::vector<To> rounded(tensor.transposed ? from.size() : 0);
  const std::span<To> out = tensor.transposed ? std::span<To>(rounded) : to;
  for (std::size_t i = 0; i < from.size(); ++i) out[i] = narrow<To>(widen(from[i]));
  if (tensor.transposed) transpose(std::span<const To>(rounded), tensor.shape[1], tensor.shape[0], to);
}

}  // namespace

struct WeightExporter::State {
  struct File {
    std::string name;
    std::vector<WeightTensor> tensors;
    std::unique_ptr<SafetensorsWriter> writer;
  };
  const ModelSpec* model = nullptr;
  DType stored = DType::bf16;
  fs::path directory;
  std::vector<File> files;
  std::size_t file = 0, tensor = 0;  // the next to write
  int block = 0;

  template <class From>
  void add_block(DType layout, std::span<const From> flat);
  std::string index_text() const;
};

WeightExporter::WeightExporter(const ModelSpec& model, DType stored, const fs::path& directory,
                               std::int64_t max_file_bytes)
    : state_(std::make_unique<State>()) {
  state_->model = &model;
  state_->stored = stored;
  state_->directory = directory;
  auto files = split_into_files(weight_tensors(model), stored, max_file_bytes);
  make_directories(directory);
  refuse_filled(directory);
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::vector<SafetensorsEntry> entries;
    for (const WeightTensor& tensor : files[i]) entries.push_back({tensor.name, stored, tensor.shape});
    const std::string name = file_name(i, files.size());
    auto writer = std::make_unique<SafetensorsWriter>(directory / name, std::move(entries));
    state_->files.push_back({name, std::move(files[i]), std::move(writer)});
  }
}

WeightExporter::~WeightExporter() = default;

template <class From>
void WeightExporter::State::add_block(DType layout, std::span<const From> flat) {
  if (block == std::ssize(model->sequence)) throw std::logic_error("export: more blocks than the model has");
  const BlockKind& kind = model->kinds[static_cast<std::size_t>(model->sequence[static_cast<std::size_t>(block)])];
  if (std::ssize(flat) < flat_layout(kind, layout, 1).padded) throw std::logic_error("export: a short flat buffer");
  const std::vector<std::int64_t> offsets = tensor_offsets(kind, layout);
  std::vector<std::byte> bytes;
  while (file < files.size() && files[file].tensors[tensor].block == block) {
    const WeightTensor& next = files[file].tensors[tensor];
    const auto from = flat.subspan(static_cast<std::size_t>(offsets[static_cast<std::size_t>(next.tensor)]),
                                   static_cast<std::size_t>(next.elements()));
    bytes.resize(from.size() * static_cast<std::size_t>(size_of(stored)));
    with_storage(stored, [&](auto tag) {
      using To = typename decltype(tag)::Type;
      store(from, next, std::span(reinterpret_cast<To*>(bytes.data()), from.size()));
    });
    files[file].writer->add(bytes);
    if (++tensor == files[file].tensors.size()) {
      ++file;
      tensor = 0;
    }
  }
  ++block;
}

void WeightExporter::add_block(DType type, std::span<const std::byte> flat) {
  with_storage(type, [&](auto tag) {
    using From = typename decltype(tag)::Type;
    state_->add_block(type, std::span(reinterpret_cast<const From*>(flat.data()), flat.size() / sizeof(From)));
  });
}

void WeightExporter::add_block_fp32(DType layout, std::span<const float> flat) { state_->add_block(layout, flat); }

std::string WeightExporter::State::index_text() const {
  std::int64_t bytes = 0;
  std::map<std::string, std::string> where;
  for (const File& each : files) {
    for (const WeightTensor& weight : each.tensors) {
      bytes += weight.elements() * size_of(stored);
      where[weight.name] = each.name;
    }
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", where}};
  return index.dump(2) + "\n";
}

void WeightExporter::finish() {
  if (state_->block != std::ssize(state_->model->sequence)) throw std::logic_error("export: blocks are missing");
  // Weights get their names last: without them nothing loads the folder.
  write_file_atomically(state_->directory / kConfigName, config_text(*state_->model, state_->stored));
  for (State::File& file : state_->files) file.writer->finish();
  if (state_->files.size() > 1) write_file_atomically(state_->directory / kWeightsIndexName, state_->index_text());
}

void export_checkpoint(const CheckpointReader& checkpoint, const ModelSpec& model, DType stored,
                       const fs::path& directory, std::int64_t max_file_bytes) {
  const CheckpointMeta& meta = checkpoint.meta();
  const std::vector<std::int64_t> elements = stored_elements(model, meta.compute);
  WeightExporter exporter(model, stored, directory, max_file_bytes);
  for (std::size_t block = 0; block < elements.size(); ++block) {
    std::vector<float> master(static_cast<std::size_t>(elements[block]));
    checkpoint.read({static_cast<int>(block), 0, elements[block]}, master, {}, {});
    if (meta.split_master && stored == DType::bf16) {  // its weights are not the nearest
      std::vector<std::uint16_t> weights(master.size());
      std::vector<std::int16_t> remainder(master.size());
      split_master(master, weights, remainder);
      exporter.add_block(DType::bf16, std::as_bytes(std::span(weights)));
    } else {
      exporter.add_block_fp32(meta.compute, master);
    }
  }
  exporter.finish();
}

}  // namespace zeroplan
