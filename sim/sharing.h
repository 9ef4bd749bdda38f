#pragma once
// Who gets how much of what is shared. A flow with amounts w_j progresses at a rate r and uses w_j r of each resource
// j.
//
// Rates are bottleneck-fair (Bonald and Roberts, "Multi-resource fairness: objectives, algorithms and performance",
// SIGMETRICS 2015): no resource is used above its capacity, and each flow has a bottleneck, a full resource of which no
// other flow uses more than it does. With equal amounts this is max-min fairness.

#include <cstdint>
#include <span>
#include <vector>

namespace zeroplan {

struct Use {
  std::uint32_t resource = 0;
  double amount = 0;  // of the resource's unit, for a whole unit of progress; > 0
  friend bool operator==(const Use&, const Use&) = default;
};

/// Rates are worked out by solve(), anew only for flows that a change can reach: a flow is held by its bottleneck, so
/// it is looked at again when that resource has more or less to give, not when any other that it uses has.
/// Deterministic: the same calls give the same bits.
class FairSharing {
 public:
  struct Change {
    std::uint32_t flow = 0;
    double before = 0, now = 0;  // rates
  };

  /// Returns its index. `capacity` > 0.
  std::uint32_t add_resource(double capacity);
  /// Makes room for a flow that is started and stopped any number of times.
  std::uint32_t add_flow();

  /// Precondition: stopped; at least one use, no resource twice. Throws std::logic_error on an amount that is not
  /// positive and finite.
  void start(std::uint32_t flow, std::span<const Use> uses);
  /// Precondition: started.
  void stop(std::uint32_t flow);
  bool active(std::uint32_t flow) const { return flows_[flow].active; }

  /// Flows whose rate differs from that of the solve before, those just started included. Valid until the next call.
  std::span<const Change> solve();

  /// As of the last solve; 0 for a flow that is stopped.
  double rate(std::uint32_t flow) const { return flows_[flow].rate; }
  /// Part of the capacity in use; by flows that were active at the last solve.
  double load(std::uint32_t resource) const;
  std::size_t num_resources() const { return resources_.size(); }

 private:
  struct FlowUse {
    std::uint32_t resource = 0;
    double amount = 0, per_amount = 0;  // 1 / amount
  };
  struct Flow {
    std::vector<FlowUse> uses;  // by resource
    double rate = 0, before = 0;
    std::uint32_t vote = 0;  // the resource that limits it most; once solved, its bottleneck
    double voted_rate = 0;
    bool active = false, fresh = false;  // fresh: started since the last solve
    bool open = false;                   // its new rate is not known yet
    bool changing = false;               // its rate is worked out anew
  };
  struct User {
    std::uint32_t flow = 0;
    double amount = 0;
  };
  struct SharedResource {
    double capacity = 0;
    double left = 0;   // not yet given away
    double share = 0;  // left, evenly for each user that still waits
    std::uint32_t waiting = 0, votes = 0;
    std::uint32_t held = 0;  // flows whose bottleneck it is
    double most_kept = 0;    // most that one of those uses whose rates stay
    bool seen = false, dirty = false, touched = false, raised = false, queued = false;
    std::vector<User> users;
  };

  void begin();
  void reopen(std::uint32_t flow);
  void reach();
  void release_holders(std::uint32_t resource);
  void prepare(SharedResource& resource);
  void fill_all();
  bool find_overtaken();
  void vote(Flow& flow);
  void fix(Flow& flow, double rate);
  void queue_if_agreed(std::uint32_t resource);
  void fill(std::uint32_t resource);
  void raise_share(std::uint32_t resource);
  void revote(std::uint32_t resource);
  void settle_rest();
  double level(const SharedResource& resource, std::uint32_t index);

  std::vector<SharedResource> resources_;
  std::vector<Flow> flows_;
  std::vector<std::uint32_t> dirty_;                     // resources whose holders have more to share
  std::vector<std::uint32_t> fresh_;                     // flows
  std::vector<std::uint32_t> component_;                 // resources that changing flows use
  std::vector<std::uint32_t> flows_of_component_;        // changing flows
  std::size_t reached_ = 0;                              // of flows_of_component_: their resources are in component_
  std::vector<std::uint32_t> agreed_, touched_, moved_;  // resources
  std::size_t num_open_ = 0;
  std::vector<double> wants_;
  std::vector<Change> changes_;
};

}  // namespace zeroplan
