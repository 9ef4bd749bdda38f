#pragma once
// Shared by the files of the lint.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/deepspeed_keys.h"
#include "planner/lint.h"

namespace zeroplan {

/// One run over a file: what the rules read, and the findings they leave.
class Linter {
 public:
  explicit Linter(const CheckInput& input);

  const ConfigText& file;
  const DeepspeedKeys& keys;
  const ModelSpec* model;
  const MachineSpec* machine;
  const DeepSpeedConfig config;

  /// Adds a finding at that path: its line is the member's, or that of the nearest section that is there.
  Finding& report(std::string_view rule, std::string path, std::string message, std::string fix = "");
  /// At this very member (a repeated key is not what its path finds).
  Finding& report_at(std::string_view rule, std::string path, int line, std::string message, std::string fix = "");

  /// No more findings are kept: loops over what a file may hold a million times stop.
  bool full() const { return truncated_; }

  const ConfigMember* find(std::string_view path) const { return file.find(path); }
  bool has(std::string_view path) const { return find(path) != nullptr; }
  const ConfigNode* value(std::string_view path) const;
  /// A bool that is given and that DeepSpeed takes for true.
  bool is_true(std::string_view path) const;
  bool is_false(std::string_view path) const;
  /// The excerpt of the value at `path`: it is there.
  std::string shown(std::string_view path) const;
  /// The key's line, or that of the nearest section above it that is there.
  int line_of(std::string_view path) const;

  /// Ranks that read different samples: all ranks / sequence_parallel_size / autotp_size. Nothing without a machine,
  /// or with a pipeline.
  std::optional<std::int64_t> data_parallel() const;

  // Corrections; each appends to the finding's edits.
  void remove(Finding& finding, const ConfigMember& member) const;
  void remove(Finding& finding, std::string_view path) const;
  /// Where the object has a member of that name already, or of another name of the same key: takes this one away, and
  /// says so in `finding.fix`; false then.
  bool rename(Finding& finding, const ConfigNode& object, const ConfigMember& member, std::string_view name) const;
  void replace(Finding& finding, const ConfigNode& node, std::string text) const;
  /// Adds `"key": value` behind the last member of the object at `section` ("" is the root). Not when it is no object
  /// or has that key.
  void insert(Finding& finding, std::string_view section, std::string_view key, std::string value) const;
  /// Takes the member out and adds it to another section. Not when that section is missing; where it has the key, as
  /// rename().
  void move(Finding& finding, const ConfigMember& member, std::string_view to) const;

  CheckAnswer take();
  std::vector<std::string> unchecked;

 private:
  /// The member of the object, other than `but`, that sets what `name` in that section sets: under that name, its
  /// alias, or the name that has replaced it.
  static const ConfigMember* setting(const DeepspeedKeys& keys, const ConfigNode& object, std::string_view section,
                                     std::string_view name, const ConfigMember& but);

  std::vector<Finding> findings_;
  Finding dropped_;
  bool truncated_ = false;
};

// The subjects, in the order of the rules.
void lint_syntax(Linter& lint);
void lint_keys(Linter& lint);
void lint_batch(Linter& lint);
void lint_precision(Linter& lint);
void lint_stage(Linter& lint);
void lint_offload(Linter& lint);
void lint_optimizer(Linter& lint);
void lint_parallel(Linter& lint);
void lint_memory(Linter& lint);

/// One value against its key: type, range, choices, null, "auto". `policy` is the section's.
void lint_value(Linter& lint, const DeepspeedKey& key, const std::string& path, const ConfigMember& member,
                UnknownKey policy);

/// Nearest of `names` within the distance of a slip of the hand, or "".
std::string slip_of(std::string_view text, const std::vector<std::string>& names);
/// Which of `names` a text means: it is one with words cut short (max_live_params), else a slip_of() one, else one with
/// words left out as well (reduce_bucket). Several where that leaves it open, none where nothing is near.
std::vector<std::string> meant_names(std::string_view text, const std::vector<std::string>& names);
/// The one of meant_names(), or "".
std::string meant_name(std::string_view text, const std::vector<std::string>& names);
/// Equal but for case, '-' and blanks.
bool same_but_case(std::string_view a, std::string_view b);
/// "1 rank", "2 ranks".
std::string plural(std::int64_t count, std::string_view word);
/// Values as people write them in JSON: 500000000, 0.9.
std::string json_number(double value);

std::int64_t divided_up(std::int64_t count, std::int64_t by);
/// Ranks that share one copy of the states: all, or MiCS's groups.
int sharding_ranks(const DeepSpeedConfig& config, int ranks);
/// Elements of each untied parameter; experts of a layer are one.
std::vector<std::int64_t> parameter_sizes(const ModelSpec& model);
std::int64_t largest_parameter(const ModelSpec& model);

/// Host memory of the offloaded states on one node (reference: engine-rules 2.13, DeepSpeed 0.19.8), at its least: as
/// asked for, and as torch's pinned allocator rounds it. Zero without offload.
struct HostBytes {
  Bytes exact, rounded;
};
HostBytes offloaded_host_bytes(const DeepSpeedConfig& config, const ModelSpec& model, const MachineSpec& machine);
/// What the NVMe of one node holds: masters, states and gradients 16 bytes an element, weights in their own type.
Bytes offloaded_nvme_bytes(const DeepSpeedConfig& config, const ModelSpec& model, const MachineSpec& machine);
/// Weights, gradients, masters and states on one GPU at the moment of the step (deepspeed.md 3 to 5), without
/// activations, gathered layers, libraries: a lower bound.
struct GpuStates {
  Bytes bytes;
  std::string arithmetic;
};
GpuStates gpu_states(const DeepSpeedConfig& config, std::int64_t parameters, int ranks);

/// Blanks and comments from `at` on are passed over.
std::size_t skip_blanks(std::string_view text, std::size_t at);
/// Edits sorted and applied; they do not overlap. Commas left without a member behind them are taken away.
std::string edited(const ConfigText& file, std::vector<TextEdit> edits);

}  // namespace zeroplan
