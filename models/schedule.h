#pragma once
// The schedule: one training step of one rank as a DAG of typed ops on streams. Built once by lower(), then only read:
// by estimate(), simulate(), the memory timeline, the arena and the executors. Nobody adds, splits or reorders ops
// later.
//
// Departures from style.md section 6, for speed (10^3 schedules of 10^4 ops a second): ops are fixed-size records;
// what an op does (Work) is shared by equal ops; labels are formed when asked for; edges and operands lie in pools.
// Alloc and Free of one memory all stand on one stream (compute), so memory over time is a fact of the schedule and not
// of its timing, and two buffers whose lifetimes do not overlap in id order may share bytes.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/model_spec.h"
#include "models/plan.h"
#include "models/units.h"

namespace zeroplan {

enum class Memory : std::uint8_t { hbm, pinned, dram, nvme };
inline constexpr int kNumMemories = 4;
std::string_view to_string(Memory memory);

/// Who a byte belongs to: the keys of `breakdown` (spec section 4).
enum class Owner : std::uint8_t { parameters, gradients, optimizer, activations, buffers, logits };
inline constexpr int kNumOwners = 6;
std::string_view to_string(Owner owner);

/// What a buffer holds; with block and value it makes the buffer's name.
enum class BufferRole : std::uint8_t {
  weight_shard,      // a rank's part of a block's weights, compute type (all of them below stage 3)
  weights,           // a block's gathered weights
  weight_staging,    // a shard on its way from host to device
  gradient,          // a block's full gradient, as backward writes it
  gradient_staging,  // a reduced shard on its way to the accumulator
  gradient_shard,    // the accumulated gradient of the rank's part (whole below stage 1)
  master,            // fp32 master or split remainder
  moments,           // Adam's two moments
  state_slot,        // optimizer states on their way between tiers
  value,             // an activation of the block's graph
  value_gradient,
  logits,
  token_ids,
  scalars,    // the sum of the losses
  norm,       // sum of squares of the gradients: a fixed-point number in 64 floats (runtime/exact_sum.h)
  workspace,  // a library's own (cuBLAS)
};
std::string_view to_string(BufferRole role);

enum class Lifetime : std::uint8_t { step, resident };

struct BufferId {
  std::uint32_t index = 0xffffffff;
  friend bool operator==(BufferId, BufferId) = default;
};

struct Buffer {
  BufferRole role = BufferRole::value;
  Memory memory = Memory::hbm;
  Owner owner = Owner::activations;
  Lifetime lifetime = Lifetime::step;
  std::int16_t block = -1;  // index into ModelSpec::sequence; -1: none
  std::int16_t value = -1;  // index into the block kind's values
  Bytes size;               // multiple of kBufferAlignment
};
inline constexpr std::int64_t kBufferAlignment = 256;

enum class Stream : std::uint8_t { compute, gather, reduce, h2d, d2h, nvme_read, nvme_write, host };
inline constexpr int kNumStreams = 8;
std::string_view to_string(Stream stream);

enum class Phase : std::uint8_t { forward, backward, optimizer };
std::string_view to_string(Phase phase);

enum class Pass : std::uint8_t { forward, recompute, backward, backward_data, backward_weight };
std::string_view to_string(Pass pass);

// --- what ops do -----------------------------------------------------------------------------------

struct Alloc {};  // operands: the buffers, in order
struct Free {};

/// y[m, n] (+)= x[m, k] w[k, n], `groups` times.
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0, groups = 1;
  DType type = DType::bf16;
  bool fp32_output = false;
  bool accumulate = false;  // adds to what is there: reads the output too
};
struct AttentionWork {
  AttentionShape shape;
  TokenShape tokens;
  DType type = DType::bf16;
  bool backward = false;
};
/// One pass over memory: kernels without a matrix product.
struct Pointwise {
  Bytes traffic;           // read + written
  std::int64_t count = 0;  // of a graph's op: tokens of the micro-step; else elements; 0: only the traffic is known
};
/// A kernel of a block's graph (or of its loss head). `graph_op` indexes BlockKind::ops; kLossOp... below otherwise.
struct Compute {
  std::int16_t kind = -1;  // block kind; -1: not of a graph
  std::int16_t graph_op = -1;
  Pass pass = Pass::forward;
  std::variant<Gemm, AttentionWork, Pointwise> kernel;
  bool on_host = false;  // runs on the host's cores, on host memory
};
inline constexpr std::int16_t kHeadLogits = -2;    // logits of one chunk of tokens
inline constexpr std::int16_t kHeadLoss = -3;      // cross-entropy and its gradient, in place over the logits
inline constexpr std::int16_t kHeadData = -4;      // gradient of the head's input
inline constexpr std::int16_t kHeadWeight = -5;    // gradient of the output matrix
inline constexpr std::int16_t kGradientSum = -6;   // value gradients of two consumers added
inline constexpr std::int16_t kAccumulate = -7;    // reduced gradient shard added to the accumulator
inline constexpr std::int16_t kGradientNorm = -8;  // sum of squares of a gradient shard
inline constexpr std::int16_t kZero = -9;          // clears what it writes
inline constexpr std::int16_t kEagerOp = -1;    // a kernel of an engine that runs PyTorch's own graph; kind is -1 too
inline constexpr std::int16_t kHostPass = -11;  // loading and saving: values made, converted or moved by the host
inline constexpr std::int16_t kNormSum = -10;   // the host's part of the global norm added to the device's

enum class CollectiveKind : std::uint8_t { all_gather, reduce_scatter, all_reduce };
std::string_view to_string(CollectiveKind kind);
/// Ranks that take part: all; the shard group (one copy of the states); the ranks holding the same shard.
enum class Group : std::uint8_t { all, shard, replica };
/// `elements` is the full tensor: the output of an all-gather, the input of a reduce-scatter. Padding is in `padding`.
struct Collective {
  CollectiveKind kind = CollectiveKind::all_gather;
  Group group = Group::all;
  std::int64_t elements = 0;  // parameters, padding excluded
  std::int64_t padded = 0;    // what is sent
  DType type = DType::bf16;
  Bytes message() const { return bytes_of(padded, type); }
};
/// Between memories; told by `from` and `to`: h2d, d2h, disk read or write.
struct Copy {
  Memory from = Memory::hbm, to = Memory::hbm;
  Bytes bytes;
};
struct AdamStep {
  std::int64_t parameters = 0;
  UpdateOn where = UpdateOn::device;
  Bytes traffic;  // read + written in the memory it runs from
};
/// Waits for its edges and takes no time: the end of the step, a segment border.
struct Join {};

using Work = std::variant<Alloc, Free, Compute, Collective, Copy, AdamStep, Join>;

struct WorkId {
  std::uint32_t index = 0;
};

/// An op by index, or a value carried around a repeated block (see Repeat), or none.
struct OpRef {
  static constexpr std::uint32_t kNone = 0xffffffff;
  static constexpr std::uint32_t kCarriedBit = 0x80000000;
  std::uint32_t bits = kNone;
  bool none() const { return bits == kNone; }
  bool carried() const { return !none() && (bits & kCarriedBit) != 0; }
  std::uint32_t index() const { return bits & ~kCarriedBit; }
  friend bool operator==(OpRef, OpRef) = default;
};

enum class Access : std::uint8_t { read, write, read_write };
/// For what sums (gradients, norms), `write` begins a sum and `read_write` adds to it.
struct Operand {
  BufferId buffer;
  Access access = Access::read;
};

struct Op {
  WorkId work;
  Stream stream = Stream::compute;
  Phase phase = Phase::forward;
  std::int16_t block = -1;       // position in ModelSpec::sequence; -1: the whole step
  std::uint32_t first_edge = 0;  // predecessors on other streams: Schedule::after()
  std::uint32_t first_operand = 0;
  std::uint16_t num_edges = 0;
  std::uint16_t num_operands = 0;
};

/// A value that flows around a repeated block: in the first iteration it is `first` (an op before the block), later
/// what `next` was at the end of the iteration before. The phi of compilers.
struct Carried {
  OpRef first, next;
};

/// Ops [begin, end) are executed `count` times. Blocks nest.
struct Repeat {
  std::uint32_t begin = 0, end = 0;
  std::int64_t count = 1;
  std::uint32_t first_carried = 0, num_carried = 0;
};

/// Immutable; made by ScheduleBuilder.
class Schedule {
 public:
  std::span<const Op> ops() const { return ops_; }
  std::span<const Buffer> buffers() const { return buffers_; }
  std::span<const Work> works() const { return works_; }
  const Work& work(const Op& op) const { return works_[op.work.index]; }
  const Buffer& buffer(BufferId id) const { return buffers_[id.index]; }
  std::span<const OpRef> after(const Op& op) const { return {edges_.data() + op.first_edge, op.num_edges}; }
  std::span<const Operand> operands(const Op& op) const {
    return {operands_.data() + op.first_operand, op.num_operands};
  }
  /// Sorted by begin; an enclosing block stands before those inside it.
  std::span<const Repeat> repeats() const { return repeats_; }
  std::span<const Carried> carried() const { return carried_; }
  bool folded() const { return !repeats_.empty(); }

  /// How often op `index` runs: the product of the repeat counts around it.
  std::vector<std::int64_t> multiplicities() const;

 private:
  friend class ScheduleBuilder;
  std::vector<Op> ops_;
  std::vector<Buffer> buffers_;
  std::vector<Work> works_;
  std::vector<OpRef> edges_;
  std::vector<Operand> operands_;
  std::vector<Repeat> repeats_;
  std::vector<Carried> carried_;
};

/// Collects a schedule. Edges must point to smaller ids: no cycle can be built.
class ScheduleBuilder {
 public:
  /// Makes room for about so many ops and what belongs to them.
  void reserve(std::size_t ops);
  /// Rounds the size up to kBufferAlignment.
  BufferId declare(Buffer buffer);
  WorkId work(Work work);
  /// Edges that are none() are dropped. Throws std::logic_error on an edge to a later op or an operand
  /// that was not declared.
  OpRef add(Stream stream, Phase phase, int block, WorkId work, std::span<const OpRef> after,
            std::span<const Operand> operands);

  void begin_repeat(std::int64_t count);
  /// Makes a carried value of the innermost open repeat. `first` may be none or carried (of an enclosing block).
  OpRef carry(OpRef first);
  void set_next(OpRef carried, OpRef next);
  void end_repeat();

  const Buffer& buffer(BufferId id) const { return schedule_.buffers_[id.index]; }
  std::size_t num_ops() const { return schedule_.ops_.size(); }
  Schedule finish();

 private:
  Schedule schedule_;
  std::vector<std::uint32_t> open_;  // indices of open repeats
};

/// "layer 3 backward: qkv weight gradient", "layer 4: gather weights".
std::string label(const Schedule& schedule, const Op& op, const ModelSpec& model);
/// "layer 3: norm 1 output", "head: weights shard".
std::string label(const Buffer& buffer, const ModelSpec& model);
/// "layer 3", "embedding", "head".
std::string block_label(const ModelSpec& model, int block);

/// Throws std::logic_error naming the ops if a step buffer is used outside its Alloc..Free, never freed or freed twice,
/// if Alloc or Free stand off the compute stream, or if two ops touch one buffer, one of them writing, with no path
/// between them (a race). Flat schedules only.
void validate(const Schedule& schedule, const ModelSpec& model);

}  // namespace zeroplan
