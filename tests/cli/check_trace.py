#!/usr/bin/env python3
"""check_trace.py TRACE.json...: is it what Perfetto and chrome://tracing read? Standard library only.

After the Trace Event Format: an object with "traceEvents"; every event has a phase and a process; complete events ("X")
have a thread, a start and a duration and those of one thread do not overlap; flow arrows ("s", "f") come in pairs of one
id, begin and end inside a slice of their thread, and do not go back in time; counters ("C") are finite numbers that rise
in time; every process and thread that is used is named. Prints what it counted; exit 1 with the first failures."""

import json
import math
import sys
from bisect import bisect_right
from collections import Counter, defaultdict

PHASES = {"X", "s", "f", "C", "M"}
FIELDS = {  # phase -> (required, allowed besides)
    "X": ({"name", "cat", "pid", "tid", "ts", "dur"}, {"args"}),
    "s": ({"name", "cat", "id", "pid", "tid", "ts"}, set()),
    "f": ({"name", "cat", "id", "pid", "tid", "ts", "bp"}, set()),
    "C": ({"name", "pid", "ts", "args"}, set()),
    "M": ({"name", "pid", "args"}, {"tid"}),
}
NANOSECOND = 1.0001e-3  # times are microseconds to a thousandth


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Checker:
    def __init__(self):
        self.failures = []
        self.slices = defaultdict(list)  # (pid, tid) -> [(ts, end, name)]
        self.starts, self.ends = {}, {}
        self.counters = defaultdict(list)
        self.named_processes, self.named_threads, self.used = {}, {}, set()
        self.counted = Counter()

    def fail(self, what):
        self.failures.append(what)

    def event(self, index, event):
        where = f"event {index}"
        if not isinstance(event, dict):
            return self.fail(f"{where}: no object")
        phase = event.get("ph")
        if phase not in PHASES:
            return self.fail(f"{where}: phase {phase!r}")
        required, allowed = FIELDS[phase]
        keys = set(event) - {"ph"}
        if required - keys or keys - required - allowed:
            return self.fail(f"{where} ({phase}): lacks {required - keys}, has {keys - required - allowed}")
        if not all(isinstance(event[k], int) for k in ("pid", "tid", "id") if k in event):
            self.fail(f"{where}: pid, tid and id must be integers")
        if not all(number(event[k]) and event[k] >= 0 for k in ("ts", "dur") if k in event):
            return self.fail(f"{where}: ts and dur must be finite and not negative")
        if not isinstance(event["name"], str) or not event["name"]:
            self.fail(f"{where}: no name")
        self.counted[phase] += 1
        getattr(self, "of_" + phase)(where, event)

    def of_X(self, where, event):
        self.slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        self.used.add((event["pid"], event["tid"]))

    def of_s(self, where, event, table=None):
        table = self.starts if table is None else table
        if event["id"] in table:
            self.fail(f"{where}: arrow {event['id']} twice")
        table[event["id"]] = (event["ts"], (event["pid"], event["tid"]))

    def of_f(self, where, event):
        if event["bp"] != "e":
            self.fail(f"{where}: an arrow must end in the slice that encloses it")
        self.of_s(where, event, self.ends)

    def of_C(self, where, event):
        values = event["args"]
        if not isinstance(values, dict) or not values or not all(number(v) for v in values.values()):
            return self.fail(f"{where}: counters must be finite numbers")
        if any(v < 0 for v in values.values()):
            self.fail(f"{where}: {event['name']} below zero")
        self.counters[event["pid"], event["name"]].append(event["ts"])
        self.used.add((event["pid"], None))

    def of_M(self, where, event):
        args = event["args"]
        if event["name"] == "process_name":
            self.named_processes[event["pid"]] = args["name"]
        elif event["name"] == "thread_name":
            self.named_threads[event["pid"], event["tid"]] = args["name"]
        elif event["name"] not in ("process_sort_index", "thread_sort_index"):
            self.fail(f"{where}: metadata {event['name']!r}")

    def finish(self):
        for thread, slices in self.slices.items():
            slices.sort()
            for before, after in zip(slices, slices[1:]):
                if after[0] < before[1] - NANOSECOND:
                    self.fail(f"thread {thread}: {after[2]!r} begins before {before[2]!r} ends")
        for arrow in sorted(set(self.starts) ^ set(self.ends)):
            self.fail(f"arrow {arrow} has one end")
        for arrow in sorted(set(self.starts) & set(self.ends)):
            (start, source), (end, target) = self.starts[arrow], self.ends[arrow]
            if end < start - NANOSECOND:
                self.fail(f"arrow {arrow} goes back in time")
            for time, thread in ((start, source), (end, target)):
                if not self.inside(time, thread):
                    self.fail(f"arrow {arrow}: no slice of thread {thread} at {time}")
        for counter, times in self.counters.items():
            if times != sorted(times):
                self.fail(f"counter {counter}: time runs back")
        for pid, tid in sorted(self.used, key=str):
            if pid not in self.named_processes:
                self.fail(f"process {pid} has no name")
            if tid is not None and (pid, tid) not in self.named_threads:
                self.fail(f"thread {pid}/{tid} has no name")

    def inside(self, time, thread):
        slices = self.slices[thread]
        at = bisect_right(slices, (time + NANOSECOND,)) - 1
        return any(0 <= k and slices[k][0] - NANOSECOND <= time <= slices[k][1] + NANOSECOND for k in (at - 1, at))


def no_constant(text):
    raise ValueError(f"{text} is no JSON")


def check(path):
    checker = Checker()
    trace = None
    try:
        with open(path, encoding="utf-8") as file:
            trace = json.load(file, parse_constant=no_constant)
    except ValueError as error:
        checker.fail(str(error))
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        checker.fail("no object with traceEvents")
    else:
        for index, event in enumerate(trace["traceEvents"]):
            checker.event(index, event)
        checker.finish()
        if not checker.counted["X"]:
            checker.fail("no slices")
    c = checker.counted
    print(f"{path}: {c['X']} slices on {len(checker.slices)} tracks, {c['s']} arrows, "
          f"{c['C']} samples of {len(checker.counters)} counters, {len(checker.failures)} failures")
    for failure in checker.failures[:10]:
        print("  " + failure)
    return not checker.failures


if __name__ == "__main__":
    sys.exit(0 if all([check(path) for path in sys.argv[1:]]) and len(sys.argv) > 1 else 1)
