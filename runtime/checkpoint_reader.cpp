#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "models/error.h"
#include "models/json_reader.h"
#include "runtime/checkpoint.h"
#include "runtime/checkpoint_file.h"
#include "runtime/checkpoint_manifest.h"

namespace zeroplan {
namespace {

namespace fs = std::filesystem;

/// A chunk and the file that holds it.
struct Located {
  const StateFile* file = nullptr;
  StateChunk chunk;
};

struct Choice {
  fs::path folder;
  std::string older;  // the checkpoint before it, for messages
  std::vector<std::string> notes;
};

std::string lines_of(const std::vector<std::string>& notes) {
  return notes.empty() ? "" : fmt::format(":\n  {}", fmt::join(notes, "\n  "));
}

/// Of the folder before `step`, or "".
std::string older_checkpoint(const fs::path& directory, std::int64_t step) {
  for (const std::int64_t other : steps_in(directory)) {
    const fs::path folder = step_folder(directory, other);
    if (other < step && has_valid_manifest(folder)) return folder.string();
  }
  return "";
}

Choice choose(const fs::path& given) {
  const fs::path path = given.has_filename() ? given : given.parent_path();
  if (const auto step = step_of_folder(path)) {
    std::string why;
    if (!has_valid_manifest(path, &why)) throw InputError(why);
    return {path, older_checkpoint(path.has_parent_path() ? path.parent_path() : ".", *step), {}};
  }
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    throw InputError(fmt::format("{}: expected a directory of checkpoints, got {}", path.string(),
                                 error ? error.message() : "something else"));
  }
  std::vector<std::string> notes;
  for (const std::int64_t step : steps_in(path)) {
    std::string why;
    const fs::path folder = step_folder(path, step);
    if (has_valid_manifest(folder, &why)) return {folder, older_checkpoint(path, step), notes};
    notes.push_back(why);
  }
  throw InputError(fmt::format("{}: holds no checkpoint{}", path.string(), lines_of(notes)));
}

/// The first key in which two configurations differ: "hidden_size is 64 there and 128 here".
std::string difference(const std::string& there, const std::string& here) {
  const JsonDocument first = JsonDocument::parse(there, "the checkpoint's configuration", JsonSyntax::comments);
  const JsonDocument second = JsonDocument::parse(here, "the model's configuration", JsonSyntax::comments);
  const auto text_of = [](const JsonValue* value) { return value != nullptr ? value->short_form() : "missing"; };
  std::vector<std::string> keys;
  for (const JsonDocument* document : {&first, &second}) {
    for (const auto& member : document->root().members()) keys.push_back(member.first);
  }
  for (const std::string& key : keys) {
    const std::string a = text_of(first.root().find(key));
    const std::string b = text_of(second.root().find(key));
    if (a != b) return fmt::format("{} is {} there and {} here", key, a, b);
  }
  return "their texts differ";
}

void check_model(const CheckpointMeta& meta, const ModelSpec& model, const fs::path& folder) {
  if (meta.model_config == model.config) return;
  throw InputError(fmt::format("{}: is of model {}, expected {}: {}", folder.string(), meta.model_name, model.name,
                               difference(meta.model_config, model.config)));
}

void check_types(const CheckpointMeta& meta, const Plan& plan, const fs::path& folder) {
  const auto check = [&](std::string_view what, DType stored, DType wanted) {
    if (stored == wanted) return;
    throw InputError(fmt::format("{}: {} are {} there and {} in the plan: resume with the same types", folder.string(),
                                 what, to_string(stored), to_string(wanted)));
  };
  check("weights", meta.compute, plan.precision.weights);
  check("optimizer states", meta.moments, plan.precision.states);
}

}  // namespace

struct CheckpointReader::State {
  fs::path folder;
  std::vector<std::string> notes;
  Manifest manifest;
  std::vector<StateFile> files;
  std::vector<std::vector<Located>> blocks;  // by first element

  void open(const ModelSpec& model);
  void locate();
  const std::vector<Located>& chunks_of(int block) const { return blocks.at(static_cast<std::size_t>(block)); }
};

void CheckpointReader::State::open(const ModelSpec& model) {
  const CheckpointMeta& meta = manifest.meta;
  if (step_of_folder(folder) != meta.step) {
    throw InputError(fmt::format("{}: its manifest is of step {}", folder.string(), meta.step));
  }
  if (manifest.elements != stored_elements(model, meta.compute)) {
    throw InputError(fmt::format("{}: its blocks do not have the model's sizes", folder.string()));
  }
  files.reserve(manifest.files.size());
  for (std::size_t rank = 0; rank < manifest.files.size(); ++rank) {
    StateFileHeader expected;
    expected.bytes_per_moment = static_cast<std::uint32_t>(size_of(meta.moments));
    expected.step = meta.step;
    expected.rank = static_cast<std::uint32_t>(rank);
    files.emplace_back(folder, manifest.files[rank], expected);
  }
  locate();
}

/// Which chunk holds which element; every element once.
void CheckpointReader::State::locate() {
  blocks.resize(manifest.elements.size());
  for (const StateFile& file : files) {
    for (const StateChunk& chunk : file.chunks()) {
      if (chunk.block >= blocks.size()) {
        throw InputError(fmt::format("{}: has states of block {}", folder.string(), chunk.block));
      }
      blocks[chunk.block].push_back({&file, chunk});
    }
  }
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    std::vector<Located>& all = blocks[block];
    std::sort(all.begin(), all.end(), [](const Located& a, const Located& b) { return a.chunk.begin < b.chunk.begin; });
    std::int64_t next = 0;
    for (const Located& part : all) {
      if (part.chunk.begin != next) break;
      next = part.chunk.end();
    }
    if (next != manifest.elements[block] || (!all.empty() && all.back().chunk.end() != next)) {
      throw InputError(fmt::format("{}: states of block {} are missing or there twice at element {} of {}",
                                   folder.string(), block, next, manifest.elements[block]));
    }
  }
}

CheckpointReader::CheckpointReader(const fs::path& path, const ModelSpec& model) : state_(std::make_unique<State>()) {
  Choice choice = choose(path);
  state_->folder = std::move(choice.folder);
  state_->notes = std::move(choice.notes);
  state_->manifest = load_manifest(state_->folder);
  check_model(state_->manifest.meta, model, state_->folder);
  try {
    state_->open(model);
  } catch (const InputError& damage) {
    if (choice.older.empty()) throw;
    throw InputError(fmt::format("{}\nthe checkpoint before it is {}", damage.what(), choice.older));
  }
}

CheckpointReader::CheckpointReader(const fs::path& path, const ModelSpec& model, const Plan& plan)
    : CheckpointReader(path, model) {
  check_types(meta(), plan, state_->folder);
}

CheckpointReader::~CheckpointReader() = default;
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;

const CheckpointMeta& CheckpointReader::meta() const { return state_->manifest.meta; }
const fs::path& CheckpointReader::path() const { return state_->folder; }
const std::vector<std::string>& CheckpointReader::notes() const { return state_->notes; }

void CheckpointReader::read(const FlatRange& range, std::span<float> master, std::span<std::byte> first,
                            std::span<std::byte> second) const {
  const std::int64_t moment = size_of(meta().moments);
  const std::array<std::span<std::byte>, 3> into = {std::as_writable_bytes(master), first, second};
  const std::array<std::int64_t, 3> sizes = {4, moment, moment};
  for (std::size_t i = 0; i < into.size(); ++i) {
    if (range.begin < 0 || range.count() < 0 || (!into[i].empty() && std::ssize(into[i]) != range.count() * sizes[i])) {
      throw std::logic_error("checkpoint: range and spans differ");
    }
    std::fill(into[i].begin(), into[i].end(), std::byte{0});
  }
  const std::vector<Located>& all = state_->chunks_of(range.block);
  auto part = std::upper_bound(all.begin(), all.end(), range.begin,
                               [](std::int64_t begin, const Located& located) { return begin < located.chunk.end(); });
  std::vector<std::byte> bytes;
  for (; part != all.end() && part->chunk.begin < range.end; ++part) {
    const StateChunk& chunk = part->chunk;
    part->file->read(chunk, bytes);
    const std::int64_t from = std::max(chunk.begin, range.begin);
    const std::int64_t count = std::min(chunk.end(), range.end) - from;
    std::int64_t array = 0;  // where it starts in the chunk
    for (std::size_t i = 0; i < into.size(); ++i) {
      const std::byte* const source = bytes.data() + array + (from - chunk.begin) * sizes[i];
      if (!into[i].empty()) {
        std::memcpy(into[i].data() + (from - range.begin) * sizes[i], source,
                    static_cast<std::size_t>(count * sizes[i]));
      }
      array += chunk.count * sizes[i];
    }
  }
}

}  // namespace zeroplan
