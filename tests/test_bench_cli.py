"""``dcgnn bench`` end to end on tiny graphs: outputs, comparison, interruption and mistakes of a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcgnn.bench import plan
from dcgnn.bench.rows import read_json, write_json
from dcgnn.bench.runner import Runner
from dcgnn.bench.shapes import SHAPES, Shape
from dcgnn.cli import main
from dcgnn.timing import interleaved_samples

TINY = ["bench", "--channels", "8", "--rounds", "2", "--warmup", "0", "--quiet"]
FEW = [*TINY, "--cases", "DCConv", "GCNConv(edge_index)", "GATConv", "--no-memory"]


@pytest.fixture(autouse=True)
def tiny_shapes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in SHAPES:
        monkeypatch.setitem(SHAPES, name, Shape(150, 900, 0.4))


def fails(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_a_run_writes_everything_and_a_second_one_compares(capsys):
    outputs = ["--json", "out/new.json", "--csv", "new.csv", "--html", "new.html", "--plots", "plots"]
    assert main([*FEW, "--shapes", "penn94", "--suites", "layers", "kernels", *outputs]) == 0
    out = capsys.readouterr().out
    assert "The paper's runtime table" in out
    assert "3.4 to 3.9" in out
    assert "0.43 to 0.69" in out
    assert "share of the limit" in out
    found = read_json("out/new.json")
    assert {row.suite for row in found} == {"layers", "kernels", "limits"}
    assert {row.phase for row in found if row.suite == "layers"} >= set(plan.PHASES)
    assert all(row.machine and row.torch and row.commit for row in found)
    assert Path("new.csv").read_text().count("\n") == len(found) + 1
    assert "<svg" not in Path("new.html").read_text()
    assert (Path("plots") / "ratios.png").is_file()

    assert main(["bench", "--from", "out/new.json", "--compare", "out/new.json"]) == 0
    out = capsys.readouterr().out
    assert "Compared with the older run" in out
    assert "too few rounds" in out


def test_several_runs_are_reported_together(capsys):
    for shape in ("penn94", "genius"):
        only = ["--cases", "DCConv", "--phases", "forward", "--suites", "layers", "--json", f"{shape}.json"]
        assert main([*FEW, "--shapes", shape, *only]) == 0
    capsys.readouterr()
    assert main(["bench", "--from", "penn94.json", "genius.json", "--json", "both.json"]) == 0
    out = capsys.readouterr().out
    assert "penn94 shape" in out
    assert "genius shape" in out
    assert len(read_json("both.json")) == len(read_json("penn94.json")) + len(read_json("genius.json"))


def test_quick_prints_the_papers_table_with_memory_of_our_layer(capsys):
    assert main([*TINY, "--quick", "--shapes", "genius", "--json", "q.json"]) == 0
    out = capsys.readouterr().out
    assert "The paper's runtime table" in out
    found = read_json("q.json")
    assert {row.case for row in found} == set(plan.QUICK_CASES)
    assert [row.case for row in found if row.peak_bytes is not None] == ["DCConv"] * 2


def test_sweeps_show_slope_and_limits(capsys):
    threads = torch.get_num_threads()
    arguments = [*FEW, "--suites", "--sweeps", "edges", "threads", "dtype", "--edges", "1e4", "2e4"]
    assert main([*arguments, "--json", "s.json"]) == 0
    out = capsys.readouterr().out
    assert "slope of log time over log edges" in out
    assert "Sweep over threads" in out
    assert "Sweep over dtype" in out
    found = read_json("s.json")
    edges = {row.num_edges for row in found if row.suite == "sweep edges"}
    assert edges == {10_000, 20_000}
    assert all(row.fraction for row in found if row.suite == "sweep dtype" and row.case == "linear")
    assert torch.get_num_threads() == threads


def test_a_sweep_that_does_not_fit_says_what_it_needs(capsys):
    assert main([*FEW, "--suites", "--sweeps", "edges", "--edges", "1e4", "1e12"]) == 0
    out = capsys.readouterr().out
    for case in ("DCConv", "GCNConv(CSR)", "GCNConv(edge_index)"):
        assert f"1e+12 edges, sweep edges: {case}: making the graph would need about" in out
    assert "GB are available (90% of" in out


def test_an_interrupt_keeps_what_is_done(capsys, monkeypatch):
    kernels = Runner.kernels

    def interrupted(self, *arguments):
        kernels(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "kernels", interrupted)
    assert main([*FEW, "--shapes", "penn94", "genius", "--json", "kept.json"]) == 130
    out, err = capsys.readouterr()
    assert "rows were done; kept in kept.json" in err
    assert "The paper's runtime table" in out
    assert {row.graph for row in read_json("kept.json")} == {"penn94 shape"}


def test_graphs_by_name_instead_of_shapes(capsys):
    name = "sbm:num_nodes=60,avg_degree=4"
    assert (
        main([*FEW, "--graphs", name, "--suites", "layers", "--phases", "forward", "--json", "g.json"]) == 0
    )
    assert {row.graph for row in read_json("g.json")} == {"sbm:avg_degree=4.0,num_nodes=60"}


def test_documents_are_filled(capsys):
    Path("page.md").write_text("<!-- bench paper -->\n<!-- /bench -->\n")
    assert main([*FEW, "--shapes", "penn94", "--suites", "layers", "--fill", "page.md"]) == 0
    assert "3.4 to 3.9" in Path("page.md").read_text()
    assert "filled paper" in capsys.readouterr().err


def test_mistakes_are_one_line(capsys):
    assert "unknown shape 'pen94'; known are penn94" in fails(capsys, *FEW, "--shapes", "pen94")
    assert "unknown case 'GCN'" in fails(capsys, *TINY, "--cases", "GCN")
    assert "unknown phase 'sideways'" in fails(capsys, *TINY, "--phases", "sideways")
    assert "unknown sweep 'weight'" in fails(capsys, *TINY, "--sweeps", "weight")
    assert "unknown suite 'toffee'" in fails(capsys, *TINY, "--suites", "toffee")
    assert "unknown graph 'coral'" in fails(capsys, *TINY, "--graphs", "coral")
    assert "--rounds is too small: 0" in fails(capsys, *TINY, "--rounds", "0")
    assert "--threads must be positive" in fails(capsys, *TINY, "--threads", "0")
    assert "--threads must be at most 1024" in fails(capsys, *TINY, "--threads", "3000")
    sweep = (*TINY, "--sweeps", "edges")
    assert "--edges: at most 1000000000000" in fails(capsys, *sweep, "--edges", "2e19")
    assert "sweeps have one width" in fails(capsys, *sweep, "--channels", "4", "8")
    assert "channels must be positive" in fails(capsys, *TINY, "--channels", "0")
    assert "--dtype wants float64, float32" in fails(capsys, *TINY, "--dtype", "int8")
    assert "No such file" in fails(capsys, "bench", "--from", "absent.json")
    assert "No such file" in fails(capsys, *TINY, "--compare", "absent.json")
    assert "there is no file absent.md" in fails(capsys, *TINY, "--fill", "absent.md")
    assert "is a folder" in fails(capsys, *TINY, "--json", ".")
    Path("other.json").write_text(json.dumps({"runs": []}))
    assert "is not a JSON file of dcgnn bench" in fails(capsys, *TINY, "--compare", "other.json")


def test_a_row_with_a_wrong_value_is_named(capsys):
    assert (
        main([*FEW, "--shapes", "penn94", "--phases", "forward", "--suites", "layers", "--json", "a.json"])
        == 0
    )
    capsys.readouterr()
    content = json.loads(Path("a.json").read_text())
    content["rows"][1]["median_ms"] = "fast"
    Path("bad.json").write_text(json.dumps(content))
    message = 'bad.json: rows[1].median_ms must be a number from 0 or null, got "fast"'
    assert message in fails(capsys, "bench", "--from", "bad.json")
    assert message in fails(capsys, "bench", "--from", "a.json", "--compare", "bad.json")
    assert message in fails(capsys, *TINY, "--compare", "bad.json")


def test_without_matplotlib_a_page_is_refused_before_anything_runs(capsys, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    assert "plots need matplotlib" in fails(capsys, *FEW, "--html", "a.html")


def test_rounds_are_interleaved_and_slow_candidates_sit_out():
    calls: list[str] = []
    samples = interleaved_samples(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=2,
        warmup=1,
        prepare={"b": lambda: calls.append("before b")},
        after_run=lambda: calls.append("."),
    )
    assert calls == ["a", ".", "before b", "b", "."] * 3
    assert [len(times.seconds) for times in samples.values()] == [2, 2]
    samples = interleaved_samples({"a": lambda: None}, rounds=9, warmup=3, each_seconds=0.0)
    assert len(samples["a"].seconds) == 1


def test_an_error_keeps_what_is_done(capsys, monkeypatch):
    def fails_to_load(*arguments, **options):
        raise OSError("no file")

    monkeypatch.setattr(plan, "loaded_problem", fails_to_load)
    arguments = ["--shapes", "cornell5", "--graphs", "cornell5", "--suites", "layers", "--csv", "kept.csv"]
    assert main([*FEW, *arguments]) == 2
    out, err = capsys.readouterr()
    assert "cornell5 shape, F = 8" in out, "the shape is measured beside the graph of the same name"
    assert "no file" in err
    assert "cornell5 shape" in Path("kept.csv").read_text()


def test_a_run_with_nothing_in_common_is_kept(capsys):
    few = [*FEW, "--shapes", "penn94", "--suites", "layers", "--phases", "forward"]
    assert main([*few, "--json", "old.json"]) == 0
    assert main([*few, "--seed", "1", "--compare", "old.json", "--json", "new.json"]) == 0
    assert "no measurement in common" in capsys.readouterr().out
    assert {row.seed for row in read_json("new.json")} == {1}
    message = fails(capsys, "bench", "--from", "new.json", "--compare", "old.json")
    assert "the two runs have no measurement in common" in message
    assert "seed = 1 in new.json and 0 in old.json" in fails(
        capsys, "bench", "--from", "new.json", "old.json"
    )
    assert "leave --quick out" in fails(capsys, "bench", "--quick", "--from", "new.json")
    write_json("none.json", [])
    assert "no rows in none.json" in fails(capsys, "bench", "--from", "none.json")


def test_more_mistakes_are_one_line(capsys):
    assert "unknown graph 'nosuch'" in fails(capsys, *FEW, "--shapes", "penn94", "--graphs", "nosuch")
    assert "nothing to measure" in fails(capsys, *FEW, "--shapes")
    assert "nothing to measure" in fails(capsys, *FEW, "--suites")
    assert "got 'abc'" in fails(capsys, *FEW, "--edges", "abc")
    assert "--max-seconds is too small: nan" in fails(capsys, *FEW, "--max-seconds", "nan")
    assert "--seed must not be negative" in fails(capsys, *FEW, "--seed", "-1")
    assert "--dtype wants float64, float32" in fails(capsys, *FEW, "--dtype", "half")
    assert "--num-local must be positive, got 0" in fails(capsys, *FEW, "--num-local", "0")
    assert "--num-global must be positive, got -1" in fails(capsys, *FEW, "--num-global", "-1")
    assert "add --sweeps edges" in fails(capsys, *FEW, "--edges", "1e4")
    Path("file").touch()
    assert "is a file, a folder is wanted" in fails(capsys, *FEW, "--plots", "file")


def test_the_scripts_print_their_tables(tmp_path):
    scripts = Path(__file__).parents[1] / "benchmarks"
    report = {"metric": "accuracy", "test_mean": 0.5, "test_std": 0.1}
    for name, seed, loss in (
        ("a.json", 0, [2.0, 1.0]),
        ("b.json", 0, [2.0, 1.25]),
        ("c.json", 7, [2.0, 1.0]),
    ):
        runs = [{"split": 0, "seed": seed, "history": {"loss": loss}}]
        Path(name).write_text(json.dumps({**report, "runs": runs}))
    for words, wanted in (
        (["scaling_model.py", "--slot-ns", "1"], "efficiency %"),
        (["compare_runs.py", "a.json", "b.json", "c.json"], "2.5e-01            nan"),
    ):
        command = [sys.executable, scripts / words[0], *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert wanted in done.stdout


def test_the_pytest_suites_time_nothing_that_is_wrong_or_too_large(monkeypatch):
    pytest.importorskip("pytest_benchmark")
    scripts = Path(__file__).parents[1] / "benchmarks"
    plant = """
import torch
from dcgnn.bench import memory
from dcgnn.bench.shapes import SHAPES, Shape
from dcgnn_kernels import fallback

SHAPES["genius"] = Shape(150, 900, 0.4)
memory.available_bytes = lambda device: 1e6
library = torch.library.Library("dcgnn", "IMPL")


def wrong(*arguments):
    return 1.1 * fallback.cluster_scatter(*arguments)


library.impl("cluster_scatter", wrong, "CPU", allow_override=True)
"""
    Path("plant.py").write_text(plant)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", *(path for path in sys.path if path)]))
    choice = (
        "genius and 16 and (test_kernel and float32 and (cluster_scatter or linear) and not backward "
        "or test_layer and forward and not backward and (MLP or plain))"
    )
    names = [str(scripts / f"bench_{name}.py") for name in ("kernels", "layers")]
    command = [sys.executable, "-m", "pytest", "-p", "plant", "-W", "ignore", "-rs", "-k", choice, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "2 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "result 0 disagrees with plain PyTorch" in done.stdout
    assert "would need about" in done.stdout
