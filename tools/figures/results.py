"""Results of the benchmarks: what lies in benchmarks/results/<gpu>.json.

One file per GPU. Each program has a block with the commit, date and driver it was measured with, so
that a run of a few programs replaces only theirs. A block's `report` is what the program wrote with
--json; the output of Google Benchmark is brought into the same form here.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The targets are for this GPU, and the documents show this one.
DOCUMENTED = "benchmarks/results/nvidia_h200.json"

QUANTILES = ("p10_us", "median_us", "p90_us")
# What Report's programs say of themselves; bench_host_calls cannot.
HOST_QUESTION = "what a step costs the host, and whether that depends on the context"
HOST_STEP_ROWS, HOST_STEP_AT_MOST_US = 256, 20.0
HOST_PARTS = ("reserve", "prepare", "apply", "settle")


class BadReport(Exception):
    """What a program wrote is no report; the text says why."""


@dataclass
class Target:
    program: str
    figure: str  # with its size
    measured: float
    goal: float
    unit: str  # us, TB/s

    @property
    def reached(self):
        return self.measured >= self.goal if self.unit == "TB/s" else self.measured <= self.goal

    def __str__(self):
        bound = "at least" if self.unit == "TB/s" else "at most"
        return f"{self.figure}: {self.measured:.2f} {self.unit}, {bound} {self.goal:.4g}"


def file_name_of(device):
    """NVIDIA H200 -> nvidia_h200.json"""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def name_with_size(figure):
    return f"{figure['name']}, {figure['axis']} {figure['size']:,}"


def targets_of(program, report):
    found = []
    for figure in report["figures"]:
        name = name_with_size(figure)
        if "at_most_us" in figure:
            found.append(Target(program, name, figure["median_us"], figure["at_most_us"], "us"))
        if "at_least_TB_per_s" in figure:
            found.append(Target(program, name, figure["TB_per_s"], figure["at_least_TB_per_s"],
                                "TB/s"))
    return found


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_report(report):
    """Raises BadReport unless every figure is whole: numbers, in order, each name and size once."""
    if not isinstance(report, dict) or not report.get("figures"):
        raise BadReport("it has no figures")
    seen = set()
    for figure in report["figures"]:
        missing = {"name", "axis", "size", *QUANTILES} - figure.keys()
        if missing:
            raise BadReport(f"{figure.get('name', 'a figure')} lacks {', '.join(sorted(missing))}")
        name = name_with_size(figure)
        if name in seen:
            raise BadReport(f"{name} is there twice")
        seen.add(name)
        p10, median, p90 = (figure[key] for key in QUANTILES)
        # A difference that is hidden behind other work may be as small as the noise, both ways.
        if not all(map(is_number, (p10, median, p90))) or not p10 <= median <= p90 or p90 <= 0:
            raise BadReport(f"{name}: {p10}, {median}, {p90} are no p10, median, p90 of a time")
        for key in ("at_most_us", "bytes", "TB_per_s", "at_least_TB_per_s"):
            if key in figure and not is_number(figure[key]):
                raise BadReport(f"{name}: {key} is {figure[key]}")
        if "at_least_TB_per_s" in figure and "TB_per_s" not in figure:
            raise BadReport(f"{name} has a rate to reach and none measured")


def aggregates_of(raw):
    """Of Google Benchmark's lines: run name -> {p10_us, median_us, p90_us: the line}"""
    runs = {}
    for line in raw.get("benchmarks", []):
        if line.get("error_occurred"):
            raise BadReport(f"{line['run_name']}: {line.get('error_message')}")
        quantile = f"{line.get('aggregate_name')}_us"
        if quantile in QUANTILES:
            runs.setdefault(line["run_name"], {})[quantile] = line
    return runs


def figure_of_host(run_name, lines):
    """A step's figure is its counter median_us, which a preempted step does not move: the median of
    the repetitions' medians, and their tenth and ninetieth percentile."""
    to_us = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
    sizes = dict(re.findall(r"/(rows|context):(\d+)", run_name))
    name = run_name.split("/")[0]
    if "rows" in sizes:
        name = f"{name}, {sizes['rows']} rows"
    figure = {"name": name, "axis": "context", "size": int(sizes["context"])}
    for quantile, line in lines.items():
        figure[quantile] = line.get("median_us", line["real_time"] * to_us[line["time_unit"]])
    if name == f"decode_step, {HOST_STEP_ROWS} rows":
        figure["at_most_us"] = HOST_STEP_AT_MOST_US
    parts = [f"{part} {lines['median_us'][f'{part}_us']:.2f}" for part in HOST_PARTS
             if f"{part}_us" in lines["median_us"]]
    return {**figure, "note": ", ".join(parts)} if parts else figure


def from_google_benchmark(raw):
    """The output of bench_host_calls in the form of the other programs."""
    backend = raw.get("context", {}).get("backend", "unknown")
    return {"program": "bench_host_calls", "question": HOST_QUESTION,
            "figures": [figure_of_host(*run) for run in aggregates_of(raw).items()],
            "notes": [f"backend: {backend}"]}


def rounded(value):
    """Six digits are more than any figure has; they keep the file short."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def save(results, path):
    """All of it or nothing: a run that is interrupted leaves the file whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1, ensure_ascii=False)
        file.write("\n")
    os.replace(unfinished, path)
