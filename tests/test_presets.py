"""Presets: every file is whole, and the command line takes its values from them."""

from __future__ import annotations

import json

import pytest

from dcgnn.cli import main
from dcgnn.data import load_graph
from dcgnn.presets import load_preset, preset_names, recipe_for, save_preset
from dcgnn.recipe import Recipe

GRAPH = "sbm:num_nodes=60,avg_degree=4"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_models_that_run(name):
    data = load_graph(GRAPH)
    from dcgnn.presets import _FOLDER

    content = json.loads((_FOLDER / f"{name}.json").read_text())
    assert content["graph"] == name
    for model, entry in content["models"].items():
        assert entry["found"], "a preset says how it was found"
        recipe = load_preset(name, model)
        if "num_global" in recipe.options and recipe.config(0).sim_weight:
            recipe = recipe.replaced({"num_global": 2})
        _, result = recipe.replaced({"hidden_channels": 8}, epochs=1).run(data)
        assert 0 <= result.test_metric <= 1


def test_train_takes_the_preset_and_given_options_win(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(
        "dcgnn",
        {"hidden_channels": 8, "num_layers": 3, "num_global": 4, "alpha": 0.3},
        {"lr": 0.02, "epochs": 3},
    )
    save_preset("mine.json", "sbm", recipe, {"by": "hand"})
    arguments = ["train", GRAPH, "--preset", "mine.json", "--quiet", "--json", "-"]
    assert main([*arguments, "--epochs", "2", "--alpha", "0.6"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["training"]["epochs"] == 2
    assert report["training"]["lr"] == 0.02
    model = report["model"]
    assert (model["hidden_channels"], model["num_layers"], model["alpha"]) == (8, 3, 0.6)
    assert model["transform"] is None, "what a preset does not name is the model's own default"


def test_recipe_for_falls_back_to_the_default():
    assert recipe_for("questions", "gcn") == load_preset("default", "gcn")


def test_save_preset_keeps_other_models(tmp_path):
    path = tmp_path / "graph.json"
    save_preset(path, "graph", Recipe("gcn", {"hidden_channels": 8}, {}), {"by": "hand"})
    save_preset(path, "graph", Recipe("mlp", {"hidden_channels": 4}, {}), {"by": "hand"})
    assert load_preset(str(path), "gcn").options == {"hidden_channels": 8}
    assert load_preset(str(path), "mlp").options == {"hidden_channels": 4}
    with pytest.raises(ValueError, match=r"a preset is a \.json file, got .*graph\.txt"):
        save_preset(tmp_path / "graph.txt", "graph", Recipe("mlp", {}, {}), {})
    with pytest.raises(ValueError, match="a preset for graph, not for other"):
        save_preset(path, "other", Recipe("mlp", {}, {}), {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a preset"),
        ('{"graph": "g"}', "it wants the keys 'graph', a name, and 'models'"),
        ("[]", "it wants the keys"),
        (
            '{"graph": "g", "models": {"dcgnn": {"options": {"nonsense": 3}, "training": {}}}}',
            "no option nonsense",
        ),
        ('{"graph": "g", "models": {"gcn": {"options": {}, "training": {}}}}', "no model 'dcgnn'"),
        ('{"graph": "g", "models": {"dcgnn": {"options": {}}}}', "training"),
        ('{"graph": "g", "models": {"dcgnn": {"options": {}, "training": {"speed": 1}}}}', "no option speed"),
        (
            '{"graph": "g", "models": {"dcgnn": {"options": {}, "training": {}}}}',
            "its options lack hidden_channels",
        ),
        (
            '{"graph": "g", "models": {"dcgnn": {"options": {}, "training": {"lr": "a"}}}}',
            "broken.json, dcgnn: lr must be of type float, got 'a'",
        ),
        (
            '{"graph": "g", "models": {"dcgnn": {"options": [1], "training": {}}}}',
            "it wants options, an object",
        ),
        ('{"graph": "g", "models": {"dcgnn": 3}}', "it wants options, an object"),
        ('{"graph": "g", "models": {}}', "it has none"),
    ],
)
def test_damaged_presets(content, message, tmp_path, capsys):
    path = tmp_path / "broken.json"
    path.write_text(content)
    assert main(["train", GRAPH, "--preset", str(path), "--quiet"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"), [("mars", "no preset 'mars'; there are"), ("mars.json", "no preset file mars.json")]
)
def test_unknown_preset(name, message, capsys):
    assert main(["train", GRAPH, "--preset", name]) == 2
    assert message in capsys.readouterr().err


def test_graphs_without_a_preset_take_the_default_one(tmp_path):
    path = tmp_path / "out.json"
    assert main(["train", GRAPH, "--preset", "--epochs", "1", "--quiet", "--json", str(path)]) == 0
    options = json.loads(path.read_text())["model"]
    expected = dict(load_preset("default").options)
    assert {name: options[name] for name in expected} == {**expected, "num_global": options["num_global"]}
