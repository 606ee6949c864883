"""All graphs by name: the one place that knows which exist and what they may be asked for."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dcgnn.data.graph_data import GraphData, Metric, random_split
from dcgnn.data.minesweeper import minesweeper
from dcgnn.data.real import REAL_GRAPHS, load_real
from dcgnn.data.sbm import stochastic_block_model
from dcgnn.data.tree import tree_neighbors_match

OptionValue = int | float | bool


@dataclass(frozen=True)
class Generator:
    """A graph that is made rather than read; its options are the arguments of ``make``."""

    name: str
    source: str
    make: Callable[..., tuple[Tensor, Tensor, Tensor]]
    num_classes: Callable[[Mapping[str, OptionValue]], int]
    metric: Metric = "accuracy"
    num_splits: int = 10

    @property
    def splits(self) -> str:
        """The kind of split, in words."""
        return "random 50/25/25"

    def options(self) -> dict[str, OptionValue]:
        """Every option with its default."""
        parameters = inspect.signature(self.make).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters}


GENERATORS: dict[str, Generator] = {
    generator.name: generator
    for generator in (
        Generator(
            name="minesweeper-synthetic",
            source="made here, after Platonov et al. 2023",
            make=minesweeper,
            num_classes=lambda options: 2,
            metric="roc_auc",
        ),
        Generator(
            name="sbm",
            source="made here: stochastic block model",
            make=stochastic_block_model,
            num_classes=lambda options: int(options["num_classes"]),
        ),
        Generator(
            name="tree-neighborsmatch",
            source="made here, after Alon and Yahav 2021",
            make=tree_neighbors_match,
            num_classes=lambda options: 2 ** int(options["depth"]),
        ),
    )
}


@dataclass(frozen=True)
class GraphInfo:
    """What ``dcgnn graphs`` says about a graph."""

    name: str
    source: str
    metric: Metric
    splits: str
    options: Mapping[str, OptionValue]


def list_graphs() -> list[GraphInfo]:
    """Every graph that :func:`load_graph` knows, generators first."""
    made = [
        GraphInfo(entry.name, entry.source, entry.metric, entry.splits, entry.options())
        for entry in GENERATORS.values()
    ]
    read = [
        GraphInfo(entry.name, entry.source, entry.metric, entry.splits, {}) for entry in REAL_GRAPHS.values()
    ]
    return made + read


def load_graph(
    name: str,
    *,
    data_root: str | Path | None = None,
    split: int = 0,
    **options: OptionValue,
) -> GraphData:
    """Load or make a graph and one of its splits.

    Args:
        name: Name of a graph, for a generator optionally with options, as in
            ``"sbm:homophily=0.2,num_nodes=2000"``.
        data_root: Folder of the raw files of real graphs: ``<data_root>/<name>/<file>``. By
            default ``$DCGNN_DATA``, else the user's cache folder.
        split: Index of the split. A random split is seeded by it alone.
        **options: Options of a generator, as an alternative to those in ``name``.

    Raises:
        ValueError: On an unknown name, option, value or split.
        DatasetUnavailable: If the files of a real graph are missing and cannot be downloaded.
    """
    if split < 0:
        raise ValueError(f"split must not be negative, got {split}")
    base, given = _parse(name, options)
    if base in REAL_GRAPHS:
        if given:
            raise ValueError(f"{base} takes no options, got {', '.join(given)}")
        return load_real(REAL_GRAPHS[base], data_root, split)

    generator = GENERATORS[base]
    x, edge_index, y = generator.make(**given)
    train_mask, val_mask, test_mask = random_split(y, split)
    stated = ",".join(f"{option}={given[option]}" for option in sorted(given))
    return GraphData(
        name=f"{base}:{stated}" if stated else base,
        x=x,
        edge_index=edge_index,
        y=y,
        train_mask=train_mask,
        val_mask=val_mask,
        test_mask=test_mask,
        num_classes=generator.num_classes({**generator.options(), **given}),
        metric=generator.metric,
        num_splits=generator.num_splits,
        split=split,
    )


def check_name(name: str) -> None:
    """Raises the ValueError of :func:`load_graph` if ``name`` is unknown; nothing is read or made."""
    _parse(name, {})


def num_splits(name: str) -> int:
    """How many splits an average over the graph ``name`` takes."""
    base, _ = _parse(name, {})
    return (GENERATORS.get(base) or REAL_GRAPHS[base]).num_splits


def draws_splits(name: str) -> bool:
    """Whether the splits of the graph ``name`` are drawn at random: then there are as many as one likes."""
    base, _ = _parse(name, {})
    return base in GENERATORS or REAL_GRAPHS[base].fractions is not None


def _parse(spec: str, extra: Mapping[str, OptionValue]) -> tuple[str, dict[str, OptionValue]]:
    """Split a spec into the name of a known graph and its checked options."""
    base, colon, tail = spec.partition(":")
    base = base.strip().lower().replace("_", "-")
    known = [*GENERATORS, *REAL_GRAPHS]
    if base not in known:
        raise ValueError(f"unknown graph {base!r}{_suggest(base, known)}; known are {', '.join(known)}")
    given: dict[str, object] = dict(extra)
    for item in tail.split(",") if tail.strip() else []:
        option, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not option or not value:
            raise ValueError(f"{base}: {item.strip()!r} is not of the form option=value")
        if option in given:
            raise ValueError(f"{base}: option {option!r} is given twice")
        given[option] = value
    if colon and not tail.strip():
        raise ValueError(f"{base}: options are wanted after the colon in {spec!r}")
    if base not in GENERATORS:
        return base, typing.cast("dict[str, OptionValue]", given)

    make = GENERATORS[base].make
    kinds = typing.get_type_hints(make)
    allowed = list(GENERATORS[base].options())
    typed: dict[str, OptionValue] = {}
    for option, entry in given.items():
        if option not in allowed:
            raise ValueError(
                f"{base} has no option {option!r}{_suggest(option, allowed)}; it has {', '.join(allowed)}"
            )
        typed[option] = _convert(base, option, entry, kinds[option])
    return base, typed


def _convert(base: str, option: str, value: object, kind: type) -> OptionValue:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    text = str(value).lower()
    try:
        if kind is bool:
            return words[text]
        # int("0.5") fails, as it should; a bool given for a number is a mistake, too.
        if isinstance(value, bool):
            raise ValueError
        return int(text) if kind is int else float(text)
    except (KeyError, ValueError):
        article = "an" if kind is int else "a"
        raise ValueError(
            f"{base}: option {option!r} wants {article} {kind.__name__}, got {value!r}"
        ) from None


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=2)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
