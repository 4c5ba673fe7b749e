"""Draws the plots of series.py from the results into docs/plots/*.svg; tools/plot calls it.

The same results give the same bytes with the same matplotlib: ids come from a fixed salt, and no
date is written. The background is white, so that a plot reads on dark pages too.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
# pylint: disable=wrong-import-position
from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullFormatter  # noqa: E402

import documents  # noqa: E402
import results as res  # noqa: E402
import series  # noqa: E402

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
STYLE = {
    "svg.hashsalt": "quire",
    "svg.fonttype": "none",
    "font.size": 11,
    "figure.figsize": (7.2, 4.8),
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def size_label(value, _):
    value = int(round(value))
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)


def draw(plot, data, device, path):
    figure, axes = pyplot.subplots()
    sizes = set()
    for i, (label, points) in enumerate(data["curves"].items()):
        x, low, middle, high = zip(*points)
        colour = COLOURS[i % len(COLOURS)]
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(x, middle, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=5,
                  label=label)
        sizes.update(x)
    if data["ceiling"]:
        axes.axhline(data["ceiling"], color="#555555", linestyle="--", linewidth=1,
                     label="device copy, same run")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(size_label))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.set_title(f"{plot.title} ({device}, median and p10–p90)", fontsize=11, loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    figure.tight_layout()
    described = documents.DIGEST + series.digest_of(data)
    figure.savefig(path, format="svg",
                   metadata={"Date": None, "Creator": "tools/plot", "Description": described})
    pyplot.close(figure)
    # matplotlib leaves blanks at line ends.
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.split("\n")), encoding="utf-8")


def draw_all(root, results):
    folder = root / documents.PLOTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for plot in series.PLOTS:
        data = series.data_of(plot, results)
        path = folder / f"{plot.name}.svg"
        if data is None:
            path.unlink(missing_ok=True)
            print(f"plot: {plot.name}: not measured yet")
            continue
        with matplotlib.rc_context(STYLE):
            draw(plot, data, results["device"], path)
        print(f"plot: {path.relative_to(root)}")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=res.ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        results = documents.load(arguments.root)
        draw_all(arguments.root, results)
        documents.write(arguments.root, results)
        return 0
    except (documents.BadDocument, series.NoFigure) as error:
        print(f"plot: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
