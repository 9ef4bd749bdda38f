#include "models/engine_walk.h"

#include <algorithm>
#include <array>
#include <variant>
#include <vector>

namespace zeroplan {
namespace {

/// One micro-step after the other; holds what PyTorch has alive.
class Walk {
 public:
  Walk(EngineHooks& engine, const EagerStep& step, const EngineRun& run, EngineTape& tape)
      : engine_(engine), step_(step), run_(run), tape_(tape), works_(step.works.size(), kNotOnTape) {
    std::int32_t largest = -1;
    for (const EagerEvent& event : step.events) {
      if (event.kind == EagerEventKind::alloc) largest = std::max(largest, event.id);
    }
    storages_.resize(static_cast<std::size_t>(largest + 1), kNoBuffer);
  }

  void initialize() {
    tape_.alloc({run_.tokens.tokens() * size_of(DType::i64), Pool::compute, BufferRole::token_ids, Owner::buffers, -1});
    engine_.initialize();
    tape_.mark(Mark::init_end);
  }

  void micro_step(const MicroStep& now) {
    tape_.set_phase(Phase::forward);
    tape_.mark(Mark::micro_begin);
    engine_.begin(now);
    for (const EagerEvent& event : step_.events) play(event);
    tape_.set_block(-1);
  }

 private:
  void play(const EagerEvent& event) {
    switch (event.kind) {
      case EagerEventKind::alloc:
        storages_[index(event.id)] = tape_.alloc({event.bytes, Pool::compute, BufferRole::value, Owner::activations,
                                                  static_cast<std::int16_t>(tape_.block())});
        return;
      case EagerEventKind::free:
        tape_.free(storages_[index(event.id)]);
        storages_[index(event.id)] = kNoBuffer;
        return;
      case EagerEventKind::kernel:
        if (event.adds_bias) take_lt_workspace();
        if (std::holds_alternative<Gemm>(step_.works[index(event.id)].kernel)) take_workspace();
        tape_.run(Stream::compute, work_of(index(event.id)));
        return;
      case EagerEventKind::gradient: {
        const TapeId storage = storages_[index(event.storage)];
        storages_[index(event.storage)] = kNoBuffer;
        engine_.gradient(event.id, storage);
        return;
      }
      case EagerEventKind::forward_pre:
        tape_.set_block(step_.modules[index(event.id)].layer);
        engine_.forward_pre(event.id);
        return;
      case EagerEventKind::forward_post:
        engine_.forward_post(event.id);
        return;
      case EagerEventKind::backward_pre:
        tape_.set_block(step_.modules[index(event.id)].layer);
        engine_.backward_pre(event.id);
        return;
      case EagerEventKind::backward_post:
        engine_.backward_post(event.id);
        return;
      case EagerEventKind::hold:
        engine_.hold(event.id, event.storage);
        return;
      case EagerEventKind::let_go:
        engine_.let_go(event.storage);
        return;
      case EagerEventKind::forward_end:
        engine_.forward_end();
        tape_.mark(Mark::forward_end);
        tape_.set_phase(Phase::backward);
        return;
      case EagerEventKind::backward_end:
        engine_.backward_end();
        tape_.mark(Mark::backward_end);
        tape_.set_phase(Phase::optimizer);
        return;
    }
  }

  std::uint32_t work_of(std::size_t id) {
    if (works_[id] == kNotOnTape) works_[id] = tape_.add_work(step_.works[id]);
    return works_[id];
  }

  /// With the first matrix product of forward, and of backward, which has a thread and so a handle of its own.
  void take_workspace() {
    const bool backward = in_backward();
    if (workspaces_ >= (backward ? 2 : 1)) return;
    tape_.alloc({run_.cublas_workspace, Pool::compute, BufferRole::workspace, Owner::buffers, -1});
    ++workspaces_;
  }
  void take_lt_workspace() {
    bool& taken = lt_workspaces_[in_backward() ? 1 : 0];
    if (taken || run_.cublas_workspace == 0) return;
    taken = true;
    tape_.alloc({run_.cublaslt_workspace, Pool::compute, BufferRole::workspace, Owner::buffers, -1});
  }
  bool in_backward() const { return tape_.phase() == Phase::backward; }
  static std::size_t index(std::int32_t id) { return static_cast<std::size_t>(id); }

  EngineHooks& engine_;
  const EagerStep& step_;
  const EngineRun& run_;
  EngineTape& tape_;
  static constexpr std::uint32_t kNotOnTape = 0xffffffff;
  std::vector<TapeId> storages_;
  std::vector<std::uint32_t> works_;  // of the tape, by the step's
  int workspaces_ = 0;
  std::array<bool, 2> lt_workspaces_{};  // of forward's thread, of autograd's
};

}  // namespace

void record_run(EngineHooks& engine, const EagerStep& step, const EngineRun& run, EngineTape& tape) {
  Walk walk(engine, step, run, tape);
  walk.initialize();
  for (int i = 0; i < run.steps; ++i) {
    tape.mark(Mark::step_begin);
    for (int micro = 0; micro < run.accumulation; ++micro) {
      const bool last = micro == run.accumulation - 1;
      walk.micro_step({i, micro, last});
      if (last) engine.update();
      tape.mark(Mark::micro_end);
    }
    tape.mark(Mark::step_end);
  }
}

}  // namespace zeroplan
