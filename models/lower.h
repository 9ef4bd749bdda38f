#pragma once
// Lowering: (model, plan) -> Schedule, one function per engine. `rank` does not matter yet: every rank of a
// data-parallel group runs the same schedule (SPMD) and flat-range shards are equal.

#include <memory>
#include <string_view>

#include "models/model_spec.h"
#include "models/plan.h"
#include "models/schedule.h"

namespace zeroplan {

enum class Folding : std::uint8_t {
  none,         // every layer and micro-step op by op: executors, simulator, validate
  micro_steps,  // layers and loss chunks op by op, equal micro-steps once, with Repeat: the arena
  layers,       // equal layers, loss chunks and micro-steps once, with Repeat: the planner's form
};

/// Elements of one block's flat parameter buffer and of one rank's shard of it: tensors in order, each aligned to 256
/// bytes of the compute type, the total padded to shard_ranks x 256 bytes (runtime.md section 3).
struct FlatLayout {
  std::int64_t parameters = 0;  // without any padding
  std::int64_t padded = 0;
  std::int64_t shard = 0;  // padded / shard_ranks
};
FlatLayout flat_layout(const BlockKind& kind, DType type, int shard_ranks);

/// Lowers many plans of one model: what does not depend on the plan (forward, backward and recompute order of each
/// block kind) is worked out once. Not thread-safe; make one per thread.
class Lowering {
 public:
  explicit Lowering(const ModelSpec& model);
  ~Lowering();
  Lowering(const Lowering&) = delete;
  Lowering& operator=(const Lowering&) = delete;

  /// The step of one rank under the zeroplan engine. Precondition: check_plan() passed.
  Schedule zeroplan(const Plan& plan, Folding folding);

  struct State;  // the cached programs; lowerings share it

 private:
  std::unique_ptr<State> state_;
};

/// As Lowering(model).zeroplan(plan, folding). Throws InputError for an engine that has no lowering yet.
Schedule lower(const ModelSpec& model, const Plan& plan, Folding folding);

/// What a rank does before and after steps, block by block through staging buffers of host memory.
enum class Transient : std::uint8_t {
  initialise,      // states made by the host and put into place
  resume,          // read from a checkpoint's files
  checkpoint,      // written to files, each element by one rank
  export_weights,  // whole 16-bit weights gathered block by block; the first rank writes them
};
inline constexpr Transient kTransients[] = {Transient::initialise, Transient::resume, Transient::checkpoint,
                                            Transient::export_weights};
std::string_view to_string(Transient what);

/// Such a transient as a flat schedule of its own (zeroplan_transients.cpp); the step's resident buffers are declared
/// in it too. Files are read and written as NVMe is, but take no room there. Throws as lower() does.
Schedule lower_transient(const ModelSpec& model, const Plan& plan, Transient what, int ranks_per_node);

/// Host memory of a rank that the greediest transient needs beside the resident buffers of `step`, the plan's schedule
/// in any folding.
Bytes transient_staging(const ModelSpec& model, const Plan& plan, const Schedule& step);

}  // namespace zeroplan
