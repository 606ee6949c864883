"""The search: it improves, resumes, prunes, keeps the test nodes out of it, and treats all models alike."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dcgnn import tuning
from dcgnn.cli import main
from dcgnn.data import load_graph
from dcgnn.presets import find_preset, load_preset, preset_names, recipe_for
from dcgnn.recipe import MODELS, Recipe, default_num_global
from dcgnn.training import TrainingInterrupted
from dcgnn.tuning import Budget, first_trials, mutated, recipe_of, search_space, tune

GRAPH = "sbm:num_nodes=60,avg_degree=4,signal=2.0"
QUICK = Budget(epochs=2, patience=2, max_layers=2)


@pytest.fixture(scope="module")
def splits():
    return [load_graph(GRAPH, split=split) for split in range(2)]


@pytest.mark.parametrize("model", MODELS)
def test_every_point_of_the_space_is_a_model(model, splits):
    space = search_space(model, QUICK)
    for index in (0, -1):
        chosen = {name: values[index] for name, values in space.items()}
        recipe = recipe_of(model, chosen, splits[0].num_classes, QUICK)
        _, result = recipe.run(splits[0])
        assert result.epochs <= QUICK.epochs


def test_resume_counts_the_trials_that_are_there(splits, tmp_path, monkeypatch):
    runs = []
    original = Recipe.run
    monkeypatch.setattr(Recipe, "run", lambda *a, **k: runs.append(1) or original(*a, **k))
    journal = tmp_path / "deep" / "journal.log"
    first = tune(splits, "mlp", trials=3, budget=QUICK, storage=journal)
    trained = len(runs)
    again = tune(splits, "mlp", trials=3, budget=QUICK, storage=journal)
    assert len(runs) == trained, "nothing is left to do"
    assert again == first
    more = tune(splits, "mlp", trials=5, budget=QUICK, storage=journal)
    assert more.trials == 5
    assert more.validation >= first.validation
    deeper = dataclasses.replace(QUICK, max_layers=3)
    assert tune(splits, "mlp", trials=1, budget=deeper, storage=journal).trials == 1, "another search"


def test_a_journal_from_before_a_setting_existed_goes_on(splits, tmp_path, monkeypatch):
    def of_before(model, budget):
        space = search_space(model, budget)
        return {name: values for name, values in space.items() if name not in ("mass", "gamma", "aggr")}

    journal = tmp_path / "journal.log"
    monkeypatch.setattr(tuning, "_CHANGES", (99,))  # a step changes every setting, those that are new, too
    trials = len(first_trials(GRAPH, "dcgnn", splits[0].num_classes, QUICK))
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "search_space", of_before)
        before = tune(splits, "dcgnn", trials=trials, budget=QUICK, storage=journal)
    assert "aggr" not in before.recipe.options
    after = tune(splits, "dcgnn", trials=trials + 3, budget=QUICK, storage=journal)
    assert after.trials == trials + 3


def test_the_best_validation_wins_and_test_labels_do_not_matter(splits):
    found = tune(splits, "gcn", trials=4, budget=QUICK)
    scores = [found.recipe.run(data, tuning.SEED)[1].val_metric for data in splits]
    assert found.validation == pytest.approx(sum(scores) / 2)
    scrambled = []
    for data in splits:
        y = data.y.clone()
        y[data.test_mask] = 1 - y[data.test_mask]
        scrambled.append(dataclasses.replace(data, y=y))
    assert tune(scrambled, "gcn", trials=4, budget=QUICK) == found


def test_bad_trials_are_given_up(splits, monkeypatch):
    """After three whole trials a bad one ends with its first split."""
    seen = []

    def run(self, data, seed=0, **_):
        seen.append(data.split)
        return None, SimpleNamespace(val_metric=0.9 if len(seen) <= 6 else 0.1)

    monkeypatch.setattr(Recipe, "run", run)
    found = tune(splits, "mlp", trials=8, budget=QUICK)
    assert found.pruned == 5
    assert seen == [0, 1] * 3 + [0] * 5


def test_a_lucky_first_split_does_not_save_a_trial(splits, monkeypatch):
    """What counts is the mean so far, not the best split so far."""
    three = [dataclasses.replace(splits[0], split=split) for split in range(3)]
    seen = []

    def run(self, data, seed=0, **_):
        seen.append(data.split)
        lucky = 0.85 if data.split == 0 else 0.1
        return None, SimpleNamespace(val_metric=0.8 if len(seen) <= 9 else lucky)

    monkeypatch.setattr(Recipe, "run", run)
    found = tune(three, "mlp", trials=5, budget=QUICK)
    assert found.pruned == 2
    assert seen == [0, 1, 2] * 3 + [0, 1] * 2


def test_bad_runs_are_given_up_before_their_end(splits, monkeypatch):
    """Also on one split: a trial is compared after 40% and 70% of the epochs of a run."""
    budget = dataclasses.replace(QUICK, epochs=10)
    ends = []

    def run(self, data, seed=0, *, after_epoch):
        good = len(ends) < 3 or len(ends) == 7
        best = 0.0
        ends.append(0)
        for epoch in range(1, 11):
            # All are bad until the fifth epoch; the later ones remain so, but for the last.
            best = 0.5 if epoch < 5 else 0.9 if good else 0.6
            ends[-1] = epoch
            after_epoch(epoch, best)
        return None, SimpleNamespace(val_metric=best)

    monkeypatch.setattr(Recipe, "run", run)
    found = tune(splits[:1], "mlp", trials=8, budget=budget)
    assert ends == [10] * 3 + [7] * 4 + [10]
    assert (found.pruned, found.validation) == (4, 0.9)


def test_an_early_stop_is_compared_as_a_whole_run(splits, monkeypatch):
    runs = []

    def run(self, data, seed=0, *, after_epoch):
        runs.append(data.split)
        best = 0.9 if len(runs) <= 6 else 0.1
        for epoch in range(1, QUICK.epochs if len(runs) % 2 else 2):
            after_epoch(epoch, best)
        return None, SimpleNamespace(val_metric=best)

    monkeypatch.setattr(Recipe, "run", run)
    assert tune(splits, "mlp", trials=5, budget=QUICK).pruned == 2
    assert runs == [0, 1] * 3 + [0] * 2


def test_trials_on_other_data_do_not_count(splits, tmp_path, monkeypatch):
    runs = []
    original = Recipe.run
    monkeypatch.setattr(Recipe, "run", lambda *a, **k: runs.append(1) or original(*a, **k))
    journal = tmp_path / "journal.log"
    other = [dataclasses.replace(data, x=data.x + 1) for data in splits]
    for given, trained in ((splits, 2), (other, 4), (splits, 4)):
        tune(given, "mlp", trials=1, budget=QUICK, storage=journal)
        assert len(runs) == trained


def test_tables_have_seeds_of_their_own(splits):
    found = tune(splits, "mlp", trials=2, budget=QUICK, finalists=2)
    assert min(found.seeds) == tuning.SEED >= 100


def test_an_interrupted_trial_is_the_next_one(splits, tmp_path, monkeypatch):
    original = Recipe.run
    journal = tmp_path / "journal.log"
    tune(splits, "mlp", trials=1, budget=QUICK, storage=journal)

    def interrupted(self, data, seed=0, **_):
        raise TrainingInterrupted(None, 1)

    def recorded(self, *arguments, **options):
        runs.append(self)
        return original(self, *arguments, **options)

    lost = first_trials(splits[0].name, "mlp", splits[0].num_classes, QUICK)[1]
    monkeypatch.setattr(Recipe, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(splits, "mlp", trials=2, budget=QUICK, storage=journal)
    runs = []
    monkeypatch.setattr(Recipe, "run", recorded)
    assert tune(splits, "mlp", trials=2, budget=QUICK, storage=journal).trials == 2, "it does not count"
    assert len(runs) == len(splits)
    assert all(lost.items() <= {**run.options, **run.training}.items() for run in runs)


def test_an_interruption_before_training_loses_nothing(splits, tmp_path, monkeypatch):
    journal, runs = tmp_path / "journal.log", []
    original = Recipe.run

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_this_process", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(splits[:1], "mlp", trials=1, budget=QUICK, storage=journal)
    monkeypatch.setattr(Recipe, "run", lambda self, *a, **k: runs.append(self) or original(self, *a, **k))
    assert tune(splits[:1], "mlp", trials=1, budget=QUICK, storage=journal).trials == 1
    first = first_trials(splits[0].name, "mlp", splits[0].num_classes, QUICK)[0]
    assert first.items() <= {**runs[0].options, **runs[0].training}.items()


def test_what_kills_its_process_does_not_stop_the_search(splits, tmp_path, monkeypatch):
    journal = tmp_path / "journal.log"
    here = tuning._this_process()
    monkeypatch.setattr(tuning, "_this_process", lambda: [here[0], here[1], here[2] - 60])
    original = Recipe.run
    first = first_trials(splits[0].name, "mlp", splits[0].num_classes, QUICK)[0]
    runs = []

    def run(self, *arguments, **options):
        runs.append(first.items() <= {**self.options, **self.training}.items())
        if runs[-1]:
            raise SystemExit  # passes through Optuna as a kill does
        return original(self, *arguments, **options)

    monkeypatch.setattr(Recipe, "run", run)
    for _ in range(3):
        with pytest.raises(SystemExit):
            tune(splits[:1], "mlp", trials=2, budget=QUICK, storage=journal)
    assert tune(splits[:1], "mlp", trials=2, budget=QUICK, storage=journal).trials == 2
    assert runs == [True, True, True, False, False]


def test_a_killed_trial_is_tried_again(splits, tmp_path, monkeypatch):
    """Only where its process is known to have ended: another one's goes on."""
    journal = tmp_path / "journal.log"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = tuning._this_process()
    owners = iter(
        [
            [here[0], ended.pid, 0.0],
            [here[0], here[1], here[2] - 60],
            here,
            ["another-machine", ended.pid, 0.0],
        ]
    )
    original = Recipe.run
    monkeypatch.setattr(tuning, "_this_process", lambda: next(owners))

    begun = []

    def killed(self, *arguments, **options):
        begun.append({**self.options, **self.training})
        raise SystemExit  # passes through Optuna as a kill does

    monkeypatch.setattr(Recipe, "run", killed)
    for _ in range(4):
        with pytest.raises(SystemExit):
            tune(splits[:1], "mlp", trials=9, budget=QUICK, storage=journal)
    monkeypatch.setattr(tuning, "_this_process", lambda: here)

    def recorded(self, *arguments, **options):
        begun.append({**self.options, **self.training})
        return original(self, *arguments, **options)

    monkeypatch.setattr(Recipe, "run", recorded)
    first = first_trials(splits[0].name, "mlp", splits[0].num_classes, QUICK)
    found = tune(splits[:1], "mlp", trials=3, budget=QUICK, storage=journal)
    assert (found.trials, len(begun)) == (3, 7)
    tried = [[index for index, run in enumerate(begun) if point.items() <= run.items()] for point in first]
    assert tried[0] == [0, 1, 2], "lost twice, then with a process that may still run"
    assert tried[1:5] == [[3], [4], [5], [6]]


def test_a_journal_that_ends_within_a_line_is_left_alone(splits, tmp_path):
    journal = tmp_path / "journal.log"
    tune(splits, "mlp", trials=1, budget=QUICK, storage=journal)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"journal.log ends in the middle of a line"):
        tune(splits, "mlp", trials=2, budget=QUICK, storage=journal)
    assert journal.read_bytes() == whole[:-20]
    journal.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    assert tune(splits, "mlp", trials=2, budget=QUICK, storage=journal).trials >= 2


def test_finalists_meet_over_several_seeds(splits, tmp_path, monkeypatch):
    """The luckiest trial of the first seed loses to the one that is better on all of them."""
    runs = []

    def run(self, data, seed=0, **_):
        runs.append(seed)
        lucky = self.options["hidden_channels"] == 32
        return None, SimpleNamespace(val_metric=0.9 if lucky and seed == 0 else 0.1 if lucky else 0.8)

    monkeypatch.setattr(Recipe, "run", run)
    search = {"trials": 12, "budget": QUICK, "storage": tmp_path / "journal.log", "seed": 0}
    alone = tune(splits, "mlp", **search)
    assert (alone.recipe.options["hidden_channels"], alone.seeds) == (32, (0,))
    found = tune(splits, "mlp", **search, finalists=12)
    assert found.recipe.options["hidden_channels"] != 32
    assert found.validation == pytest.approx(0.8)
    assert found.seeds == (0, 1, 2)
    trained = len(runs)
    assert tune(splits, "mlp", **search, finalists=12) == found
    assert len(runs) == trained, "finalists are kept in the journal"


def test_no_losses_without_global_clusters():
    space = search_space("dcgnn", QUICK)
    chosen = {name: values[-1] for name, values in space.items()} | {"alpha": 0.0}
    config = recipe_of("dcgnn", chosen, 3, QUICK).config(0)
    assert (config.ortho_weight, config.sim_weight) == (0.0, 0.0)


@pytest.mark.parametrize("model", ["dcgnn", "gcn", "linkx"])
def test_limits_narrow_the_space(model):
    space = search_space(model, Budget(max_layers=2, max_channels=64))
    assert (space["num_layers"], space["hidden_channels"]) == ((1, 2), (32, 64))
    with pytest.raises(ValueError, match="max_layers must be at least 1, got 0"):
        search_space(model, Budget(max_layers=0))
    with pytest.raises(ValueError, match="max_channels must be at least 32, got 31"):
        search_space(model, Budget(max_channels=31))


def test_what_lies_beyond_the_limits_becomes_the_nearest():
    deep = Recipe("gcn", {"num_layers": 16, "dropout": 0.37, "norm": "none such"}, {"lr": 1.0})
    point = tuning.point_of(deep, 2, Budget(max_layers=8))
    assert (point["num_layers"], point["dropout"], point["lr"]) == (8, 0.4, 0.03)
    assert "norm" not in point
    for first in first_trials("minesweeper", "gcn", 2, Budget(max_layers=3)):
        assert first["num_layers"] <= 3


def test_first_trials_are_points_of_the_space():
    space = search_space("dcgnn", Budget())
    for first in tuning._FIRST_TRIALS:
        assert set(first) == set(space)
        assert all(value in space[name] for name, value in first.items())


@pytest.mark.parametrize("graph", preset_names())
@pytest.mark.parametrize("model", MODELS)
def test_searches_begin_with_presets(graph, model):
    """The point of a preset is the preset, but for its budget."""
    recipe = find_preset(graph, model)
    if recipe is None:
        return
    budget = Budget(recipe.training["epochs"], recipe.training["patience"], max_layers=16)
    classes = {"cora": 7, "citeseer": 6, "pubmed": 3, "wisconsin": 5}.get(graph, 2)
    first = first_trials(graph, model, classes, budget)[0]
    assert set(first) == set(search_space(model, budget))
    again = recipe_of(model, first, classes, budget)
    assert dict(again.options) == {
        **{name: value for name, value in tuning._UNNAMED.items() if name in again.options},
        **recipe.options,
        **(
            {"num_global": recipe.options["num_global"] or default_num_global(classes)}
            if model == "dcgnn"
            else {}
        ),
    }
    assert dict(again.training) == {"lr_schedule": "constant", **recipe.training}


def test_first_trials_are_trained_first(splits, monkeypatch):
    seen = []
    original = Recipe.run
    monkeypatch.setattr(Recipe, "run", lambda self, *a, **k: seen.append(self) or original(self, *a, **k))
    tune(splits[:1], "gcn", trials=4, budget=QUICK)
    default = recipe_for(splits[0].name, "gcn")
    assert seen[0].options == {"input_dropout": None, "weight_period": None, **default.options}
    assert [recipe.options["norm"] for recipe in seen] == ["layer", "batch", "batch", "batch"]
    assert [recipe.options["weight_period"] for recipe in seen] == [None, None, None, 1]


def test_later_trials_change_a_good_one(splits, tmp_path, monkeypatch):
    """Most trials differ from one of the best before them in at most four settings, and none comes twice."""
    seen = []

    def run(self, data, seed=0, **_):
        seen.append({**self.options, **self.training})
        return None, SimpleNamespace(val_metric=1.0 / len(seen))

    monkeypatch.setattr(Recipe, "run", run)
    tune(splits[:1], "mlp", trials=12, budget=QUICK)
    begun = len(first_trials(splits[0].name, "mlp", 2, QUICK))
    assert begun == 6
    apart = [
        min(sum(new[name] != old[name] for name in new) for old in seen[:3])
        for index, new in enumerate(seen)
        if index >= begun and index % tuning._EXPLORE_EVERY
    ]
    assert len(apart) == 5
    assert all(1 <= count <= 4 for count in apart)
    assert len({json.dumps(settings, sort_keys=True) for settings in seen}) == len(seen)


def test_numbers_move_by_at_most_two_places():
    space = {"width": (1, 2, 3, 4, 5, 6), "norm": (None, "batch", "layer"), "fixed": (7,)}
    draw = random.Random(0)
    parent = {"width": 2, "norm": None, "fixed": 7}
    children = [mutated(parent, space, draw) for _ in range(200)]
    assert {child["width"] for child in children} == {1, 2, 3, 4}
    assert {child["norm"] for child in children} == {None, "batch", "layer"}
    assert {child["fixed"] for child in children} == {7}


def test_command_writes_a_preset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "tune",
        GRAPH,
        "--trials",
        "2",
        "--epochs",
        "2",
        "--max-layers",
        "1",
        "--split",
        "0",
        "--quiet",
    ]
    assert main([*arguments, "--write", "found.json"]) == 0
    out = capsys.readouterr().out
    assert "best of 2 trials" in out
    assert load_preset("found.json").training["epochs"] == 2
    assert json.loads((tmp_path / "found.json").read_text())["models"]["dcgnn"]["found"]["splits"] == [0]
    assert len(list(tmp_path.glob("dcgnn-tune-sbm-*.log"))) == 1
    assert main(["tune", GRAPH, "--trials", "3", *arguments[4:-1]]) == 0
    captured = capsys.readouterr()
    assert "best of 3 trials" in captured.out, "the journal in this folder goes on"
    assert "3/3" in captured.err
    assert main([*arguments, "--model", "bert"]) == 2
    assert "--model must be one of" in capsys.readouterr().err


def test_mistakes_show_before_the_search(tmp_path, monkeypatch, capsys, splits):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dcgnn.cli.tune.tune", lambda *a, **k: pytest.fail("the search began"))
    other = tmp_path / "other.json"
    other.write_text('{"graph": "cora", "models": {}}')
    command = ["tune", splits[0].name, "--split", "0"]
    assert main([*command, "--write", str(other)]) == 2
    assert "a preset for cora" in capsys.readouterr().err
    assert main([*command, "--write", str(other / "mine.json")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    assert main([*command, "--patience", "0"]) == 2
    assert "patience must be positive, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"text\n", b"\xae\xff\n", b"[]\n", b'{"op_code": 77, "worker_id": "1"}\n']
)
def test_a_broken_journal_is_named(content, splits, tmp_path):
    journal = tmp_path / "journal.log"
    journal.write_bytes(content)
    with pytest.raises(ValueError, match=r"journal\.log is not a journal of Optuna"):
        tune(splits[:1], "mlp", trials=1, budget=QUICK, storage=journal)
    with pytest.raises(ValueError, match="is a folder, a file is wanted"):
        tune(splits[:1], "mlp", trials=1, budget=QUICK, storage=tmp_path)


def test_processes_on_one_journal_share_the_trials(splits, tmp_path, monkeypatch):
    """Trials that another process ends meanwhile count."""
    journal = tmp_path / "journal.log"
    other = []
    original = Recipe.run

    def run(self, *arguments, **options):
        if not other:
            other.append(True)
            tune(splits[:1], "mlp", trials=3, budget=QUICK, storage=journal)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Recipe, "run", run)
    assert tune(splits[:1], "mlp", trials=4, budget=QUICK, storage=journal).trials == 4


def test_processes_that_begin_together_share_the_first_trials(splits, tmp_path, monkeypatch):
    """Another process puts its first trials into the journal just before this one does."""
    journal = tmp_path / "journal.log"
    original_first, original_run = tuning.first_trials, Recipe.run
    began, seen = [], []

    def first(*arguments):
        if not began:
            began.append(True)
            tune(splits[:1], "mlp", trials=1, budget=QUICK, storage=journal)
        return original_first(*arguments)

    def run(self, *arguments, **options):
        seen.append(json.dumps(self.to_dict(), sort_keys=True))
        return original_run(self, *arguments, **options)

    monkeypatch.setattr(tuning, "first_trials", first)
    monkeypatch.setattr(Recipe, "run", run)
    count = len(original_first(splits[0].name, "mlp", splits[0].num_classes, QUICK)) + 3
    tune(splits[:1], "mlp", trials=count, budget=QUICK, storage=journal)
    assert len(seen) == len(set(seen)) == count


def test_without_optuna_the_error_says_what_to_install(monkeypatch, splits):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"optuna is not installed; pip install"):
        tune(splits, "mlp", trials=1)
