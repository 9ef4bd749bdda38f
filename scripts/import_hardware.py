#!/usr/bin/env python3
"""One-time conversion of a hardware data set (gpus.json, nodes.json) into models/catalog.

Usage: scripts/import_hardware.py DATA_DIR
Kept so that a later edition of the data set can be imported the same way; the catalog files are what counts.
Afterwards scripts/index_catalog.py writes the index.
"""
import json
import pathlib
import sys

CATALOG = pathlib.Path(__file__).resolve().parent.parent / "models" / "catalog"

# NVLink-C2C of the Grace superchips: rate of one superchip, one direction, and the GPUs that share it.
# links.json: nvlink-c2c-gh200 and nvlink-c2c-gb200.
C2C = {"GH200-96GB": 1, "GH200-144GB": 1, "GB200": 2, "GB300": 2}

# Figures that the data set leaves open and that follow from others.
DERIVED = {
    "RTX-PRO-6000-Blackwell-Server": (
        {"peak_bf16": "480 TFLOPS", "peak_fp16": "480 TFLOPS"},
        "peak_bf16, peak_fp16: 503.8 of the workstation edition x 120 / 125.95, the ratio of the fp32 rates"),
}

GPU_FIELDS = {
    "memory.nvidia_smi_total_MiB": ["memory"],
    "memory.label": ["memory"],
    "hbm_bandwidth_GBps": ["memory_bandwidth"],
    "peak_tflops_dense": ["peak_bf16", "peak_fp16", "peak_fp32"],
    "peak_tflops_dense.fp32": ["peak_fp32"],
    "sm_count": ["num_sms"],
    "pcie": ["pcie"],
    "p2p_over_pcie": ["p2p_over_pcie"],
    "nvlink": ["nvlink"],
    "nvlink.links": ["nvlink_links"],
}
NODE_FIELDS = {
    "cpu": ["cpu", "sockets", "physical_cores"],
    "cpu.model": ["cpu"],
    "cpu.sockets": ["sockets"],
    "cpu.physical_cores": ["physical_cores"],
    "dram_GiB": ["dram"],
    "dram_bandwidth_GBps_theoretical": ["dram_bandwidth"],
    "local_nvme": ["nvme"],
    "local_nvme.count": ["nvme"],
    "network": ["network"],
    "network.total_Gbps": ["network"],
    "pcie_topology": ["gpus_per_pcie_switch", "gpus_per_root_complex", "pcie_generation"],
    "gpu_interconnect": ["interconnect"],
}


def quantity(value, unit):
    if value is None:
        return None
    text = f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f"{text} {unit}"


def known(entry):
    """Drops what is not known: an absent key is completed by the loader."""
    return {key: value for key, value in entry.items() if value not in (None, [], {})}


# Citations for the source ids of the data set: what was read, without its commentary.
SOURCES = {
    "mle": "github.com/stas00/ml-engineering @744d01e (2026-08-22)",
    "ds-nv": "NVIDIA data sheet, recalled",
    "ds-amd": "AMD product page, recalled",
    "ds-intel": "Intel Gaudi white paper, recalled",
    "hmc": "hmc-tech.com/gpu, 2026-11",
    "smi-modal": "github.com/modal-labs/modal-client/pull/2797: nvidia-smi totals",
    "smi-issues": "nvidia-smi listings in public issues",
    "torch-props": "torch.cuda.get_device_properties printouts in public repositories",
    "torch-oom": "totals in CUDA out-of-memory messages of public issues",
    "bioir": "BioIR benchmark README: device GiB",
    "aws-api": "github.com/aws/karpenter-provider-aws @1d92708 (2026-08-21)",
    "llm-analysis": "github.com/cli99/llm-analysis @d841e40 (2024-11-13) gpu_configs",
    "gpuhunt": "github.com/dstackai/gpuhunt @3584151",
    "simai": "github.com/aliyun/SimAI @cef83f9 (2026-08-14)",
    "hf": "Hugging Face hardware pages, 2026",
    "kitguru": "kitguru.net launch reviews",
    "tweak-h20": "tweaktown and others: H20 listings",
    "rtx6kpro": "github.com/voipmonitor/rtx6kpro @29f3863 (2026-05)",
    "tinygrad": "github.com/tinygrad/open-gpu-kernel-modules @9e39420",
    "mlperf51": "github.com/mlcommons/inference_results_v5.1 @965182b systems",
    "aiinframap": "aiinframap.com, mid-2026",
    "data-gate": "data-gate.ch, 2026-05-25",
    "mercatus": "mercatus-ai price article, 2026",
    "lenovo26": "Lenovo Press LP2368 (2026-02-04)",
    "nccl-74": "github.com/NVIDIA/nccl-tests/issues/74",
    "karp-aws": "github.com/aws/karpenter-provider-aws @1d92708: EC2 API, us-east-1 prices of 2026-07-20",
    "karp-az": "github.com/Azure/karpenter-provider-azure @352646f: retail prices of 2026-06-18",
    "karp-gcp": "github.com/cloudpilot-ai/karpenter-provider-gcp @417f047: prices of 2026-08-03",
    "sky": "github.com/skypilot-org/skypilot-catalog v8",
    "ofi": "github.com/aws/aws-ofi-nccl @2daf7d3 topology",
    "azhpc": "github.com/Azure/azhpc-images @8e9d055 (2026-07-29) topology",
    "azdoc": "Azure VM size documentation",
    "toolkit": "github.com/GoogleCloudPlatform/cluster-toolkit @1047080",
    "raw26": "Raw Cloud GPU Instance Pricing - 2026 (public note, 2026-09), secondary",
    "r3-26": "Hyperscaler GPU Round 3 Verification (public note, 2026-05-25), secondary",
    "lead26": "GPU Rental Leaderboard (public note, 2026-05-25), secondary",
    "press-dgx": "launch press: DGX-1, DGX-2 (2018), DGX A100 (2020)",
    "semi": "SemiAnalysis estimate, quoted by Epoch AI",
    "nccl-issues": "NCCL issue logs: nvidia-smi topo -m",
    "pf": "platform-fools.pages.dev, 2026-04-27",
    "reddit-3090ti": "reddit r/LocalLLaMA: 2x3090 Ti with NVLink on X99",
    "deepnvme": "github.com/deepspeedai/DeepSpeed blogs/deepnvme",
    "recalled": "vendor page, recalled",
}


def resolve(ids):
    return [SOURCES[i] for i in ids]


def recalled(fields, table, entry):
    names = [name for field in fields for name in table.get(field, [])]
    return [name for i, name in enumerate(names) if name in entry and name not in names[:i]]


def segment(gpu):
    name = gpu["name"]
    if name.startswith("RTX-A") or name.startswith("RTX-6000") or name.endswith("Blackwell-WS"):
        return "workstation"
    if name.startswith("RTX-") and "Server" not in name:
        return "consumer"
    return "data centre"


def wiring(gpu):
    """How a box of several such GPUs is usually joined: what a generic node assumes."""
    kind = gpu["nvlink"]["kind"]
    if kind.startswith("nvswitch or nvlink-mesh"):
        return "nvswitch above 4"
    if kind.startswith("nvlink-mesh (DGX-1) or nvswitch"):
        return "nvswitch above 8"
    if kind.startswith("nvswitch"):
        return "nvswitch"
    if "mesh" in kind or kind.startswith("in-chip Ethernet"):
        return "mesh"
    if kind == "bridge, pairs":
        return "pairs"
    return "none"  # no link, or an optional bridge that nobody said is there


def convert_gpu(gpu):
    memory, peak, link = gpu["memory"], gpu["peak_tflops_dense"], gpu["nvlink"]
    physical = memory["physical_GiB"]
    generation = link["generation"]
    entry = {
        "name": gpu["name"],
        "aliases": gpu["aliases"],
        "default_for": gpu["default_for"],
        "vendor": gpu["vendor"],
        "arch": gpu["arch"],
        "segment": segment(gpu),
        "form_factor": gpu["form_factor"],
        "compute_capability": gpu["compute_capability"],
        "label": memory["label"],
        "memory": quantity(memory["torch_total_GiB"][0], "GiB") if memory["torch_total_GiB"] else None,
        "driver_memory": quantity(memory["nvidia_smi_total_MiB"], "MiB"),
        "physical_memory": quantity(physical, "GiB") if physical else quantity(memory["label"], "GB"),
        "memory_bandwidth": quantity(gpu["hbm_bandwidth_GBps"], "GB/s"),
        "peak_bf16": quantity(peak["bf16"], "TFLOPS"),
        "peak_fp16": quantity(peak["fp16"], "TFLOPS"),
        "peak_fp32": quantity(peak["fp32"], "TFLOPS"),
        "measured_matmul": quantity(gpu["measured_matmul_tflops"]["bf16"], "TFLOPS"),
        "num_sms": gpu["sm_count"],
        "nvlink": quantity(link["per_direction_GBps"] or None, "GB/s"),
        "nvlink_generation": generation if isinstance(generation, int) else None,
        "nvlink_links": link["links"] or None,
        "wiring": wiring(gpu),
        "pcie_generation": gpu["pcie"]["gen"],
        "pcie": quantity(gpu["pcie"]["theoretical_per_direction_GBps"], "GB/s"),
        "p2p_over_pcie": gpu["p2p_over_pcie"],
        "c2c": "450 GB/s" if gpu["name"] in C2C else None,
        "gpus_per_c2c": C2C.get(gpu["name"]),
        "sources": resolve(gpu["sources"]),
    }
    figures, basis = DERIVED.get(gpu["name"], ({}, None))
    entry = known(entry | figures)
    if basis:
        entry["sources"] = entry["sources"] + [basis]
    # Form factor and the like are not carried, so their "recalled" marks are not either.
    marks = recalled(gpu["recalled_fields"], GPU_FIELDS, entry | {"memory": ""})
    return known(entry | {"recalled": marks})


def gpudirect(kind):
    """NICs that read and write GPU memory themselves. EFA on G instances has no GPUDirect RDMA."""
    return any(kind.startswith(word) for word in ("InfiniBand", "IB ", "RoCE", "EFA", "GPUDirect"))


def convert_network(network):
    nics, total = network["nics"], network["total_Gbps"]
    if not nics or not total:
        return None
    entry = {"nics": nics, "bandwidth": quantity(total, "Gb/s"), "kind": network["kind"] or "Ethernet"}
    if gpudirect(entry["kind"]):
        # Host NICs beside the GPU NICs do not carry collectives.
        if network["Gbps_per_nic"] and network["Gbps_per_nic"] * nics < total:
            entry["bandwidth"] = quantity(network["Gbps_per_nic"] * nics, "Gb/s")
        entry["gpudirect"] = True
    return entry


def convert_nvme(nvme):
    if nvme["count"] == 0 or (nvme["count"] is None and not nvme["total_TB"]):
        return {"drives": 0} if nvme["count"] == 0 else None
    return known({
        "drives": nvme["count"],
        "capacity": quantity(nvme["total_TB"], "TB"),
        "read": quantity(nvme["read_GBps"], "GB/s"),
        "write": quantity(nvme["write_GBps"], "GB/s"),
    })


def convert_price(price):
    if price["on_demand"] is None:
        return None
    return known({
        "usd_per_hour": price["on_demand"],
        "region": price["region"],
        "date": price["date"],
        "source": SOURCES[price["source"]],
    })


def convert_node(node):
    pcie, cpu = node["pcie_topology"], node["cpu"]
    nvme = convert_nvme(node["local_nvme"])
    entry = {
        "name": node["name"],
        "aliases": [a for a in node["aliases"] if a.lower() != node["name"].lower()],
        "provider": node["provider"],
        "kind": node["kind"],
        "gpu": node["gpu"],
        "gpus_per_node": node["gpu_count"],
        "interconnect": node["interconnect_class"],
        "nvlink": quantity(node["nvlink_per_gpu_per_direction_GBps"] or None, "GB/s"),
        "gpus_per_pcie_switch": pcie["gpus_per_pcie_switch"],
        "gpus_per_root_complex": pcie["gpus_per_root_complex"],
        "pcie_generation": pcie["pcie_gen"],
        "pcie_lanes": 8 if pcie["description"].startswith("x8") else None,
        "sockets": cpu["sockets"],
        "physical_cores": cpu["physical_cores"],
        "vcpus": cpu["vcpus"],
        "cpu": cpu["model"],
        "dram": quantity(node["dram_GiB"], "GiB"),
        "dram_bandwidth": quantity(node["dram_bandwidth_GBps_theoretical"], "GB/s"),
        "nvme": nvme,
        "network": convert_network(node["network"]),
        "price": convert_price(node["price_per_hour_usd"]),
        "sources": resolve(node["sources"]),
    }
    entry = known(entry)
    return known(entry | {"recalled": recalled(node["recalled_fields"], NODE_FIELDS, entry)})


def write(path, entry):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry, indent=2, ensure_ascii=False) + "\n")


def main():
    data = pathlib.Path(sys.argv[1])
    gpus = json.loads((data / "gpus.json").read_text())
    nodes = json.loads((data / "nodes.json").read_text())
    names = set()
    for gpu in gpus["gpus"]:
        names.add(gpu["name"])
        write(CATALOG / "gpus" / f"{gpu['name']}.json", convert_gpu(gpu))
    for node in nodes["nodes"]:
        if node["gpu"] not in names:
            print(f"left out: {node['name']} (no data on its GPU, {node['gpu']})", file=sys.stderr)
            continue
        write(CATALOG / "nodes" / f"{node['name']}.json", convert_node(node))


if __name__ == "__main__":
    main()
