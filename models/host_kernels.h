#pragma once
// What `zeroplan probe` measures of a host whose cores are the devices, and what its kernels are counted in. One thread
// takes the sum over a kernel's terms of count x time of one ("call", "mac", "element", ...). The probe fits the times,
// the cost model multiplies them: both count with the functions below.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/model_spec.h"
#include "models/units.h"

namespace zeroplan {

/// How a kernel's work is counted.
enum class HostForm : std::uint8_t {
  matmul,     // call, mac, packed_a, packed_b, stored, distant
  attention,  // call, task, mac, score, element
  rows,       // call, row, element, far_element, distant_element
  elements,   // call, element, far_element, distant_element
};
std::span<const std::string_view> terms_of(HostForm form);

struct HostKernelForm {
  std::string_view name;  // "linear forward", "norm rms backward", "adam"
  HostForm form;
};
/// Every kernel that a probe measures.
std::span<const HostKernelForm> host_kernel_forms();
/// nullptr when there is none of that name.
const HostKernelForm* find_host_kernel(std::string_view name);

/// One kernel on one element type, in one thread.
struct HostKernelTime {
  std::string kernel;
  DType type = DType::bf16;
  std::vector<Seconds> terms;  // in the order of terms_of(form)
  friend bool operator==(const HostKernelTime&, const HostKernelTime&) = default;
};

/// How much faster so many threads are than one, on products of matrices.
struct HostSpeedup {
  int threads = 1;
  double compute = 1;
  friend bool operator==(const HostSpeedup&, const HostSpeedup&) = default;
};
/// Read-modify-write of a large array.
struct HostMemoryRate {
  int threads = 1;
  BytesPerSecond rate;
  friend bool operator==(const HostMemoryRate&, const HostMemoryRate&) = default;
};
/// A collective of so many ranks, one a thread: from the last one's arrival to the return of all.
struct HostCollectiveTime {
  std::string collective;  // "all-gather", "reduce-scatter", "all-reduce"
  int ranks = 2;
  DType type = DType::bf16;
  std::vector<Bytes> messages;  // the full tensor; ascending
  std::vector<Seconds> times;
  friend bool operator==(const HostCollectiveTime&, const HostCollectiveTime&) = default;
};
struct HostDiskRate {
  std::string direction;  // "read", "write"
  Bytes block;
  int depth = 1;  // transfers in flight
  BytesPerSecond rate;
  friend bool operator==(const HostDiskRate&, const HostDiskRate&) = default;
};

struct HostKernels {
  std::string instructions;  // of the matmul kernel: "avx512", "avx2", "portable"
  int tile_rows = 4;         // what it computes at once
  int tile_columns = 4;
  Bytes near_memory;                  // operands up to this size come from a core's own caches
  Bytes shared_memory;                // up to this size from a cache that cores share; beyond it from DRAM
  Seconds pool_wake;                  // until a thread of a pool begins its part
  Seconds stream_wake;                // until a stream goes on after an op of another stream
  std::vector<HostSpeedup> speedups;  // threads ascending, 1 first
  std::vector<HostMemoryRate> memory;
  std::vector<HostKernelTime> kernels;
  std::vector<HostCollectiveTime> collectives;
  std::vector<HostDiskRate> disk;
  friend bool operator==(const HostKernels&, const HostKernels&) = default;

  /// nullptr when it was not measured.
  const HostKernelTime* find(std::string_view kernel, DType type) const;
};

// --- counts, in the order of terms_of() -------------------------------------------------------------

/// A kernel's counts; the sum of count x time is its time in one thread.
using HostCounts = std::vector<double>;

/// y[m, n] (+)= a[m, k] b[k, n] as runtime/kernels/gemm.cpp cuts it for `threads` threads. `adds`: the output is read
/// too. `distant`: elements of weights or of their gradient that come from, or go to, DRAM.
HostCounts matmul_counts(const HostKernels& host, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                         int threads, double distant);
/// As runtime/kernels/attention.cpp: blocks of 128 queries with all their keys.
HostCounts attention_counts(const HostKernels& host, const AttentionShape& shape, TokenShape tokens);
/// `bytes`: what is read and written between two uses of the same memory; at least what the op itself moves.
HostCounts rows_counts(const HostKernels& host, std::int64_t rows, std::int64_t width, Bytes bytes);
HostCounts elements_counts(const HostKernels& host, std::int64_t elements, Bytes bytes);

/// Precondition: as many counts as terms.
Seconds host_time(const HostKernelTime& kernel, std::span<const double> counts);

}  // namespace zeroplan
