"""Runs the benchmark programs one after another and keeps what they found; tools/bench calls it.

A program that fails, hangs or writes no whole report keeps its old block, and the run fails at its
end. Without a GPU only the host calls run, and nothing is written.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results as res

TIMEOUT_S = 150
ALL_AT_MOST_S = 240
HOST_CALLS = "bench_host_calls"
NO_DEVICE = 77  # exit status of a program that finds no CUDA device
# What cannot change a time: a run's own output would otherwise make the tree dirty.
NOT_MEASURED = [":!benchmarks/results", ":!docs", ":!*.md"]


def output_of(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60,
                              check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def first_match(pattern, path):
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1).strip() if match else None


def find_gpu():
    """(name, driver) of the first GPU, or None: nvidia-smi, or the driver's files without it."""
    line = output_of(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader",
                      "-i", "0"])
    if line and line.count(",") == 1:
        name, driver = line.split(",")
        return name.strip(), driver.strip()
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        name = first_match(r"^Model:\s*(.+)$", information)
        if name:
            driver = first_match(r"Kernel Module[^0-9]*([0-9.]+)", "/proc/driver/nvidia/version")
            return name, driver or "unknown"
    return None


def cuda_version(build):
    for file in sorted(Path(build).glob("CMakeFiles/*/CMakeCUDACompiler.cmake")):
        return first_match(r'CMAKE_CUDA_COMPILER_VERSION "([^"]+)"', file)
    return None


def commit_of(root, given):
    """(commit, dirty); `given` is for a copy of the tree without git: HASH or HASH-dirty."""
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    git = ["git", "-C", str(root)]
    commit = output_of(git + ["rev-parse", "HEAD"])
    if commit is None:
        return "unknown", True
    changed = output_of(git + ["status", "--porcelain", "--", "."] + NOT_MEASURED)
    return commit, changed is None or changed != ""


def run_program(program, build):
    """Its report. Raises BadReport when there is none to keep."""
    path = Path(build) / "benchmarks" / program
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        host = program == HOST_CALLS
        command = [str(path)] + (["--benchmark_out_format=json", f"--benchmark_out={out}"]
                                 if host else ["--json", str(out)])
        try:
            # Google Benchmark's own table is wide and in another form: show_host prints ours.
            done = subprocess.run(command, timeout=TIMEOUT_S, check=False,
                                  stdout=subprocess.DEVNULL if host else None,
                                  stderr=subprocess.PIPE if host else None, text=True)
        except subprocess.TimeoutExpired:
            raise res.BadReport(f"not done after {TIMEOUT_S} s") from None
        except OSError as error:
            raise res.BadReport(str(error)) from None
        if done.returncode == NO_DEVICE:
            raise res.BadReport("it finds no CUDA device")
        if done.returncode != 0:
            raise res.BadReport(f"exit status {done.returncode} {done.stderr or ''}".strip())
        try:
            report = res.load(out)
        except (OSError, json.JSONDecodeError) as error:
            raise res.BadReport(f"no JSON: {error}") from None
    try:
        report = res.rounded(res.from_google_benchmark(report) if host else report)
        res.check_report(report)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise res.BadReport(f"its JSON has another form: {error!r}") from None
    if host:
        show_host(report)
    return report


def show_host(report):
    print(f"{HOST_CALLS}: {report['question']} ({'; '.join(report['notes'])})")
    for figure in report["figures"]:
        p10, median, p90 = (figure[key] for key in res.QUANTILES)
        line = (f"  {figure['name']:<34} {figure['axis']} {figure['size']:>7} {median:9.3f} us "
                f"(p10 {p10:.3f}, p90 {p90:.3f})")
        if "at_most_us" in figure:
            reached = "reached" if median <= figure["at_most_us"] else "not reached"
            line += f"  [at most {figure['at_most_us']:.1f} us: {reached}]"
        print(line + (f"  {figure['note']}" if "note" in figure else ""))


def choose(names, built):
    """Programs by name, with or without bench_; all of them without a name."""
    chosen = [name if name.startswith("bench_") else f"bench_{name}" for name in names]
    unknown = [name for name in chosen if name not in built]
    if unknown:
        sys.exit(f"bench: no program {', '.join(unknown)}; there are {', '.join(built)}")
    return [name for name in built if not chosen or name in chosen]


def summarise(reports):
    targets = [t for program, report in reports.items() for t in res.targets_of(program, report)]
    missed = [target for target in targets if not target.reached]
    print(f"\nbench: {len(targets) - len(missed)} of {len(targets)} figures reached their targets")
    for target in missed:
        print(f"  not reached: {target} ({target.program})")


def new_results(path, programs_there, gpu, cpu, everything):
    found = res.load(path) if path.exists() else {}
    blocks = found.get("programs", {})
    if everything:  # what no longer exists is no result
        blocks = {name: block for name, block in blocks.items() if name in programs_there}
    return {"device": gpu[0], "cpu": cpu, "programs": blocks}


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="./tools/bench", description="Runs the benchmarks and writes "
        "benchmarks/results/<gpu>.json. With names, only these are run and replaced.")
    parser.add_argument("programs", nargs="*", help="such as: step planner")
    parser.add_argument("--commit", help="=HASH or =HASH-dirty, for a copy of the tree without git")
    parser.add_argument("--results", help="=FOLDER to write to")
    parser.add_argument("--build", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--built", required=True, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv):
    arguments = parse(argv)
    built = arguments.built.split()
    chosen = choose(arguments.programs, built)
    gpu = find_gpu()
    if gpu is None or built == [HOST_CALLS]:
        why = "no GPU here" if gpu is None else "this build has no CUDA"
        if HOST_CALLS not in chosen:
            print(f"bench: {why}, and {', '.join(chosen)} needs one")
            return 1
        print(f"bench: {why}: only the host calls are run, and no results are written")
        chosen = [HOST_CALLS]
        gpu = None
    else:
        path = Path(arguments.results or res.ROOT / "benchmarks" / "results")
        path = path / res.file_name_of(gpu[0])
        cpu = first_match(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or "unknown"
        found = new_results(path, built, gpu, cpu, not arguments.programs)
        commit, dirty = commit_of(res.ROOT, arguments.commit)
    reports, failed = {}, []
    begin = time.monotonic()
    for k, program in enumerate(chosen, 1):
        print(f"\n[{k}/{len(chosen)}] {program}, {time.monotonic() - begin:.0f} s so far")
        started = time.monotonic()
        try:
            reports[program] = run_program(program, arguments.build)
        except res.BadReport as error:
            failed.append(program)
            print(f"bench: {program} failed: {error}")
            continue
        seconds = time.monotonic() - started
        print(f"[{k}/{len(chosen)}] {program}: {seconds:.1f} s")
        if gpu:
            now = datetime.datetime.now(datetime.timezone.utc)
            stamp = {"date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "commit": commit, "dirty": dirty,
                     "driver": gpu[1], "cuda": cuda_version(arguments.build) or "unknown"}
            found["programs"][program] = {**stamp, "seconds": round(seconds, 1),
                                          "report": reports[program]}
            latest = {"device": found["device"], "cpu": found["cpu"], **stamp}
            found = {**latest, "programs": dict(sorted(found["programs"].items()))}
            res.save(found, path)
    summarise(reports)
    total = time.monotonic() - begin
    slow = f", more than the {ALL_AT_MOST_S} s they should" if total > ALL_AT_MOST_S else ""
    print(f"bench: {len(chosen)} programs took {total:.0f} s{slow}")
    if gpu and reports:
        print(f"bench: wrote {os.path.relpath(path)}; ./tools/plot draws it into the documents")
    if failed:
        print(f"bench: FAILED: {', '.join(failed)}; older results of these stay as they were")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # in order with what the programs print
    sys.exit(main(sys.argv[1:]))
