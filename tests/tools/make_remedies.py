#!/usr/bin/env python3
"""make_remedies.py BASE.json FOLDER: the plans of examples/remedies from one plan that `zeroplan plan` wrote:

    zeroplan plan --model llama-3.2-3b --gpus 4xA100-80G --zero 3 --seq-len 1024 --micro-batch 1 --global-batch 16 \\
        --recompute full --out base
    tests/tools/make_remedies.py base/plan.json examples/remedies"""

import copy
import json
import os
import sys

base = json.load(open(sys.argv[1]))
folder = sys.argv[2]
blocks = sum(base["plan"]["optimizer"].values())


def place(tier):
    return {"gpu": 0, "host": 0, "nvme": 0, tier: blocks}


def write(name, machine=None, **changes):
    plan = copy.deepcopy(base)
    plan["plan"].update(changes)
    if machine:
        machine(plan["machine"])
    plan["machine"].pop("assumptions", None)
    with open(os.path.join(folder, name + ".json"), "w") as out:
        json.dump(plan, out, indent=1)
        out.write("\n")


def without_nvlink(machine):
    machine["name"] += " without NVLink"
    machine["interconnect"] = "root_complex"
    machine.pop("nvlink")


write("nvlink")
write("pcie", without_nvlink)
for distance in range(4):
    write(f"prefetch_{distance}", prefetch_layers=distance)
write("update_host", optimizer=place("host"), update="host")
write("update_device", optimizer=place("host"), update="gpu")
write("states_nvme", optimizer=place("nvme"), update="host")
write("reduce_micro_step", zero_stage=1, reduce_each="micro_step")
write("reduce_step", zero_stage=1, reduce_each="step")
for batch in (1, 4):
    for recompute in ("none", "full"):
        layers = 0 if recompute == "none" else base["plan"]["recompute_layers"]
        write(f"batch_{batch}_{recompute}", micro_batch=batch, accumulation=4 // batch, recompute=recompute,
              recompute_layers=layers)
