// Speed of the simulator: ninja simulate_bench && build/.../simulate_bench. Prints the least of several runs; the text
// of docs/benchmarks.md is this output.

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <queue>
#include <random>
#include <vector>

#include "models/lower.h"
#include "models/machine_spec.h"
#include "sim/cost_model.h"
#include "sim/event_queue.h"
#include "sim/sharing.h"
#include "sim/simulate.h"

namespace zeroplan {
namespace {

/// CPU time of this thread: other builds on the machine do not count.
double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds(const std::function<void()>& body, int runs) {
  double least = 1e300;
  for (int i = 0; i < runs; ++i) {
    const double begin = cpu_seconds();
    body();
    least = std::min(least, cpu_seconds() - begin);
  }
  return least;
}

/// std::priority_queue in the queue's clothes.
class Heap {
 public:
  void push(Event event) { heap_.push(event); }
  Event pop() {
    const Event event = heap_.top();
    heap_.pop();
    return event;
  }

 private:
  struct After {
    bool operator()(const Event& a, const Event& b) const {
      return a.time > b.time || (a.time == b.time && a.id > b.id);
    }
  };
  std::priority_queue<Event, std::vector<Event>, After> heap_;
};

/// The hold model: `pending` events; each pop pushes one at a later time. Nanoseconds for a pop and a push.
template <class Queue>
double hold(std::size_t pending, const std::vector<double>& gaps) {
  constexpr std::size_t kHolds = 4'000'000;
  double checksum = 0;
  double least = 1e300;
  for (int run = 0; run < 3; ++run) {
    Queue queue;
    for (std::size_t i = 0; i < pending; ++i) queue.push({gaps[i % gaps.size()], static_cast<std::uint32_t>(i), 0});
    for (std::size_t i = 0; i < pending; ++i) {  // reach the steady state
      Event event = queue.pop();
      event.time += gaps[(i * 7 + 1) % gaps.size()];
      queue.push(event);
    }
    least = std::min(least, seconds(
                                [&] {
                                  for (std::size_t i = 0; i < kHolds; ++i) {
                                    Event event = queue.pop();
                                    checksum += event.time;
                                    event.time += gaps[i % gaps.size()];
                                    queue.push(event);
                                  }
                                },
                                1));
  }
  if (checksum < 0) fmt::print("never\n");
  return least / kHolds * 1e9;
}

void bench_queue() {
  std::mt19937_64 random(1);
  const auto gaps = [&](auto distribution) {
    std::vector<double> all(1u << 20);
    for (double& gap : all) gap = distribution(random);
    return all;
  };
  const std::pair<const char*, std::vector<double>> shapes[] = {
      {"exponential", gaps(std::exponential_distribution<double>(1.0))},
      {"uniform 0.9-1.1", gaps(std::uniform_real_distribution<double>(0.9, 1.1))},
      {"log-normal, s = 3", gaps(std::lognormal_distribution<double>(0.0, 3.0))},
  };
  for (const std::size_t pending : {std::size_t{1000}, std::size_t{1'000'000}}) {
    for (const auto& [name, all] : shapes) {
      const double ours = hold<EventQueue>(pending, all), heap = hold<Heap>(pending, all);
      fmt::print("queue, {:>7} pending, {:18} {:6.1f} M pop + push/s; std::priority_queue {:5.1f} M ({:.1f} times)\n",
                 pending, name, 1e3 / ours, 1e3 / heap, heap / ours);
    }
  }
}

/// Flows of 1 to 4 resources come and go; each end recomputes what it touches.
void bench_flows(const char* name, std::uint32_t num_resources, std::uint32_t num_flows, std::uint32_t span) {
  constexpr int kCompletions = 500'000;
  const double time = seconds(
      [&] {
        std::mt19937 random(2);
        FairSharing sharing;
        EventQueue queue;
        std::vector<double> left(num_flows), updated(num_flows);
        std::vector<std::uint32_t> stamps(num_flows);
        for (std::uint32_t r = 0; r < num_resources; ++r) sharing.add_resource(1 + static_cast<double>(random() % 4));
        double now = 0;
        const auto begin = [&](std::uint32_t flow) {
          std::vector<Use> uses;
          const auto home = static_cast<std::uint32_t>(random() % (num_resources / span)) * span;
          const std::uint32_t count = std::min(span, 1 + static_cast<std::uint32_t>(random() % 4));
          const auto first = static_cast<std::uint32_t>(random() % span);
          for (std::uint32_t k = 0; k < count; ++k) uses.push_back({home + (first + k) % span, 1.0});
          left[flow] = 1 + static_cast<double>(random() % 1000) / 1000;
          updated[flow] = now;
          sharing.start(flow, uses);
        };
        const auto settle = [&] {
          for (const auto& change : sharing.solve()) {
            if (!sharing.active(change.flow)) continue;
            left[change.flow] -= (now - updated[change.flow]) * change.before;
            updated[change.flow] = now;
            queue.push({now + std::max(0.0, left[change.flow]) / change.now, change.flow, ++stamps[change.flow]});
          }
        };
        for (std::uint32_t f = 0; f < num_flows; ++f) sharing.add_flow();
        for (std::uint32_t f = 0; f < num_flows; ++f) begin(f);
        settle();
        for (int done = 0; done < kCompletions;) {
          const Event event = queue.pop();
          if (event.stamp != stamps[event.id]) continue;
          now = event.time;
          ++done;
          sharing.stop(event.id);
          begin(event.id);
          settle();
        }
      },
      3);
  fmt::print("flows, {:40} {:6.2f} M completions/s\n", name, kCompletions / time * 1e-6);
}

struct Job {
  const char* name;
  const char* gpus;
  int nodes;
  Plan plan;
  SimulatedRanks ranks;
};

void bench_job(const Job& job) {
  const ModelSpec model = find_model("llama-2-70b");
  const MachineSpec machine = machine_for(parse_gpu_request(job.gpus), job.nodes);
  Plan plan = job.plan;
  plan.ranks = plan.shard_ranks = machine.ranks();
  plan.optimizer =
      Placement::all(plan.optimizer.host > 0 ? Tier::host : Tier::hbm, static_cast<int>(model.sequence.size()));
  plan.parameters = Placement::all(Tier::hbm, static_cast<int>(model.sequence.size()));
  const MachineCostModel cost(machine, plan.shard_ranks, DType::bf16);
  Simulation result;
  double lowered = 0, estimated = 0;
  Seconds step;
  const double time = seconds(
      [&] {
        Schedule schedule;
        lowered = seconds([&] { schedule = lower(model, plan, Folding::none); }, 1);
        const auto asked = demands(schedule, cost);
        Estimate e;
        estimated = seconds([&] { e = Estimator().run(schedule, asked); }, 1);
        step = e.step;
        result = simulate(schedule, asked, machine, plan.shard_ranks, {job.ranks, 0, false});
      },
      3);
  const double run = time - lowered - estimated;
  fmt::print(
      "{:46} {} of {} ranks x {} ops: {:7.1f} ms ({:.2f} M ops/s, {} events), step {:.4f} s, {:.3f} of estimate()\n",
      job.name, result.simulated_ranks, result.ranks, result.ops, run * 1e3,
      static_cast<double>(result.ops * result.simulated_ranks) / run * 1e-6, result.events, result.step.base(),
      result.step / step);
}

void bench_jobs() {
  Plan plan;
  plan.zero_stage = 3;
  Plan offload = plan;
  offload.optimizer.host = 1;
  Plan steps = plan;
  steps.accumulation = 8;
  const auto all = SimulatedRanks::all, folded = SimulatedRanks::folded;
  bench_job({"70B ZeRO-3, 128 x 8xH100, all ranks", "8xH100", 128, plan, all});
  bench_job({"  optimizer on the host", "8xH100", 128, offload, all});
  bench_job({"70B ZeRO-3, 128 x 8xRTX 4090, all ranks", "8x4090", 128, plan, all});
  bench_job({"  optimizer on the host", "8x4090", 128, offload, all});
  bench_job({"70B ZeRO-3, 340 x 3xRTX 3090, all ranks", "3x3090", 340, offload, all});
  bench_job({"70B ZeRO-3, 16384 x 8xH100, folded", "8xH100", 16384, plan, folded});
  bench_job({"  optimizer on the host", "8xH100", 16384, offload, folded});
  bench_job({"  8 micro-steps", "8xH100", 16384, steps, folded});
}

}  // namespace
}  // namespace zeroplan

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  if (which.empty() || which == "queue") zeroplan::bench_queue();
  if (which.empty() || which == "flows") {
    zeroplan::bench_flows("256 on 1024 resources in islands of 8", 1024, 256, 8);
    zeroplan::bench_flows("64 on 64 resources, one component", 64, 64, 64);
  }
  if (which.empty() || which == "jobs") zeroplan::bench_jobs();
}
