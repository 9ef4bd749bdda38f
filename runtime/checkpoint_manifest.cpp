#include "runtime/checkpoint_manifest.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "models/error.h"
#include "models/json_reader.h"
#include "models/json_text.h"
#include "runtime/checksum.h"

namespace zeroplan {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFormat = "zeroplan checkpoint";
constexpr std::string_view kChecksumKey = "  \"manifest_checksum\": ";
constexpr std::int64_t kMaxCount = std::int64_t{1} << 60;
constexpr int kMaxRanks = 1'000'000;

std::string json_string(std::string_view text) { return json_quoted(text, std::string_view::npos); }

/// 64-bit seeds and checksums are texts: JSON numbers are doubles to many readers.
template <class Number>
Number parse_text(const JsonValue& value, int base, std::string_view expected) {
  const std::string& text = value.as_string();
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) value.fail(expected);
  return number;
}
std::uint64_t seed_of(const JsonValue& value) {
  return parse_text<std::uint64_t>(value, 10, "a seed as text, such as \"1\"");
}
std::uint64_t checksum_of(const JsonValue& value) {
  return parse_text<std::uint64_t>(value, 16, "a checksum as text of 16 hexadecimal digits");
}

DType storage_type(const JsonValue& value, std::span<const DType> allowed) {
  for (const DType type : allowed) {
    if (value.as_string() == to_string(type)) return type;
  }
  value.fail("the name of a floating-point type");
}

std::string file_text(const NamedFile& file) {
  return fmt::format(R"({{"name": {}, "bytes": {}, "checksum": "{}"}})", json_string(file.name), file.bytes,
                     checksum_text(file.checksum));
}

NamedFile read_file_entry(const JsonValue& value) {
  value.require_only({"name", "bytes", "checksum"});
  return {value.at("name").as_string(), value.at("bytes").as_int(0, kMaxCount), checksum_of(value.at("checksum"))};
}

LossScaleState read_loss_scale(const JsonValue& value) {
  value.require_only({"scale", "good_steps", "hysteresis_left", "skipped_steps"});
  LossScaleState state;
  state.scale = value.at("scale").as_real(0, std::numeric_limits<double>::max());
  state.good_steps = value.at("good_steps").as_int(0, kMaxCount);
  state.hysteresis_left = value.at("hysteresis_left").as_int(0, kMaxCount);
  state.skipped_steps = value.at("skipped_steps").as_int(0, kMaxCount);
  return state;
}

void read_data(const JsonValue& value, CheckpointMeta& meta) {
  value.require_only({"seed", "samples", "fingerprint"});
  meta.data_seed = seed_of(value.at("seed"));
  meta.samples = value.at("samples").as_int(0, kMaxCount);
  meta.data = value.at("fingerprint").as_string();
}

void read_model(const JsonValue& value, CheckpointMeta& meta) {
  value.require_only({"name", "config_checksum", "config"});
  meta.model_name = value.at("name").as_string();
  meta.model_config = value.at("config").as_string();
  const JsonValue& checksum = value.at("config_checksum");
  if (checksum_of(checksum) != xxh64(bytes_of_text(meta.model_config))) checksum.fail("the checksum of the config");
}

void read_precision(const JsonValue& value, CheckpointMeta& meta) {
  value.require_only({"compute", "moments", "split_master"});
  constexpr std::array kCompute = {DType::bf16, DType::fp16, DType::fp32};
  constexpr std::array kMoments = {DType::bf16, DType::fp32};
  meta.compute = storage_type(value.at("compute"), kCompute);
  meta.moments = storage_type(value.at("moments"), kMoments);
  meta.split_master = value.at("split_master").as_bool();
}

/// The text up to the checksum's line. Throws InputError when the checksum is missing or another.
void check_manifest_checksum(std::string_view text, const std::string& name) {
  const std::size_t at = text.rfind(kChecksumKey);
  const std::string expected =
      at == std::string_view::npos ? "" : checksum_text(xxh64(bytes_of_text(text.substr(0, at))));
  if (at == std::string_view::npos || text.substr(at + kChecksumKey.size()) != "\"" + expected + "\"\n}\n") {
    throw InputError(fmt::format("{}: damaged: {}", name,
                                 at == std::string_view::npos ? std::string("it does not end in its checksum")
                                                              : "its checksum would be " + expected));
  }
}

}  // namespace

std::string write_manifest(const Manifest& manifest) {
  const CheckpointMeta& m = manifest.meta;
  std::string text = fmt::format("{{\n  \"format\": \"{}\",\n  \"schema\": 1,\n", kFormat);
  text += fmt::format("  \"step\": {},\n  \"updates\": {},\n  \"ranks\": {},\n", m.step, m.updates, m.ranks);
  text += fmt::format(
      "  \"loss_scale\": {{\"scale\": {}, \"good_steps\": {}, \"hysteresis_left\": {}, \"skipped_steps\": {}}},\n",
      m.loss_scale.scale, m.loss_scale.good_steps, m.loss_scale.hysteresis_left, m.loss_scale.skipped_steps);
  text += fmt::format("  \"weights_seed\": \"{}\",\n", m.weights_seed);
  text += fmt::format("  \"data\": {{\"seed\": \"{}\", \"samples\": {}, \"fingerprint\": {}}},\n", m.data_seed,
                      m.samples, json_string(m.data));
  text += fmt::format("  \"precision\": {{\"compute\": \"{}\", \"moments\": \"{}\", \"split_master\": {}}},\n",
                      to_string(m.compute), to_string(m.moments), m.split_master);
  text += fmt::format("  \"model\": {{\"name\": {}, \"config_checksum\": \"{}\",\n    \"config\": {}}},\n",
                      json_string(m.model_name), checksum_text(xxh64(bytes_of_text(m.model_config))),
                      json_string(m.model_config));
  text += fmt::format("  \"plan\": {},\n", json_string(m.plan));
  text += fmt::format("  \"elements\": [{}],\n  \"files\": [", fmt::join(manifest.elements, ", "));
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    text += fmt::format("{}\n    {}", i == 0 ? "" : ",", file_text(manifest.files[i]));
  }
  text += "\n  ],\n";
  return text + fmt::format("{}\"{}\"\n}}\n", kChecksumKey, checksum_text(xxh64(bytes_of_text(text))));
}

Manifest read_manifest(std::string_view text, const std::string& name) {
  check_manifest_checksum(text, name);
  const JsonDocument document = JsonDocument::parse(text, name);
  const JsonValue& root = document.root();
  root.require_only({"format", "schema", "step", "updates", "ranks", "loss_scale", "weights_seed", "data", "precision",
                     "model", "plan", "elements", "files", "manifest_checksum"});
  if (root.at("format").as_string() != kFormat) root.at("format").fail(fmt::format("\"{}\"", kFormat));
  root.at("schema").as_int(1, 1);
  Manifest manifest;
  CheckpointMeta& meta = manifest.meta;
  meta.step = root.at("step").as_int(0, kMaxCount);
  meta.updates = root.at("updates").as_int(0, kMaxCount);
  meta.ranks = static_cast<int>(root.at("ranks").as_int(1, kMaxRanks));
  meta.loss_scale = read_loss_scale(root.at("loss_scale"));
  meta.weights_seed = seed_of(root.at("weights_seed"));
  read_data(root.at("data"), meta);
  read_precision(root.at("precision"), meta);
  read_model(root.at("model"), meta);
  meta.plan = root.at("plan").as_string();
  for (const JsonValue& count : root.at("elements").items()) manifest.elements.push_back(count.as_int(0, kMaxCount));
  for (const JsonValue& file : root.at("files").items()) {
    manifest.files.push_back(read_file_entry(file));
    // Also what keeps a file of another folder out.
    const std::string expected = state_file_name(static_cast<int>(manifest.files.size()) - 1);
    if (manifest.files.back().name != expected) file.at("name").fail(fmt::format("\"{}\"", expected));
  }
  if (std::ssize(manifest.files) != meta.ranks) root.at("files").fail(fmt::format("{} files", meta.ranks));
  return manifest;
}

Manifest load_manifest(const fs::path& folder) {
  const InputFile file(folder / kManifestName);
  if (file.size() > static_cast<std::int64_t>(kMaxJsonBytes)) {
    throw InputError(fmt::format("{}: too large for a manifest: {} bytes", file.path().string(), file.size()));
  }
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return read_manifest(text, file.path().string());
}

// --- summaries ---------------------------------------------------------------------------------------

std::string write_summary(const RankSummary& summary) {
  std::string ranges;
  for (const FlatRange& range : summary.ranges) {
    ranges += fmt::format("{}[{}, {}, {}]", ranges.empty() ? "" : ", ", range.block, range.begin, range.end);
  }
  return fmt::format(R"({{"file": {}, "ranges": [{}]}})", file_text(summary.file), ranges);
}

RankSummary read_summary(std::string_view text) {
  const JsonDocument document = JsonDocument::parse(text, "checkpoint summary");
  RankSummary summary;
  summary.file = read_file_entry(document.root().at("file"));
  for (const JsonValue& range : document.root().at("ranges").items()) {
    if (range.items().size() != 3) range.fail("block, begin and end");
    summary.ranges.push_back({static_cast<int>(range.items()[0].as_int(0, std::numeric_limits<int>::max())),
                              range.items()[1].as_int(0, kMaxCount), range.items()[2].as_int(0, kMaxCount)});
  }
  return summary;
}

// --- folders -----------------------------------------------------------------------------------------

fs::path step_folder(const fs::path& directory, std::int64_t step) {
  return directory / fmt::format("step-{:06}", step);
}

std::optional<std::int64_t> step_of_folder(const fs::path& folder) {
  const std::string name = folder.filename().string();
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  if (error != std::errc{} || end != name.data() + name.size() || step < 0) return std::nullopt;
  return step_folder("", step).string() == name ? std::optional(step) : std::nullopt;
}

std::vector<std::int64_t> steps_in(const fs::path& directory) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  fs::directory_iterator it(directory, error);
  if (error == std::errc::no_such_file_or_directory) return steps;
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    const auto step = step_of_folder(it->path());
    std::error_code ignored;
    if (step && it->is_directory(ignored)) steps.push_back(*step);
  }
  if (error) throw InputError(fmt::format("{}: cannot be listed: {}", directory.string(), error.message()));
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

bool has_valid_manifest(const fs::path& folder, std::string* why) {
  std::error_code error;
  if (fs::symlink_status(folder / kManifestName, error).type() == fs::file_type::not_found) {
    if (why != nullptr) *why = fmt::format("{}: no {}: it was not finished", folder.string(), kManifestName);
    return false;
  }
  try {
    load_manifest(folder);
    return true;
  } catch (const InputError& failure) {
    if (why != nullptr) *why = failure.what();
    return false;
  }
}

}  // namespace zeroplan
