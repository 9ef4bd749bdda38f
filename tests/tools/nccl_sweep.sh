#!/usr/bin/env bash
# Every algorithm and protocol of NCCL over message sizes on the GPUs of this machine. usage: nccl_sweep.sh OUT_FOLDER
# NVLink multicast (NVLS) stays off: a program that dies in it can put a shared host's GPUs out of service.
set -euo pipefail
out=$1
here=$(cd "$(dirname "$0")" && pwd)
nccl=$(python3 -c 'import os, nvidia.nccl; print(list(nvidia.nccl.__path__)[0])')
export NCCL_NVLS_ENABLE=0
nvcc -O2 -std=c++17 -I"$nccl/include" "$here/nccl_sweep.cu" -o /tmp/nccl_sweep -L"$nccl/lib" -l:libnccl.so.2
export LD_LIBRARY_PATH="$nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
{
  nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm --format=csv
  nvidia-smi topo -m
  nvidia-smi nvlink -s | head -40
  lscpu | head -20
  nvcc --version | tail -2
} >"$out/nccl_machine.txt" 2>&1 || true
NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING timeout 60 /tmp/nccl_sweep log 65536 >"$out/nccl_log.txt" 2>&1 || true
csv=$out/nccl.csv
echo "config,collective,ranks,bytes,calls,median_us,least_us,busbw_GBps" >"$csv"
timeout 60 /tmp/nccl_sweep default >>"$csv" || echo "default failed" >&2
for protocol in LL LL128 Simple; do
  NCCL_ALGO=Ring NCCL_PROTO=$protocol timeout 60 /tmp/nccl_sweep "Ring/$protocol" 1073741824 >>"$csv" || echo "Ring $protocol failed" >&2
  NCCL_ALGO=Tree NCCL_PROTO=$protocol timeout 60 /tmp/nccl_sweep "Tree/$protocol" 1073741824 >>"$csv" || echo "Tree $protocol failed" >&2
done
timeout 60 /tmp/nccl_sweep default2 >>"$csv" || true
for channels in 1 2 4 8 16; do
  NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_MIN_NCHANNELS=$channels NCCL_MAX_NCHANNELS=$channels timeout 60 \
    /tmp/nccl_sweep "Ring/Simple/$channels" 268435456 >>"$csv" || true
done
NCCL_P2P_DISABLE=1 timeout 60 /tmp/nccl_sweep shm 1073741824 >>"$csv" || true
wc -l "$csv"
