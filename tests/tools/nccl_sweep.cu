// Measures NCCL's collectives over message sizes, one process driving every GPU it sees, as nccl-tests does: rounds of
// many calls between two events, the slowest GPU counts. Algorithm and protocol come from NCCL_ALGO and NCCL_PROTO
// (docs/measurements/README.md has the commands). Prints CSV rows on stdout.
//
//   nvcc -O2 -I$NCCL/include tests/tools/nccl_sweep.cu -o nccl_sweep -L$NCCL/lib -l:libnccl.so.2
//   NCCL_ALGO=Ring NCCL_PROTO=LL128 ./nccl_sweep LABEL [MAX_BYTES]

#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}
void check(ncclResult_t status, const char* what) {
  if (status == ncclSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, ncclGetErrorString(status));
  std::exit(1);
}

enum class Kind { all_reduce, all_gather, reduce_scatter };
constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter"};

struct Device {
  ncclComm_t comm;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  void *send, *receive;
};

/// `bytes` is the full tensor; bf16, out of place.
void call(std::vector<Device>& devices, Kind kind, std::size_t bytes) {
  const std::size_t whole = bytes / 2, part = whole / devices.size();
  check(ncclGroupStart(), "group start");
  for (Device& d : devices) {
    if (kind == Kind::all_reduce)
      check(ncclAllReduce(d.send, d.receive, whole, ncclBfloat16, ncclSum, d.comm, d.stream), "all-reduce");
    if (kind == Kind::all_gather)
      check(ncclAllGather(d.send, d.receive, part, ncclBfloat16, d.comm, d.stream), "all-gather");
    if (kind == Kind::reduce_scatter)
      check(ncclReduceScatter(d.send, d.receive, part, ncclBfloat16, ncclSum, d.comm, d.stream), "reduce-scatter");
  }
  check(ncclGroupEnd(), "group end");
}

/// Microseconds a call: the mean over a round, of the slowest GPU.
double round_us(std::vector<Device>& devices, Kind kind, std::size_t bytes, int calls) {
  for (int g = 0; g < static_cast<int>(devices.size()); ++g) {
    check(cudaSetDevice(g), "set device");
    check(cudaEventRecord(devices[g].begin, devices[g].stream), "record");
  }
  for (int i = 0; i < calls; ++i) call(devices, kind, bytes);
  double slowest = 0;
  for (int g = 0; g < static_cast<int>(devices.size()); ++g) {
    check(cudaSetDevice(g), "set device");
    check(cudaEventRecord(devices[g].end, devices[g].stream), "record");
  }
  for (Device& d : devices) {
    check(cudaEventSynchronize(d.end), "synchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, d.begin, d.end), "elapsed");
    slowest = std::max(slowest, 1e3 * ms / calls);
  }
  return slowest;
}

void sweep(std::vector<Device>& devices, const char* label, Kind kind, std::size_t most) {
  constexpr int kRounds = 5;
  for (std::size_t bytes = 4096; bytes <= most; bytes *= 2) {
    const int calls = bytes <= (8u << 20) ? 60 : bytes <= (256u << 20) ? 20 : 6;
    round_us(devices, kind, bytes, 5);
    std::vector<double> rounds;
    for (int r = 0; r < kRounds; ++r) rounds.push_back(round_us(devices, kind, bytes, calls));
    std::sort(rounds.begin(), rounds.end());
    const double n = static_cast<double>(devices.size());
    const double wire = static_cast<double>(bytes) * (n - 1) / n * (kind == Kind::all_reduce ? 2 : 1);
    const double median = rounds[kRounds / 2];
    std::printf("%s,%s,%d,%zu,%d,%.3f,%.3f,%.3f\n", label, kNames[static_cast<int>(kind)],
                static_cast<int>(devices.size()), bytes, calls, median, rounds.front(), wire / median * 1e-3);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* label = argc > 1 ? argv[1] : "default";
  const std::size_t most = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::size_t{4} << 30;
  int count = 0;
  check(cudaGetDeviceCount(&count), "device count");
  std::vector<ncclComm_t> comms(count);
  check(ncclCommInitAll(comms.data(), count, nullptr), "communicator");
  std::vector<Device> devices(count);
  for (int g = 0; g < count; ++g) {
    check(cudaSetDevice(g), "set device");
    devices[g].comm = comms[g];
    check(cudaStreamCreateWithFlags(&devices[g].stream, cudaStreamNonBlocking), "stream");
    check(cudaEventCreate(&devices[g].begin), "event");
    check(cudaEventCreate(&devices[g].end), "event");
    check(cudaMalloc(&devices[g].send, most), "buffer");
    check(cudaMalloc(&devices[g].receive, most), "buffer");
    check(cudaMemset(devices[g].send, 0x3f, most), "fill");  // 0.747 in bf16
  }
  const bool tree = std::getenv("NCCL_ALGO") != nullptr && std::string_view(std::getenv("NCCL_ALGO")) == "Tree";
  sweep(devices, label, Kind::all_reduce, most);
  if (tree) return 0;  // trees only reduce to all
  sweep(devices, label, Kind::all_gather, most);
  sweep(devices, label, Kind::reduce_scatter, most);
  return 0;
}
