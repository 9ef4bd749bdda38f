#!/usr/bin/env bash
# remedies.sh ZEROPLAN EXAMPLES: the usual remedies for a slow or large step, each a pair of plans in EXAMPLES/remedies,
# played by simulate: every one moves time and memory the way it should. Prints the table of docs/simulator.md.
set -uo pipefail
zeroplan="$(realpath -- "${1:?the program}")"
examples="$(realpath -- "${2:?the folder of examples}")/remedies"
if ! command -v python3 >/dev/null; then echo "remedies: skipped, there is no python3"; exit 0; fi
exec python3 - "$zeroplan" "$examples" <<'PY'
import json, os, subprocess, sys

zeroplan, folder = sys.argv[1:]
played = {}


def play(name):
    if name not in played:
        out = subprocess.run([zeroplan, "simulate", os.path.join(folder, name + ".json"), "--json"],
                             capture_output=True, text=True, timeout=600)
        if out.returncode:
            sys.exit(f"FAILED: {name}: exit {out.returncode}: {out.stderr}")
        answer = json.loads(out.stdout)
        p = answer["prediction"]
        played[name] = {
            "step": p["step_seconds"],
            "gathers": p["time"]["exposed_communication"],
            "offload": p["time"]["exposed_offload"],
            **{tier: p["memory"].get(tier, {}).get("peak_bytes", 0) for tier in ("gpu", "host", "nvme")},
        }
    return played[name]


failures = []


def law(holds, what):
    if not holds:
        failures.append(what)


def row(title, names):
    cells = []
    for name in names:
        r = play(name)
        memory = f"{r['gpu'] / 2**30:.1f}"
        if r["host"]:
            memory += f" + host {r['host'] / 2**30:.0f}"
        if r["nvme"]:
            memory += f" + NVMe {r['nvme'] / 2**30:.0f}"
        waits = [f"{1e3 * r[k]:.0f} {word}" for k, word in (("gathers", "for ranks"), ("offload", "for offload"))
                 if 1e3 * r[k] >= 0.5]
        cells.append((name, f"{1e3 * r['step']:.0f} ms", ", ".join(waits) or "-", memory + " GiB"))
    print(f"{title}:")
    for cell in cells:
        print("  {:<18} {:>9}  waits {:<32} {}".format(*cell))


row("NVLink or PCIe between the same GPUs", ["nvlink", "pcie"])
law(play("pcie")["step"] > 2 * play("nvlink")["step"], "PCIe should be far slower than NVLink")
law(play("pcie")["gathers"] > 10 * play("nvlink")["gathers"], "PCIe should wait for collectives")
law(play("pcie")["gpu"] == play("nvlink")["gpu"], "the link takes no memory")

distances = [f"prefetch_{d}" for d in range(4)]
row("layers gathered ahead", distances)
for near, far in zip(distances, distances[1:]):
    law(play(far)["step"] <= play(near)["step"], f"{far} should be no slower than {near}")
    law(play(far)["gpu"] > play(near)["gpu"], f"{far} should hold more than {near}")
law(play("prefetch_1")["gathers"] < 0.5 * play("prefetch_0")["gathers"], "one layer ahead should hide most gathers")

row("states on the host: updated by its cores or streamed through the GPU; on disk",
    ["nvlink", "update_host", "update_device", "states_nvme"])
law(play("update_host")["gpu"] < play("nvlink")["gpu"], "offload should free GPU memory")
law(play("update_host")["step"] > play("nvlink")["step"], "offload should cost time")
law(play("update_device")["gpu"] > play("update_host")["gpu"], "streaming needs slots on the GPU")
law(play("states_nvme")["step"] > play("update_host")["step"], "disks should be slower than host memory")
law(play("states_nvme")["host"] < play("update_host")["host"], "disks should free host memory")
law(play("states_nvme")["nvme"] > 0 == play("update_host")["nvme"], "states should be on disk")

row("gradients reduced in every micro-step or once a step (ZeRO-1)", ["reduce_micro_step", "reduce_step"])
law(play("reduce_step")["step"] < play("reduce_micro_step")["step"], "once a step should be faster")
law(play("reduce_step")["gpu"] > play("reduce_micro_step")["gpu"], "whole gradients should take more memory")

batches = [f"batch_{b}_{r}" for b in (1, 4) for r in ("none", "full")]
row("micro-batch and recompute, the same global batch", batches)
for recompute in ("none", "full"):
    small, large = play(f"batch_1_{recompute}"), play(f"batch_4_{recompute}")
    law(large["step"] < small["step"] and large["gpu"] > small["gpu"], f"a larger micro-batch trades memory ({recompute})")
for batch in (1, 4):
    kept, made = play(f"batch_{batch}_none"), play(f"batch_{batch}_full")
    law(made["step"] > kept["step"] and made["gpu"] < kept["gpu"], f"recompute trades time (micro-batch {batch})")

for failure in failures:
    print("FAILED:", failure)
sys.exit(bool(failures))
PY
