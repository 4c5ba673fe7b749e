"""What the plots show, out of the results; drawing it is plots.py's part, which needs matplotlib.

A plot carries the digest of what it shows, so that a check can tell whether it is that of the
results without drawing it again.
"""

import hashlib
import json
import re
from dataclasses import dataclass

DECODE, STEP, IN_SITU = "bench_decode_chain", "bench_step", "bench_in_situ"
PLANNER, PREFILL = "bench_planner", "bench_prefill"
SERVING = "bench_serving"


@dataclass(frozen=True)
class Curve:
    """Figures of one program on one axis, by name. `label` may refer to groups of the pattern."""
    program: str
    axis: str
    pattern: str
    label: str


@dataclass(frozen=True)
class Plot:
    name: str  # of the block in the documents, and of docs/plots/NAME.svg
    title: str
    x_label: str
    curves: tuple
    rate: bool = False  # TB/s, beside the ceiling of a copy
    inverse: bool = False  # how often the time fits into a second
    unit: str = "µs"

    @property
    def y_label(self):
        return "TB/s" if self.rate else self.unit


PLOTS = (
    Plot("layer_over_batch", "Cache work of one CSA layer in a decode step", "batch", (
        Curve(DECODE, "batch", r"CSA layer", "one launch"),
        Curve(DECODE, "batch", r"CSA layer, loads after the wait",
              "one launch, loads after the wait"),
        Curve(DECODE, "batch", r"CSA layer, separate operations", "separate operations"),
        Curve(IN_SITU, "batch", r"CSA append \([abc]\) ([\w ]+)", r"in situ, producer: \1"))),
    Plot("planner_over_tokens", "Plan of a step", "tokens",
         (Curve(PLANNER, "tokens", r"ragged plan, (64 tokens a request|1024 requests)",
                r"\1"),)),
    Plot("step_over_batch", "Plan, appends and commit of a whole decode step", "batch",
         (Curve(STEP, "batch", r"(V4-\w+) step", r"\1"),)),
    Plot("prefill_over_tokens", "Prefill of one layer", "tokens",
         (Curve(PREFILL, "tokens", r"((?:CSA|HCA|window)(?: and indexer)? (?:parts?|layer))",
                r"\1"),), rate=True),
    Plot("serving_over_steps", "Decode throughput of the serving loop, 64 requests",
         "steps a visit", (Curve(SERVING, "steps a visit", r"decode, (\d+ drafts)", r"\1"),),
         inverse=True, unit="tokens per second"),
)


class NoFigure(Exception):
    """A program was measured, but has no figure by a name that the documents know."""


def per_second(figure):
    """(low, middle, high): the slowest has the lowest rate."""
    return tuple(1e6 / figure[key] for key in ("p90_us", "median_us", "p10_us"))


def points_of(curve, report, rate, inverse=False):
    """label -> points by size, of the figures that the curve names."""
    found = {}
    for figure in report["figures"]:
        match = re.fullmatch(curve.pattern, figure["name"])
        if not match or figure["axis"] != curve.axis or (rate and "TB_per_s" not in figure):
            continue
        label = match.expand(curve.label)
        low, middle, high = figure["p10_us"], figure["median_us"], figure["p90_us"]
        if rate:  # the slowest has the lowest rate
            best = figure["TB_per_s"]
            low, middle, high = best * middle / high, best, best * middle / low
        if inverse:
            low, middle, high = per_second(figure)
        point = [figure["size"], round(low, 4), round(middle, 4), round(high, 4)]
        found.setdefault(label, []).append(point)
    return {label: sorted(points) for label, points in found.items()}


def data_of(plot, results):
    """{"curves": {label: [[size, low, median, high]]}, "ceiling": TB/s or None}, or None when none
    of its programs has been measured."""
    curves, measured, ceiling = {}, False, None
    for curve in plot.curves:
        block = results["programs"].get(curve.program)
        if block is None:
            continue
        measured = True
        points = points_of(curve, block["report"], plot.rate, plot.inverse)
        if not points:
            raise NoFigure(f"{curve.program} has no figure named {curve.pattern} over {curve.axis}"
                           f" for the plot {plot.name}; tools/figures/series.py has the names")
        curves.update(points)
        if plot.rate:
            ceiling = block["report"].get("ceilings", {}).get("copy_TB_per_s")
    return {"curves": curves, "ceiling": ceiling} if measured else None


def digest_of(data):
    text = json.dumps(data, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
