// gpu_sweep OUT_FOLDER [PEAK_TFLOPS]: measures one GPU and its host, and writes the tables described in
// docs/measurements/README.md: environment, sustained, gemm, launch, memory, pcie, host (.csv). It sets nothing on the
// card. About two minutes. Exit 0 all written, 2 wrong arguments, 3 a CUDA or cuBLAS call failed or a result was wrong.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 tests/tools/gpu_sweep.cu -lcublasLt -o gpu_sweep && ./gpu_sweep out
//
// Self-contained on purpose: it has to build on a bare machine with nothing but nvcc.

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <immintrin.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <source_location>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Bf16 = __nv_bfloat16;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGiB = std::size_t{1} << 30;
constexpr std::size_t kColdBytes = 512 * kMiB;  // cycled through between two uses of a buffer: 8 times H200's L2
constexpr double kSampleMs = 4;                 // shortest timed sample; 5 samples make 20 ms
constexpr int kSamples = 5;
constexpr std::size_t kMaxGraphNodes = 512;
constexpr double kGemmBudgetSeconds = 110;  // wall clock; rows that do not fit are named, never dropped silently

// --- errors, owners -----------------------------------------------------------------------------

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const std::string& what, const char* name, const std::source_location& at) {
  throw Failure(what + " failed: " + name + " at " + at.file_name() + ":" + std::to_string(at.line()) + " in " +
                at.function_name());
}

void check(cudaError_t status, std::source_location at = std::source_location::current()) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the sticky copy
  fail("CUDA call", cudaGetErrorName(status), at);
}

void check(cublasStatus_t status, std::source_location at = std::source_location::current()) {
  if (status != CUBLAS_STATUS_SUCCESS) fail("cuBLAS call", cublasLtGetStatusName(status), at);
}

void check_launch(std::source_location at = std::source_location::current()) { check(cudaGetLastError(), at); }

// What frees each kind of handle.
struct Destroy {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
  void operator()(cublasLtHandle_t library) const { cublasLtDestroy(library); }
  void operator()(cublasLtMatmulDesc_t operation) const { cublasLtMatmulDescDestroy(operation); }
  void operator()(cublasLtMatrixLayout_t layout) const { cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const { cublasLtMatmulPreferenceDestroy(preference); }
};
struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct FreePinned {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};

/// Owns a handle; neither copied nor moved.
template <class Handle, class Free = Destroy>
struct Owned {
  Handle handle{};
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle) Free()(handle);
  }
  operator Handle() const { return handle; }
};

struct Stream : Owned<cudaStream_t> {
  Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
};
struct Event : Owned<cudaEvent_t> {
  explicit Event(unsigned flags = cudaEventDefault) { check(cudaEventCreateWithFlags(&handle, flags)); }
};
struct DeviceBuffer : Owned<void*, FreeDevice> {
  explicit DeviceBuffer(std::size_t bytes) { check(cudaMalloc(&handle, bytes)); }
  char* bytes() const { return static_cast<char*>(handle); }
};
struct PinnedBuffer : Owned<void*, FreePinned> {
  explicit PinnedBuffer(std::size_t bytes) { check(cudaHostAlloc(&handle, bytes, cudaHostAllocDefault)); }
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double elapsed_us(cudaEvent_t from, cudaEvent_t to) {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, from, to));
  return 1000.0 * ms;
}

/// A CSV file that reports what it could not write.
class Table {
 public:
  Table(const std::filesystem::path& folder, const std::string& name, const std::string& header)
      : path_(folder / name), file_(std::fopen(path_.c_str(), "w")) {
    if (!file_) throw Failure(path_.string() + ": cannot be written");
    row("%s", header.c_str());
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() { std::fclose(file_); }
  template <class... Args>
  void row(const char* format, Args... args) {
    std::fprintf(file_, format, args...);
    if (std::fputc('\n', file_) == EOF || std::fflush(file_) != 0) throw Failure(path_.string() + ": write failed");
  }

 private:
  std::filesystem::path path_;
  std::FILE* file_;
};

std::string nvidia_smi() {
  std::FILE* pipe = popen(
      "nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,"
      "power.limit --format=csv,noheader 2>&1",
      "r");
  if (!pipe) return "nvidia-smi could not be started";
  char line[512] = "";
  std::string text = std::fgets(line, sizeof line, pipe) ? line : "nvidia-smi printed nothing";
  pclose(pipe);
  std::erase(text, '\n');
  return text;
}

// --- kernels ------------------------------------------------------------------------------------

__device__ std::uint64_t mixed(std::uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Standard normal values, a function of the index and the seed only. Two at a time by Box-Muller.
template <class Element>
__global__ void fill_normal(Element* out, std::size_t count, std::uint64_t seed, float scale) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; 2 * i < count; i += stride) {
    const std::uint64_t bits = mixed((i + 1) * 0x9e3779b97f4a7c15ULL + seed);
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
    const float angle = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
    float s = 0, c = 0;
    sincospif(2 * angle, &s, &c);
    const float radius = scale * sqrtf(-2 * logf(u));
    out[2 * i] = Element(radius * c);
    if (2 * i + 1 < count) out[2 * i + 1] = Element(radius * s);
  }
}

template <class Element>
void fill(cudaStream_t stream, void* data, std::size_t count, std::uint64_t seed, float scale = 1) {
  fill_normal<<<2048, 256, 0, stream>>>(static_cast<Element*>(data), count, seed, scale);
  check_launch();
}

__device__ std::uint64_t global_ns() {
  std::uint64_t ns = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void empty_kernel() {}

/// Keeps the stream busy, so that what is queued behind it starts with a full queue and no host in the way.
__global__ void spin(std::uint64_t ns) {
  const std::uint64_t start = global_ns();
  while (global_ns() - start < ns) {
  }
}

/// SM clock: cycles over 300 us of the global timer, right behind the work that set the clock.
__global__ void sm_clock(double* mhz) {
  const std::uint64_t start_ns = global_ns();
  const long long start = clock64();
  std::uint64_t now = start_ns;
  while (now - start_ns < 300000) now = global_ns();
  *mhz = static_cast<double>(clock64() - start) * 1e3 / static_cast<double>(now - start_ns);
}

/// out[m, n] = first x second in double, by the index rules of the three layouts (GemmCase).
__global__ void naive_gemm(const Bf16* weight_side, const Bf16* token_side, double* out, int m, int n, int k,
                           bool first_transposed, bool second_transposed) {
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (column >= n) return;
  double sum = 0;
  for (int l = 0; l < k; ++l) {
    const Bf16 a =
        first_transposed ? weight_side[std::size_t(column) * k + l] : weight_side[std::size_t(l) * n + column];
    const Bf16 b = second_transposed ? token_side[std::size_t(l) * m + row] : token_side[std::size_t(row) * k + l];
    sum += double(__bfloat162float(a)) * double(__bfloat162float(b));
  }
  out[std::size_t(row) * n + column] = sum;
}

constexpr int kVectors = 4;  // independent 16-byte accesses in flight a thread
constexpr int kThreads = 256;

__global__ void copy_kernel(const float4* in, float4* out, std::size_t count) {
  const std::size_t first = std::size_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  float4 v[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (first + j * kThreads < count) v[j] = in[first + j * kThreads];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (first + j * kThreads < count) out[first + j * kThreads] = v[j];
}

__global__ void add_kernel(const float4* a, const float4* b, float4* out, std::size_t count) {
  const std::size_t first = std::size_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  float4 x[kVectors], y[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (first + j * kThreads < count) x[j] = a[first + j * kThreads], y[j] = b[first + j * kThreads];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (first + j * kThreads < count)
      out[first + j * kThreads] = {x[j].x + y[j].x, x[j].y + y[j].y, x[j].z + y[j].z, x[j].w + y[j].w};
}

/// One partial sum a block: the written bytes do not count.
__global__ void reduce_kernel(const float4* in, float* partial, std::size_t count) {
  float sum = 0;
  const std::size_t first = std::size_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (first + j * kThreads < count) {
      const float4 v = in[first + j * kThreads];
      sum += (v.x + v.y) + (v.z + v.w);
    }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
  __shared__ float warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) sum += warps[w];
    partial[blockIdx.x] = sum;
  }
}

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101) at one step: bias corrections are factors of that step.
struct AdamConstants {
  float rate = 1e-3f, beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f, decay = 0.1f;
  float inverse_correction1 = 1 / (1 - 0.9f), inverse_correction2 = 1 / (1 - 0.95f);
};

__host__ __device__ inline void adam_step(float gradient, float& master, float& momentum, float& variance,
                                          const AdamConstants& c) {
  momentum = c.beta1 * momentum + (1 - c.beta1) * gradient;
  variance = c.beta2 * variance + (1 - c.beta2) * gradient * gradient;
  const float step = momentum * c.inverse_correction1 / (sqrtf(variance * c.inverse_correction2) + c.epsilon);
  master -= c.rate * (step + c.decay * master);
}

/// Eight parameters a thread. 28 bytes a parameter: 2 + 4 + 4 + 4 read, 4 + 4 + 4 + 2 written.
__global__ void adam_kernel(const uint4* gradient, float4* master, float4* momentum, float4* variance, uint4* out,
                            std::size_t eights, AdamConstants constants) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= eights) return;
  const uint4 packed = gradient[i];
  float4 p[2] = {master[2 * i], master[2 * i + 1]};
  float4 m[2] = {momentum[2 * i], momentum[2 * i + 1]};
  float4 v[2] = {variance[2 * i], variance[2 * i + 1]};
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
  unsigned result[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float4 &pw = p[w / 2], &mw = m[w / 2], &vw = v[w / 2];
    float& p0 = w % 2 ? pw.z : pw.x;
    float& p1 = w % 2 ? pw.w : pw.y;
    adam_step(__uint_as_float(words[w] << 16), p0, w % 2 ? mw.z : mw.x, w % 2 ? vw.z : vw.x, constants);
    adam_step(__uint_as_float(words[w] & 0xffff0000u), p1, w % 2 ? mw.w : mw.y, w % 2 ? vw.w : vw.y, constants);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(p0, p1);
    memcpy(&result[w], &pair, sizeof pair);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    master[2 * i + h] = p[h];
    momentum[2 * i + h] = m[h];
    variance[2 * i + h] = v[h];
  }
  out[i] = {result[0], result[1], result[2], result[3]};
}

unsigned blocks_for(std::size_t items, std::size_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// --- timing -------------------------------------------------------------------------------------

struct Timing {
  double median_us = 0, min_us = 0, max_us = 0;  // of one launch
  std::size_t launches = 0;                      // timed in all
};

Timing summary(std::vector<double> samples, std::size_t launches) {
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples.front(), samples.back(), launches};
}

using Launch = std::function<void(std::size_t index)>;

struct Graph : Owned<cudaGraphExec_t> {
  /// `nodes` launches in a row on `stream`, captured.
  Graph(cudaStream_t stream, const Launch& launch, std::size_t nodes) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (std::size_t i = 0; i < nodes; ++i) launch(i);
    Owned<cudaGraph_t> graph;
    check(cudaStreamEndCapture(stream, &graph.handle));
    check(cudaGraphInstantiate(&handle, graph.handle, 0));
  }
};

/// Median time of one launch in a replayed graph (the host cannot be the bottleneck). `launch(i)` uses buffer set
/// i modulo the number of sets. `guess_us` sizes the graph; one untimed launch loads the kernel.
Timing timed(cudaStream_t stream, const Launch& launch, double guess_us, std::size_t min_nodes = 1,
             double sample_ms = kSampleMs, int samples = kSamples) {
  launch(0);
  const auto wanted = static_cast<std::size_t>(std::ceil(1000 * sample_ms / guess_us));
  const std::size_t nodes = std::clamp(wanted, std::size_t{1}, kMaxGraphNodes);
  const std::size_t graph_nodes = std::max(nodes, std::min(min_nodes, kMaxGraphNodes));
  const Graph graph(stream, launch, graph_nodes);
  const std::size_t replays = std::max<std::size_t>(1, (wanted + graph_nodes - 1) / graph_nodes);
  std::vector<Event> marks(samples + 1);
  if (samples > 1) check(cudaGraphLaunch(graph, stream));  // warm-up
  check(cudaEventRecord(marks[0], stream));
  for (int s = 0; s < samples; ++s) {
    for (std::size_t r = 0; r < replays; ++r) check(cudaGraphLaunch(graph, stream));
    check(cudaEventRecord(marks[s + 1], stream));
  }
  check(cudaStreamSynchronize(stream));
  std::vector<double> each;
  for (int s = 0; s < samples; ++s)
    each.push_back(elapsed_us(marks[s], marks[s + 1]) / static_cast<double>(replays * graph_nodes));
  return summary(std::move(each), samples * replays * graph_nodes);
}

// --- matmuls ------------------------------------------------------------------------------------

enum class Role { forward, input_gradient, weight_gradient };

/// One product out[m, n] (row-major) summed over k, named as SimuMax's table does, from cuBLAS's column-major view
/// (weight side first):  TN forward: X[m, k], W[n, k].  NN input gradient: dY[m, k], W[k, n].
/// NT weight gradient: dY[k, m], X[k, n], so that k is the tokens.
struct GemmCase {
  Role role = Role::forward;
  std::int64_t m = 0, k = 0, n = 0;
  bool fp32 = false, accumulate = false;
  std::string what;

  const char* layout() const { return role == Role::forward ? "TN" : role == Role::input_gradient ? "NN" : "NT"; }
  bool first_transposed() const { return role == Role::forward; }
  bool second_transposed() const { return role == Role::weight_gradient; }
  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
  std::size_t first_bytes() const { return aligned(n * k * 2); }
  std::size_t second_bytes() const { return aligned(m * k * 2); }
  std::size_t out_bytes() const { return aligned(m * n * (fp32 ? 4 : 2)); }
  std::size_t footprint() const { return first_bytes() + second_bytes() + out_bytes(); }
  /// Buffer sets to cycle through so that no operand is found in the L2 cache.
  std::size_t sets() const { return (kColdBytes + footprint() - 1) / footprint(); }
  static std::size_t aligned(std::int64_t bytes) { return (static_cast<std::size_t>(bytes) + 1023) / 1024 * 1024; }
};

struct Linear {
  const char* name;
  std::int64_t out, in;
  bool all_tokens;  // measured at every token count, not only at 8192
};

// Linear layers of published configurations (config.json of each model); "qkv" and "gate+up" are the fused forms.
constexpr Linear kLinears[] = {
    {"Llama-2 7B qkv", 12288, 4096, false},
    {"Llama-2 7B o", 4096, 4096, true},
    {"Llama-2 7B up", 11008, 4096, false},
    {"Llama-2 7B gate+up", 22016, 4096, true},
    {"Llama-2 7B down", 4096, 11008, true},
    {"Llama-2 13B o", 5120, 5120, false},
    {"Llama-2 13B up", 13824, 5120, true},
    {"Llama-2 13B down", 5120, 13824, false},
    {"Llama-2 70B qkv", 10240, 8192, false},
    {"Llama-2 70B o", 8192, 8192, false},
    {"Llama-2 70B up", 28672, 8192, true},
    {"Llama-2 70B down", 8192, 28672, false},
    {"Llama-3 8B kv", 1024, 4096, false},
    {"Llama-3 8B qkv", 6144, 4096, true},
    {"Llama-3 8B up", 14336, 4096, false},
    {"Llama-3 8B down", 4096, 14336, false},
    {"Qwen2.5 0.5B qkv", 1152, 896, false},
    {"Qwen2.5 0.5B o", 896, 896, true},
    {"Qwen2.5 0.5B up", 4864, 896, true},
    {"Qwen2.5 0.5B down", 896, 4864, false},
    {"Qwen2.5 1.5B qkv", 2048, 1536, false},
    {"Qwen2.5 1.5B up", 8960, 1536, true},
    {"Qwen2.5 1.5B down", 1536, 8960, false},
    {"GPT-2 qkv", 2304, 768, false},
    {"GPT-2 o", 768, 768, true},
    {"GPT-2 up", 3072, 768, true},
    {"GPT-2 down", 768, 3072, false},
    {"GPT-2 large up", 5120, 1280, false},
    {"GPT-2 large down", 1280, 5120, false},
    {"GPT-2 XL qkv", 4800, 1600, false},
    {"GPT-2 XL o", 1600, 1600, false},
    {"GPT-2 XL up", 6400, 1600, true},
    {"GPT-2 XL down", 1600, 6400, false},
    {"Llama-2 7B head", 32000, 4096, false},
    {"GPT-2 head", 50257, 768, false},
    {"GPT-2 head, padded", 50304, 768, false},
    {"Llama-3 8B head", 128256, 4096, false},
    {"Qwen2.5 0.5B head", 151936, 896, false},
};

GemmCase linear_case(const Linear& layer, Role role, std::int64_t tokens) {
  GemmCase c;
  c.role = role;
  c.what = layer.name;
  std::erase(c.what, ',');
  if (role == Role::forward) std::tie(c.m, c.k, c.n) = std::tuple(tokens, layer.in, layer.out);
  if (role == Role::input_gradient) std::tie(c.m, c.k, c.n) = std::tuple(tokens, layer.out, layer.in);
  if (role == Role::weight_gradient) std::tie(c.m, c.k, c.n) = std::tuple(layer.out, tokens, layer.in);
  return c;
}

void add_output_variants(std::vector<GemmCase>& cases, GemmCase base) {
  for (const auto& [fp32, accumulate] : {std::pair(false, false), {false, true}, {true, false}, {true, true}}) {
    base.fp32 = fp32;
    base.accumulate = accumulate;
    cases.push_back(base);
  }
}

/// Sweeps first, then 8192 tokens, then the other token counts: the order in which rows matter if time runs out.
std::vector<GemmCase> planned_cases() {
  constexpr Role kRoles[] = {Role::forward, Role::input_gradient, Role::weight_gradient};
  std::vector<GemmCase> cases;
  for (const std::int64_t k : {64, 128, 256, 512, 1024, 2048, 4096, 8192})
    for (const Role role : kRoles) cases.push_back({role, 4096, k, 4096, false, false, "k sweep"});
  for (std::int64_t tiles = 8; tiles <= 27; ++tiles)
    cases.push_back({Role::forward, 128 * tiles, 4096, 128 * tiles, false, false, "tile sweep"});
  for (const std::int64_t size : {8192, 16384})
    cases.push_back({Role::forward, size, size, size, false, false, "square"});
  for (const Linear& layer : kLinears) {
    for (const Role role : kRoles) {
      GemmCase c = linear_case(layer, role, 8192);
      c.accumulate = c.fp32 = role == Role::weight_gradient;
      cases.push_back(c);
      if (layer.all_tokens && role == Role::weight_gradient) add_output_variants(cases, c);
    }
    if (layer.out >= 32000) {  // logits are often written in fp32
      GemmCase c = linear_case(layer, Role::forward, 8192);
      c.fp32 = true;
      cases.push_back(c);
    }
  }
  add_output_variants(cases, linear_case(kLinears[1], Role::forward, 8192));
  for (const std::int64_t tokens : {512, 1024, 2048, 4096, 16384, 32768})
    for (const Linear& layer : kLinears) {
      if (!layer.all_tokens) continue;
      for (const Role role : kRoles) {
        GemmCase c = linear_case(layer, role, tokens);
        // The engine accumulates weight gradients in fp32 or in bf16: both, alternating by token count.
        c.accumulate = role == Role::weight_gradient;
        c.fp32 = c.accumulate && tokens != 1024 && tokens != 4096 && tokens != 32768;
        cases.push_back(c);
      }
    }
  std::set<std::tuple<int, std::int64_t, std::int64_t, std::int64_t, bool, bool>> seen;
  std::erase_if(cases, [&seen](const GemmCase& c) {
    return !seen.insert({static_cast<int>(c.role), c.m, c.k, c.n, c.fp32, c.accumulate}).second;
  });
  return cases;
}

using MatrixLayout = Owned<cublasLtMatrixLayout_t>;

/// cuBLASLt's view of one case: descriptors, and the algorithms that its heuristic ranks first.
class Matmul {
 public:
  Matmul(cublasLtHandle_t library, const GemmCase& c, void* workspace, std::size_t workspace_bytes)
      : library_(library), workspace_(workspace), workspace_bytes_(workspace_bytes), beta_(c.accumulate ? 1.f : 0.f) {
    check(cublasLtMatmulDescCreate(&operation_.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t first = c.first_transposed() ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = c.second_transposed() ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    check(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    create(first_, CUDA_R_16BF, c.first_transposed() ? c.k : c.n, c.first_transposed() ? c.n : c.k);
    create(second_, CUDA_R_16BF, c.second_transposed() ? c.m : c.k, c.second_transposed() ? c.k : c.m);
    create(out_, c.fp32 ? CUDA_R_32F : CUDA_R_16BF, c.n, c.m);
    find_algorithms();
  }

  std::size_t num_algorithms() const { return algorithms_.size(); }

  void run(std::size_t algorithm, const void* first, const void* second, void* out, cudaStream_t stream) const {
    const float alpha = 1;
    check(cublasLtMatmul(library_, operation_, &alpha, first, first_, second, second_, &beta_, out, out_, out, out_,
                         &algorithms_[algorithm].value, workspace_, workspace_bytes_, stream));
  }

 private:
  static void create(MatrixLayout& layout, cudaDataType type, std::int64_t rows, std::int64_t columns) {
    check(cublasLtMatrixLayoutCreate(&layout.handle, type, static_cast<std::uint64_t>(rows),
                                     static_cast<std::uint64_t>(columns), rows));
  }

  void find_algorithms() {
    constexpr int kCandidates = 8;
    Owned<cublasLtMatmulPreference_t> preference;
    check(cublasLtMatmulPreferenceCreate(&preference.handle));
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes_,
                                               sizeof workspace_bytes_));
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int found = 0;
    check(cublasLtMatmulAlgoGetHeuristic(library_, operation_, first_, second_, out_, out_, preference, kCandidates,
                                         results, &found));
    for (int i = 0; i < found; ++i)
      if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms_.push_back({results[i].algo});
    if (algorithms_.empty()) throw Failure("cuBLASLt: no algorithm for a matmul");
  }

  cublasLtHandle_t library_;
  void* workspace_;
  std::size_t workspace_bytes_;
  float beta_;
  Owned<cublasLtMatmulDesc_t> operation_;
  MatrixLayout first_, second_, out_;
  // Named: cudafe++ 13.0 crashes on a std::vector of cuBLASLt's unnamed structs.
  struct Algorithm {
    cublasLtMatmulAlgo_t value;
  };
  std::vector<Algorithm> algorithms_;
};

struct CublasLt : Owned<cublasLtHandle_t> {
  CublasLt() { check(cublasLtCreate(&handle)); }
};

/// Operand pools large enough for every case, filled with normal bf16 values once; products read, never change them.
class GemmBench {
 public:
  explicit GemmBench(const std::vector<GemmCase>& cases)
      : first_bytes_(largest(cases, &GemmCase::first_bytes)),
        second_bytes_(largest(cases, &GemmCase::second_bytes)),
        first_(first_bytes_),
        second_(second_bytes_),
        out_(largest(cases, &GemmCase::out_bytes)),
        workspace_(kWorkspaceBytes),
        clock_(sizeof(double)) {
    fill<Bf16>(stream_, first_, first_bytes_ / 2, 1);
    fill<Bf16>(stream_, second_, second_bytes_ / 2, 2);
    check(cudaStreamSynchronize(stream_));
  }

  struct Result {
    Timing timing;
    std::size_t algorithms = 0;
    double first_choice_us = 0;
    double sm_mhz = 0;
  };

  /// The best of the heuristic's algorithms, each timed once, then timed properly.
  Result measure(const GemmCase& c) {
    prepare_output(c);
    const Matmul matmul(library_, c, workspace_, kWorkspaceBytes);
    double guess = c.flops() / 600e6 + 3;  // us, at 600 TFLOP/s
    std::size_t best = 0;
    double best_us = 0, first_us = 0;
    for (std::size_t a = 0; a < matmul.num_algorithms(); ++a) {
      const double us = timed(stream_, launcher(matmul, a, c), guess, 1, 0.3, 1).median_us;
      if (a == 0) first_us = us;
      if (a == 0 || us < best_us) std::tie(best, best_us) = std::pair(a, us);
    }
    Result result{timed(stream_, launcher(matmul, best, c), best_us, c.sets()), matmul.num_algorithms(), first_us, 0};
    sm_clock<<<1, 1, 0, stream_>>>(static_cast<double*>(clock_.handle));
    check_launch();
    check(cudaMemcpyAsync(&result.sm_mhz, clock_, sizeof(double), cudaMemcpyDeviceToHost, stream_));
    check(cudaStreamSynchronize(stream_));
    return result;
  }

  /// Every layout and output against double arithmetic; throws Failure on a wrong product.
  void verify();
  /// `seconds` of 8192-cubed products without a pause: does the rate fall as the card warms?
  void sustain(Table& table, double seconds);

 private:
  static constexpr std::size_t kWorkspaceBytes = 64 * kMiB;

  static std::size_t largest(const std::vector<GemmCase>& cases, std::size_t (GemmCase::*bytes)() const) {
    std::size_t most = 0;
    for (const GemmCase& c : cases) most = std::max(most, (c.*bytes)() * c.sets());
    return most;
  }

  void prepare_output(const GemmCase& c) {
    const std::size_t bytes = c.out_bytes() * c.sets();
    if (c.fp32) fill<float>(stream_, out_, bytes / 4, 3);
    if (!c.fp32) fill<Bf16>(stream_, out_, bytes / 2, 3);
  }

  Launch launcher(const Matmul& matmul, std::size_t algorithm, const GemmCase& c) {
    return [this, &matmul, algorithm, sets = c.sets(), first = c.first_bytes(), second = c.second_bytes(),
            out = c.out_bytes()](std::size_t i) {
      const std::size_t set = i % sets;
      matmul.run(algorithm, first_.bytes() + set * first, second_.bytes() + set * second, out_.bytes() + set * out,
                 stream_);
    };
  }

  std::size_t first_bytes_, second_bytes_;
  Stream stream_;
  CublasLt library_;
  DeviceBuffer first_, second_, out_, workspace_, clock_;
};

template <class Element>
double relative_error(const char* out, const std::vector<double>& reference, double start_scale) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    Element value;
    std::memcpy(&value, out + i * sizeof(Element), sizeof value);
    const double expected = reference[i] + start_scale;
    error += (double(float(value)) - expected) * (double(float(value)) - expected);
    norm += expected * expected;
  }
  return std::sqrt(error / norm);
}

void GemmBench::verify() {
  constexpr int kM = 384, kN = 640, kK = 512;
  constexpr double kTolerance = 1e-2;  // bf16 results round at 2^-9
  const DeviceBuffer reference(sizeof(double) * kM * kN);
  for (const Role role : {Role::forward, Role::input_gradient, Role::weight_gradient}) {
    std::vector<GemmCase> cases;
    add_output_variants(cases, {role, kM, kK, kN, false, false, "check"});
    for (const GemmCase& c : cases) {
      // Accumulating starts from ones (bf16 0x3f80, fp32 0x3f800000); otherwise the output is poisoned with NaN.
      std::vector<char> host(c.out_bytes());
      const std::uint32_t word = !c.accumulate ? 0xffffffffu : c.fp32 ? 0x3f800000u : 0x3f803f80u;
      for (std::size_t i = 0; i + 4 <= host.size(); i += 4) std::memcpy(&host[i], &word, 4);
      check(cudaMemcpy(out_, host.data(), host.size(), cudaMemcpyHostToDevice));
      check(cudaDeviceSynchronize());  // a pageable copy may return before it has landed; stream_ would not wait
      const Matmul matmul(library_, c, workspace_, kWorkspaceBytes);
      matmul.run(0, first_, second_, out_, stream_);
      naive_gemm<<<dim3(blocks_for(kN, 128), kM), 128, 0, stream_>>>(
          static_cast<const Bf16*>(first_.handle), static_cast<const Bf16*>(second_.handle),
          static_cast<double*>(reference.handle), kM, kN, kK, c.first_transposed(), c.second_transposed());
      check_launch();
      check(cudaStreamSynchronize(stream_));
      std::vector<double> expected(std::size_t{kM} * kN);
      check(cudaMemcpy(expected.data(), reference, sizeof(double) * expected.size(), cudaMemcpyDeviceToHost));
      check(cudaMemcpy(host.data(), out_, host.size(), cudaMemcpyDeviceToHost));
      const double start = c.accumulate ? 1 : 0;
      const double error = c.fp32 ? relative_error<float>(host.data(), expected, start)
                                  : relative_error<Bf16>(host.data(), expected, start);
      if (!(error < kTolerance))
        throw Failure(std::string("matmul ") + c.layout() + " is wrong: relative error " + std::to_string(error));
    }
  }
  std::printf("gemm: 12 layout and output combinations agree with double arithmetic\n");
}

void GemmBench::sustain(Table& table, double seconds) {
  const GemmCase c{Role::forward, 8192, 8192, 8192, false, false, "sustained"};
  prepare_output(c);
  const Matmul matmul(library_, c, workspace_, kWorkspaceBytes);
  constexpr int kPerGraph = 40;  // about 55 ms on an H200
  const Launch launch = launcher(matmul, 0, c);
  launch(0);
  const Graph graph(stream_, launch, kPerGraph);
  const int replays = static_cast<int>(std::ceil(seconds / (kPerGraph * c.flops() / 780e12)));
  std::vector<Event> marks(static_cast<std::size_t>(replays) + 1);
  check(cudaEventRecord(marks[0], stream_));
  for (int i = 0; i < replays; ++i) {
    check(cudaGraphLaunch(graph, stream_));
    check(cudaEventRecord(marks[i + 1], stream_));
  }
  const std::string under_load = nvidia_smi();
  check(cudaStreamSynchronize(stream_));
  double last = 0;
  for (int i = 0; i < replays; ++i) {
    last = kPerGraph * c.flops() / elapsed_us(marks[i], marks[i + 1]) / 1e6;
    table.row("%.1f,%.1f,8192x8192x8192 TN bf16", elapsed_us(marks[0], marks[i + 1]) / 1e3, last);
  }
  std::printf("sustained: %.0f TFLOP/s after %.1f s; under load: %s\n", last,
              elapsed_us(marks[0], marks[replays]) / 1e6, under_load.c_str());
}

void measure_gemms(const std::filesystem::path& folder, const std::string& gpu, double peak_tflops) {
  const std::vector<GemmCase> cases = planned_cases();
  GemmBench bench(cases);
  bench.verify();
  Table sustained(folder, "sustained.csv", "elapsed_ms,tflops,shape");
  bench.sustain(sustained, 3);
  Table table(folder, "gemm.csv",
              "row_id,source_id,source,locator,gpu,op,batch,m,k,n,layout,accumulate,out_dtype,extra_key,peak_tflops,"
              "efficiency,achieved_tflops,est_time_us,value_kind,extra_notes");
  const Clock::time_point start = Clock::now();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const GemmCase& c = cases[i];
    if (seconds_since(start) > kGemmBudgetSeconds) {
      std::printf("gemm: time budget of %.0f s spent, the last %zu of %zu rows were NOT measured\n", kGemmBudgetSeconds,
                  cases.size() - i, cases.size());
      break;
    }
    const GemmBench::Result r = bench.measure(c);
    const double tflops = c.flops() / r.timing.median_us / 1e6;
    table.row(
        "sweep-%03zu,gpu_sweep,tests/tools/gpu_sweep.cu,%s,%s,matmul,1,%lld,%lld,%lld,%s,%s,%s,,%g,%.6f,%.2f,%.3f,"
        "measured,%zu timed launches; spread %.1f %%; best of %zu algorithms; first choice %.2f us; SM %.0f MHz",
        i, c.what.c_str(), gpu.c_str(), static_cast<long long>(c.m), static_cast<long long>(c.k),
        static_cast<long long>(c.n), c.layout(), c.accumulate ? "True" : "False", c.fp32 ? "fp32" : "bf16", peak_tflops,
        tflops / peak_tflops, tflops, r.timing.median_us, r.timing.launches,
        100 * (r.timing.max_us - r.timing.min_us) / r.timing.median_us, r.algorithms, r.first_choice_us, r.sm_mhz);
    if (i % 25 == 0 || i + 1 == cases.size())
      std::printf("gemm %3zu/%zu %6.1f s  %s %lldx%lldx%lld: %.1f TFLOP/s, SM %.0f MHz\n", i + 1, cases.size(),
                  seconds_since(start), c.layout(), static_cast<long long>(c.m), static_cast<long long>(c.k),
                  static_cast<long long>(c.n), tflops, r.sm_mhz);
    std::fflush(stdout);
  }
}

// --- launches -----------------------------------------------------------------------------------

/// Device time and host time of `count` rounds of `enqueue`, queued behind a spinning kernel so that the host is ahead.
/// `count` stays small enough for the driver's queue (about 1000 entries), or the host would wait for the device.
struct Queued {
  double device_us = 0, host_us = 0;  // each a round
};

Queued queued(cudaStream_t stream, int count, const Launch& enqueue) {
  std::vector<double> device, host;
  for (int repeat = 0; repeat < 2 * kSamples; ++repeat) {
    const Event begin, end;
    spin<<<1, 1, 0, stream>>>(20'000'000);
    check_launch();
    check(cudaEventRecord(begin, stream));
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < count; ++i) enqueue(static_cast<std::size_t>(i));
    host.push_back(seconds_since(start) * 1e6 / count);
    check(cudaEventRecord(end, stream));
    check(cudaStreamSynchronize(stream));
    device.push_back(elapsed_us(begin, end) / count);
  }
  return {summary(device, 1).median_us, summary(host, 1).median_us};
}

class LaunchBench {
 public:
  explicit LaunchBench(Table& table, int num_sms) : table_(table), num_sms_(static_cast<unsigned>(num_sms)) {}

  void empty_kernels() {
    for (const unsigned blocks : {1u, num_sms_, 8 * num_sms_}) {
      const Launch launch = [this, blocks](std::size_t) {
        empty_kernel<<<blocks, 128, 0, stream_>>>();
        check_launch();
      };
      const std::string grid = std::to_string(blocks) + " blocks";
      back_to_back("empty kernel; host launching; " + grid, launch);
      const Queued q = queued(stream_, 400, launch);
      write("empty kernel; full queue; " + grid, 400, q.device_us);
      write("host time of a launch call; " + grid, 400, q.host_us);
      write("empty kernel; graph replay; " + grid, 512, timed(stream_, launch, 2).median_us);
    }
  }

  void events() {
    const Event mark(cudaEventDisableTiming), there(cudaEventDisableTiming), back(cudaEventDisableTiming);
    const Queued record = queued(stream_, 300, [&](std::size_t) {
      empty_kernel<<<1, 128, 0, stream_>>>();
      check_launch();
      check(cudaEventRecord(mark, stream_));
    });
    write("empty kernel and event record; one stream; full queue", 300, record.device_us);
    write("host time of launch and event record", 300, record.host_us);
    const Stream other;
    const Queued round_trip = queued(stream_, 100, [&](std::size_t) {
      empty_kernel<<<1, 128, 0, stream_>>>();
      check_launch();
      check(cudaEventRecord(there, stream_));
      check(cudaStreamWaitEvent(other, there, 0));
      empty_kernel<<<1, 128, 0, other>>>();
      check_launch();
      check(cudaEventRecord(back, other));
      check(cudaStreamWaitEvent(stream_, back, 0));
    });
    write("hop to another stream: kernel and record and wait; full queue", 200, round_trip.device_us / 2);
    write("host time of a hop", 200, round_trip.host_us / 2);
  }

  void short_kernels() {
    for (const std::size_t bytes : {64 * kMiB / 1024, kMiB, 16 * kMiB}) {
      const DeviceBuffer in(bytes), out(bytes);
      fill<float>(stream_, in, bytes / 4, 4);
      const std::size_t count = bytes / sizeof(float4);
      const Launch launch = [&](std::size_t) {
        copy_kernel<<<blocks_for(count, kThreads * kVectors), kThreads, 0, stream_>>>(
            static_cast<const float4*>(in.handle), static_cast<float4*>(out.handle), count);
        check_launch();
      };
      launch(0);
      const std::string name = "copy kernel of " + std::to_string(bytes / 1024) + " KiB in L2";
      back_to_back(name + "; host launching", launch);
      write(name + "; full queue", 400, queued(stream_, 400, launch).device_us);
      write(name + "; graph replay", 512, timed(stream_, launch, 2).median_us);
    }
  }

  void host_round_trips() {
    constexpr int kTrips = 1000;
    double launch = 0, copy = 0;
    const DeviceBuffer device(1024);
    const PinnedBuffer host(1024);
    for (int i = 0; i < kTrips; ++i) {
      Clock::time_point start = Clock::now();
      empty_kernel<<<1, 128, 0, stream_>>>();
      check_launch();
      check(cudaStreamSynchronize(stream_));
      launch += seconds_since(start);
      start = Clock::now();
      check(cudaMemcpyAsync(device, host, 4, cudaMemcpyHostToDevice, stream_));
      check(cudaStreamSynchronize(stream_));
      copy += seconds_since(start);
    }
    write("launch and synchronize; wall clock", kTrips, launch / kTrips * 1e6);
    write("4-byte pinned copy to device and synchronize; wall clock", kTrips, copy / kTrips * 1e6);
  }

 private:
  void back_to_back(const std::string& name, const Launch& launch) {
    constexpr int kLaunches = 10000;
    std::vector<double> each;
    for (int sample = 0; sample < kSamples; ++sample) {
      const Event begin, end;
      check(cudaEventRecord(begin, stream_));
      for (int i = 0; i < kLaunches; ++i) launch(static_cast<std::size_t>(i));
      check(cudaEventRecord(end, stream_));
      check(cudaStreamSynchronize(stream_));
      each.push_back(elapsed_us(begin, end) / kLaunches);
    }
    write(name, kLaunches, summary(each, kLaunches).median_us);
  }

  void write(const std::string& name, int count, double us) {
    table_.row("%s,%d,%.3f", name.c_str(), count, us);
    std::printf("launch: %-62s %8.2f us\n", name.c_str(), us);
  }

  Table& table_;
  unsigned num_sms_;
  Stream stream_;
};

// --- device memory ------------------------------------------------------------------------------

/// Slices of one pool: set i of `bytes` bytes each.
class MemoryBench {
 public:
  explicit MemoryBench(Table& table) : table_(table), pool_(kPool), partial_(kGiB / 1024) {
    // Finite whatever it is read as: two bf16 make an fp32 with the second as high half.
    fill<Bf16>(stream_, pool_, kPool / 2, 5, 1e-2f);
  }

  void verify();

  void sweep() {
    for (const std::size_t bytes : {kMiB, 4 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB, kGiB, 4 * kGiB})
      for (const bool cold : {true, false}) {
        if (!cold && bytes > 64 * kMiB) continue;  // larger buffers never stay in L2
        stream_kernels(bytes, cold);
        adam(bytes / 4, cold);
      }
  }

 private:
  static constexpr std::size_t kPool = 17 * kGiB;

  void stream_kernels(std::size_t bytes, bool cold) {
    const std::size_t count = bytes / sizeof(float4);
    const unsigned blocks = blocks_for(count, kThreads * kVectors);
    const auto at = [this, bytes](std::size_t slot) { return reinterpret_cast<float4*>(pool_.bytes() + slot * bytes); };
    measure("read", bytes, bytes, bytes, cold, [=, this](std::size_t set) {
      reduce_kernel<<<blocks, kThreads, 0, stream_>>>(at(set), static_cast<float*>(partial_.handle), count);
    });
    measure("copy", bytes, 2 * bytes, 2 * bytes, cold, [=, this](std::size_t set) {
      copy_kernel<<<blocks, kThreads, 0, stream_>>>(at(2 * set), at(2 * set + 1), count);
    });
    measure("cudaMemcpy device to device", bytes, 2 * bytes, 2 * bytes, cold, [=, this](std::size_t set) {
      check(cudaMemcpyAsync(at(2 * set + 1), at(2 * set), bytes, cudaMemcpyDeviceToDevice, stream_));
    });
    measure("add of two into a third", bytes, 3 * bytes, 3 * bytes, cold, [=, this](std::size_t set) {
      add_kernel<<<blocks, kThreads, 0, stream_>>>(at(3 * set), at(3 * set + 1), at(3 * set + 2), count);
    });
  }

  void launch_adam(std::size_t parameters, char* base) {
    const std::size_t vector = 4 * parameters;
    adam_kernel<<<blocks_for(parameters / 8, kThreads), kThreads, 0, stream_>>>(
        reinterpret_cast<uint4*>(base + 3 * vector), reinterpret_cast<float4*>(base),
        reinterpret_cast<float4*>(base + vector), reinterpret_cast<float4*>(base + 2 * vector),
        reinterpret_cast<uint4*>(base + 3 * vector + 2 * parameters), parameters / 8, AdamConstants{});
    check_launch();
  }

  void adam(std::size_t parameters, bool cold) {
    const std::size_t sets = cold ? (kColdBytes + 16 * parameters - 1) / (16 * parameters) : 1;
    for (std::size_t set = 0; set < sets; ++set) fill_adam(parameters, pool_.bytes() + set * 16 * parameters);
    measure("fused AdamW", 4 * parameters, 16 * parameters, 28 * parameters, cold,
            [=, this](std::size_t set) { launch_adam(parameters, pool_.bytes() + set * 16 * parameters); });
    fill<Bf16>(stream_, pool_, std::min(kPool, sets * 16 * parameters) / 2, 5, 1e-2f);
  }

  /// master, momentum, variance (fp32), gradient, out (bf16), one after another. The variance is made positive by one
  /// step of the kernel from zero.
  void fill_adam(std::size_t parameters, char* base) {
    fill<float>(stream_, base, parameters, 6);
    check(cudaMemsetAsync(base + 4 * parameters, 0, 8 * parameters, stream_));
    fill<Bf16>(stream_, base + 12 * parameters, 2 * parameters, 7, 1e-2f);
    launch_adam(parameters, base);
  }

  /// `footprint` bytes a set, `moved` bytes read and written by one launch.
  void measure(const char* kernel, std::size_t buffer, std::size_t footprint, std::size_t moved, bool cold,
               const Launch& launch) {
    const std::size_t sets = cold ? (kColdBytes + footprint - 1) / footprint : 1;
    const Launch checked = [&launch, sets](std::size_t i) {
      launch(i % sets);
      check_launch();
    };
    const Timing t = timed(stream_, checked, static_cast<double>(moved) / 4e6 + 2, sets);
    const double rate = static_cast<double>(moved) / t.median_us / 1e3;
    table_.row("%s,%zu,%zu,%s,%zu,%.3f,%.1f,%.1f", kernel, buffer, moved, cold ? "cold" : "L2", t.launches, t.median_us,
               rate, 100 * (t.max_us - t.min_us) / t.median_us);
    if (cold && (buffer == kMiB || buffer == 64 * kMiB || buffer == 4 * kGiB))
      std::printf("memory: %-28s %5zu MiB buffers %10.2f us %8.1f GB/s\n", kernel, buffer / kMiB, t.median_us, rate);
  }

  Table& table_;
  Stream stream_;
  DeviceBuffer pool_, partial_;
};

void require(bool right, const char* what) {
  if (!right) throw Failure(std::string("wrong result of the kernel: ") + what);
}

void MemoryBench::verify() {
  constexpr std::size_t kCount = 1 << 16, kBytes = 4 * kCount;
  std::vector<float> a(kCount), b(kCount), c(kCount), d(kCount);
  char* base = pool_.bytes();
  fill<float>(stream_, base, kCount, 8);
  fill<float>(stream_, base + kBytes, kCount, 9);
  check(cudaMemsetAsync(base + 2 * kBytes, 0xff, 2 * kBytes, stream_));
  const auto at = [base](int slot) { return reinterpret_cast<float4*>(base + slot * kBytes); };
  const unsigned blocks = blocks_for(kCount / 4, kThreads * kVectors);
  add_kernel<<<blocks, kThreads, 0, stream_>>>(at(0), at(1), at(2), kCount / 4);
  copy_kernel<<<blocks, kThreads, 0, stream_>>>(at(2), at(3), kCount / 4);
  check_launch();
  reduce_kernel<<<blocks, kThreads, 0, stream_>>>(at(0), static_cast<float*>(partial_.handle), kCount / 4);
  check_launch();
  check(cudaStreamSynchronize(stream_));
  int slot = 0;
  for (std::vector<float>* to : {&a, &b, &c, &d})
    check(cudaMemcpy(to->data(), at(slot++), kBytes, cudaMemcpyDeviceToHost));
  std::vector<float> partial(blocks);
  check(cudaMemcpy(partial.data(), partial_, 4 * blocks, cudaMemcpyDeviceToHost));
  double sum = 0, expected = 0;
  for (const float p : partial) sum += p;
  for (std::size_t i = 0; i < kCount; ++i) {
    expected += a[i];
    require(c[i] == a[i] + b[i] && d[i] == c[i], "add or copy");
  }
  require(std::abs(sum - expected) < 1e-2, "read");
  fill_adam(kCount, base);
  check(cudaStreamSynchronize(stream_));
  std::vector<char> before(16 * kCount), after(16 * kCount);
  check(cudaMemcpy(before.data(), base, before.size(), cudaMemcpyDeviceToHost));
  launch_adam(kCount, base);
  check(cudaStreamSynchronize(stream_));
  check(cudaMemcpy(after.data(), base, after.size(), cudaMemcpyDeviceToHost));
  for (std::size_t i = 0; i < kCount; ++i) {
    float state[3], out[3];
    for (std::size_t s = 0; s < 3; ++s) {
      std::memcpy(&state[s], &before[(s * kCount + i) * 4], 4);
      std::memcpy(&out[s], &after[(s * kCount + i) * 4], 4);
    }
    std::uint16_t gradient = 0, rounded = 0;
    std::memcpy(&gradient, &before[12 * kCount + 2 * i], 2);
    std::memcpy(&rounded, &after[14 * kCount + 2 * i], 2);
    const std::uint32_t wide = std::uint32_t{gradient} << 16, wide_out = std::uint32_t{rounded} << 16;
    float g = 0, published = 0;
    std::memcpy(&g, &wide, 4);
    std::memcpy(&published, &wide_out, 4);
    adam_step(g, state[0], state[1], state[2], AdamConstants{});
    for (int s = 0; s < 3; ++s) require(std::abs(out[s] - state[s]) <= 1e-5f * std::abs(state[s]) + 1e-7f, "AdamW");
    require(std::abs(published - out[0]) <= 0x1p-8f * std::abs(out[0]), "AdamW's bf16 copy");
  }
  fill<Bf16>(stream_, pool_, 16 * kCount / 2, 5, 1e-2f);
  std::printf("memory: read, copy, add and AdamW agree with the host\n");
}

// --- PCIe ---------------------------------------------------------------------------------------

void measure_pcie(Table& table) {
  const PinnedBuffer to_device(kGiB), from_device(kGiB);
  const DeviceBuffer into(kGiB), out_of(kGiB);
  std::memset(to_device, 0x5a, kGiB);
  std::memset(from_device, 0x3c, kGiB);
  const Stream up, down;
  for (const char* direction : {"H2D", "D2H", "duplex"}) {
    const bool h2d = std::string(direction) != "D2H", d2h = std::string(direction) != "H2D";
    for (std::size_t bytes = 64 * 1024; bytes <= kGiB; bytes *= 4) {
      const auto copies = static_cast<int>(std::clamp<std::size_t>(256 * kMiB / bytes, 3, 400));
      std::vector<double> each;
      for (int sample = 0; sample <= kSamples; ++sample) {
        const Event begin, end, other(cudaEventDisableTiming);
        check(cudaEventRecord(begin, up));
        check(cudaStreamWaitEvent(down, begin, 0));
        for (int i = 0; i < copies; ++i) {
          if (h2d) check(cudaMemcpyAsync(into, to_device, bytes, cudaMemcpyHostToDevice, up));
          if (d2h) check(cudaMemcpyAsync(from_device, out_of, bytes, cudaMemcpyDeviceToHost, down));
        }
        check(cudaEventRecord(other, down));
        check(cudaStreamWaitEvent(up, other, 0));
        check(cudaEventRecord(end, up));
        check(cudaStreamSynchronize(up));
        if (sample > 0) each.push_back(elapsed_us(begin, end) / copies);  // the first warms up
      }
      const Timing t = summary(each, static_cast<std::size_t>(copies));
      table.row("%s,%zu,%d,%.3f,%.2f", direction, bytes, copies * kSamples, t.median_us,
                static_cast<double>(bytes) / t.median_us / 1e3);
      if (bytes == kMiB || bytes == 256 * kMiB)
        std::printf("pcie: %-6s %4zu MiB %10.1f us %6.1f GB/s each way\n", direction, bytes / kMiB, t.median_us,
                    static_cast<double>(bytes) / t.median_us / 1e3);
    }
  }
}

// --- host ---------------------------------------------------------------------------------------

struct AdamArrays {
  float *master, *momentum, *variance;
  std::uint16_t *gradient, *out;
};

std::uint16_t rounded_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void adam_scalar(const AdamArrays& a, std::size_t begin, std::size_t end, const AdamConstants& c) {
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint32_t wide = std::uint32_t{a.gradient[i]} << 16;
    float g = 0;
    std::memcpy(&g, &wide, 4);
    adam_step(g, a.master[i], a.momentum[i], a.variance[i], c);
    a.out[i] = rounded_bf16(a.master[i]);
  }
}

__attribute__((target("avx512f"))) void adam_avx512(const AdamArrays& a, std::size_t begin, std::size_t end,
                                                    const AdamConstants& c) {
  const __m512 beta1 = _mm512_set1_ps(c.beta1), rest1 = _mm512_set1_ps(1 - c.beta1);
  const __m512 beta2 = _mm512_set1_ps(c.beta2), rest2 = _mm512_set1_ps(1 - c.beta2);
  const __m512 correction1 = _mm512_set1_ps(c.inverse_correction1), correction2 = _mm512_set1_ps(c.inverse_correction2);
  const __m512 epsilon = _mm512_set1_ps(c.epsilon), rate = _mm512_set1_ps(c.rate), decay = _mm512_set1_ps(c.decay);
  for (std::size_t i = begin; i < end; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.gradient + i));
    const __m512 g = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    __m512 m = _mm512_loadu_ps(a.momentum + i), v = _mm512_loadu_ps(a.variance + i), p = _mm512_loadu_ps(a.master + i);
    m = _mm512_fmadd_ps(beta1, m, _mm512_mul_ps(rest1, g));
    v = _mm512_fmadd_ps(beta2, v, _mm512_mul_ps(rest2, _mm512_mul_ps(g, g)));
    const __m512 root = _mm512_add_ps(_mm512_sqrt_ps(_mm512_mul_ps(v, correction2)), epsilon);
    const __m512 step = _mm512_div_ps(_mm512_mul_ps(m, correction1), root);
    p = _mm512_fnmadd_ps(rate, _mm512_fmadd_ps(decay, p, step), p);
    _mm512_storeu_ps(a.momentum + i, m);
    _mm512_storeu_ps(a.variance + i, v);
    _mm512_storeu_ps(a.master + i, p);
    const __m512i bits = _mm512_castps_si512(p);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(a.out + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
}

__attribute__((target("avx2,fma"))) void adam_avx2(const AdamArrays& a, std::size_t begin, std::size_t end,
                                                   const AdamConstants& c) {
  const __m256 beta1 = _mm256_set1_ps(c.beta1), rest1 = _mm256_set1_ps(1 - c.beta1);
  const __m256 beta2 = _mm256_set1_ps(c.beta2), rest2 = _mm256_set1_ps(1 - c.beta2);
  const __m256 correction1 = _mm256_set1_ps(c.inverse_correction1), correction2 = _mm256_set1_ps(c.inverse_correction2);
  const __m256 epsilon = _mm256_set1_ps(c.epsilon), rate = _mm256_set1_ps(c.rate), decay = _mm256_set1_ps(c.decay);
  for (std::size_t i = begin; i < end; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a.gradient + i));
    const __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    __m256 m = _mm256_loadu_ps(a.momentum + i), v = _mm256_loadu_ps(a.variance + i), p = _mm256_loadu_ps(a.master + i);
    m = _mm256_fmadd_ps(beta1, m, _mm256_mul_ps(rest1, g));
    v = _mm256_fmadd_ps(beta2, v, _mm256_mul_ps(rest2, _mm256_mul_ps(g, g)));
    const __m256 root = _mm256_add_ps(_mm256_sqrt_ps(_mm256_mul_ps(v, correction2)), epsilon);
    const __m256 step = _mm256_div_ps(_mm256_mul_ps(m, correction1), root);
    p = _mm256_fnmadd_ps(rate, _mm256_fmadd_ps(decay, p, step), p);
    _mm256_storeu_ps(a.momentum + i, m);
    _mm256_storeu_ps(a.variance + i, v);
    _mm256_storeu_ps(a.master + i, p);
    const __m256i bits = _mm256_castps_si256(p);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(sum, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(a.out + i), _mm256_castsi256_si128(packed));
  }
}

/// Reads and writes every element once: 8 bytes of traffic each. The portable loop; the compiler uses SSE2.
void read_modify_write(float* data, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) data[i] = data[i] * 0.999f + 0.001f;
}

struct HostTiming {
  double seconds_a_pass = 0;
  int passes = 0;
};

/// Runs `work(begin, end)` over `count` elements cut into equal parts, pass after pass, for at least `seconds`.
HostTiming timed_on_host(int threads, std::size_t count, double seconds,
                         const std::function<void(std::size_t, std::size_t)>& work) {
  HostTiming timing;
  bool done = false, warm = false;
  Clock::time_point start;
  std::barrier meet(threads, [&]() noexcept {
    if (!warm) {
      warm = true;
      start = Clock::now();
      return;
    }
    ++timing.passes;
    timing.seconds_a_pass = seconds_since(start) / timing.passes;
    done = seconds_since(start) >= seconds;
  });
  std::vector<std::jthread> workers;
  for (int t = 0; t < threads; ++t)
    workers.emplace_back([&, t] {
      const std::size_t part = count / static_cast<std::size_t>(threads) / 64 * 64;
      const std::size_t begin = part * static_cast<std::size_t>(t), end = t + 1 == threads ? count : begin + part;
      while (!done) {
        work(begin, end);
        meet.arrive_and_wait();
      }
    });
  workers.clear();
  return timing;
}

using AdamLoop = void (*)(const AdamArrays&, std::size_t, std::size_t, const AdamConstants&);
struct NamedLoop {
  const char* name;
  AdamLoop loop;
};

std::vector<NamedLoop> adam_loops() {
  std::vector<NamedLoop> loops;
  if (__builtin_cpu_supports("avx512f")) loops.push_back({"adam avx512", adam_avx512});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) loops.push_back({"adam avx2", adam_avx2});
  if (loops.empty()) loops.push_back({"adam scalar", adam_scalar});
  return loops;
}

/// 16 bytes a parameter in one block: master, momentum, variance, gradient, out.
AdamArrays arrays_in(float* base, std::size_t parameters) {
  auto* halves = reinterpret_cast<std::uint16_t*>(base + 3 * parameters);
  return {base, base + parameters, base + 2 * parameters, halves, halves + parameters};
}

void start_values(const AdamArrays& a, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    const auto hash = static_cast<std::uint32_t>(i * 2654435761u);
    a.master[i] = static_cast<float>(hash >> 8) * 0x1p-23f - 1;
    a.momentum[i] = 1e-3f;
    a.variance[i] = 1e-5f;
    a.gradient[i] = rounded_bf16(1e-2f * (static_cast<float>(hash & 0xffff) * 0x1p-15f - 1));
    a.out[i] = 0;
  }
}

void verify_adam_loops() {
  constexpr std::size_t kParameters = 1024;
  for (const NamedLoop& named : adam_loops()) {
    std::vector<float> fast(4 * kParameters), plain(4 * kParameters);
    for (std::vector<float>* block : {&fast, &plain})
      start_values(arrays_in(block->data(), kParameters), 0, kParameters);
    named.loop(arrays_in(fast.data(), kParameters), 0, kParameters, {});
    adam_scalar(arrays_in(plain.data(), kParameters), 0, kParameters, {});
    for (std::size_t i = 0; i < 3 * kParameters; ++i)
      require(std::abs(fast[i] - plain[i]) <= 1e-5f * std::abs(plain[i]) + 1e-7f, named.name);
    const AdamArrays a = arrays_in(fast.data(), kParameters);
    for (std::size_t i = 0; i < kParameters; ++i) require(a.out[i] == rounded_bf16(a.master[i]), named.name);
  }
}

void measure_host(Table& table) {
  constexpr std::size_t kParameters = std::size_t{1} << 27;  // 2 GiB: several times the last-level cache
  constexpr double kSeconds = 0.6;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const AdamConstants constants;
  for (const int threads : {1, 2, 4, 8, 12, 16}) {
    if (threads > cores) {
      std::printf("host: %d threads left out, %d cores\n", threads, cores);
      continue;
    }
    const auto block = std::make_unique_for_overwrite<float[]>(4 * kParameters);  // the threads below place its pages
    const AdamArrays a = arrays_in(block.get(), kParameters);
    timed_on_host(threads, kParameters, 0, [&](std::size_t begin, std::size_t end) { start_values(a, begin, end); });
    const auto write = [&](const char* what, const HostTiming& t, double bytes_a_item, double items) {
      table.row("%s,%d,%.0f,%g,%d,%.6f,%.4f,%.2f", what, threads, items, bytes_a_item, t.passes, t.seconds_a_pass,
                items / t.seconds_a_pass / 1e9, items * bytes_a_item / t.seconds_a_pass / 1e9);
      std::printf("host: %-18s %2d threads %7.2f G/s %7.1f GB/s\n", what, threads, items / t.seconds_a_pass / 1e9,
                  items * bytes_a_item / t.seconds_a_pass / 1e9);
    };
    for (const NamedLoop& named : adam_loops())
      write(named.name,
            timed_on_host(threads, kParameters, kSeconds,
                          [&](std::size_t begin, std::size_t end) { named.loop(a, begin, end, constants); }),
            28, kParameters);
    write("read-modify-write",
          timed_on_host(threads, 4 * kParameters, kSeconds,
                        [&](std::size_t begin, std::size_t end) { read_modify_write(a.master, begin, end); }),
          8, 4 * kParameters);
    std::fflush(stdout);
  }
}

// --- program ------------------------------------------------------------------------------------

int run(const std::filesystem::path& folder, double peak_tflops) {
  const Clock::time_point start = Clock::now();
  verify_adam_loops();
  cudaDeviceProp properties{};
  check(cudaSetDevice(0));
  check(cudaGetDeviceProperties(&properties, 0));
  std::string gpu = properties.name;
  if (gpu.starts_with("NVIDIA ")) gpu.erase(0, 7);
  Table environment(folder, "environment.csv", "key,value");
  int driver = 0;
  check(cudaDriverGetVersion(&driver));
  environment.row("gpu,%s", gpu.c_str());
  environment.row("sms,%d", properties.multiProcessorCount);
  environment.row("l2_bytes,%d", properties.l2CacheSize);
  environment.row("cuda_driver,%d", driver);
  environment.row("cublaslt,%zu", cublasLtGetVersion());
  environment.row("host_cores,%u", std::thread::hardware_concurrency());
  environment.row("nvidia_smi_start,\"%s\"", nvidia_smi().c_str());
  std::printf("%s: %s\n", gpu.c_str(), nvidia_smi().c_str());

  {
    Table table(folder, "launch.csv", "case,launches,us_each");
    LaunchBench bench(table, properties.multiProcessorCount);
    bench.empty_kernels();
    bench.events();
    bench.short_kernels();
    bench.host_round_trips();
  }
  {
    Table table(folder, "memory.csv",
                "kernel,buffer_bytes,moved_bytes,cache,timed_launches,us,gb_per_s,spread_percent");
    MemoryBench bench(table);
    bench.verify();
    bench.sweep();
  }
  {
    Table table(folder, "pcie.csv", "direction,bytes,copies,us_each,gb_per_s_each_way");
    measure_pcie(table);
  }
  measure_gemms(folder, gpu, peak_tflops);
  environment.row("nvidia_smi_end,\"%s\"", nvidia_smi().c_str());
  {
    Table table(folder, "host.csv", "case,threads,items,bytes_per_item,passes,s_per_pass,g_items_per_s,gb_per_s");
    measure_host(table);
  }
  std::printf("done in %.0f s; %s\n", seconds_since(start), nvidia_smi().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr double kHopperPeak = 989;  // TFLOP/s, dense bf16 of H100 SXM and H200 (datasheet)
  char* rest = nullptr;
  const double peak = argc == 3 ? std::strtod(argv[2], &rest) : kHopperPeak;
  if (argc < 2 || argc > 3 || (rest && *rest != '\0') || !(peak > 0)) {
    std::fprintf(stderr, "usage: gpu_sweep OUT_FOLDER [PEAK_TFLOPS]\n");
    return 2;
  }
  try {
    std::filesystem::create_directories(argv[1]);
    return run(argv[1], peak);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_sweep: %s\n", error.what());
    return 3;
  }
}
