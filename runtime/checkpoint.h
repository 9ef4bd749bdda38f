#pragma once
// Checkpoints: DIR/step-000100/rank-00000.zpc ... and manifest.json, written last (docs/files.md, "Checkpoints"). A
// folder without a valid manifest is no checkpoint, so a run killed at any moment leaves the one before. States are
// stored by (block, element of the block's flat buffer), so any number of ranks, shard group and ZeRO stage reads them
// back bit for bit.
//
// Saving, on every rank:
//   CheckpointWriter writer(directory, meta, model, rank);         // once for each checkpoint
//   for (each range of mine) writer.add(range, master, first, second);
//   const auto files = world.exchange(writer.finish());            // also the barrier before the manifest
//   if (rank == 0) commit_manifest(directory, meta, model, files, keep);
// With replicas or ZeRO-0, who stores a range is free; each element is stored once.
//
// Resuming:
//   const CheckpointReader reader(path, model, plan);
//   for (each range of mine) reader.read(range, master, first, second);
//
// Errors: what the disk refuses (full, read-only, EIO) is a DeviceError with path and reason. A missing, truncated or
// altered file, another model or another type is an InputError.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "models/plan.h"
#include "models/units.h"

namespace zeroplan {

/// Elements [begin, end) of the flat parameter buffer of block `block` of ModelSpec::sequence (models/lower.h,
/// FlatLayout; runtime/kernels/kernels.h, tensor_offsets).
struct FlatRange {
  int block = 0;
  std::int64_t begin = 0, end = 0;
  std::int64_t count() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

/// Dynamic loss scaling between two steps; `scale` 1 and zeros without it.
struct LossScaleState {
  double scale = 1;
  std::int64_t good_steps = 0;       // since the last overflow or growth
  std::int64_t hysteresis_left = 0;  // overflows until the scale falls
  std::int64_t skipped_steps = 0;    // in all
  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

/// What a checkpoint says besides the states; equal on all ranks.
struct CheckpointMeta {
  std::int64_t step = 0;     // training steps done, skipped ones among them; names the folder
  std::int64_t updates = 0;  // Adam steps done
  LossScaleState loss_scale;
  std::uint64_t weights_seed = 0;
  std::uint64_t data_seed = 0;
  std::int64_t samples = 0;  // sequences consumed: step x global batch
  std::string data;          // TokenData::fingerprint()
  // From model and plan, see checkpoint_meta():
  std::string model_name;
  std::string model_config;     // ModelSpec::config
  DType compute = DType::bf16;  // plan.precision.weights: the layout of flat buffers
  DType moments = DType::fp32;  // plan.precision.states: how moments are stored
  bool split_master = false;    // 16-bit weights are the master rounded half up, not to nearest even
  int ranks = 1;                // world size
  std::string plan;             // plan_keys_json(), one line
  friend bool operator==(const CheckpointMeta&, const CheckpointMeta&) = default;
};
/// The part that model and plan determine; the caller fills in the rest.
CheckpointMeta checkpoint_meta(const ModelSpec& model, const Plan& plan);

/// Elements of each block's flat buffer without the padding to the shard group: what a checkpoint stores, in order of
/// ModelSpec::sequence.
std::vector<std::int64_t> stored_elements(const ModelSpec& model, DType compute);

/// To be called before the first step of a run that will write checkpoints from `done_steps` on: makes `directory` and
/// throws InputError when it holds a checkpoint newer than that, which the run would come to overwrite; names it.
/// DeviceError when it cannot be written.
void check_checkpoint_directory(const std::filesystem::path& directory, std::int64_t done_steps);

/// Writes one rank's file of one checkpoint, front to back, holding one chunk in memory.
class CheckpointWriter {
 public:
  /// Makes DIR/step-NNNNNN. Throws InputError when a valid checkpoint stands there.
  CheckpointWriter(const std::filesystem::path& directory, const CheckpointMeta& meta, const ModelSpec& model,
                   int rank);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// States of a range: fp32 master (fp32 weights are their own; 16-bit weights without a master are widened), first
  /// and second moments as raw bytes of meta.moments. Elements beyond stored_elements() are left out. Any order, ranges
  /// of any size. Spans must have range.count() elements: std::logic_error.
  void add(const FlatRange& range, std::span<const float> master, std::span<const std::byte> first,
           std::span<const std::byte> second);
  /// Closes and syncs the file. Returns one line for commit_manifest().
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// On rank 0 after every rank's finish(): checks that the files hold every element exactly once (std::logic_error),
/// writes the manifest durably, then removes files and checkpoints no longer needed: all but the `keep` newest (at
/// least 1) and folders without a manifest that are older. `files`: what finish() returned, in rank order.
void commit_manifest(const std::filesystem::path& directory, const CheckpointMeta& meta, const ModelSpec& model,
                     std::span<const std::string> files, int keep = 2);

/// Reads a checkpoint. Thread-safe once made.
class CheckpointReader {
 public:
  /// `path`: a directory of checkpoints, of which the newest valid one is taken, or one step-NNNNNN in it. Throws
  /// InputError when there is none, saying what is wrong with each; when a file that the manifest names is missing,
  /// truncated or altered (data are checked as they are read), naming the checkpoint before it; when model, compute
  /// type or moment type differ from `model` and `plan`, naming both.
  CheckpointReader(const std::filesystem::path& path, const ModelSpec& model, const Plan& plan);
  /// For exports: takes compute and moment type as they are.
  CheckpointReader(const std::filesystem::path& path, const ModelSpec& model);
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;

  const CheckpointMeta& meta() const;
  const std::filesystem::path& path() const;  // DIR/step-NNNNNN
  /// What was wrong with newer folders, to be shown to the user; empty when the newest was taken.
  const std::vector<std::string>& notes() const;

  /// The states of a range, from whichever rank files hold them; elements beyond stored_elements() become 0. Spans as
  /// in CheckpointWriter::add(); an empty span skips that array. Throws InputError naming file, offset, expected and
  /// found checksum.
  void read(const FlatRange& range, std::span<float> master, std::span<std::byte> first,
            std::span<std::byte> second) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zeroplan
