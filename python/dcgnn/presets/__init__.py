"""Settings for published graphs: one JSON file a graph, made by ``dcgnn tune``.

.. code-block:: json

    {
      "graph": "cora",
      "models": {
        "dcgnn": {
          "options": {"hidden_channels": 64, "num_layers": 2},
          "training": {"lr": 0.01, "epochs": 300},
          "found": {"trials": 40, "splits": [0, 1, 2], "validation": 0.89}
        }
      }
    }

``options`` are arguments of the model, ``training`` fields of :class:`~dcgnn.training.TrainConfig`, ``found``
says how they were chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcgnn.checkpoint import atomic_write, check_writable
from dcgnn.recipe import Recipe

_FOLDER = Path(__file__).parent


def preset_names() -> list[str]:
    """The graphs that have a preset."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_preset(name: str, model: str = "dcgnn") -> Recipe:
    """The settings of ``model`` for the graph ``name``, or from the file of that path.

    Raises:
        ValueError: If there is no such preset, or not for this model, or it is not one.
    """
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise ValueError(f"no preset file {name}")
    else:
        path = _FOLDER / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"no preset {name!r}; there are {', '.join(preset_names()) or 'none'}")
    entries = _read(path)["models"]
    if model not in entries:
        raise ValueError(f"preset {name!r} has no model {model!r}; it has {', '.join(entries) or 'none'}")
    entry = entries[model]
    try:
        for part in ("options", "training"):
            if not isinstance(entry, dict) or not isinstance(entry.get(part), dict):
                raise ValueError(f"it wants {part}, an object")
        recipe = Recipe(model, entry["options"], entry["training"])
        recipe.config(seed=0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"preset {path.name}, {model}: {error}") from error
    return recipe


def preset_to_write(path: str | Path, graph: str) -> dict[str, Any]:
    """What a preset file for ``graph`` holds so far.

    Raises:
        ValueError: If the file is not a preset, or one of another graph, or cannot be written.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"a preset is a .json file, got {path}")
    check_writable(path)
    content: dict[str, Any] = {"graph": graph, "models": {}}
    if path.exists():
        content = _read(path)
    if content["graph"] != graph:
        raise ValueError(f"{path} is a preset for {content['graph']}, not for {graph}")
    return content


def save_preset(path: str | Path, graph: str, recipe: Recipe, found: Mapping[str, Any]) -> None:
    """Put a recipe and how it was found into a preset file; other models in it stay."""
    content = preset_to_write(path, graph)
    content["models"][recipe.model] = {
        "options": dict(recipe.options),
        "training": dict(recipe.training),
        "found": dict(found),
    }
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(path, lambda file: file.write(text.encode()))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a preset ({error})") from error
    named = content if isinstance(content, dict) else {}
    if not isinstance(named.get("graph"), str) or not isinstance(named.get("models"), dict):
        raise ValueError(
            f"{path} is not a preset: it wants the keys 'graph', a name, and 'models', an object"
        )
    return content


def find_preset(graph: str, model: str) -> Recipe | None:
    """The preset of ``graph`` for ``model``, or None where there is none."""
    path = _FOLDER / f"{graph}.json"
    if path.is_file() and model in _read(path)["models"]:
        return load_preset(graph, model)
    return None


def recipe_for(graph: str, model: str) -> Recipe:
    """The preset of ``graph`` for ``model``, else the settings in ``default.json``."""
    return find_preset(graph, model) or load_preset("default", model)
