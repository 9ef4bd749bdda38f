#include "planner/engine_peak.h"

#include <fmt/format.h>

#include <span>

#include "models/op_label.h"

namespace zeroplan {
namespace {

/// How far a run, or the forward or backward of a micro-step, has come: `layers` from its first layer on.
enum class RunPart : std::uint8_t { initialize, before, layers };

std::string place_of(const TapeOp& op, RunPart part) {
  if (part == RunPart::initialize) return "initialize";
  if (op.block >= 0) return fmt::format("layer {}", op.block);
  switch (op.phase) {
    case Phase::forward:
      return part == RunPart::layers ? "head" : "embedding";
    case Phase::backward:
      return part == RunPart::layers ? "step" : "head";
    case Phase::optimizer:
      return "step";
  }
  return "step";
}

/// Follows the tape: bytes by owner, and which part of the model runs.
class Follower {
 public:
  explicit Follower(const EngineTape& tape) : tape_(tape) {}

  /// True when more is alive after the op than ever before.
  bool next(const TapeOp& op) {
    if (op.kind == TapeKind::mark) mark(op.mark);
    if (op.block >= 0) in_layers_ = true;
    if (op.kind != TapeKind::alloc && op.kind != TapeKind::free) return false;
    const TapeBuffer& buffer = tape_.buffer(static_cast<TapeId>(op.id));
    const std::int64_t change = op.kind == TapeKind::alloc ? buffer.bytes : -buffer.bytes;
    now_ += change;
    live_[static_cast<std::size_t>(buffer.owner)] += Bytes(static_cast<double>(change));
    if (now_ <= most_) return false;
    most_ = now_;
    return true;
  }

  const OwnerBytes& live() const { return live_; }
  RunPart part() const { return !initialized_ ? RunPart::initialize : in_layers_ ? RunPart::layers : RunPart::before; }

 private:
  void mark(Mark mark) {
    if (mark == Mark::init_end) initialized_ = true;
    // Forward goes from the embedding through the layers to the head, backward the other way.
    if (mark == Mark::micro_begin || mark == Mark::forward_end) in_layers_ = false;
  }

  const EngineTape& tape_;
  OwnerBytes live_{};
  std::int64_t now_ = 0, most_ = -1;
  bool initialized_ = false, in_layers_ = false;
};

std::optional<Work> first_work(const EngineTape& tape, std::span<const TapeOp> ops) {
  for (const TapeOp& op : ops) {
    if (op.kind == TapeKind::work) return tape.works()[op.id];
  }
  return std::nullopt;
}

}  // namespace

EnginePeak peak_moment(const EngineTape& tape) {
  Follower follower(tape);
  EnginePeak peak;
  std::size_t at = tape.ops().size();
  RunPart part = RunPart::initialize;
  for (std::size_t i = 0; i < tape.ops().size(); ++i) {
    if (!follower.next(tape.ops()[i])) continue;
    at = i;
    part = follower.part();
    peak.owners = follower.live();
  }
  if (at == tape.ops().size()) return peak;
  const TapeOp& highest = tape.ops()[at];
  peak.place = place_of(highest, part);
  peak.phase = highest.phase;
  peak.work = first_work(tape, tape.ops().subspan(at));
  return peak;
}

std::string label(const EnginePeak& peak, const ModelSpec& model) {
  const std::string where =
      peak.place == "initialize" ? peak.place : fmt::format("{} {}", peak.place, to_string(peak.phase));
  return peak.work ? fmt::format("{}: {}", where, work_name(*peak.work, model)) : where;
}

}  // namespace zeroplan
