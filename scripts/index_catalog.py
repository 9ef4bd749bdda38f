#!/usr/bin/env python3
"""Writes models/catalog/gpu_index.json and node_index.json: what name look-up needs without reading every entry.

Run it after adding or changing a file in models/catalog/gpus or nodes. A test compares index and entries.
"""
import json
import pathlib

CATALOG = pathlib.Path(__file__).resolve().parent.parent / "models" / "catalog"


def entries(folder):
    return [json.loads(path.read_text()) for path in sorted((CATALOG / folder).glob("*.json"))]


def write(name, columns, rows):
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in sorted(rows))
    head = json.dumps(columns)
    (CATALOG / name).write_text(f'{{\n "columns": {head},\n "rows": [\n{lines}\n ]\n}}\n')


def gpu_row(gpu):
    return [gpu["name"], gpu["label"], gpu.get("default_for", []), gpu.get("aliases", [])]


def node_row(node):
    return [node["name"], node["provider"], node["kind"], node["gpu"], node["gpus_per_node"], node.get("dram", ""),
            node.get("price", {}).get("usd_per_hour", 0), node.get("aliases", [])]


def main():
    write("gpu_index.json", ["name", "label", "default_for", "aliases"], map(gpu_row, entries("gpus")))
    write("node_index.json",
          ["name", "provider", "kind", "gpu", "gpus_per_node", "dram", "usd_per_hour", "aliases"],
          map(node_row, entries("nodes")))


if __name__ == "__main__":
    main()
