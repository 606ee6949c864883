"""Published graphs through the classes of PyTorch Geometric, without a write to the user's folder.

Raw files are looked up in ``<root>/<name>/`` (all files side by side) and in the place where PyG
itself would have put them. PyG then processes them in a temporary folder, so a data root may be
read-only and shared. Files that are not there are downloaded by PyG into a temporary folder first
and kept under the root only when they are complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.datasets import HeterophilousGraphDataset, LINKXDataset, Planetoid, WebKB
from torch_geometric.utils import to_undirected

from dcgnn.data.graph_data import GraphData, Metric, random_split
from dcgnn.data.us_election import USElection

#: Environment variable that names the folder of the raw files.
DATA_ROOT_VARIABLE = "DCGNN_DATA"


class DatasetUnavailable(RuntimeError):
    """The files of a graph are neither there nor could they be downloaded, or are unreadable."""


class _LINKXWithoutSplits(LINKXDataset):
    """PyG's class, but content without the separate file of splits."""

    splits: ClassVar[dict[str, str]] = {}


@dataclass(frozen=True)
class RealGraph:
    """Where a published graph comes from and how it is split.

    Args:
        name: Name on the command line, and the folder of the raw files.
        source: Who published it, in a few words.
        dataset: Makes the PyG dataset from a root folder.
        raw_dir: Where PyG looks for the raw files below that root.
        files: The raw files.
        metric: What is reported.
        num_splits: Number of splits.
        fractions: Shares for training and validation of a random split; ``None`` where the raw
            files hold the splits.
        fallback: A second reading for fewer files, if one exists.
    """

    name: str
    source: str
    dataset: Callable[[str], InMemoryDataset]
    raw_dir: str
    files: tuple[str, ...]
    metric: Metric = "accuracy"
    num_splits: int = 10
    fractions: tuple[float, float] | None = None
    fallback: RealGraph | None = None

    @property
    def splits(self) -> str:
        """The kind of split, in words."""
        if self.fractions is None:
            return f"{self.num_splits} from files"
        train, val = (round(100 * share) for share in self.fractions)
        return f"random {train}/{val}/{100 - train - val}"


def _planetoid(pyg_name: str) -> RealGraph:
    name = pyg_name.lower()
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    return RealGraph(
        name=name,
        source="Planetoid, splits of Geom-GCN",
        dataset=lambda root: Planetoid(root, pyg_name, split="geom-gcn"),
        raw_dir=f"{pyg_name}/geom-gcn/raw",
        files=tuple(f"ind.{name}.{part}" for part in parts) + _geom_gcn_splits(name),
    )


def _heterophilous(pyg_name: str, metric: Metric) -> RealGraph:
    folder = pyg_name.lower().replace("-", "_")
    return RealGraph(
        name=pyg_name.lower(),
        source="Platonov et al. 2023",
        dataset=lambda root: HeterophilousGraphDataset(root, pyg_name),
        raw_dir=f"{folder}/raw",
        files=(f"{folder}.npz",),
        metric=metric,
    )


def _linkx(name: str, source: str, metric: Metric = "accuracy") -> RealGraph:
    return RealGraph(
        name=name,
        source=source,
        dataset=lambda root: _LINKXWithoutSplits(root, name),
        raw_dir=f"{name}/raw",
        files=("data.mat",),
        metric=metric,
        fractions=(0.5, 0.25),
    )


def _geom_gcn_splits(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_split_0.6_0.2_{index}.npz" for index in range(10))


_FACEBOOK = "Facebook100, Lim et al. 2021"

REAL_GRAPHS: dict[str, RealGraph] = {
    graph.name: graph
    for graph in (
        _planetoid("Cora"),
        _planetoid("CiteSeer"),
        _planetoid("PubMed"),
        RealGraph(
            name="wisconsin",
            source="WebKB, Pei et al. 2020",
            dataset=lambda root: WebKB(root, "Wisconsin"),
            raw_dir="wisconsin/raw",
            files=(
                "out1_node_feature_label.txt",
                "out1_graph_edges.txt",
                *_geom_gcn_splits("wisconsin"),
            ),
            fractions=(0.5, 0.25),
        ),
        RealGraph(
            name="us-election",
            source="Jia and Benson 2020",
            dataset=USElection,
            raw_dir="us-election/raw",
            files=(
                "adjacency.txt",
                "election.csv",
                "income.csv",
                "population.csv",
                "education.csv",
                "unemployment.csv",
            ),
            fractions=(0.6, 0.2),
        ),
        _heterophilous("Minesweeper", "roc_auc"),
        _heterophilous("Tolokers", "roc_auc"),
        _heterophilous("Roman-empire", "accuracy"),
        _heterophilous("Amazon-ratings", "accuracy"),
        _heterophilous("Questions", "roc_auc"),
        RealGraph(
            name="penn94",
            source=_FACEBOOK,
            dataset=lambda root: LINKXDataset(root, "penn94"),
            raw_dir="penn94/raw",
            files=("data.mat", "fb100-Penn94-splits.npy"),
            num_splits=5,
            fallback=_linkx("penn94", _FACEBOOK),
        ),
        _linkx("cornell5", _FACEBOOK),
        _linkx("amherst41", _FACEBOOK),
        _linkx("genius", "Lim et al. 2021", "roc_auc"),
    )
}


def default_data_root() -> Path:
    """``$DCGNN_DATA``, else the user's cache folder (``$XDG_CACHE_HOME/dcgnn``)."""
    if root := os.environ.get(DATA_ROOT_VARIABLE):
        return Path(root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dcgnn"


def load_real(graph: RealGraph, data_root: str | Path | None, split: int) -> GraphData:
    """Read one published graph and one of its splits.

    Features are those of the files (bags of words stay binary), edges go both ways, unlabelled
    nodes are in no mask.

    Raises:
        DatasetUnavailable: If files are missing or cannot be read.
    """
    root = Path(data_root).expanduser() if data_root is not None else default_data_root()
    graph, data = _read(graph, root)
    if lacks_its_splits(graph.name, root):
        missing = ", ".join(sorted(set(REAL_GRAPHS[graph.name].files) - set(graph.files)))
        warnings.warn(
            f"{graph.name}: without {missing} its splits are random ones, not the published ones",
            stacklevel=2,
        )
    num_nodes = data.x.size(0)
    labels = data.y.long()
    if graph.fractions is None:
        if split >= graph.num_splits:
            raise ValueError(f"{graph.name} has splits 0..{graph.num_splits - 1}, got split {split}")
        masks = [
            mask[:, split].bool() & (labels >= 0) for mask in (data.train_mask, data.val_mask, data.test_mask)
        ]
    else:
        masks = list(random_split(labels, split, graph.fractions))
    return GraphData(
        name=graph.name,
        x=data.x.to(torch.float32),
        edge_index=to_undirected(data.edge_index, num_nodes=num_nodes),
        y=labels,
        train_mask=masks[0],
        val_mask=masks[1],
        test_mask=masks[2],
        num_classes=int(labels.max()) + 1,
        metric=graph.metric,
        num_splits=graph.num_splits,
        split=split,
    )


def has_split_files(name: str, data_root: str | Path | None) -> bool:
    """Whether splits come with the files of the graph ``name``, be they taken or not."""
    graph = REAL_GRAPHS[name]
    if graph.fractions is None:
        return not lacks_its_splits(name, data_root)
    return any("_split_" in file for file in graph.files)


def load_from_split_files(name: str, data_root: str | Path | None, split: int) -> GraphData:
    """The graph ``name`` with a split that comes with its files, where :func:`load_real` draws one, too."""
    return load_real(dataclasses.replace(REAL_GRAPHS[name], fractions=None), data_root, split)


def raw_files(name: str, data_root: str | Path | None) -> list[Path]:
    """The files that :func:`load_real` would read for the graph ``name``; none where one is missing."""
    root = Path(data_root).expanduser() if data_root is not None else default_data_root()
    found = _locate(REAL_GRAPHS[name], root)
    return [] if found is None else [found[1] / file for file in found[0].files]


def lacks_its_splits(name: str, data_root: str | Path | None) -> bool:
    """Whether the graph ``name`` is there without its published splits: random ones take their place."""
    root = Path(data_root).expanduser() if data_root is not None else default_data_root()
    found = _locate(REAL_GRAPHS[name], root)
    return found is not None and found[0].files != REAL_GRAPHS[name].files


def _locate(graph: RealGraph, root: Path) -> tuple[RealGraph, Path] | None:
    """The reading for which all files are there, and their folder."""
    candidate: RealGraph | None = graph
    while candidate is not None:
        for folder in (root / graph.name, root / graph.raw_dir):
            if all((folder / file).is_file() for file in candidate.files):
                return candidate, folder
        candidate = candidate.fallback
    return None


def _read(graph: RealGraph, root: Path) -> tuple[RealGraph, Data]:
    found = _locate(graph, root)
    if found is not None:
        return found[0], _process(*found)
    present = [file for file in graph.files if (root / graph.name / file).is_file()]
    if present:
        # The user has begun to put the files here: a download elsewhere would only hide the gap.
        missing = [file for file in graph.files if file not in present]
        raise DatasetUnavailable(
            f"{graph.name}: {root / graph.name} lacks {', '.join(missing)} (it has {', '.join(present)})"
        )
    return graph, _download(graph, root)


def _process(graph: RealGraph, folder: Path) -> Data:
    """Let PyG process the files of ``folder`` in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="dcgnn-data-") as staged:
        raw = Path(staged) / graph.raw_dir
        raw.mkdir(parents=True)
        for file in graph.files:
            _link(folder / file, raw / file)
        try:
            # PyG reports "Processing..." on stderr, in the middle of our progress bar.
            with contextlib.redirect_stderr(io.StringIO()):
                return graph.dataset(staged)[0]
        except Exception as error:
            raise DatasetUnavailable(
                f"{graph.name}: the files in {folder} could not be read "
                f"({type(error).__name__}: {_one_line(error)})"
            ) from error


def _download(graph: RealGraph, root: Path) -> Data:
    """Let PyG download into a temporary folder; keep the raw files when all are there."""
    with tempfile.TemporaryDirectory(prefix="dcgnn-data-") as staged:
        try:
            data = graph.dataset(staged)[0]
        except Exception as error:
            raise DatasetUnavailable(
                f"{graph.name}: no files in {root / graph.name} and the download failed "
                f"({type(error).__name__}: {_one_line(error)}); to use files of your own, put "
                f"{_shortened(graph.files)} into {root / graph.name}, or name another folder that "
                f"has {graph.name}/ with them by --data-root or {DATA_ROOT_VARIABLE}"
            ) from error
        try:
            _keep(Path(staged) / graph.raw_dir, root / graph.raw_dir)
        except OSError as error:
            warnings.warn(f"{graph.name}: downloaded, but not kept: {error}", stacklevel=2)
        return data


def _link(source: Path, target: Path) -> None:
    try:
        target.symlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


def _keep(source: Path, target: Path) -> None:
    """Copy the folder ``source`` to ``target`` so that ``target`` is complete or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".incoming-") as incoming:
        shutil.copytree(source, Path(incoming) / target.name)
        os.replace(Path(incoming) / target.name, target)


def _shortened(files: tuple[str, ...]) -> str:
    """The file names, the ten numbered splits of Geom-GCN as one pattern."""
    patterns = (re.sub(r"(_split_.*)_\d\.npz$", r"\1_{0..9}.npz", file) for file in files)
    return ", ".join(dict.fromkeys(patterns))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
