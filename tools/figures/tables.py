"""The tables of the documents, out of the results: one function a kind of block."""

import re

import results as res
import series

NOT_MEASURED = "*Not measured yet.*"


def number(value):
    """Three or four digits, as the figures are good for."""
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def span(figure):
    return f"{number(figure['median_us'])} ({number(figure['p10_us'])}–{number(figure['p90_us'])})"


def goal(figure):
    reached = {True: "reached", False: "**not reached**"}
    texts = [f"at {'most' if target.unit == 'us' else 'least'} {target.goal:.4g} "
             f"{target.unit.replace('us', 'µs')}: {reached[target.reached]}"
             for target in res.targets_of("", {"figures": [figure]})]
    return "; ".join(texts)


def table(head, rows, align=None):
    align = align or ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, align, *rows])


def is_grid(figures):
    """Better read as names over sizes than as one line a figure."""
    names = {figure["name"] for figure in figures}
    return len(figures) >= 2 * len(names) and not any("bytes" in f or "note" in f for f in figures)


def grid(axis, figures):
    sizes = sorted({figure["size"] for figure in figures})
    names = list(dict.fromkeys(figure["name"] for figure in figures))
    cells = {}
    for figure in figures:
        text = span(figure)
        if goal(figure):
            text += f"<br>{goal(figure)}"
        cells[figure["name"], figure["size"]] = text
    rows = [[name] + [cells.get((name, size), "") for size in sizes] for name in names]
    return table([f"µs over {axis}"] + [f"{size:,}" for size in sizes], rows)


def lines(axis, figures, copy_rate):
    rows = []
    for figure in figures:
        rate = ""
        if "TB_per_s" in figure:
            rate = f"{number(figure['TB_per_s'])} TB/s"
            if copy_rate:
                rate += f", {100 * figure['TB_per_s'] / copy_rate:.0f} % of a copy"
        rows.append([figure["name"], f"{figure['size']:,}", span(figure), rate,
                     "; ".join(filter(None, [goal(figure), figure.get("note", "")]))])
    return table(["what", axis, "µs (p10–p90)", "rate", "to reach, remarks"], rows,
                 ["---", "---:", "---:", "---:", "---"])


def of_program(program, results):
    block = results["programs"].get(program)
    if block is None:
        return NOT_MEASURED
    report = block["report"]
    axes = dict.fromkeys(figure["axis"] for figure in report["figures"])
    copy_rate = report.get("ceilings", {}).get("copy_TB_per_s")
    parts = []
    for axis in axes:
        figures = [figure for figure in report["figures"] if figure["axis"] == axis]
        parts.append(grid(axis, figures) if is_grid(figures) else lines(axis, figures, copy_rate))
    remarks = [f"- {name}: {format(value, ',d' if isinstance(value, int) else '.4g')}"
               for name, value in report.get("values", {}).items()]
    remarks += [f"- {note}" for note in report.get("notes", [])]
    return "\n\n".join(parts + (["\n".join(remarks)] if remarks else []))


def machine(results):
    head = ["program", "commit", "date", "driver", "CUDA", "seconds"]
    rows = [[name, block["commit"][:12] + (" and changes" if block["dirty"] else ""),
             block["date"][:10], block["driver"], block["cuda"], f"{block['seconds']:.0f}"]
            for name, block in results["programs"].items()]
    return f"{results['device']}; host: {results['cpu']}.\n\n" + table(
        head, rows, ["---"] * 5 + ["---:"])


def ceilings(results):
    rows = []
    for program, block in results["programs"].items():
        found = block["report"].get("ceilings")
        if found:
            rates = [number(found[f"{kind}_TB_per_s"]) for kind in ("copy", "read", "write")]
            times = [number(found[f"empty_{kind}"]["median_us"])
                     for kind in ("plain", "wait", "wait_trigger")]
            rows.append([program, *rates, *times])
    head = ["in the run of", "copy, TB/s", "read", "write", "empty kernel, µs",
            "with wait", "with wait and trigger"]
    return table(head, rows) if rows else NOT_MEASURED


def targets(results):
    found = [target for program, block in results["programs"].items()
             for target in res.targets_of(program, block["report"])]
    rows = [[target.figure, f"{number(target.measured)} {target.unit.replace('us', 'µs')}",
             f"{'≤' if target.unit == 'us' else '≥'} {target.goal:.4g}",
             "yes" if target.reached else "**no**"] for target in found]
    reached = sum(target.reached for target in found)
    return f"{reached} of {len(found)} reached.\n\n" + table(
        ["figure", "median", "to reach", "reached"], rows)


def serving(results):
    """A line for each figure of the serving loop: tokens per second, as its readers count."""
    block = results["programs"].get(series.SERVING)
    if block is None:
        return NOT_MEASURED
    rows = []
    for figure in block["report"]["figures"]:
        low, middle, high = series.per_second(figure)
        rows.append([figure["name"], f"{figure['size']:,}",
                     f"{number(middle)} ({number(low)}–{number(high)})",
                     f"{figure['median_us']:.3f}", figure.get("note", "")])
    found = table(["what", "steps a visit", "tokens per second (p10–p90)", "µs a token", "remarks"],
                  rows, ["---", "---:", "---:", "---:", "---"])
    remarks = "\n".join(f"- {note}" for note in block["report"].get("notes", []))
    return found + ("\n\n" + remarks if remarks else "")


# --- README ---

def figure_of(results, program, name, size):
    block = results["programs"].get(program)
    if block is None:
        return None
    for figure in block["report"]["figures"]:
        if re.fullmatch(name, figure["name"]) and size in (None, figure["size"]):
            return figure
    raise series.NoFigure(f"{program} has no figure {name} of size {size} for the README")


def largest_with(results, program, key):
    block = results["programs"].get(program)
    if block is None:
        return None
    figures = [figure for figure in block["report"]["figures"] if key in figure]
    if not figures:
        raise series.NoFigure(f"{program} has no figure with {key} for the README")
    return max(figures, key=lambda figure: figure["size"])


def headline(results):
    """The four most telling lines, as far as they have been measured."""
    rows = []
    fused = figure_of(results, series.DECODE, "CSA layer", 64)
    if fused:
        apart = figure_of(results, series.DECODE, "CSA layer, separate operations", 64)
        rows.append(["CSA layer in a decode step, batch 64: all cache work in one launch",
                     f"{number(fused['median_us'])} µs; as separate operations "
                     f"{number(apart['median_us'])} µs"])
    step = figure_of(results, series.STEP, "V4-Flash step", 64)
    if step:
        rows.append(["whole V4-Flash decode step, batch 64: plan, 43 appends, commit",
                     f"{number(step['median_us'])} µs"])
    plan = largest_with(results, series.PLANNER, "at_most_us")
    if plan:
        rows.append([f"{plan['name']}, on the device: {plan['size']:,} {plan['axis']}",
                     f"{number(plan['median_us'])} µs"])
    prefill = largest_with(results, series.PREFILL, "at_least_TB_per_s")
    if prefill:
        report = results["programs"][series.PREFILL]["report"]
        text = f"{number(prefill['median_us'])} µs, {number(prefill['TB_per_s'])} TB/s"
        if "ceilings" in report:
            share = 100 * prefill["TB_per_s"] / report["ceilings"]["copy_TB_per_s"]
            text += f", {share:.0f} % of a device copy"
        rows.append([f"prefill, {prefill['name']}: {prefill['size']:,} {prefill['axis']}", text])
    return table([f"on one {results['device']}, medians", ""], rows, ["---", "---"])
