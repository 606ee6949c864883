"""The command line, end to end: results, JSON, resume, interruption, and every mistake of a user."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dcgnn import DCGNN, DCMsgPassing
from dcgnn.baselines import BASELINES
from dcgnn.checkpoint import load_checkpoint
from dcgnn.cli import main
from dcgnn.cli.options import model_defaults, train_option_names
from dcgnn.cli.train import parse_splits
from dcgnn.data import list_graphs
from dcgnn.presets import load_preset

GRAPH = "sbm:num_nodes=60,avg_degree=4,signal=2.0"
QUICK = ["train", GRAPH, "--hidden", "8", "--layers", "1", "--quiet"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DCGNN_DATA", raising=False)


def fails(capsys, *arguments: str) -> str:
    """The one line on stderr of a command that exits with 2."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_train_prints_the_metric(capsys):
    assert main([*QUICK, "--epochs", "3"]) == 0
    out, err = capsys.readouterr()
    assert "split 0, seed 0: test accuracy" in out
    assert err == ""
    assert list(Path().iterdir()) == [], "nothing is written unless asked for"


def test_train_shows_progress(capfd):
    assert main(["train", GRAPH, "--epochs", "3", "--hidden", "8"]) == 0
    err = capfd.readouterr().err
    assert "loss=" in err
    assert "val accuracy=" in err


def test_json_file_and_several_runs(capsys):
    arguments = [*QUICK, "--epochs", "2", "--split", "0,2-3", "--seeds", "2", "--seed", "5"]
    assert main([*arguments, "--json", "deep/result.json"]) == 0
    assert "over 6 runs" in capsys.readouterr().out
    report = json.loads(Path("deep/result.json").read_text())
    assert [(run["split"], run["seed"]) for run in report["runs"]] == [
        (split, seed) for split in (0, 2, 3) for seed in (5, 6)
    ]
    scores = [run["test_metric"] for run in report["runs"]]
    assert report["test_mean"] == pytest.approx(sum(scores) / 6)
    assert report["metric"] == "accuracy"
    assert report["model"]["hidden_channels"] == 8
    assert report["training"]["epochs"] == 2
    assert len(report["runs"][0]["history"]["loss"]) == 2
    assert "torch" in report["environment"]["versions"]


def test_json_on_stdout_is_all_of_stdout(capsys):
    assert main([*QUICK, "--epochs", "2", "--split", "0-1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["runs"]) == 2
    assert "test accuracy" in err


def test_every_model_option_reaches_the_model():
    named = set(inspect.signature(DCGNN).parameters) | set(inspect.signature(DCMsgPassing).parameters)
    assert set(model_defaults()) == named - {
        "in_channels",
        "out_channels",
        "num_nodes",
        "channels",
        "kwargs",
    }


@pytest.mark.parametrize(
    "options",
    [
        ["--num-local", "3", "--alpha", "0.3", "--beta", "0", "--lam", "1", "--local-init", "fresh"],
        ["--local-iters", "none", "--global-iters", "none"],
        ["--local-cost-scale", "none", "--global-cost-scale", "mean", "--aggr", "sum"],
        ["--gamma", "paper", "--mass", "paper", "--activation", "tanh", "--transform", "none"],
        ["--norm", "batch", "--no-residual", "--node-activation", "none", "--no-ego-readout"],
        ["--adjacency-embedding", "--num-mlp-layers", "2", "--dropout", "0.1", "--num-global", "6"],
        ["--ortho-weight", "0.1", "--sim-weight", "0.1", "--sim-aggr", "mean"],
        ["--sim-weight", "0.1", "--sim-metric", "distance"],
        ["--lr", "0.02", "--weight-decay", "0", "--patience", "1", "--device", "cpu"],
    ],
)
def test_model_and_training_options(options, capsys):
    assert main([*QUICK, "--epochs", "2", *options]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("model", BASELINES)
def test_baselines_train_with_their_own_options(model, capsys):
    own = {"gat": ["--heads", "2"], "linkx": ["--num-edge-layers", "2"]}.get(model, ["--no-residual"])
    assert main([*QUICK, "--epochs", "2", "--model", model, *own, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["model"] == model
    assert "alpha" not in report["model"]
    given = {"gat": ("heads", 2), "linkx": ("num_edge_layers", 2)}.get(model, ("residual", False))
    assert report["model"][given[0]] == given[1]


def test_baselines_take_their_preset(capsys):
    assert main([*QUICK, "--epochs", "2", "--model", "gcn", "--preset", "cora", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    preset = load_preset("cora", "gcn")
    own = {
        name: value for name, value in preset.options.items() if name not in ("hidden_channels", "num_layers")
    }
    assert own.items() <= report["model"].items()
    assert report["model"]["hidden_channels"] == 8  # what was given wins
    assert report["training"]["lr"] == preset.training["lr"]


def test_checkpoints_tell_baselines_apart(capsys):
    arguments = [*QUICK, "--epochs", "2", "--checkpoint", "run.pt"]
    assert main([*arguments, "--model", "gcn"]) == 0
    capsys.readouterr()
    assert "gcn" in fails(capsys, *arguments, "--model", "sage", "--resume")
    assert "gcn" in fails(capsys, "report", "run.pt")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "gcn", "--alpha", "0.5"],
        ["--model", "gcn", "--heads", "2"],
        ["--model", "linkx", "--norm", "batch"],
        ["--heads", "2"],
        ["--model", "gat", "--sim-weight", "0.1"],
        ["--model", "gat", "--ortho-weight", "0.1"],
        ["--model", "gat", "--objective-every", "1"],
        ["--model", "gat", "--loader", "neighbor"],
        ["--model", "gat", "--partition"],
    ],
)
def test_options_of_other_models_are_refused(arguments, capsys):
    option = next(word for word in arguments if word.startswith("--") and word != "--model")
    assert option in fails(capsys, *QUICK, *arguments)


def test_resume_continues_to_the_same_result(capsys):
    arguments = [*QUICK, "--dropout", "0.5", "--json", "-"]
    assert main([*arguments, "--epochs", "8"]) == 0
    whole = json.loads(capsys.readouterr().out)["runs"][0]
    assert main([*arguments, "--epochs", "3", "--checkpoint", "run.pt"]) == 0
    assert load_checkpoint("run.pt")["epoch"] == 3
    capsys.readouterr()
    assert main([*arguments, "--epochs", "8", "--checkpoint", "run.pt", "--resume"]) == 0
    resumed = json.loads(capsys.readouterr().out)["runs"][0]
    for run in (whole, resumed):
        del run["seconds"], run["seconds_per_epoch"], run["history"]["seconds"]
    assert whole == resumed


def test_resume_of_several_runs_starts_those_that_are_missing(capsys):
    arguments = [*QUICK, "--checkpoint", "run.pt", "--checkpoint-every", "1", "--epochs", "2"]
    assert main([*arguments, "--split", "0-1"]) == 0
    assert sorted(path.name for path in Path().iterdir()) == [
        "run-split0-seed0.pt",
        "run-split1-seed0.pt",
    ]
    Path("run-split1-seed0.pt").unlink()
    assert main([*arguments, "--split", "0-1", "--resume"]) == 0
    assert load_checkpoint("run-split1-seed0.pt")["epoch"] == 2


def test_resume_refuses_another_run(capsys):
    keep = ["--checkpoint", "run.pt", "--epochs", "2"]
    assert main([*QUICK, *keep]) == 0
    capsys.readouterr()
    assert "num_layers is 1 in the checkpoint and 2 here" in fails(
        capsys, *QUICK, *keep, "--resume", "--layers", "2"
    )
    assert "split is 0 in the checkpoint and 1 here" in fails(
        capsys, *QUICK, *keep, "--resume", "--split", "1"
    )
    whole = Path("run.pt").read_bytes()
    Path("run.pt").write_bytes(whole[: len(whole) // 2])
    assert "run.pt is damaged" in fails(capsys, *QUICK, *keep, "--resume")
    assert "nothing to resume" in fails(capsys, *QUICK, "--checkpoint", "other.pt", "--resume")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train"], "the following arguments are required: GRAPH"),
        (["train", "korra"], "unknown graph 'korra' (did you mean cora?)"),
        (["train", "sbm:homofily=1"], "did you mean homophily"),
        ([*QUICK, "--norm", "group"], "norm must be one of"),
        ([*QUICK, "--alpha", "2"], "alpha must be in [0, 1]"),
        ([*QUICK, "--layers", "0"], "num_layers must be"),
        ([*QUICK, "--layers", "two"], "argument --layers: invalid int value: 'two'"),
        ([*QUICK, "--local-iters", "few"], "argument --local-iters: invalid int or none value"),
        ([*QUICK, "--activation", "wiggle"], "wiggle"),
        ([*QUICK, "--sim-weight", "1", "--num-global", "3"], "must be a multiple of num_classes"),
        ([*QUICK, "--sim-weight", "1", "--sim-aggr", "median"], "aggr must be one of"),
        ([*QUICK, "--epochs", "0"], "epochs must be positive, got 0"),
        ([*QUICK, "--seeds", "0"], "--seeds must be positive"),
        ([*QUICK, "--checkpoint-every", "-1"], "--checkpoint-every must not be negative"),
        ([*QUICK, "--split", "1-0"], "the range 1-0 is empty"),
        ([*QUICK, "--split", "0-99999999999"], "--split: the range 0-99999999999 has more than"),
        ([*QUICK, "--split", "first"], "--split wants 0, 0-9, 0,3,5 or all"),
        ([*QUICK, "--device", "abacus"], "--device abacus cannot be used"),
        ([*QUICK, "--json", "."], "is a folder, a file is wanted"),
        ([*QUICK, "--checkpoint", "file/run.pt"], "file"),
        ([*QUICK, "--colour", "red"], "unrecognized arguments: --colour red"),
        (["train", "us-election", "--data-root", "data"], "data/us-election lacks election.csv"),
        (["demo", "--epochs", "0"], "epochs must be positive"),
    ],
)
def test_mistakes_get_one_clear_message(arguments, message, capsys):
    Path("file").touch()
    folder = Path("data/us-election")
    folder.mkdir(parents=True)
    (folder / "adjacency.txt").touch()
    err = fails(capsys, *arguments)
    assert message in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("dcgnn")
    if not err.startswith("usage:"):
        assert err.count("\n") == 1


def test_an_unusable_cuda_device_is_named(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert "--device cuda cannot be used" in fails(capsys, *QUICK, "--device", "cuda")


def test_divergence_exits_with_1(capsys):
    assert main([*QUICK, "--lr", "3e37", "--epochs", "5", "--norm", "none"]) == 1
    err = capsys.readouterr().err
    assert "in epoch 1; try a learning rate below 3e+37" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [3]), ("0-3", [0, 1, 2, 3]), ("5, 1-2,2", [5, 1, 2]), ("all", [0, 1, 2, 3, 4])],
)
def test_splits(text, expected):
    assert parse_splits(text, 5) == expected


def test_graphs_and_help_list_every_graph(capsys):
    assert main(["graphs"]) == 0
    listed = capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    helped = capsys.readouterr().out
    for entry in list_graphs():
        assert entry.name in listed
        assert entry.name in helped
        assert entry.source in listed
    for name in [*train_option_names(), *model_defaults()]:
        flag = {"hidden_channels": "hidden", "num_layers": "layers"}.get(name, name)
        assert f"--{flag.replace('_', '-')}" in helped
    assert "homophily=0.5" in listed


def test_info(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["backends"]["reference"]["available"] is True
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    for name in facts["backends"]:
        assert name in out


def test_demo_compares_three_models(capsys):
    graph = "minesweeper-synthetic:rows=12,cols=12"
    assert main(["demo", "--graph", graph, "--epochs", "2", "--hidden", "8", "--quiet"]) == 0
    out = capsys.readouterr().out
    for word in ("DC-GNN", "GCN", "GAT", "DCConv", "GCNConv", "GATConv", "test ROC AUC", "reference"):
        assert word in out


def start(*arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "dcgnn", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts pytest in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def test_module_prints_json_alone_on_stdout():
    process = start(*QUICK, "--epochs", "2", "--json", "-")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["runs"][0]["epochs"] == 2


@pytest.mark.parametrize(("signum", "named"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_an_interrupt_leaves_a_checkpoint_that_resumes(signum, named, capsys):
    arguments = ["train", GRAPH, "--hidden", "8", "--layers", "1", "--patience", "1000000"]
    path = Path("run.pt" if named else "dcgnn-sbm-num_nodes=60,avg_degree=4,signal=2.0-split0-seed0.pt")
    keep = ["--checkpoint", "run.pt", "--checkpoint-every", "1000000"] if named else []
    process = start(*arguments, *keep, "--epochs", "1000000")
    # The bar appears with the first epoch: training has begun.
    seen = b""
    while b"loss=" not in seen:
        assert process.poll() is None, seen
        seen += os.read(process.stderr.fileno(), 1024)
    time.sleep(0.2)
    process.send_signal(signum)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"checkpoint: {path}" in err.splitlines()[-1]
    epoch = load_checkpoint(path)["epoch"]
    assert epoch >= 1
    capsys.readouterr()
    assert main([*arguments, *keep, "--resume", "--epochs", str(epoch + 1), "--quiet", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["epochs"] == epoch + 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dcgnn-kernels ")


def test_a_graph_that_does_not_fit_into_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sbm:num_features=1000000000000", "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("dcgnn: out of memory")
