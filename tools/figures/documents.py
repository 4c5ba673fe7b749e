"""Writes the figures into the documents, between <!-- figures:begin NAME --> and figures:end, or
checks that they are those of the results; the test `documents_figures` does.

Exit status of --check: 0 all equal, 1 something differs, 77 there are no results yet.
"""

import argparse
import re
import sys
from pathlib import Path

import results as res
import series
import tables

DOCUMENTS = ("README.md", "docs/PERFORMANCE.md")
PLOTS_FOLDER = "docs/plots"
NOT_YET = 77
BLOCK = re.compile(r"(<!-- figures:begin (\S+) -->\n)(.*?)(<!-- figures:end -->)", re.DOTALL)
DIGEST = "figures "  # in a plot's description, before the digest of what it shows


class BadDocument(Exception):
    pass


def plot_block(plot, results, document):
    if series.data_of(plot, results) is None:
        return tables.NOT_MEASURED
    to_root = "../" * document.count("/")
    return f"![{plot.title}]({to_root}{PLOTS_FOLDER}/{plot.name}.svg)"


def block(name, results, document):
    """The text of a block: a table by its name, a program's without bench_, or plot:NAME."""
    kinds = {"machine": tables.machine, "ceilings": tables.ceilings, "targets": tables.targets,
             "headline": tables.headline, "serving": tables.serving}
    plots = {f"plot:{plot.name}": plot for plot in series.PLOTS}
    if name in kinds:
        return kinds[name](results)
    if name in plots:
        return plot_block(plots[name], results, document)
    return tables.of_program(f"bench_{name}", results)


def rewritten(text, results, document):
    """The document with its blocks as the results have them: empty where there are none."""
    if text.count("<!-- figures:") != 2 * len(BLOCK.findall(text)):
        raise BadDocument(f"{document}: a figures:begin or figures:end stands alone")

    def replace(match):
        content = block(match.group(2), results, document) + "\n" if results else ""
        return match.group(1) + content + match.group(4)

    return BLOCK.sub(replace, text)


def unshown(root, results):
    """Programs that have figures, but no block in any document."""
    names = {name for document in DOCUMENTS
             for _, name, _, _ in BLOCK.findall((root / document).read_text(encoding="utf-8"))}
    return [program for program in results["programs"]
            if program.removeprefix("bench_") not in names]


def digest_in(path):
    try:
        match = re.search(DIGEST + "([0-9a-f]+)", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match.group(1) if match else None


def stale_plots(root, results):
    for plot in series.PLOTS:
        data = series.data_of(plot, results) if results else None
        path = root / PLOTS_FOLDER / f"{plot.name}.svg"
        wanted = series.digest_of(data) if data else None
        if digest_in(path) != wanted or (data is None and path.exists()):
            yield str(path.relative_to(root))


def differences(root, results):
    found = []
    for document in DOCUMENTS:
        text = (root / document).read_text(encoding="utf-8")
        if rewritten(text, results, document) != text:
            found.append(document)
    return found + list(stale_plots(root, results))


def load(root):
    path = root / res.DOCUMENTED
    return res.load(path) if path.exists() else None


def check(root):
    results = load(root)
    found = differences(root, results)
    for name in found:
        print(f"figures: {name} is not what {res.DOCUMENTED} says; ./tools/plot rewrites it")
    missing = unshown(root, results) if results else []
    for program in missing:
        print(f"figures: docs/PERFORMANCE.md shows nothing of {program}; give it a block")
    if found or missing:
        return 1
    if results is None:
        print(f"SKIPPED: there is no {res.DOCUMENTED} yet; the documents show no figure")
        return NOT_YET
    print(f"figures: documents and plots are those of {res.DOCUMENTED}")
    return 0


def write(root, results):
    for document in DOCUMENTS:
        path = root / document
        old = path.read_text(encoding="utf-8")
        new = rewritten(old, results, document)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"figures: rewrote {document}")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    parser.add_argument("--root", type=Path, default=res.ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        if arguments.check:
            return check(arguments.root)
        write(arguments.root, load(arguments.root))
        return 0
    except (BadDocument, series.NoFigure) as error:
        print(f"figures: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
