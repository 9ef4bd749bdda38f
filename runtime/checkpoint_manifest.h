#pragma once
// manifest.json of a checkpoint, and the folders of a directory of checkpoints.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/checkpoint.h"
#include "runtime/checkpoint_file.h"

namespace zeroplan {

inline constexpr std::string_view kManifestName = "manifest.json";

struct Manifest {
  CheckpointMeta meta;
  std::vector<std::int64_t> elements;  // stored_elements() of each block
  std::vector<NamedFile> files;        // in rank order
};

/// Ends in a checksum of everything before it.
std::string write_manifest(const Manifest& manifest);
/// Strict. Throws InputError naming `name` and line, for an altered text as well.
Manifest read_manifest(std::string_view text, const std::string& name);
/// Of a folder; InputError when there is none.
Manifest load_manifest(const std::filesystem::path& folder);

/// What finish() hands to rank 0: the file and the ranges in it, as one line.
struct RankSummary {
  NamedFile file;
  std::vector<FlatRange> ranges;
};
std::string write_summary(const RankSummary& summary);
RankSummary read_summary(std::string_view text);

/// DIR/step-000100.
std::filesystem::path step_folder(const std::filesystem::path& directory, std::int64_t step);
/// The step that a folder's name says; nothing for other names.
std::optional<std::int64_t> step_of_folder(const std::filesystem::path& folder);
/// Steps of the step-NNNNNN folders of a directory, newest first, finished or not. Empty when it does not exist.
std::vector<std::int64_t> steps_in(const std::filesystem::path& directory);
/// Whether a folder holds a manifest that can be read and is unaltered; if not, `why` (may be null) says what is wrong.
bool has_valid_manifest(const std::filesystem::path& folder, std::string* why = nullptr);

}  // namespace zeroplan
