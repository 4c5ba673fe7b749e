"""tools/figures: programs that are stand-ins, results and documents in a temporary folder. All
figures here are invented, to see that they arrive; none of them is a measurement."""

import contextlib
import copy
import io
import json
import os
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools" / "figures"))
# pylint: disable=wrong-import-position
import documents  # noqa: E402
import results as res  # noqa: E402
import run  # noqa: E402
import series  # noqa: E402
import tables  # noqa: E402


def figure(name, axis, size, median, **more):
    return {"name": name, "axis": axis, "size": size, "p10_us": median - 0.125,
            "median_us": median, "p90_us": median + 0.25, **more}


CEILINGS = {"copy_TB_per_s": 4.0, "read_TB_per_s": 3.5, "write_TB_per_s": 3.0,
            **{f"empty_{kind}": {"p10_us": 0.5, "median_us": 0.625, "p90_us": 0.75}
               for kind in ("plain", "wait", "wait_trigger")}}


def report(program, figures, **more):
    return {"program": program, "question": "an invented one", "figures": figures, **more}


def invented_reports():
    batches = (1, 64, 256)
    chain = [figure(name, "batch", batch, us + batch / 64)
             for name, us in (("CSA layer", 11), ("CSA layer, loads after the wait", 22),
                              ("CSA layer, separate operations", 33)) for batch in batches]
    chain[1]["at_most_us"] = 12.5  # 12: reached
    chain[2]["at_most_us"] = 14.5  # 15: missed
    step = [figure(f"{model} step", "batch", batch, 500 + batch)
            for model in ("V4-Flash", "V4-Pro") for batch in batches]
    plan = [figure("ragged plan, 1024 requests", "tokens", tokens, 40 + tokens / 4096,
                   at_most_us=80)
            for tokens in (4096, 65536)]
    prefill = [figure("CSA and indexer parts", "tokens", 65536, 200, bytes=400e6, TB_per_s=2.0,
                      at_least_TB_per_s=4.5)]
    in_situ = [figure(f"CSA append ({producer}) invented", "batch", batch, 66,
                      note="beside them") for producer in "ab" for batch in batches]
    serving = [figure(f"decode, {drafts} drafts", "steps a visit", steps, 1.0 + drafts / 4 + steps,
                      note="the host idles") for drafts in (0, 2) for steps in (1, 4)]
    reports = [report("bench_decode_chain", chain, ceilings=CEILINGS,
                      values={"fused over separate": 0.75}),
               report("bench_step", step), report("bench_planner", plan),
               report("bench_serving", serving, notes=["of an invented model"]),
               report("bench_in_situ", in_situ, values={"bytes": 1234567}),
               report("bench_prefill", prefill, ceilings=CEILINGS, notes=["an invented note"])]
    return {one["program"]: one for one in reports}


def google_output(median=17.0):
    lines = []
    for rows in (1, 256):
        run_name = f"decode_step/rows:{rows}/context:1024/iterations:2000/repeats:30/manual_time"
        for kind, us in (("mean", 99), ("p10", median - 1), ("median", median), ("p90", median + 1),
                         ("cv", 0.01)):
            lines.append({"run_name": run_name, "aggregate_name": kind, "real_time": 1e6,
                          "time_unit": "us", "median_us": us, "prepare_us": 5.0})
    for kind in ("p10", "median", "p90"):
        lines.append({"run_name": "headroom_fit_usage/context:1024/min_time:0.010/repeats:30",
                      "aggregate_name": kind, "real_time": 250.0, "time_unit": "ns"})
    return {"context": {"backend": "idle"}, "benchmarks": lines}


def invented_results():
    stamp = {"date": "2001-02-03T04:05:06Z", "commit": "0123456789abcdef", "dirty": False,
             "driver": "1.2", "cuda": "3.4"}
    blocks = {program: {**stamp, "seconds": 1.5, "report": one}
              for program, one in invented_reports().items()}
    return {"device": "NVIDIA H200", "cpu": "a CPU", **stamp, "programs": blocks}


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)


class Reports(unittest.TestCase):
    def test_the_output_of_google_benchmark_takes_the_form_of_the_others(self):
        found = res.from_google_benchmark(google_output())
        res.check_report(found)
        one, many, ask = found["figures"]
        self.assertEqual((one["name"], one["axis"], one["size"]),
                         ("decode_step, 1 rows", "context", 1024))
        self.assertEqual([many[key] for key in res.QUANTILES], [16, 17, 18])
        self.assertEqual(many["at_most_us"], 20)
        self.assertNotIn("at_most_us", one)
        self.assertEqual(many["note"], "prepare 5.00")
        self.assertEqual(ask["median_us"], 0.25)

    def test_a_report_that_is_not_whole_is_refused(self):
        good = report("bench_x", [figure("a", "batch", 1, 2.0)])
        res.check_report(good)
        for spoil in ({"median_us": None}, {"median_us": float("nan")}, {"p10_us": 3.0},
                      {"p90_us": 1.0}, {"p90_us": float("inf")}, {"at_least_TB_per_s": 1.0},
                      {"at_most_us": None}):
            bad = copy.deepcopy(good)
            bad["figures"][0].update(spoil)
            with self.assertRaises(res.BadReport, msg=spoil):
                res.check_report(bad)
        for bad in ({}, report("bench_x", []), report("bench_x", good["figures"] * 2),
                    report("bench_x", [{"name": "a", "axis": "batch", "size": 1}])):
            with self.assertRaises(res.BadReport, msg=bad):
                res.check_report(bad)

    def test_a_target_is_reached_at_its_value_and_missed_beyond(self):
        for us, reached in ((2.0, True), (2.01, False)):
            found, = res.targets_of("p", report("p", [figure("a", "batch", 1, us, at_most_us=2)]))
            self.assertEqual(found.reached, reached)
        for rate, reached in ((4.0, True), (3.99, False)):
            found, = res.targets_of("p", report("p", [
                figure("a", "batch", 1, 1.0, TB_per_s=rate, at_least_TB_per_s=4)]))
            self.assertEqual(found.reached, reached)

    def test_a_device_names_its_file(self):
        self.assertEqual(res.file_name_of("NVIDIA H200"), "nvidia_h200.json")
        self.assertEqual(res.file_name_of("NVIDIA A100-SXM4 (80GB)"), "nvidia_a100_sxm4_80gb.json")


class Runs(Folder):
    def setUp(self):
        super().setUp()
        (self.folder / "benchmarks").mkdir()
        self.programs = []
        self.path = self.folder / "results" / "invented_gpu.json"
        self.add("bench_host_calls", google_output())
        for program in ("bench_decode_chain", "bench_step"):
            self.add(program, invented_reports()[program])

    def add(self, program, output, status=0, before=""):
        """A program that writes `output` to the path in its last argument."""
        source = self.folder / f"{program}.out"
        source.write_text(output if isinstance(output, str) else json.dumps(output))
        path = self.folder / "benchmarks" / program
        path.write_text('#!/bin/sh\nfor last; do :; done\n'
                        f'{before}cp "{source}" "${{last#--benchmark_out=}}"\nexit {status}\n')
        path.chmod(0o755)
        if program not in self.programs:
            self.programs.append(program)

    def bench(self, *arguments, gpu=("Invented GPU", "5.6"), commit="--commit=aaa"):
        said = io.StringIO()
        with mock.patch.object(run, "find_gpu", lambda: gpu), contextlib.redirect_stdout(said):
            status = run.main([f"--build={self.folder}", f"--built={' '.join(self.programs)}",
                               f"--results={self.path.parent}", commit, *arguments])
        return status, said.getvalue()

    def blocks(self):
        return res.load(self.path)["programs"]

    def test_a_whole_run_keeps_every_report_and_names_the_missed_target(self):
        status, said = self.bench()
        self.assertEqual(status, 0, said)
        found = res.load(self.path)
        self.assertEqual((found["device"], found["driver"], found["commit"], found["dirty"]),
                         ("Invented GPU", "5.6", "aaa", False))
        self.assertEqual(list(found["programs"]), sorted(self.programs))
        self.assertEqual(found["programs"]["bench_step"]["report"],
                         invented_reports()["bench_step"])
        self.assertIn("2 of 3 figures reached their targets", said)  # the host's is the third
        self.assertIn("not reached: CSA layer, batch 256: 15.00 us, at most 14.5", said)
        self.assertIn("[3/3]", said)

    def test_named_programs_alone_are_replaced(self):
        self.bench()
        self.add("bench_step", report("bench_step", [figure("V4-Flash step", "batch", 64, 7.0)]))
        self.add("bench_decode_chain", "not run: this would fail")
        status, said = self.bench("step", commit="--commit=bbb-dirty")
        self.assertEqual(status, 0, said)
        blocks = self.blocks()
        self.assertEqual((blocks["bench_step"]["commit"], blocks["bench_step"]["dirty"]),
                         ("bbb", True))
        self.assertEqual(blocks["bench_step"]["report"]["figures"][0]["median_us"], 7.0)
        self.assertEqual(blocks["bench_decode_chain"]["commit"], "aaa")
        self.assertIn("bench_host_calls", blocks)

    def test_a_program_that_fails_keeps_its_old_block_and_fails_the_run_at_its_end(self):
        self.bench()
        old = self.blocks()["bench_decode_chain"]
        good = invented_reports()["bench_decode_chain"]
        bad = copy.deepcopy(good)
        bad["figures"][0]["median_us"] = None
        for output, status, before, why in (
                (good, 3, "", "exit status 3"), (good, 77, "", "it finds no CUDA device"),
                ("{", 0, "", "no JSON"), ("[]", 0, "", "no figures"), (bad, 0, "", "None"),
                ({"figures": ["a"]}, 0, "", "another form"),
                (good, 0, "exec sleep 9\n", "not done after 0.5 s"),
                (good, 0, "kill -9 $$\n", "exit status -9")):
            self.add("bench_decode_chain", output, status, before)
            with mock.patch.object(run, "TIMEOUT_S", 0.5):
                done, said = self.bench(commit="--commit=bbb")
            self.assertEqual(done, 1, said)
            self.assertRegex(said, f"bench_decode_chain failed: .*{why}")
            self.assertIn("FAILED: bench_decode_chain;", said)
            self.assertEqual(self.blocks()["bench_decode_chain"], old)
            self.assertEqual(self.blocks()["bench_step"]["commit"], "bbb")  # the later one ran

    def test_without_a_gpu_the_host_calls_run_and_nothing_is_written(self):
        self.add("bench_decode_chain", "not run: this would fail")
        status, said = self.bench(gpu=None)
        self.assertEqual(status, 0, said)
        self.assertIn("no GPU here: only the host calls are run, and no results are written", said)
        self.assertIn("1 of 1 figures reached", said)
        self.assertFalse(self.path.exists())
        status, said = self.bench("step", gpu=None)
        self.assertEqual(status, 1)
        self.assertIn("no GPU here, and bench_step needs one", said)
        self.programs = ["bench_host_calls"]
        status, said = self.bench()
        self.assertIn("this build has no CUDA", said)
        self.assertFalse(self.path.exists())

    def test_a_whole_run_drops_what_no_longer_exists_and_a_named_one_does_not(self):
        self.bench()
        self.programs.remove("bench_step")
        self.bench("decode_chain")
        self.assertIn("bench_step", self.blocks())
        self.bench()
        self.assertNotIn("bench_step", self.blocks())

    def test_an_unknown_program_is_refused_with_those_there_are(self):
        with self.assertRaises(SystemExit) as refused:
            self.bench("stepp")
        self.assertIn("bench_stepp; there are bench_host_calls", str(refused.exception.code))

    def test_only_what_is_measured_makes_a_tree_dirty(self):
        if shutil.which("git") is None:
            self.skipTest("no git")
        tree = self.folder / "tree"
        for name in ("kernels/a.cu", "benchmarks/results/gpu.json", "docs/a.md", "README.md"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text("as committed\n")
        git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
        self.assertEqual(run.commit_of(tree, None), ("unknown", True))
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
            self.assertIsNotNone(run.output_of(git + command))
        commit, dirty = run.commit_of(tree, None)
        self.assertEqual((len(commit), dirty), (40, False))
        for name in ("benchmarks/results/gpu.json", "docs/a.md", "README.md"):
            (tree / name).write_text("changed\n")
        self.assertFalse(run.commit_of(tree, None)[1])
        (tree / "kernels/new.cu").write_text("")
        self.assertTrue(run.commit_of(tree, None)[1])

    def test_the_gpu_and_its_driver_come_from_nvidia_smi(self):
        smi = self.folder / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1'\n")
        smi.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": f"{self.folder}:{os.environ['PATH']}"}):
            self.assertEqual(run.find_gpu(), ("NVIDIA H200", "580.1"))


class Plots(unittest.TestCase):
    def test_a_plot_of_throughput_shows_how_often_a_time_fits_into_a_second(self):
        plot, = (plot for plot in series.PLOTS if plot.name == "serving_over_steps")
        curves = series.data_of(plot, invented_results())["curves"]
        self.assertEqual(list(curves), ["0 drafts", "2 drafts"])
        self.assertEqual(curves["2 drafts"][1], [4, 173913.0435, 181818.1818, 186046.5116])


class Documents(Folder):
    def setUp(self):
        super().setUp()
        for document in documents.DOCUMENTS:
            (self.folder / document).parent.mkdir(exist_ok=True)
            # Without the committed figures.
            text = (ROOT / document).read_text(encoding="utf-8")
            (self.folder / document).write_text(documents.rewritten(text, None, document),
                                                encoding="utf-8")

    def keep(self, results):
        res.save(results, self.folder / res.DOCUMENTED)

    def pretend_plots(self, results):
        for plot in series.PLOTS:
            digest = series.digest_of(series.data_of(plot, results))
            path = self.folder / documents.PLOTS_FOLDER / f"{plot.name}.svg"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"<svg>{documents.DIGEST}{digest}</svg>")

    def tool(self, *arguments):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = documents.main([f"--root={self.folder}", *arguments])
        return status, said.getvalue()

    def test_without_results_the_check_is_skipped_and_blocks_must_be_empty(self):
        status, said = self.tool("--check")
        self.assertEqual(status, documents.NOT_YET)
        self.assertIn("SKIPPED: there is no benchmarks/results/nvidia_h200.json yet", said)
        path = self.folder / "README.md"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("<!-- figures:end -->", "1.0 µs\n<!-- figures:end -->", 1),
                        encoding="utf-8")
        self.assertEqual(self.tool("--check")[0], 1)

    def test_documents_follow_the_results_and_a_change_of_either_fails_the_check(self):
        results = invented_results()
        self.keep(results)
        self.pretend_plots(results)
        status, said = self.tool("--check")
        self.assertEqual(status, 1)
        self.assertIn("README.md is not what", said)
        self.assertIn("docs/PERFORMANCE.md is not what", said)
        self.tool()
        self.assertEqual(self.tool("--check"), (0, mock.ANY))
        readme = (self.folder / "README.md").read_text(encoding="utf-8")
        for line in ("| 12.00 µs; as separate operations 34.00 µs |",
                     "plan, 43 appends, commit | 564.0 µs |",
                     "| ragged plan, 1024 requests, on the device: 65,536 tokens | 56.00 µs |",
                     "| 200.0 µs, 2.00 TB/s, 50 % of a device",
                     "](docs/plots/layer_over_batch.svg)"):
            self.assertIn(line, readme)
        page = (self.folder / "docs/PERFORMANCE.md").read_text(encoding="utf-8")
        for line in ("| 15.00 (14.88–15.25)<br>at most 14.5 µs: **not reached** |",
                     "3 of 5 reached.", "| bench_step | 0123456789ab | 2001-02-03 |",
                     "- fused over separate: 0.75", "- an invented note", "- bytes: 1,234,567",
                     "| CSA append (b) invented | 64 | 66.00 (65.88–66.25) |  | beside them |",
                     "| decode, 2 drafts | 4 | 181,818 (173,913–186,047) | 5.500 | the host idles |",
                     "- of an invented model", "](../docs/plots/serving_over_steps.svg)",
                     "](../docs/plots/planner_over_tokens.svg)", tables.NOT_MEASURED):
            self.assertIn(line, page)

        changed = copy.deepcopy(results)
        changed["programs"]["bench_step"]["report"]["figures"][1]["median_us"] += 1
        self.keep(changed)
        said = self.tool("--check")[1]
        for name in ("README.md", "docs/PERFORMANCE.md", "docs/plots/step_over_batch.svg"):
            self.assertIn(f"{name} is not what", said)
        self.assertNotIn("layer_over_batch.svg", said)
        self.keep(results)
        (self.folder / "README.md").write_text(readme.replace("12.00", "11.00"), encoding="utf-8")
        self.assertEqual(self.tool("--check")[0], 1)

    def test_a_plot_that_is_missing_fails_the_check(self):
        results = invented_results()
        self.keep(results)
        self.pretend_plots(results)
        self.tool()
        (self.folder / "docs/plots/step_over_batch.svg").unlink()
        status, said = self.tool("--check")
        self.assertEqual(status, 1)
        self.assertIn("docs/plots/step_over_batch.svg is not what", said)

    def test_a_program_without_a_block_and_a_renamed_figure_fail_the_check(self):
        results = invented_results()
        results["programs"]["bench_other"] = results["programs"]["bench_step"]
        self.keep(results)
        self.pretend_plots(results)
        self.tool()
        status, said = self.tool("--check")
        self.assertEqual(status, 1)
        self.assertIn("shows nothing of bench_other", said)

        for program in ("bench_step", "bench_in_situ"):  # the README has nothing of the second
            results = invented_results()
            for one in results["programs"][program]["report"]["figures"]:
                one["name"] += " renamed"
                one["name"] = one["name"].replace("append", "appends")
            self.keep(results)
            status, said = self.tool("--check")
            self.assertEqual(status, 1)
            self.assertIn(f"{program} has no figure", said)

    def test_a_marker_that_stands_alone_is_an_error(self):
        path = self.folder / "README.md"
        path.write_text(path.read_text(encoding="utf-8") + "<!-- figures:begin step -->\n",
                        encoding="utf-8")
        status, said = self.tool("--check")
        self.assertEqual(status, 1)
        self.assertIn("stands alone", said)

    def test_one_measured_program_is_enough_for_documents(self):
        results = invented_results()
        for program in results["programs"]:
            some = copy.deepcopy(results)
            some["programs"] = {program: results["programs"][program]}
            for document in documents.DOCUMENTS:
                text = (self.folder / document).read_text(encoding="utf-8")
                once = documents.rewritten(text, some, document)
                self.assertEqual(documents.rewritten(once, some, document), once)

    def test_plots_are_the_same_bytes_each_time_and_pass_the_check(self):
        try:
            import plots  # pylint: disable=import-outside-toplevel
        except ImportError:
            self.skipTest("no matplotlib")
        results = invented_results()
        self.keep(results)
        pictures = []
        for _ in range(2):
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(plots.main([f"--root={self.folder}"]), 0)
            pictures.append({path.name: path.read_bytes()
                             for path in (self.folder / "docs/plots").glob("*.svg")})
        self.assertEqual(len(pictures[0]), len(series.PLOTS))
        self.assertEqual(pictures[0], pictures[1])
        self.assertEqual(self.tool("--check")[0], 0)


if __name__ == "__main__":
    unittest.main()
