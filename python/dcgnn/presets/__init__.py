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

from dcgnn.checkpoint import atomic_write
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
    if path.suffix != ".json":
        path = _FOLDER / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"no preset {name!r}; there are {', '.join(preset_names()) or 'none'}")
    entries = _read(path)["models"]
    if model not in entries:
        raise ValueError(f"preset {name!r} has no model {model!r}; it has {', '.join(entries)}")
    entry = entries[model]
    try:
        return Recipe(model, entry["options"], entry["training"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"preset {path.name}, {model}: {error}") from error


def save_preset(path: str | Path, graph: str, recipe: Recipe, found: Mapping[str, Any]) -> None:
    """Put a recipe and how it was found into a preset file; other models in it stay."""
    path = Path(path)
    content: dict[str, Any] = {"graph": graph, "models": {}}
    if path.is_file():
        content = _read(path)
    if content["graph"] != graph:
        raise ValueError(f"{path} is a preset for {content['graph']}, not for {graph}")
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
        if not isinstance(content["models"], dict) or not isinstance(content["graph"], str):
            raise TypeError("graph and models are wanted")
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a preset ({error})") from error
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
