#!/usr/bin/env python3
"""check_whatif.py laws JSON | changes JSON | apply FLAGS COMMAND... | owned JSON FILE | step JSON SIMULATED |
csv JSON CSV | fuzz ZEROPLAN FILE: what whatif.sh asks of answers. Standard library only."""

import csv
import json
import math
import random
import subprocess
import sys


def load(path):
    return json.load(open(path))


def answers(document):
    return document.get("answers", [document])


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-9)


def laws(path):
    for answer in answers(load(path)):
        limits = answer["limits"]
        for row in answer["rows"]:
            runs = [(r, r["nodes"]) for r in row.get("node_counts", []) if r["fits"]]
            if row["fits"]:
                runs.append((row["run"], row["machine"]["nodes"]))
            for run, nodes in runs:
                assert close(run["node_hours"], run["hours"] * nodes)
                if "price" in row:
                    per_node = row["price"]["usd_per_hour"] / row["machine"]["nodes"]
                    assert close(run["usd"], run["hours"] * nodes * per_node), row["hardware"]
                else:
                    assert "usd" not in run and "over_budget_usd" not in run
                if "deadline_days" in limits:
                    assert close(run["late_days"] + 1, max(0, run["hours"] / 24 - limits["deadline_days"]) + 1)
                if "budget_usd" in limits and "usd" in run:
                    assert close(run["over_budget_usd"] + 1, max(0, run["usd"] - limits["budget_usd"]) + 1)
                if "within_limits" in run:
                    assert run["within_limits"] == (run.get("late_days", 0) == 0 and run.get("over_budget_usd", 0) == 0)
            if row["fits"]:
                speed = row["prediction"]["tokens_per_second"]
                assert close(row["run"]["hours"], limits["tokens"] / speed / 3600)
        taken = [row for row in answer["rows"] if row.get("recommended")]
        assert len(taken) == answer["verdict"]["within_limits"]
        kept = [row["run"] for row in answer["rows"] if row.get("run", {}).get("within_limits")]
        assert bool(kept) == bool(taken)
        if taken and limits["prefer"] == "cheapest":
            assert taken[0]["run"]["usd"] == min(run["usd"] for run in kept if "usd" in run)
        if taken and limits["prefer"] == "fastest":
            assert taken[0]["run"]["hours"] == min(run["hours"] for run in kept)


def changes(path):
    found = load(path)["verdict"]["changes"]
    assert found
    for change in found:
        print(change["flag"])


def apply(flags, *command):
    """The command with the flags in place of its own, one word a line."""
    words, given = list(command), flags.split()
    for flag, value in zip(given[::2], given[1::2]):
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    print("\n".join(words))


def owned(path, file):
    for machine in load(file)["machines"]:
        if "on_premise" not in machine:
            continue
        terms = {k: float(v.split()[0]) for k, v in machine["on_premise"].items() if k != "source"}
        usd = terms["capital"] / (terms["lifetime"] * 365.25 * 24 * terms["utilisation"] / 100)
        usd += terms["power"] * terms["electricity"]
        for answer in answers(load(path)):
            row = next(r for r in answer["rows"] if r["hardware"] == machine["name"])
            assert close(row["price"]["usd_per_hour"], usd * machine["nodes"])
            assert "kWh" in row["price"]["source"]


def step(path, simulated):
    row = answers(load(path))[0]["rows"][0]
    assert close(row["prediction"]["step_seconds"], load(simulated)["prediction"]["step_seconds"])


def same_csv(path, table):
    rows = [(a.get("name", ""), r) for a in answers(load(path)) for r in a["rows"]]
    lines = list(csv.DictReader(open(table, newline="")))
    assert len(rows) == len(lines)
    for (name, row), line in zip(rows, lines):
        assert line["workload"] == name and line["hardware"] == row["hardware"]
        assert float(line["hours"]) == row["run"]["hours"]
        assert line["usd"] == "" if "usd" not in row["run"] else float(line["usd"]) == row["run"]["usd"]
        assert line["plan_file"] == row["plan_file"]
        assert line["price_source"] == row.get("price", {}).get("source", "")


def fuzz(program, file):
    text, rng = open(file, "rb").read(), random.Random(5)
    for i in range(80):
        broken = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(broken))
            kind = rng.randrange(3)
            if kind == 0:
                broken[at] = rng.randrange(256)
            elif kind == 1:
                del broken[at:at + rng.randint(1, 40)]
            else:
                broken[at:at] = rng.choice([b'"', b"{", b"[", b",", b"-1", b"1e308", b"null", b"0", b"\\u0000"])
        open("fuzzed.json", "wb").write(broken)
        done = subprocess.run([program, "whatif", "fuzzed.json"], capture_output=True, timeout=600)
        assert done.returncode in (0, 1, 2), (i, done.returncode, done.stderr)
        assert done.returncode != 2 or (not done.stdout and done.stderr.count(b"\n") == 1), (i, done.stderr)


if __name__ == "__main__":
    {"laws": laws, "changes": changes, "apply": apply, "owned": owned, "step": step, "csv": same_csv, "fuzz": fuzz}[
        sys.argv[1]](*sys.argv[2:])
