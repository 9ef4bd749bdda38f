#pragma once
// Weights as Hugging Face stores them: model.safetensors (or several files and model.safetensors.index.json) and
// config.json in one folder, which `from_pretrained` loads. Tied tensors are left out, as transformers does.
//
// Families: those whose stored layout was checked against transformers, see storage_of_tensors(). GPT-2's linears are
// stored [in, out] there (Conv1D) and turned on the way.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "models/model_spec.h"
#include "models/units.h"
#include "runtime/checkpoint.h"

namespace zeroplan {

/// transformers' default, 5 GB a file.
inline constexpr std::int64_t kMaxWeightFileBytes = 5'000'000'000;

/// Throws InputError naming the supported families when the weights of `model` cannot be exported or imported.
void check_weight_files(const ModelSpec& model);

/// Streams blocks into files, one block in memory at a time.
class WeightExporter {
 public:
  /// Files of `stored` (bf16, fp16 or fp32) elements below `directory`, which is made. Throws InputError when it
  /// already holds weights or a config.json, or for a family without a checked layout.
  WeightExporter(const ModelSpec& model, DType stored, const std::filesystem::path& directory,
                 std::int64_t max_file_bytes = kMaxWeightFileBytes);
  ~WeightExporter();

  /// The next block of ModelSpec::sequence: its whole flat buffer of `type` elements, laid out for `type` (padding to a
  /// shard group may follow). Rounded to nearest even where `stored` is narrower.
  void add_block(DType type, std::span<const std::byte> flat);
  /// The same from fp32 values in the layout of `layout` (masters of 16-bit weights).
  void add_block_fp32(DType layout, std::span<const float> flat);
  /// Writes index and config.json. Throws std::logic_error when blocks are missing.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Exports the weights of a checkpoint, read block by block: in the compute type exactly what the run computes with.
void export_checkpoint(const CheckpointReader& checkpoint, const ModelSpec& model, DType stored,
                       const std::filesystem::path& directory, std::int64_t max_file_bytes = kMaxWeightFileBytes);

/// Weights to start from: a .safetensors file or a folder of Hugging Face's. Thread-safe once made.
class WeightImporter {
 public:
  /// Throws InputError when a tensor of the model is missing or has another shape, naming it; when tensors are there
  /// that the model does not have (copies of tied ones are allowed).
  WeightImporter(const ModelSpec& model, const std::filesystem::path& path);
  ~WeightImporter();

  /// Elements [range.begin, range.end) of a block's flat buffer in the layout of `type`, as fp32; padding is 0.
  void read(const FlatRange& range, DType type, std::span<float> out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zeroplan
