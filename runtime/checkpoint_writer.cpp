#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>

#include "models/error.h"
#include "models/lower.h"
#include "runtime/checkpoint.h"
#include "runtime/checkpoint_file.h"
#include "runtime/checkpoint_manifest.h"
#include "runtime/file_descriptor.h"

namespace zeroplan {
namespace {

namespace fs = std::filesystem;

void remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    throw DeviceError(fmt::format("{}: unlink: {}", path.string(), std::strerror(errno)));
  }
}

bool is_state_file(const std::string& name) {
  return name.starts_with("rank-") && (name.ends_with(".zpc") || name.ends_with(".zpc.tmp"));
}

std::vector<fs::path> state_files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    if (is_state_file(it->path().filename().string())) files.push_back(it->path());
  }
  if (error) throw DeviceError(fmt::format("{}: cannot be listed: {}", folder.string(), error.message()));
  return files;
}

/// Only what we wrote; a folder with anything else in it stays. The manifest goes first: what a kill leaves is no
/// checkpoint then.
void remove_checkpoint(const fs::path& folder) {
  remove_file(folder / kManifestName);
  remove_file(folder / (std::string(kManifestName) + ".tmp"));
  sync_directory(folder);
  for (const fs::path& file : state_files_in(folder)) remove_file(file);
  if (::rmdir(folder.c_str()) != 0 && errno != ENOTEMPTY && errno != EEXIST) {
    throw DeviceError(fmt::format("{}: rmdir: {}", folder.string(), std::strerror(errno)));
  }
}

/// Files of a larger world that was killed in this folder before.
void remove_strangers(const fs::path& folder, const Manifest& manifest) {
  for (const fs::path& file : state_files_in(folder)) {
    const std::string name = file.filename().string();
    const bool ours = std::any_of(manifest.files.begin(), manifest.files.end(),
                                  [&](const NamedFile& named) { return named.name == name; });
    if (!ours) remove_file(file);
  }
}

void remove_old(const fs::path& directory, std::int64_t newest, int keep) {
  int kept = 0;
  for (const std::int64_t step : steps_in(directory)) {
    if (step > newest) continue;
    const fs::path folder = step_folder(directory, step);
    std::error_code error;
    if (!fs::exists(folder / kManifestName, error)) {
      if (!error) remove_checkpoint(folder);
    } else if (has_valid_manifest(folder)) {  // a damaged one stays for people to look at
      if (++kept > keep) remove_checkpoint(folder);
    }
  }
}

/// Makes a file and removes it again; every rank may do so at the same time.
void check_writable(const fs::path& directory) {
  std::string name = (directory / "zeroplan-writable-XXXXXX").string();
  const FileDescriptor file(::mkstemp(name.data()));
  if (!file.is_open())
    throw DeviceError(fmt::format("{}: cannot be written: {}", directory.string(), std::strerror(errno)));
  remove_file(name);
}

void check_coverage(std::vector<FlatRange> ranges, const std::vector<std::int64_t>& elements) {
  std::sort(ranges.begin(), ranges.end(), [](const FlatRange& a, const FlatRange& b) {
    return std::pair(a.block, a.begin) < std::pair(b.block, b.begin);
  });
  std::vector<std::int64_t> next(elements.size(), 0);
  for (const FlatRange& range : ranges) {
    std::int64_t& end = next.at(static_cast<std::size_t>(range.block));
    if (range.begin != end) {
      throw std::logic_error(fmt::format("checkpoint: block {}: elements {} to {} are stored {}", range.block,
                                         std::min(range.begin, end), std::max(range.begin, end),
                                         range.begin < end ? "twice" : "by no rank"));
    }
    end = range.end;
  }
  for (std::size_t block = 0; block < elements.size(); ++block) {
    if (next[block] == elements[block]) continue;
    throw std::logic_error(
        fmt::format("checkpoint: block {}: {} of {} elements are stored", block, next[block], elements[block]));
  }
}

}  // namespace

CheckpointMeta checkpoint_meta(const ModelSpec& model, const Plan& plan) {
  CheckpointMeta meta;
  meta.model_name = model.name;
  meta.model_config = model.config;
  meta.compute = plan.precision.weights;
  meta.moments = plan.precision.states;
  meta.split_master = plan.precision.split_master;
  meta.ranks = plan.ranks;
  meta.plan = plan_keys_json(plan, -1);
  return meta;
}

std::vector<std::int64_t> stored_elements(const ModelSpec& model, DType compute) {
  std::vector<std::int64_t> elements;
  for (const int kind : model.sequence) {
    elements.push_back(flat_layout(model.kinds[static_cast<std::size_t>(kind)], compute, 1).padded);
  }
  return elements;
}

void check_checkpoint_directory(const fs::path& directory, std::int64_t done_steps) {
  make_directories(directory);
  check_writable(directory);
  for (const std::int64_t step : steps_in(directory)) {
    const fs::path folder = step_folder(directory, step);
    if (step > done_steps && has_valid_manifest(folder)) {
      throw InputError(
          fmt::format("{}: holds a checkpoint of step {}, and this run starts after step {}: resume from it, "
                      "remove it or choose another directory",
                      directory.string(), step, done_steps));
    }
  }
}

// --- one rank ----------------------------------------------------------------------------------------

struct CheckpointWriter::State {
  CheckpointMeta meta;
  std::vector<std::int64_t> elements;
  std::optional<StateFileWriter> file;
};

CheckpointWriter::CheckpointWriter(const fs::path& directory, const CheckpointMeta& meta, const ModelSpec& model,
                                   int rank)
    : state_(std::make_unique<State>()) {
  state_->meta = meta;
  state_->elements = stored_elements(model, meta.compute);
  const fs::path folder = step_folder(directory, meta.step);
  make_directories(folder);
  if (has_valid_manifest(folder)) {
    throw InputError(fmt::format("{}: there is a checkpoint already", folder.string()));
  }
  StateFileHeader header;
  header.bytes_per_moment = static_cast<std::uint32_t>(size_of(meta.moments));
  header.step = meta.step;
  header.rank = static_cast<std::uint32_t>(rank);
  state_->file.emplace(folder, header);
}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::add(const FlatRange& range, std::span<const float> master, std::span<const std::byte> first,
                           std::span<const std::byte> second) {
  const std::int64_t moment_bytes = range.count() * size_of(state_->meta.moments);
  if (range.begin < 0 || range.count() < 0 || std::ssize(master) != range.count() ||
      std::ssize(first) != moment_bytes || std::ssize(second) != moment_bytes) {
    throw std::logic_error("checkpoint: range and spans differ");
  }
  FlatRange stored = range;
  stored.end = std::min(range.end, state_->elements.at(static_cast<std::size_t>(range.block)));
  if (stored.count() > 0) state_->file->add(stored, master, first, second);
}

std::string CheckpointWriter::finish() {
  const NamedFile named = state_->file->finish();
  return write_summary({named, state_->file->ranges()});
}

// --- rank 0 ------------------------------------------------------------------------------------------

void commit_manifest(const fs::path& directory, const CheckpointMeta& meta, const ModelSpec& model,
                     std::span<const std::string> files, int keep) {
  if (std::ssize(files) != meta.ranks) throw std::logic_error("checkpoint: one summary a rank is needed");
  Manifest manifest{meta, stored_elements(model, meta.compute), {}};
  std::vector<FlatRange> ranges;
  for (const std::string& text : files) {
    RankSummary summary = read_summary(text);
    manifest.files.push_back(std::move(summary.file));
    ranges.insert(ranges.end(), summary.ranges.begin(), summary.ranges.end());
  }
  check_coverage(std::move(ranges), manifest.elements);
  const fs::path folder = step_folder(directory, meta.step);
  write_file_atomically(folder / kManifestName, write_manifest(manifest));
  remove_strangers(folder, manifest);
  remove_old(directory, meta.step, std::max(keep, 1));
}

}  // namespace zeroplan
