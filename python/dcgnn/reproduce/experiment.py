"""What every table and figure shares: runs that are kept one by one, a table, verdicts, JSON, a picture."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dcgnn.checkpoint import atomic_write
from dcgnn.data import GraphData, load_graph, num_splits
from dcgnn.data.real import REAL_GRAPHS, default_data_root
from dcgnn.recipe import Recipe
from dcgnn.training import TrainingInterrupted
from dcgnn_kernels import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Job:
    """One unit of work whose result is kept: ``settings`` say all that it depends on."""

    label: str
    settings: Mapping[str, Any]
    compute: Callable[[], dict[str, Any]]


@dataclass
class Outcome:
    """A finished table or figure.

    Args:
        header: Names of the columns.
        rows: Cells of the table.
        verdicts: ``pass``, ``short ...`` or another word by what it is about.
        data: What the JSON file holds besides.
        draw: Draws the figure.
        notes: Sentences below the table.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdicts: Mapping[str, str]
    data: Mapping[str, Any]
    draw: Callable[[Figure], None]
    notes: Sequence[str] = ()


@dataclass
class Context:
    """Where data come from, where results go, and what was asked for.

    Args:
        out: Folder of the results; one folder a table or figure below it.
        data_root: Folder of the raw files.
        datasets: Graphs to take; None: all that are there.
        models: Models to take; None: all.
        splits: Splits to train.
        seed: Seed of training.
        epochs: Most epochs, where the preset's number is too many.
        progress: Show a progress bar on stderr.
        depths: Depths of Tree-NeighborsMatch; None: all.
    """

    out: Path
    data_root: str | Path | None = None
    datasets: Sequence[str] | None = None
    models: Sequence[str] | None = None
    splits: Sequence[int] = (0, 1, 2)
    seed: int = 0
    epochs: int | None = None
    progress: bool = False
    depths: Sequence[int] | None = None
    _graphs: dict[tuple[str, int], GraphData] = field(default_factory=dict, repr=False)

    def load(self, graph: str, split: int = 0) -> GraphData:
        """A graph and one of its splits; the last few are kept."""
        key = (graph, split)
        if key not in self._graphs:
            while len(self._graphs) >= 3:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = load_graph(graph, data_root=self.data_root, split=split)
        return self._graphs[key]

    def splits_of(self, graph: str) -> list[int]:
        """The splits that were asked for, as far as the graph has them."""
        return [split for split in self.splits if split < num_splits(graph)]

    def choose_graphs(self, possible: Sequence[str], otherwise: str | None = None) -> list[str]:
        """The graphs that were asked for, else those of ``possible`` whose files are there, else the embedded
        graph ``otherwise``.

        Raises:
            ValueError: If a graph is not one of ``possible``, or none is left.
        """
        if self.datasets is not None:
            for graph in self.datasets:
                if graph not in possible:
                    raise ValueError(f"--datasets: {graph!r} is not one of {', '.join(possible)}")
            return list(self.datasets)
        found = [graph for graph in possible if has_files(graph, self.data_root)]
        if not found and otherwise is not None:
            return [otherwise]
        if not found:
            raise ValueError(
                f"no files of {', '.join(possible)} under {self.data_root or default_data_root()}; "
                "see dcgnn graphs"
            )
        return found

    def choose_models(self, possible: Sequence[str]) -> list[str]:
        """The models that were asked for, else all of ``possible``."""
        for model in self.models or ():
            if model not in possible:
                raise ValueError(f"--models: {model!r} is not one of {', '.join(possible)}")
        return list(self.models or possible)

    def shortened(self, recipe: Recipe) -> Recipe:
        """The recipe with no more epochs than were asked for."""
        if self.epochs is None:
            return recipe
        return recipe.replaced(epochs=min(self.epochs, recipe.training.get("epochs", self.epochs)))

    def training_job(
        self, recipe: Recipe, graph: str, split: int, data: Callable[[], GraphData] | None = None
    ) -> Job:
        """Train one recipe on one split; ``data`` where the graph is not simply loaded."""
        recipe = self.shortened(recipe)

        def compute() -> dict[str, Any]:
            _, result = recipe.run(data() if data else self.load(graph, split), self.seed)
            kept = result.to_dict()
            del kept["history"]
            return kept

        settings = {"recipe": recipe.to_dict(), "graph": graph, "split": split, "seed": self.seed}
        return Job(f"{graph} {recipe.model} split {split}", settings, compute)

    def collect(self, name: str, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The results of all jobs in order; one that is kept from before is not computed again."""
        folder = self.out / name / "runs"
        results = []
        with tqdm(total=len(jobs), desc=name, unit="run", disable=not self.progress) as bar:
            for job in jobs:
                bar.set_postfix_str(job.label)
                results.append(_kept(folder, job))
                bar.update()
        return results


def has_files(graph: str, data_root: str | Path | None) -> bool:
    """Whether the raw files of a published graph are there."""
    entry = REAL_GRAPHS[graph]
    root = Path(data_root).expanduser() if data_root is not None else default_data_root()
    candidates = [entry] if entry.fallback is None else [entry, entry.fallback]
    return any(
        all((folder / file).is_file() for file in candidate.files)
        for candidate in candidates
        for folder in (root / entry.name, root / entry.raw_dir)
    )


def _kept(folder: Path, job: Job) -> dict[str, Any]:
    identity = json.dumps({"version": __version__, **job.settings}, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    path = folder / f"{re.sub(r'[^a-z0-9.-]+', '-', job.label.lower())}-{digest}.json"
    if path.is_file():
        try:
            return json.loads(path.read_text(encoding="utf-8"))["result"]
        except (json.JSONDecodeError, KeyError, TypeError):
            pass  # not ours or damaged: computed and written anew
    started = time.perf_counter()
    try:
        result = job.compute()
    except TrainingInterrupted:
        raise KeyboardInterrupt("interrupted; finished runs are kept, the same command continues") from None
    content = {
        "settings": json.loads(identity),
        "result": result,
        "wall_seconds": time.perf_counter() - started,
    }
    write_json(path, content)
    return result


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values atomically."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    atomic_write(path, lambda file: file.write(text.encode()))
