#pragma once
// Plans under DeepSpeed or FSDP2 as those engines run them: configuration, step time, memory, verdict.

#include <memory>

#include "planner/engine_fit.h"
#include "planner/search.h"
#include "sim/engine_time.h"

namespace zeroplan {

/// What predict_engine_time() is asked for the plan's step. DeepSpeed as its exported configuration has it.
EngineTimeRun engine_time_run(const Plan& plan, const ModelSpec& model);
EngineWorkload engine_workload(const Plan& plan);
Fsdp2Options fsdp2_options(const Plan& plan);

/// Plans of one request; keeps what plans share. The request outlives it. Not thread-safe.
class EnginePlans {
 public:
  explicit EnginePlans(const Request& request);

  EngineTime time(const Plan& plan) const { return time(plan, request_.machine, builtin_engine_time_fit()); }
  EngineTime time(const Plan& plan, const MachineSpec& machine, const EngineTimeFit& fit,
                  double collective_scale = 1) const;
  EngineTrial try_fit(const Plan& plan);
  EngineFit fit(const Plan& plan, FitDetail detail = FitDetail::whole);
  /// The run op by op, its accumulation as given.
  EngineRecording record(const Plan& plan, std::int64_t accumulation,
                         RecordedMicroSteps recorded = RecordedMicroSteps::different);
  /// As deepspeed.json of the plan has it.
  DeepSpeedConfig configuration(const Plan& plan) const;
  Candidate candidate(const Plan& plan, const EngineTime& time, const EngineFit& fit) const;
  /// The request's model with its adapters.
  const ModelSpec& trained() const { return trained_; }

 private:
  bool nvme_fits(const Plan& plan) const;

  const Request& request_;
  ModelSpec trained_;
  MachineSpec diskless_;  // on the machine itself the exporter may move states of other plans to NVMe
  EngineFitter fitter_;
};

}  // namespace zeroplan
