#pragma once
// Random models, machines and legal plans for the property tests. The same seed gives the same cases on every platform.

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/plan.h"

namespace zeroplan::tests {

/// Draws that do not depend on the standard library's distributions.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  /// In [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high);
  /// True in `percent` of 100 draws.
  bool chance(int percent) { return between(1, 100) <= percent; }
  /// In [0, 1).
  double unit() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }
  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(from.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

/// One of the catalog's models, whole.
const ModelSpec& catalog_model(Random& random);
/// `model` with at most `layers` of its layers, in their order; an encoder's last and a decoder's first layer stay.
ModelSpec shortened(const ModelSpec& model, int layers, Random& random);
/// The text of a small Llama, GPT-2 or Mixtral configuration with odd sizes.
std::string random_config(Random& random);
/// Nine in ten with at most 4 layers: a shortened catalog model or a random configuration; else a whole catalog model.
ModelSpec random_model(Random& random);
/// As random_model(), but what a configuration can say: plan.json carries models so.
ModelSpec random_readable_model(Random& random);

/// A catalog node, or a GPU with a count, on one or several nodes, with and without NVMe.
MachineSpec random_machine(Random& random);

/// A plan that check_plan() accepts, whose shard groups fit nodes of `ranks_per_node`. `max_micro_layers` bounds layers
/// x micro-steps: how long the flat schedule gets.
Plan random_plan(Random& random, const ModelSpec& model, int ranks, int ranks_per_node,
                 std::int64_t max_micro_layers = 160);

struct Scenario {
  ModelSpec model;
  Plan plan;
};
Scenario random_scenario(Random& random);

/// For failure messages: everything that is needed to see the case again.
std::string name_of(const Scenario& scenario);

/// Cases of a slow property test: ZEROPLAN_PROPERTY_CASES, or `otherwise`.
std::int64_t slow_cases(std::int64_t otherwise);

}  // namespace zeroplan::tests
