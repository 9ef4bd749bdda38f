#!/usr/bin/env python3
"""Draws the losses of training runs and says how far they agree (docs/training-run.md).

    examples/plot_losses.py "ZeRO-3, 4 ranks=z3.json" "ZeRO-0, 1 rank=z0.json" --out curve

Each argument is NAME=FILE; FILE is what `zeroplan run --measure` wrote, or the CSV of an earlier call followed by
:COLUMN. Writes curve.csv (losses that read back to the same bits) and curve.svg (losses above, differences to the first
run below) and prints how far each run fell. Only Python's standard library is needed.
"""

import argparse
import csv
import html
import json
import math
import sys

WIDTH, LEFT, RIGHT = 800, 64, 16
COLOURS = ["#1f6fb4", "#d1493f", "#3a8f4d", "#8a56b0", "#a0722a"]


def read(argument):
    name, _, path = argument.partition("=")
    if not path:
        sys.exit("plot_losses.py: expected NAME=FILE, got %r" % argument)
    try:
        if ".csv:" in path:
            path, _, column = path.rpartition(":")
            with open(path, newline="") as file:
                losses = [float(row[column]) for row in csv.DictReader(file) if row[column]]
        else:
            with open(path) as file:
                losses = json.load(file)["losses"]
    except (OSError, KeyError, ValueError) as error:
        sys.exit("plot_losses.py: %s: %s" % (path, error))
    if not losses:
        sys.exit("plot_losses.py: %s: no losses" % path)
    return name, losses


def smoothed(losses, window):
    """Mean of the losses up to half a window before and after every step, of fewer near the ends."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    result = []
    for i in range(len(losses)):
        half = min(window // 2, i, len(losses) - 1 - i)
        result.append((sums[i + half + 1] - sums[i - half]) / (2 * half + 1))
    return result


def tick_step(span):
    """1, 2 or 5 times a power of ten, for 4 to 10 ticks."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * k for k in (1, 2, 5, 10) if span / (power * k) <= 8)


class Panel:
    """One coordinate system of the chart."""

    def __init__(self, top, height, steps, low, high, title):
        self.top, self.height, self.steps, self.low, self.high = top, height, steps, low, high
        self.title = title
        self.out = []

    def x(self, step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps

    def y(self, value):
        value = min(max(value, self.low), self.high)
        return self.top + self.height * (self.high - value) / (self.high - self.low)

    def axes(self):
        step = tick_step(self.high - self.low)
        for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            y = self.y(k * step)
            self.out.append('<path d="M%d %.1fH%d" stroke="#ddd"/>' % (LEFT, y, WIDTH - RIGHT))
            self.out.append('<text x="%d" y="%.1f" text-anchor="end">%.4g</text>' % (LEFT - 6, y + 4, k * step))
        step = max(1, tick_step(self.steps))
        bottom = self.top + self.height
        for k in range(int(self.steps // step) + 1):
            x = self.x(k * step)
            self.out.append('<path d="M%.1f %d v4" stroke="#888"/>' % (x, bottom))
            self.out.append('<text x="%.1f" y="%d" text-anchor="middle">%.4g</text>' % (x, bottom + 17, k * step))
        self.out.append('<path d="M%d %dV%dH%d" fill="none" stroke="#888"/>' % (LEFT, self.top, bottom, WIDTH - RIGHT))
        self.out.append('<text x="%d" y="%d" font-weight="bold">%s</text>' % (LEFT, self.top - 8, html.escape(self.title)))

    def line(self, values, colour, width, extra=""):
        points = " ".join("%.1f,%.1f" % (self.x(i + 1), self.y(v)) for i, v in enumerate(values))
        self.out.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="%g" %s/>' %
                        (points, colour, width, extra))


def chart(runs, window):
    steps = max(len(losses) for _, losses in runs)
    everything = [loss for _, losses in runs for loss in losses]
    losses_panel = Panel(30, 300, steps, math.floor(min(everything) * 5) / 5, math.ceil(max(everything) * 5) / 5,
                         "loss, nats a byte (faint: each step; line: mean of %d steps)" % (window // 2 * 2 + 1))
    losses_panel.axes()
    for i, (_, losses) in enumerate(runs):
        losses_panel.line(losses, COLOURS[i % len(COLOURS)], 0.6, 'opacity="0.25"')
    for i, (name, losses) in enumerate(runs):  # a run that hides another is dashed
        dashes = 'stroke-dasharray="7 7"' if i > 0 else ""
        losses_panel.line(smoothed(losses, window), COLOURS[i % len(COLOURS)], 2, dashes)
        y = 52 + 20 * i
        losses_panel.out.append('<path d="M%d %dh40" stroke="%s" stroke-width="2" %s/>' %
                                (WIDTH - 330, y - 4, COLOURS[i % len(COLOURS)], dashes))
        losses_panel.out.append('<text x="%d" y="%d">%s</text>' % (WIDTH - 282, y, html.escape(name)))
    parts, height = losses_panel.out, 360
    if len(runs) > 1:
        gaps = [[b - a for a, b in zip(runs[0][1], losses)] for _, losses in runs[1:]]
        most = max(abs(g) for gap in gaps for g in gap) or 1e-6
        panel = Panel(400, 120, steps, -most, most, "difference to %s, each step" % runs[0][0])
        panel.axes()
        for i, gap in enumerate(gaps, 1):
            panel.line(gap, COLOURS[i % len(COLOURS)], 0.8)
        parts, height = parts + panel.out, 550
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">\n'
            '<rect width="%d" height="%d" fill="#fff"/>\n%s\n</svg>\n' % (WIDTH, height, WIDTH, height, "\n".join(parts)))


def write_csv(path, runs):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step"] + [name for name, _ in runs])
        for i in range(max(len(losses) for _, losses in runs)):
            writer.writerow([i + 1] + [repr(losses[i]) if i < len(losses) else "" for _, losses in runs])


def describe(runs, window):
    first_name, first = runs[0]
    for name, losses in runs:
        last = losses[-window:]
        print("%s: %.4f at step 1, %.4f over the last %d of %d steps" %
              (name, losses[0], sum(last) / len(last), len(last), len(losses)))
    for name, losses in runs[1:]:
        both = list(zip(first, losses))
        apart = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if apart is None:
            print("%s: the same bits as %s in all %d steps" % (name, first_name, len(both)))
        else:
            print("%s: differs from %s from step %d on, by at most %.2g; mean difference of the last %d steps %+.2g" %
                  (name, first_name, apart + 1, max(abs(a - b) for a, b in both), min(window, len(both)),
                   sum(b - a for a, b in both[-window:]) / len(both[-window:])))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", nargs="+", help="NAME=FILE, from run --measure, or NAME=FILE.csv:COLUMN")
    parser.add_argument("--out", required=True, help="writes OUT.csv and OUT.svg")
    parser.add_argument("--window", type=int, default=0, help="steps of the moving mean (a 40th of the run)")
    args = parser.parse_args()
    runs = [read(argument) for argument in args.run]
    window = args.window or max(1, max(len(losses) for _, losses in runs) // 40)
    try:
        write_csv(args.out + ".csv", runs)
        with open(args.out + ".svg", "w") as file:
            file.write(chart(runs, window))
    except OSError as error:
        sys.exit("plot_losses.py: %s" % error)
    describe(runs, window)


if __name__ == "__main__":
    main()
