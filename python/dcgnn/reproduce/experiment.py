"""What every table and figure shares: runs that are kept one by one, a table, verdicts, JSON, a picture."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dcgnn.checkpoint import atomic_write, check_writable
from dcgnn.data import GraphData, draws_splits, load_graph, num_splits
from dcgnn.data.real import REAL_GRAPHS, default_data_root, raw_files
from dcgnn.recipe import Recipe
from dcgnn.training import TrainingInterrupted
from dcgnn_kernels import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Job:
    """One unit of work whose result is kept.

    Args:
        label: Its name where people read, and the beginning of its file's.
        settings: All that the result depends on besides the files of a graph.
        compute: Makes the result.
        graph: The graph that it is about; the files of a published one are a part of what it depends on.
    """

    label: str
    settings: Mapping[str, Any]
    compute: Callable[[], dict[str, Any]]
    graph: str | None = None


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
        seed: Seed of training; of several, the first.
        seeds: Seeds for every split, where a table takes several.
        epochs: Most epochs, where the preset's number is too many.
        progress: Show a progress bar on stderr.
        depths: Depths of Tree-NeighborsMatch; None: all.
        covered: What the result was made of: ``graphs``, ``models``, ``splits``, ``seeds``, ``depths``.
    """

    out: Path
    data_root: str | Path | None = None
    datasets: Sequence[str] | None = None
    models: Sequence[str] | None = None
    splits: Sequence[int] = (0, 1, 2)
    seed: int = 0
    seeds: int = 1
    epochs: int | None = None
    progress: bool = False
    depths: Sequence[int] | None = None
    covered: dict[str, list[Any]] = field(default_factory=dict)
    _graphs: dict[tuple[str, int], GraphData] = field(default_factory=dict, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, repr=False)

    def load(self, graph: str, split: int = 0) -> GraphData:
        """A graph and one of its splits; the last few are kept."""
        key = (graph, split)
        if key not in self._graphs:
            while len(self._graphs) >= 3:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = load_graph(graph, data_root=self.data_root, split=split)
        return self._graphs[key]

    def splits_of(self, graph: str) -> list[int]:
        """The splits that were asked for.

        Raises:
            ValueError: If the graph does not have all of them.
        """
        available = num_splits(graph)
        missing = [split for split in self.splits if split >= available]
        if missing and not draws_splits(graph):
            raise ValueError(
                f"--split: {graph} has splits 0 to {available - 1}, not {', '.join(map(str, missing))}"
            )
        self.covered["splits"] = list(self.splits)
        return list(self.splits)

    def choose_graphs(self, possible: Sequence[str], otherwise: str | None = None) -> list[str]:
        """The graphs that were asked for, else those of ``possible`` whose files are there, else the embedded
        graph ``otherwise``.

        Raises:
            ValueError: If a graph is not one of ``possible`` or its files are not there, or none is left.
        """
        if self.datasets is not None:
            _check_names("--datasets", self.datasets, possible)
            published = [graph for graph in self.datasets if graph in REAL_GRAPHS]
            missing = [graph for graph in published if not has_files(graph, self.data_root)]
            found = list(self.datasets)
        else:
            found = [graph for graph in possible if has_files(graph, self.data_root)]
            if not found and otherwise is not None:
                found = [otherwise]
            missing = [] if found else list(possible)
        if missing:  # now rather than after the graphs before it were trained
            raise ValueError(
                f"no files of {', '.join(missing)} under {self.data_root or default_data_root()}; "
                "see dcgnn graphs"
            )
        self.covered["graphs"] = found
        return found

    def choose_models(self, possible: Sequence[str]) -> list[str]:
        """The models that were asked for, else all of ``possible``."""
        if self.models is not None:
            _check_names("--models", self.models, possible)
        self.covered["models"] = list(possible if self.models is None else self.models)
        return self.covered["models"]

    def shortened(self, recipe: Recipe) -> Recipe:
        """The recipe with no more epochs than were asked for."""
        if self.epochs is None:
            return recipe
        return recipe.replaced(epochs=min(self.epochs, recipe.training.get("epochs", self.epochs)))

    def training_job(
        self,
        recipe: Recipe,
        graph: str,
        split: int,
        data: Callable[[], GraphData] | None = None,
        seed: int | None = None,
        variant: str = "",
    ) -> Job:
        """Train one recipe on one split; ``data`` where the graph is not simply loaded, with a name for it in
        ``variant``; ``seed`` where it is not the context's.
        """
        recipe = self.shortened(recipe)
        chosen = self.seed if seed is None else seed
        seeds = self.covered.setdefault("seeds", [])
        if chosen not in seeds:
            seeds.append(chosen)

        def compute() -> dict[str, Any]:
            _, result = recipe.run(data() if data else self.load(graph, split), chosen)
            kept = result.to_dict()
            del kept["history"]
            return kept

        name = f"{graph} {variant}".strip()
        settings = {"recipe": recipe.to_dict(), "graph": name, "split": split, "seed": chosen}
        return Job(f"{name} {recipe.model} split {split}", settings, compute, graph)

    def _digest(self, graph: str | None) -> str | None:
        """SHA-256 of the raw files of a published graph; other graphs follow from their names."""
        if graph not in REAL_GRAPHS:
            return None
        if graph not in self._digests:
            digest = hashlib.sha256()
            for path in raw_files(graph, self.data_root):
                digest.update(path.read_bytes())
            self._digests[graph] = digest.hexdigest()
        return self._digests[graph]

    def collect(self, name: str, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The results of all jobs in order; one that is kept from before is not computed again."""
        folder = self.out / name / "runs"
        for path in (folder.parent / "result.json", folder.parent / "figure.png", folder / "run.json"):
            check_writable(path)
        results = []
        with tqdm(total=len(jobs), desc=name, unit="run", disable=not self.progress) as bar:
            for job in jobs:
                bar.set_postfix_str(job.label)
                results.append(_kept(folder, job, self._digest(job.graph)))
                bar.update()
        return results


def averaged(splits: Sequence[int]) -> str:
    """What :func:`spread` shows of these splits, in words."""
    if len(splits) == 1:
        return f"split {splits[0]}"
    return f"mean ± deviation over splits {listed(splits)}"


def listed(values: Sequence[object]) -> str:
    """``0, 1, 2``; many whole numbers in a row as ``0 to 99``."""
    if len(values) > 10 and list(values) == list(range(int(str(values[0])), int(str(values[-1])) + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def spread(values: Sequence[float]) -> str:
    """``mean ± deviation`` in two decimals; of a single value just that."""
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def _check_names(option: str, given: Sequence[str], possible: Sequence[str]) -> None:
    if not given:
        raise ValueError(f"{option} is empty; there are {', '.join(possible)}")
    for name in given:
        if name not in possible:
            raise ValueError(f"{option}: {name!r} is not one of {', '.join(possible)}")
        if given.count(name) > 1:
            raise ValueError(f"{option} names {name} twice")


def has_files(graph: str, data_root: str | Path | None) -> bool:
    """Whether the raw files of a published graph are there."""
    return bool(raw_files(graph, data_root))


def _kept(folder: Path, job: Job, data: str | None) -> dict[str, Any]:
    """The result of a job, from its file if that is whole and was made from the same settings and data."""
    identity = json.dumps({"version": __version__, "data": data, **job.settings}, sort_keys=True)
    digest = _sha256(identity)[:12]
    path = folder / f"{re.sub(r'[^a-z0-9.-]+', '-', job.label.lower())}-{digest}.json"
    check_writable(path)
    if path.is_file():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["settings"] == json.loads(identity) and kept["sha256"] == _sha256(kept["result"]):
                return kept["result"]
        except (ValueError, KeyError, TypeError):
            pass
        tqdm.write(f"{path} is damaged: computed again", file=sys.stderr)
    started = time.perf_counter()
    try:
        result = job.compute()
    except TrainingInterrupted:
        raise KeyboardInterrupt("interrupted; finished runs are kept, the same command continues") from None
    content = {
        "settings": json.loads(identity),
        "result": result,
        "sha256": _sha256(result),
        "wall_seconds": time.perf_counter() - started,
    }
    write_json(path, content)
    return result


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values atomically."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    atomic_write(path, lambda file: file.write(text.encode()))
