// What one pass over the space must not miss.

#include "planner/searcher.h"

#include <algorithm>

#include "tests/catch.h"

namespace zeroplan {
namespace {

Request request_of(const std::string& model, const std::string& gpus) {
  Request request;
  request.model = find_model(model);
  request.machine = machine_for(parse_gpu_request(gpus), 1);
  request.seq_len = 4096;
  request.global_batch = 128;
  request.top_k = 10;
  return request;
}

TEST_CASE("States that go back to the GPU make room for their gradients too") {
  // 13B on 4 x 40 GB with full recompute: weights stay on the GPU, which has room for half of the states. A block whose
  // states return brings its fp32 gradient along.
  Request request = request_of("13B", "4xA100-40G");
  request.constraints.stages = {3};
  request.constraints.recompute = Recompute::full;
  request.constraints.micro_batch = 1;
  const auto plans = Searcher(request, {*request.seq_len, *request.global_batch}).run();
  const int blocks = static_cast<int>(request.model.sequence.size());
  const auto found = std::find_if(plans.begin(), plans.end(), [&](const Candidate& c) {
    return c.plan.gradients == Tier::host && c.plan.parameters.hbm == blocks;
  });
  REQUIRE(found != plans.end());
  CHECK(found->plan.optimizer.hbm > blocks / 3);
  CHECK(fits(found->prediction, request.margin));
}

TEST_CASE("a disk that would help is named with the offload that uses it") {
  Request request = request_of("13B", "8xA100-80G");
  set_host_memory(request.machine, 96_GiB);
  request.constraints.stages = {3};
  request.constraints.offload = Offload{OffloadWhat::optimizer, Tier::host};
  request.constraints.recompute = Recompute::full;
  request.constraints.micro_batch = 1;
  const Answer answer = search(request);
  REQUIRE(answer.shortfall.has_value());
  const auto& changes = answer.shortfall->changes;
  const auto disk = std::find_if(changes.begin(), changes.end(),
                                 [](const Shortfall::Change& c) { return c.flag.find("--nvme") != std::string::npos; });
  REQUIRE(disk != changes.end());
  CHECK(disk->flag == "--nvme 1x1TB --offload optimizer:nvme");
  // Followed, it fits.
  set_nvme(request.machine, "1x1TB");
  request.constraints.offload->to = Tier::nvme;
  CHECK(search(request).feasible);
}

}  // namespace
}  // namespace zeroplan
