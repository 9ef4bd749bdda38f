#pragma once
// Which parameters stage 3 has gathered at any moment: DeepSpeed's PartitionedParameterCoordinator with its exact
// fetch, prefetch and release rules (deepspeed.md section 5.4), and what each gather allocates (5.5).

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "models/deepspeed_stage_parts.h"

namespace zeroplan {

class ParameterFetcher {
 public:
  ParameterFetcher(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);

  /// A root forward begins. The first one is recorded with its backward; from the second on the trace is used (first
  /// steps of data/groundtruth; engine-rules.md 2.11 has both one later).
  void begin_micro_step();
  /// Pre-hooks: the module's parameters are there when this returns; with a trace more are on their way.
  void fetch(int module, bool forward);
  /// Post-hooks: what no later use holds is given up.
  void release(int module, bool forward);
  /// Backwards that no post-hook ended (their inputs need no gradient).
  void end_backward();
  /// Everything is released, persistent parameters too; secondary shards are dropped.
  void release_all();
  /// After the update, one gather a persistent parameter.
  void gather_persistent();
  /// One parameter gathered and given up again, as initialize does for each trainable one.
  void visit(std::size_t parameter);
  void make_secondary(std::size_t parameter);
  void drop_secondary_shards();
  /// A graph keeps the parameter's gathered buffer: given up meanwhile, it is freed by the last let_go().
  void hold(int parameter, int number);
  void let_go(int number);

 private:
  enum class State : std::uint8_t { sharded, in_flight, available };
  struct Parameter {
    std::int64_t elements = 0, shard = 0;
    bool persistent = false, trainable = true;
    State state = State::sharded;
    TapeId full = kNoBuffer;
    TapeId secondary = kNoBuffer;  // hpZ
    int flight = -1;               // index into flights_
    int last_use = -1;             // position in the trace for which it was last fetched or promised
    std::set<int> users;           // modules that are at work with it
  };
  /// One all-gather. Several parameters share a flat buffer until the last of them has been waited for; under MiCS
  /// there is none: each is received where it will stay.
  struct Flight {
    TapeId buffer = kNoBuffer;
    TapeId scales = kNoBuffer, dequantized = kNoBuffer;  // of 8-bit weights: for each group; all in fp16
    std::vector<std::size_t> parameters;
    int waited = 0;
    bool copied = false;
  };
  /// What a rank contributes to a gather, and how many do.
  struct Part {
    std::int64_t elements = 0;
    int ranks = 1;
  };
  Part part_of(const Parameter& parameter) const;
  const std::vector<int>& own(int module) const { return step_.modules[static_cast<std::size_t>(module)].parameters; }
  Parameter& at(int parameter) { return parameters_[static_cast<std::size_t>(parameter)]; }
  bool traced() const { return !trace_.empty(); }
  Group group_of(const Parameter& parameter) const;
  std::int64_t gathered_bytes(const Parameter& parameter) const;
  void in_flight(const std::vector<std::size_t>& wanted, const Flight& flight);

  void gather(const std::vector<std::size_t>& wanted);
  void start_flight(const std::vector<std::size_t>& wanted);
  void start_mics_flight(const std::vector<std::size_t>& wanted);
  void start_quantized_flight(const std::vector<std::size_t>& wanted);
  void dequantize_one(std::size_t parameter, Flight& flight);
  void dequantize_all(Flight& flight);
  void gather_alone(std::size_t parameter);
  bool autograd_holds(int module, int parameter, bool forward) const;
  TapeId bring_up_shard(const Parameter& parameter, Stream stream, Pool pool);
  std::vector<TapeId> bring_up(const std::vector<std::size_t>& wanted);
  void start_without_gather(const std::vector<std::size_t>& wanted);
  void wait_for(std::size_t parameter);
  void copy_out(Flight& flight);
  void follow_trace(int module);
  void prefetch();
  const std::vector<int>& releasable(int module);
  void give_up(std::size_t parameter, int holder = -1);
  void drop(TapeId full);

  const EagerStep& step_;
  const DeepSpeedJob& job_;
  EngineTape& tape_;
  Stream stream_;
  Pool pool_;
  std::int64_t weight_size_;
  int shard_ranks_;
  std::vector<Parameter> parameters_;
  std::vector<Flight> flights_;
  int in_flight_ = 0;           // parameters
  std::int64_t available_ = 0;  // elements gathered through here since the root forward began

  int forwards_ = 0;  // root forwards
  bool recording_ = false, in_backward_ = false;
  std::vector<int> recorded_, trace_;       // modules in the order of their hooks
  std::vector<std::pair<int, int>> queue_;  // (parameter, position) of the trace
  std::size_t queue_head_ = 0;
  int position_ = 0;                                         // hooks since the root forward began
  std::map<std::pair<int, int>, std::vector<int>> release_;  // by module and position; never invalidated
  /// Buffers that graphs keep.
  struct Kept {
    int holds = 0;
    bool given_up = false;
  };
  std::map<TapeId, Kept> kept_;
  std::map<int, TapeId> holds_;              // by number
  std::vector<int> open_backwards_;          // modules whose backward runs
  std::map<int, std::set<int>> recomputed_;  // frozen parameters fetched by recomputation inside one
  bool quantizes_;                           // gathers of the hooks carry 8-bit weights
  bool holds_weights_;                       // linears keep what they multiplied with: up to 0.19.3
  std::set<int> runs_again_;                 // modules of which backward repeats the forward
  std::map<int, std::vector<TapeId>> held_;  // by module, until its backward is over
};

}  // namespace zeroplan
