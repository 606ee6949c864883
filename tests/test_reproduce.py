"""Tables and figures of the paper: kept runs, verdicts, state, and every experiment on small made-up data."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from test_data_real import write_facebook, write_heterophilous, write_wisconsin

from dcgnn import training
from dcgnn.cli import main
from dcgnn.data import load_graph
from dcgnn.presets import find_preset, load_preset, recipe_for
from dcgnn.recipe import Recipe
from dcgnn.reproduce import (
    EXPERIMENTS,
    Context,
    ablations,
    classification,
    few_labels,
    reproduce,
    sensitivity,
    state_of,
    tree,
)
from dcgnn.reproduce.experiment import Job, has_files
from dcgnn.reproduce.paper import BASELINES, CLASSIFICATION, Printed, verdict


@pytest.fixture
def data_root(tmp_path, monkeypatch):
    """A folder with Minesweeper's file alone, 12 nodes."""
    root = tmp_path / "data"
    (root / "minesweeper").mkdir(parents=True)
    write_heterophilous(root / "minesweeper" / "minesweeper.npz")
    monkeypatch.setenv("DCGNN_DATA", str(root))
    return root


def context(tmp_path, data_root, **options) -> Context:
    return Context(out=tmp_path / "out", data_root=data_root, epochs=2, **options)


@pytest.mark.parametrize(
    ("printed", "ours", "expected"),
    [
        (Printed(90.0, 1.0), 89.1, "pass"),
        (Printed(90.0, 1.0), 88.5, "short by 1.50"),
        (Printed(90.0), 89.9, "short by 0.10"),
        (Printed(90.0), 90.0, "pass"),
        (None, 50.0, "no number at hand"),
    ],
)
def test_verdict(printed, ours, expected):
    assert verdict(printed, ours) == expected


def test_finished_runs_are_not_computed_again(tmp_path):
    calls = []

    def job(number: int, fails: bool = False) -> Job:
        def compute():
            if fails:
                raise KeyboardInterrupt
            calls.append(number)
            return {"value": number}

        return Job(f"run {number}", {"number": number}, compute)

    kept = Context(out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        kept.collect("table", [job(0), job(1), job(2, fails=True)])
    assert calls == [0, 1]
    assert kept.collect("table", [job(0), job(1), job(2)]) == [{"value": n} for n in range(3)]
    assert calls == [0, 1, 2]

    for path in (tmp_path / "table" / "runs").glob("run-1-*.json"):
        path.write_text("{ damaged")
    kept.collect("table", [job(0), job(1), job(2)])
    assert calls == [0, 1, 2, 1], "a damaged file is computed anew, the others are not"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"\xae",
        lambda content: {**content, "result": {}},
        lambda content: {**content, "result": None},
        lambda content: {**content, "result": {"other": 1}},
        lambda content: {**content, "result": {"value": "1"}},
        lambda content: {**content, "settings": {}},
        lambda content: [],
    ],
)
def test_damaged_runs_are_computed_again(damage, tmp_path, capsys):
    calls = []
    job = Job("run", {"number": 1}, lambda: calls.append(1) or {"value": 1})
    kept = Context(out=tmp_path)
    kept.collect("table", [job])
    (path,) = (tmp_path / "table" / "runs").iterdir()
    broken = damage(json.loads(path.read_text()))
    path.write_bytes(broken if isinstance(broken, bytes) else json.dumps(broken).encode())
    assert kept.collect("table", [job]) == kept.collect("table", [job]) == [{"value": 1}]
    assert len(calls) == 2
    assert f"{path} is damaged: computed again" in capsys.readouterr().err


def test_what_cannot_be_kept_is_not_computed(tmp_path):
    job = Job("run", {"number": 1}, lambda: pytest.fail("computed"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written to"):
        Context(out=tmp_path / "file").collect("table", [job])
    (tmp_path / "table" / "result.json").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"result\.json is a folder, a file is wanted"):
        Context(out=tmp_path).collect("table", [job])


def test_runs_on_other_files_of_a_graph_are_other_runs(tmp_path, data_root):
    options = {"datasets": ["minesweeper"], "models": ["mlp"], "splits": [0]}
    runs = tmp_path / "out" / "classification" / "runs"

    def trained() -> int:
        reproduce("classification", context(tmp_path, data_root, **options))
        return len(list(runs.iterdir()))

    assert trained() == 1
    path = data_root / "minesweeper" / "minesweeper.npz"
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, "node_labels": arrays["node_labels"][::-1]})
    assert trained() == 2
    np.savez(path, **arrays)
    path.touch()
    assert trained() == 2, "what counts is what the files hold"


def test_several_seeds_are_averaged_split_by_split(tmp_path, data_root):
    options = {"datasets": ["minesweeper"], "models": ["mlp"], "splits": [0, 1], "seed": 3}
    several = context(tmp_path, data_root, seeds=2, **options)
    row = reproduce("classification", several).data["results"]["minesweeper"]["mlp"]
    single = {}
    for path in (tmp_path / "out" / "classification" / "runs").iterdir():
        run = json.loads(path.read_text())
        single[run["settings"]["split"], run["settings"]["seed"]] = 100 * run["result"]["test_metric"]
    assert set(single) == {(split, seed) for split in (0, 1) for seed in (3, 4)}
    expected = [(single[split, 3] + single[split, 4]) / 2 for split in (0, 1)]
    assert row["splits"] == pytest.approx(expected)
    assert "seeds 3, 4" in state_of(EXPERIMENTS["classification"], several)
    assert main(["reproduce", "classification", "--seeds", "0", "--quiet"]) == 2


def test_a_seed_shows_and_what_a_result_replaces(data_root, tmp_path, capsys):
    command = ["reproduce", "classification", "--data-root", str(data_root), "--datasets", "minesweeper"]
    command += ["--out", str(tmp_path), "--epochs", "1", "--quiet", "--split", "0"]
    assert main([*command, "--models", "mlp,gcn"]) == 0
    assert "in percent, split 0, seed 0;" in capsys.readouterr().out
    assert main([*command, "--models", "mlp", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert "in percent, split 0, seed 5;" in out
    before = "minesweeper; models mlp, gcn; splits 0; at most 1 epochs"
    assert f"This replaces the result for {before}; its runs are kept" in out
    assert main([*command, "--models", "mlp", "--seed", "5"]) == 0
    assert "replaces" not in capsys.readouterr().out
    assert main(["reproduce", "--list", "--out", str(tmp_path)]) == 0
    assert "models mlp; splits 0; seeds 5;" in capsys.readouterr().out


def test_splits_of_every_kind(tmp_path):
    write_wisconsin(tmp_path)
    here = context(tmp_path, tmp_path, models=["dcgnn", "mlp"], splits=[0, 2])
    outcome = reproduce("splits", here)
    assert [row[:4] for row in outcome.rows] == [
        ["wisconsin", "50/25/25", "6 / 3 / 3", "91.67"],
        ["wisconsin", "60/20/20", "7 / 2 / 3", "91.67"],
        ["wisconsin", "60/20/20 balanced", "5 / 2 / 5", "91.67"],
        ["wisconsin", "from files", "4 / 4 / 4", "91.67"],
    ]
    assert list(outcome.verdicts) == [f"wisconsin, {row[1]}" for row in outcome.rows]
    runs = [json.loads(path.read_text()) for path in (tmp_path / "out" / "splits" / "runs").iterdir()]
    assert len(runs) == 4 * 2 * 2
    for way, scores in outcome.data["test"].items():
        for model, values in scores.items():
            mine = [
                run
                for run in runs
                if run["result"]["graph"] == way and run["settings"]["recipe"]["model"] == model
            ]
            kept = {run["result"]["split"]: 100 * run["result"]["test_metric"] for run in mine}
            assert [kept[0], kept[2]] == values
    with pytest.raises(ValueError, match="--split: the files of wisconsin have splits 0 to 9"):
        reproduce("splits", replace(here, splits=[10]))


def test_a_balanced_split_that_leaves_nothing_to_score_is_left_out(tmp_path):
    root = tmp_path / "data"
    (root / "minesweeper").mkdir(parents=True)
    write_heterophilous(root / "minesweeper" / "minesweeper.npz", labels=[0, 0, 0, 1] * 13)
    here = context(tmp_path, root, datasets=["minesweeper"], models=["mlp"], splits=[0])
    assert [row[1] for row in reproduce("splits", here).rows] == ["50/25/25", "60/20/20", "from files"]


def test_splits_without_split_files(tmp_path):
    (tmp_path / "penn94").mkdir()
    write_facebook(tmp_path / "penn94")
    with pytest.warns(UserWarning, match="its splits are random ones"):
        outcome = reproduce(
            "splits", context(tmp_path, tmp_path, datasets=["penn94"], models=["mlp"], splits=[0])
        )
    assert [row[1] for row in outcome.rows] == ["50/25/25", "60/20/20", "60/20/20 balanced"]
    assert not outcome.verdicts


def test_equal_variants_do_not_pass(tmp_path, data_root, monkeypatch):
    """The paper's choice passes alone where it is better than every other."""

    def outcome(tests: list[float]) -> str:
        values = iter(tests)
        monkeypatch.setattr(Context, "collect", lambda *_: [{"test_metric": value} for value in values])
        made = reproduce(
            "ablation-objective", context(tmp_path, data_root, datasets=["minesweeper"], splits=[0])
        )
        return made.verdicts["minesweeper"]

    assert outcome([0.5, 0.5, 0.4, 0.5]) == "α = 0 and β = 0 as good"
    assert outcome([0.5, 0.4, 0.6, 0.3]) == "α = 1 better"
    assert outcome([0.6, 0.4, 0.5, 0.5]) == "pass"


def test_other_settings_are_another_run(tmp_path):
    kept = Context(out=tmp_path)
    for seed in (0, 1):
        result = kept.collect("table", [Job("run", {"seed": seed}, lambda seed=seed: {"seed": seed})])
        assert result == [{"seed": seed}]


def test_classification_trains_every_model_and_tells_the_verdict(tmp_path, data_root, capsys):
    arguments = ["reproduce", "classification", "--out", str(tmp_path / "out"), "--epochs", "2", "--quiet"]
    assert main([*arguments, "--split", "0-1"]) == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "classification" / "result.json").read_text())
    row = result["results"]["minesweeper"]
    assert set(row) == set(classification.MODELS)
    for entry in row.values():
        assert len(entry["splits"]) == 2
        assert entry["mean"] == pytest.approx(np.mean(entry["splits"]))
    assert result["verdicts"]["minesweeper"] == CLASSIFICATION["minesweeper"].verdict(row["dcgnn"]["mean"])
    lines = out.splitlines()
    (ours,) = (number for number, line in enumerate(lines) if line.startswith("minesweeper "))
    assert "98.50 ± 0.21" in lines[ours]
    # Below ours, each in the column of its model.
    for model, printed in BASELINES["minesweeper"].items():
        place = lines[ours + 1].index(str(printed))
        assert lines[ours][place:].startswith(f"{row[model]['mean']:.2f} ± ")
    assert (tmp_path / "out" / "classification" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_more_splits_than_the_paper_tell_what_three_of_them_can_be(tmp_path, data_root, monkeypatch):
    options = {"datasets": ["minesweeper"], "models": ["dcgnn"]}
    few = reproduce("classification", context(tmp_path, data_root, splits=[0, 1, 2], **options))
    assert not any("choices" in note for note in few.notes)
    many = reproduce("classification", context(tmp_path, data_root, splits=[0, 1, 2, 3], **options))
    tests = many.data["results"]["minesweeper"]["dcgnn"]["splits"]
    means = sorted((sum(tests) - left) / 3 for left in tests)
    (note,) = (note for note in many.notes if "choices" in note)
    assert "of the 4 choices of 3" in note
    assert f"0 pass; DC-GNN's means over them go from {means[0]:.2f} to {means[3]:.2f}" in note

    monkeypatch.setitem(CLASSIFICATION, "minesweeper", Printed(means[0]))
    again = reproduce("classification", context(tmp_path, data_root, splits=[0, 1, 2, 3], **options))
    assert any("4 pass" in note for note in again.notes)


def test_penn94_on_other_splits_is_not_compared(tmp_path):
    (tmp_path / "penn94").mkdir()
    write_facebook(tmp_path / "penn94")
    here = context(tmp_path, tmp_path, datasets=["penn94"], models=["mlp", "dcgnn"], splits=[0, 1, 2, 3])
    with pytest.warns(UserWarning, match="its splits are random ones"):
        outcome = reproduce("classification", here)
    verdict = "not compared: random splits, not the published ones"
    assert outcome.verdicts == {"penn94": verdict}
    (row,) = outcome.rows  # none with the paper's baselines below
    assert row[1] == "–"
    assert row[4] == verdict
    assert not any("choices" in note for note in outcome.notes)
    figure = Figure()
    outcome.draw(figure)
    lines = [segment for drawn in figure.axes[0].collections for segment in drawn.get_segments()]
    assert CLASSIFICATION["penn94"].mean not in {height for segment in lines for _, height in segment}


def test_random_splits_are_as_many_as_one_likes(tmp_path):
    (tmp_path / "amherst41").mkdir()
    write_facebook(tmp_path / "amherst41")
    splits = list(range(4, 16))
    here = context(tmp_path, tmp_path, datasets=["amherst41"], models=["mlp"], splits=splits)
    outcome = reproduce("classification", here)
    assert len(outcome.data["results"]["amherst41"]["mlp"]["splits"]) == 12
    assert "over splits 4 to 15, seed 0;" in outcome.notes[0]
    assert "splits 4 to 15" in state_of(EXPERIMENTS["classification"], here)


@pytest.mark.parametrize("name", ["ablation-objective", "ablation-losses", "ablation-aggregator"])
def test_ablations(name, tmp_path, data_root):
    outcome = reproduce(name, context(tmp_path, data_root, datasets=["minesweeper"], splits=[0]))
    assert len(outcome.rows[0]) == len(outcome.header)
    settings = [
        json.loads(path.read_text())["settings"] for path in (tmp_path / "out" / name / "runs").iterdir()
    ]
    recipes = [json.dumps(entry["recipe"], sort_keys=True) for entry in settings]
    assert len(set(recipes)) == len(outcome.header) - 2, "every variant is another recipe"


def test_aggregators_differ_where_the_preset_leaves_the_number_of_clusters_open():
    recipe = recipe_for("questions", "dcgnn").with_num_global(18)
    for variant in ablations._aggregator_variants(recipe).values():
        assert variant.options["num_global"] == 36, "with one cluster a class all aggregators are the same"


def test_seeds_show_where_no_recipe_is_trained(tmp_path, capsys):
    command = ["reproduce", "dirichlet-energy", "--out", str(tmp_path), "--quiet"]
    assert main([*command, "--seed", "5"]) == 0
    assert main([*command, "--seed", "6"]) == 0
    out = capsys.readouterr().out
    assert "This replaces the result for grid 20 x 20; seeds 5;" in out
    assert main(["reproduce", "--list", "--out", str(tmp_path)]) == 0
    assert "grid 20 x 20; seeds 6" in capsys.readouterr().out


def test_sensitivity_varies_one_option_at_a_time(tmp_path, data_root, monkeypatch, capsys):
    monkeypatch.setattr(sensitivity, "LAMBDAS", (0.1, 20.0))
    monkeypatch.setattr(sensitivity, "GLOBAL_PER_CLASS", (1, 2))
    monkeypatch.setattr(sensitivity, "LOCALS", (1, 3))
    arguments = ["--datasets", "minesweeper", "--epochs", "2", "--split", "0-1", "--quiet"]
    assert main(["reproduce", "sensitivity", *arguments, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "out" / "sensitivity"
    result = json.loads((folder / "result.json").read_text())
    assert [(point["option"], point["value"]) for point in result["results"]] == [
        *(("lam", value) for value in (0.1, 2.0, 20.0)),
        *(("num_global", value) for value in (2, 4, 8)),
        *(("num_local", value) for value in (1, 2, 3)),
    ]
    runs = [json.loads(path.read_text()) for path in (folder / "runs").iterdir()]
    assert len(runs) == 2 * 7, "the preset's run is shared by the three sweeps"
    preset = result["presets"]["minesweeper"]["options"]
    for point, row in zip(result["results"], result["rows"], strict=True):
        wanted = {**preset, point["option"]: point["value"]}
        mine = [run["result"] for run in runs if run["settings"]["recipe"]["options"] == wanted]
        assert sorted(point["test"]) == sorted(100 * run["test_metric"] for run in mine)
        assert sorted(point["validation"]) == sorted(100 * run["val_metric"] for run in mine)
        assert point["is_preset"] == (wanted == preset)
        assert row[-1].startswith(f"{np.mean(point['test']):.2f} ± ")
        assert row[-1] in out
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_sensitivity_without_files_takes_the_embedded_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "_EMBEDDED", "minesweeper-synthetic:rows=6,cols=6")
    for option in ("LAMBDAS", "GLOBAL_PER_CLASS", "LOCALS"):
        monkeypatch.setattr(sensitivity, option, ())
    outcome = reproduce("sensitivity", context(tmp_path, tmp_path / "nothing", splits=[0]))
    assert [row[:3] for row in outcome.rows] == [
        ["minesweeper-synthetic:rows=6,cols=6", title, f"{value} (preset)"]
        for title, value in (("λ", 2), ("|Ω|", 8), ("K", 2))
    ]


def test_few_labels_choose_settings_on_validation(tmp_path, monkeypatch):
    """Both models have three settings, one with the skeleton of the other; test nodes do not choose."""
    skeletons = {
        "dcgnn": ({"num_layers": 3, "norm": "layer", "dropout": 0.1}, {"lr": 0.1, "epochs": 7}),
        "gcn": ({"num_layers": 4, "norm": None, "dropout": 0.2}, {"lr": 0.2, "epochs": 9}),
    }
    for model, other in (("dcgnn", "gcn"), ("gcn", "dcgnn")):
        with monkeypatch.context() as patch:
            patch.setattr(few_labels, "recipe_for", lambda graph, name: Recipe(name, *skeletons[name]))
            own, swapped, default = few_labels.candidates("cora", model).values()
        assert default == load_preset("default", model)
        assert (own.model, dict(own.options), dict(own.training)) == (model, *skeletons[model])
        options, training = skeletons[other]
        assert swapped.model == model
        assert options.items() <= swapped.options.items()
        assert swapped.options["residual"] is False, "what the other's preset does not name"
        assert dict(swapped.training) == {"lr_schedule": "constant", **training}
        assert set(own.options) <= set(swapped.options)

    class Result:
        def __init__(self, val, test) -> None:
            self.numbers = {"val_metric": val, "test_metric": test, "history": None}

        def to_dict(self):
            return dict(self.numbers)

    def run(self, data, seed=0):
        assert int(data.train_mask.sum()) == 5 * data.num_classes
        own = self == find_preset("cora", self.model)
        if self.model == "gcn":
            return None, Result(*((0.5, 0.9) if own else (0.6, 0.7)))
        return None, Result(*((0.8, 0.6) if own else (0.7, 0.5)))

    graph = load_graph("sbm:num_nodes=2000")
    monkeypatch.setattr(Context, "choose_graphs", lambda *a, **k: ["cora"])
    monkeypatch.setattr(Context, "load", lambda *a, **k: graph)
    monkeypatch.setattr("dcgnn.recipe.Recipe.run", run)
    outcome = reproduce("few-labels", Context(out=tmp_path, splits=[0, 1]))
    assert outcome.data["test"] == {"cora": {"dcgnn": [60.0, 60.0], "gcn": [70.0, 70.0]}}
    assert outcome.verdicts == {"cora": "short of GCN"}
    assert outcome.data["chosen"] == {"cora, dcgnn": "own preset", "cora, gcn": "skeleton of DC-GNN"}
    assert any("own preset 50.00" in note and "60.00 ± 0.00 / 70.00" in note for note in outcome.notes)


def test_homophily_datasets_runtime(tmp_path, data_root):
    sizes = reproduce("datasets", context(tmp_path, data_root))
    assert sizes.rows[0][:5] == ["minesweeper", "12", "12", "5", "2"]
    assert sizes.verdicts["minesweeper"].startswith("differs: nodes 10000 in the paper")
    matrices = reproduce("homophily", context(tmp_path, data_root))
    assert matrices.data["graphs"]["minesweeper"]["matrix"] == [[0.0, 1.0], [1.0, 0.0]]
    times = reproduce("runtime", context(tmp_path, data_root, models=["dcgnn", "gcn"]))
    seconds = times.data["results"]["minesweeper"]["seconds"]
    assert list(seconds) == ["dcgnn", "gcn", "gcn prepared"]
    assert all(value > 0 for value in seconds.values())
    assert times.header[-2:] == ["DC-GNN / GCN", "DC-GNN / GCN (prepared)"]
    assert times.rows[0][-1] == f"{seconds['dcgnn'] / seconds['gcn prepared']:.2f}"


def test_figures_without_files(tmp_path, monkeypatch):
    nowhere = context(tmp_path, tmp_path / "nothing")
    energy = reproduce("dirichlet-energy", nowhere)
    assert energy.verdicts == {"grid 20 x 20": "pass"}
    curve = energy.data["energy_by_layer"]["grid 20 x 20"]["β = 0"]
    assert curve[25] < 1e-18 * curve[0], "in float32 the rest is rounding by then"
    assert all(deeper < before for before, deeper in itertools.pairwise(curve[:26]))
    resistance = reproduce("effective-resistance", nowhere)
    assert len(resistance.rows) == 4
    assert set(resistance.verdicts.values()) == {"pass"}
    monkeypatch.setattr(tree, "DEPTHS", (2, 3))
    monkeypatch.setattr(tree, "_NUM_TREES", {2: 20, 3: 20})
    trees = reproduce("tree-neighborsmatch", nowhere)
    assert [row[0] for row in trees.rows] == ["DC-GNN", "GCN", "GAT", "GIN"]
    accuracies = trees.data["results"]["gcn"]["3"]
    percent = [f"{100 * accuracies[key]:.1f}" for key in ("train_metric", "test_metric")]
    assert trees.rows[1][2] == " / ".join(percent)
    some = reproduce("tree-neighborsmatch", replace(nowhere, depths=[3], models=["gcn"]))
    assert (some.header, some.rows) == (["model", "depth 3"], [["GCN", " / ".join(percent)]])
    assert "of depth 2" not in some.notes[0]


def test_trees_count_the_epoch_that_fits_the_training_trees(tmp_path, monkeypatch):
    results = []

    def spy(*arguments, **options):
        results.append(training.train(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(tree, "train", spy)
    outcome = reproduce("tree-neighborsmatch", Context(out=tmp_path, depths=[2], models=["gcn"], epochs=12))
    (result,) = results
    kept = outcome.data["results"]["gcn"]["2"]
    assert result.epochs == 12
    assert kept["train_metric"] == result.train_metric == max(result.history.val_metric)
    assert "val_metric" not in kept, "no trees are left for validation"


def test_list_names_everything_and_its_state(tmp_path, data_root, capsys):
    assert main(["reproduce", "--list", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    for name in EXPERIMENTS:
        assert name in out
    few = state_of(EXPERIMENTS["few-labels"], context(tmp_path, data_root))
    assert few == "needs data: cora, citeseer, pubmed"
    reproduce("datasets", context(tmp_path, data_root))
    state = state_of(EXPERIMENTS["datasets"], context(tmp_path, data_root))
    assert state.startswith("done (0 of 1 pass): minesweeper; needs data: penn94, ")
    narrow = context(tmp_path, data_root, models=["mlp"], splits=[1])
    reproduce("classification", narrow)
    state = state_of(EXPERIMENTS["classification"], narrow)
    assert state.startswith(
        "done (nothing to compare with): minesweeper; models mlp; splits 1; at most 2 epochs; needs data: "
    )


@pytest.mark.parametrize("content", [b"[]", b"\xae", b'{"verd', b'{"verdicts": {}, "covers": 1}'])
def test_list_survives_a_damaged_result(content, tmp_path, data_root):
    path = tmp_path / "out" / "datasets" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    state = state_of(EXPERIMENTS["datasets"], context(tmp_path, data_root))
    assert state.startswith(f"unreadable: {path}")


def test_has_files_takes_penn94_without_its_splits(tmp_path):
    (tmp_path / "penn94").mkdir()
    assert not has_files("penn94", tmp_path)
    (tmp_path / "penn94" / "data.mat").touch()
    assert has_files("penn94", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "NAME is wanted"),
        (["reproduce", "table-9"], "no table or figure 'table-9'"),
        (["reproduce", "classification", "--datasets", "mars"], "'mars' is not one of"),
        (["reproduce", "classification", "--models", "bert"], "'bert' is not one of"),
        (["reproduce", "tree-neighborsmatch", "--depths", "5-7"], "--depths: 7 is not one of 2, 3, 4, 5, 6"),
        (["reproduce", "tree-neighborsmatch", "--depths", "deep"], "--depths wants"),
        (["reproduce", "few-labels"], "no files of cora, citeseer, pubmed"),
        (["reproduce", "classification", "--datasets", "minesweeper,cora"], "no files of cora under"),
        (["reproduce", "classification", "--datasets", "minesweeper,minesweeper"], "names minesweeper twice"),
        (["reproduce", "classification", "--datasets", ","], "--datasets is empty"),
        (["reproduce", "classification", "--models", "mlp,mlp"], "--models names mlp twice"),
        (["reproduce", "classification", "--split", "9-10"], "minesweeper has splits 0 to 9, not 10"),
        (["reproduce", "tree-neighborsmatch", "--epochs", "0"], "--epochs must be positive, got 0"),
        (["reproduce", "ablation-losses", "--models", "gcn"], "--models: ablation-losses does not take it"),
        (
            ["reproduce", "tree-neighborsmatch", "--datasets", "cora"],
            "--datasets: tree-neighborsmatch does not",
        ),
    ],
)
def test_mistakes(arguments, message, tmp_path, data_root, capsys):
    assert main([*arguments, "--out", str(tmp_path / "out"), "--quiet"]) == 2
    assert message in capsys.readouterr().err
