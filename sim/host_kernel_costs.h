#pragma once
// Times of single kernels on a probed host: one thread, and a rank's pool of threads. Part of host_device_model.h.

#include <cstdint>
#include <string_view>
#include <vector>

#include "models/host_kernels.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/schedule.h"

namespace zeroplan {

/// One kernel's work: what a single thread takes, into how many ranges a pool may cut it, and what comes from DRAM.
struct KernelWork {
  Seconds alone;
  std::int64_t ranges = 1;
  Bytes distant;
  std::int64_t column_ranges = 0;  // of the part that sums over rows; 0: there is none
};

class HostKernelCosts {
 public:
  /// Precondition: machine.host_kernels. Without a model only works that name themselves have a cost.
  HostKernelCosts(const MachineSpec& machine, int shard_ranks, DType type, const ModelSpec* model_or_null);

  /// Throws std::logic_error for a graph op when there is no model; InputError for a kernel that was not measured.
  KernelWork compute(const Compute& c) const;
  KernelWork adam(const AdamStep& a) const;
  /// Between two memories of the host.
  KernelWork copy(Bytes bytes) const;

  /// What a rank's pool takes while every rank of the node does the same.
  Seconds in_pool(const KernelWork& work) const;
  double speedup(int of_threads) const;
  int threads() const { return threads_; }

 private:
  BytesPerSecond memory_rate(int of_threads) const;
  double crowded(int threads_of_rank) const;
  Seconds in_pool(Seconds alone, std::int64_t ranges) const;

  const HostKernelTime& kernel(std::string_view name, DType of_type) const;
  Bytes passed_in_a_step() const;
  Bytes all_states(double bytes_per_parameter) const;
  double far_part(Bytes nearer) const;
  Bytes beyond_shared(Bytes moved, Bytes footprint) const;
  Bytes with_kept(Bytes moved, Pass pass) const;

  KernelWork elements(std::string_view name, DType of_type, std::int64_t count, Bytes moved, Bytes footprint) const;
  KernelWork elements(std::string_view name, std::int64_t count, Bytes moved) const;
  KernelWork rows(std::string_view name, std::int64_t count, std::int64_t width, Bytes moved) const;
  KernelWork product(std::string_view name, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                     std::int64_t weight_elements) const;
  KernelWork linear(const GraphOp* op, const std::vector<TensorSpec>* tensors, Pass pass, const Gemm& g) const;
  KernelWork attention(const AttentionWork& a) const;
  KernelWork norm(const BlockKind& kind, const GraphOp& op, Pass pass, const Pointwise& w) const;
  KernelWork pointwise(const BlockKind& kind, const GraphOp& op, Pass pass, const Pointwise& w) const;
  KernelWork coded(std::int16_t code, const Pointwise& w) const;
  KernelWork loss(const Pointwise& w) const;

  MachineSpec machine_;
  HostKernels host_;
  DType type_;
  int ranks_, shard_ranks_;
  int threads_ = 1;  // of a rank's pool
  std::vector<BlockKind> kinds_;
  double parameters_ = 0;
};

}  // namespace zeroplan
