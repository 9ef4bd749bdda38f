#pragma once
// Shared by the exporters of deepspeed.json, accelerate_fsdp.yaml and launch.sh.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/search.h"

namespace zeroplan {

/// What an exporter reads. The references outlive it.
struct ExportSubject {
  const Plan& plan;
  const ModelSpec& model;  // with the plan's adapters
  const MachineSpec& machine;
  const Prediction& prediction;
  double margin;

  int ranks_per_node() const;
};

/// Element counts of the model that the other engines' knobs are stated in.
struct ModelShape {
  std::int64_t parameters = 0;
  std::int64_t trained = 0;        // of them; fewer with adapters
  std::int64_t largest_layer = 0;  // the layer block with most parameters
  std::int64_t layer_tensors = 0;  // parameters of that block as modules hold them: experts fused to one
  std::int64_t largest_tensor =
      0;  // one parameter; experts of a layer are fused (transformers 5: gate and up together)
  std::int64_t largest_vector = 0;  // norms and biases
  std::int64_t all_vectors = 0;     // their sum over the model
};
ModelShape shape_of(const ModelSpec& model);
/// Share of the model's parameters in the first `blocks` blocks, 0..1.
double share_of_first(const ModelSpec& model, int blocks);

struct DeepspeedExport {
  std::string json;
  std::vector<std::string> notes;
  int stage = 0;               // as exported: 3 where a plan below has states on NVMe
  bool on_host = false;        // the optimizer runs on the CPU
  bool nvme = false;           // something is written to kNvmePath
  std::optional<Plan> plan;    // what DeepSpeed is to run when that is not the subject's plan
  bool exact_pinning = false;  // torch's power-of-two pinned blocks do not fit the host, exact ones do
};
DeepspeedExport export_deepspeed(const ExportSubject& subject);

struct FsdpExport {
  std::string yaml;  // empty: not expressible, the first note says why
  std::vector<std::string> notes;
};
FsdpExport export_fsdp(const ExportSubject& subject);

std::string export_launch(const ExportSubject& subject, const DeepspeedExport& deepspeed, const FsdpExport& fsdp);

/// An amount in a note: what would read "0.0 GiB" is "less than 0.1 GiB".
std::string noted_gib(Bytes amount);

/// Where deepspeed.json sends what lives on NVMe, until the user changes it.
inline constexpr std::string_view kNvmePath = "/local_nvme";

/// Printable ASCII on one line, cut after `longest` characters: safe in a comment of bash and YAML.
std::string comment_text(std::string_view text, std::size_t longest);
/// One bash word in single quotes; control characters become blanks.
std::string shell_quoted(std::string_view text);

}  // namespace zeroplan
