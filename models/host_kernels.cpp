#include "models/host_kernels.h"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "models/gemm_tasks.h"

namespace zeroplan {
namespace {

constexpr std::array<std::string_view, 6> kMatmulTerms{"call", "mac", "packed_a", "packed_b", "stored", "distant"};
constexpr std::array<std::string_view, 5> kAttentionTerms{"call", "task", "mac", "score", "element"};
constexpr std::array<std::string_view, 5> kRowsTerms{"call", "row", "element", "far_element", "distant_element"};
constexpr std::array<std::string_view, 4> kElementsTerms{"call", "element", "far_element", "distant_element"};

constexpr HostKernelForm kForms[] = {
    {"linear forward", HostForm::matmul},
    {"linear backward data", HostForm::matmul},
    {"linear backward weight", HostForm::matmul},
    {"bias backward", HostForm::elements},
    {"attention forward", HostForm::attention},
    {"attention backward", HostForm::attention},
    {"norm rms forward", HostForm::rows},
    {"norm rms backward", HostForm::rows},
    {"norm layer forward", HostForm::rows},
    {"norm layer backward", HostForm::rows},
    {"rotary forward", HostForm::rows},
    {"rotary backward", HostForm::rows},
    {"silu forward", HostForm::elements},
    {"silu backward", HostForm::elements},
    {"silu gated forward", HostForm::elements},
    {"silu gated backward", HostForm::elements},
    {"gelu_tanh forward", HostForm::elements},
    {"gelu_tanh backward", HostForm::elements},
    {"gelu_tanh gated forward", HostForm::elements},
    {"gelu_tanh gated backward", HostForm::elements},
    {"gelu_erf forward", HostForm::elements},
    {"gelu_erf backward", HostForm::elements},
    {"gelu_erf gated forward", HostForm::elements},
    {"gelu_erf gated backward", HostForm::elements},
    {"relu forward", HostForm::elements},
    {"relu backward", HostForm::elements},
    {"embedding forward", HostForm::rows},
    {"embedding backward", HostForm::rows},
    {"loss", HostForm::rows},
    {"add", HostForm::elements},
    {"accumulate", HostForm::elements},
    {"gradient norm", HostForm::elements},
    {"clear", HostForm::elements},
    {"copy", HostForm::elements},
    {"adam", HostForm::elements},
};

// Queries of a task of runtime/kernels/attention.cpp.
constexpr std::int64_t kQueryBlock = 128;

constexpr std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }
constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) { return divide_up(n, unit) * unit; }

/// The part of a count whose operands lie beyond the first `nearer` of `bytes`.
double part_beyond(double count, Bytes nearer, Bytes bytes) {
  return bytes > nearer ? count * (1 - nearer / bytes) : 0;
}

}  // namespace

std::span<const std::string_view> terms_of(HostForm form) {
  switch (form) {
    case HostForm::matmul:
      return kMatmulTerms;
    case HostForm::attention:
      return kAttentionTerms;
    case HostForm::rows:
      return kRowsTerms;
    case HostForm::elements:
      return kElementsTerms;
  }
  throw std::logic_error("terms_of: unknown form");
}

std::span<const HostKernelForm> host_kernel_forms() { return kForms; }

const HostKernelForm* find_host_kernel(std::string_view name) {
  const auto* found = std::ranges::find(kForms, name, &HostKernelForm::name);
  return found == std::end(kForms) ? nullptr : found;
}

const HostKernelTime* HostKernels::find(std::string_view kernel, DType type) const {
  for (const HostKernelTime& time : kernels) {
    if (time.kernel == kernel && time.type == type) return &time;
  }
  return nullptr;
}

HostCounts matmul_counts(const HostKernels& host, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                         int threads, double distant) {
  const GemmTasks cut = gemm_tasks(m, n, threads);
  const std::int64_t rows = round_up(m, host.tile_rows), columns = round_up(n, host.tile_columns);
  const auto real = [](std::int64_t count) { return static_cast<double>(count); };
  return {1,
          real(rows) * real(columns) * real(k),
          real(rows) * real(k) * real(cut.column_tasks),
          real(columns) * real(k) * real(cut.row_tasks),
          real(m) * real(n) * (adds ? 2 : 1),
          distant};
}

HostCounts attention_counts(const HostKernels& host, const AttentionShape& shape, TokenShape tokens) {
  const std::int64_t s = tokens.seq_len, d = shape.qk_dim;
  const double groups = static_cast<double>(tokens.batch * shape.heads);
  double tasks = 0, macs = 0, scores = 0;
  for (std::int64_t row = 0; row < s; row += kQueryBlock) {
    const std::int64_t rows = std::min(kQueryBlock, s - row);
    const std::int64_t first = shape.window > 0 ? std::max<std::int64_t>(0, row - shape.window + 1) : 0;
    const std::int64_t keys = (shape.causal ? row + rows : s) - first;
    tasks += groups;
    scores += groups * static_cast<double>(rows * keys);
    const std::int64_t padded = round_up(rows, host.tile_rows);
    macs += groups * static_cast<double>(
                         padded * (round_up(keys, host.tile_columns) * d + keys * round_up(d, host.tile_columns)));
  }
  const double packed = static_cast<double>((shape.heads + 2 * shape.kv_heads) * d);
  return {1, tasks, macs, scores, static_cast<double>(tokens.tokens()) * packed};
}

HostCounts rows_counts(const HostKernels& host, std::int64_t rows, std::int64_t width, Bytes bytes) {
  const auto elements = static_cast<double>(rows * width);
  return {1, static_cast<double>(rows), elements, part_beyond(elements, host.near_memory, bytes),
          part_beyond(elements, host.shared_memory, bytes)};
}

HostCounts elements_counts(const HostKernels& host, std::int64_t elements, Bytes bytes) {
  const auto count = static_cast<double>(elements);
  return {1, count, part_beyond(count, host.near_memory, bytes), part_beyond(count, host.shared_memory, bytes)};
}

Seconds host_time(const HostKernelTime& kernel, std::span<const double> counts) {
  if (counts.size() != kernel.terms.size()) throw std::logic_error("host_time: counts of another kernel");
  Seconds sum;
  for (std::size_t i = 0; i < counts.size(); ++i) sum += counts[i] * kernel.terms[i];
  return sum;
}

}  // namespace zeroplan
