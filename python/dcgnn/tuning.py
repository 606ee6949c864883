"""Search for settings on the validation metric, with Optuna."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from tqdm import tqdm

from dcgnn.checkpoint import check_writable
from dcgnn.data import GraphData
from dcgnn.extras import require
from dcgnn.presets import find_preset
from dcgnn.recipe import Recipe, default_num_global
from dcgnn.training import TrainingDiverged, TrainingInterrupted

if TYPE_CHECKING:
    import optuna

#: Seed of searches: none of those that the tables report, so that no table shows the luck of a search.
SEED = 100

_DROPOUT = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)

#: Grid of all models; a baseline gets what DC-GNN gets. Every preset lies on it.
_SKELETON: dict[str, Sequence[Any]] = {
    "hidden_channels": (32, 64, 128, 256),
    "num_layers": (1, 2, 3, 4, 6, 8, 10, 12, 16),
    "dropout": _DROPOUT,
    "input_dropout": (None, 0.0),
    "norm": (None, "batch", "layer"),
    "residual": (False, True),
    "weight_period": (None, 1, 2),
}

#: What only DC-GNN has: the paper's letters first, then the options of this package.
_DCGNN: dict[str, Sequence[Any]] = {
    "alpha": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9),
    "beta": (0.0, 0.1, 0.5, 1.0, 2.0, 5.0),
    "lam": (0.1, 0.5, 1.0, 2.0, 5.0, 10.0),
    "clusters_per_class": (1, 2, 3, 4),
    "global_cost_scale": ("none", "mean"),
    "mass": ("node", "paper"),
    "gamma": ("exact", "paper"),
    "aggr": ("mean", "sum", "symmetric"),
    "transform": (None, "shared", "per-cluster"),
    "activation": (None, "tanh"),
    "node_activation": (None, "relu"),
    "ego_readout": (False, True),
    "local_init": ("carry", "fresh"),
    "adjacency_embedding": (False, True),
    "num_mlp_layers": (1, 2),
}

_LINKX: dict[str, Sequence[Any]] = {
    "hidden_channels": (32, 64, 128, 256),
    "num_layers": (1, 2, 3),
    "num_edge_layers": (1, 2),
    "num_node_layers": (1, 2),
    "dropout": _DROPOUT,
}

_TRAINING: dict[str, Sequence[Any]] = {
    "lr": (0.001, 0.003, 0.005, 0.01, 0.03),
    "lr_schedule": ("constant", "cosine"),
    "weight_decay": (0.0, 5e-5, 5e-4, 5e-3),
}

_LOSSES: dict[str, Sequence[Any]] = {
    "ortho_weight": (0.0, 0.01, 0.1, 1.0),
    "sim_weight": (0.0, 0.01, 0.1, 1.0),
}

_LAYERED: dict[str, Any] = {
    "hidden_channels": 64, "num_layers": 2, "dropout": 0.4, "norm": "layer", "residual": True,
    "alpha": 0.5, "beta": 0.5, "lam": 2.0, "clusters_per_class": 1, "transform": "per-cluster",
    "activation": None, "node_activation": "relu", "ego_readout": True, "local_init": "carry",
    "adjacency_embedding": False, "num_mlp_layers": 1, "input_dropout": None, "global_cost_scale": "none",
    "lr": 0.01, "lr_schedule": "constant", "weight_decay": 5e-4, "ortho_weight": 0.0, "sim_weight": 0.0,
    "weight_period": None, "mass": "node", "gamma": "exact", "aggr": "mean",
}  # fmt: skip

_PLAIN = _LAYERED | {
    "dropout": 0.6, "norm": None, "residual": False, "node_activation": None, "transform": None,
    "ego_readout": False, "alpha": 0.1,
}  # fmt: skip

#: With raw costs the few Sinkhorn iterations let single nodes of the global problem run away.
_DEEP = _LAYERED | {
    "num_layers": 8, "norm": "batch", "dropout": 0.2, "input_dropout": 0.0, "weight_decay": 0.0,
    "global_cost_scale": "mean", "local_init": "fresh", "lr_schedule": "cosine",
}  # fmt: skip

#: Where a search begins: a skeleton for all graphs, with LINKX's input, without a node's own way past its
#: neighbours, deep (also with the same maps in all layers, and with weights that tell a node's degree), the
#: plain layer, and little more than an MLP. Baselines begin with the same, as far as they have the settings.
_FIRST_TRIALS: tuple[dict[str, Any], ...] = (
    _LAYERED,
    _LAYERED | {"adjacency_embedding": True},
    # Friendships tell more than one's own features: with them at hand GCN on Amherst41 learns those by heart.
    _LAYERED | {
        "norm": "batch", "residual": False, "input_dropout": 0.0, "adjacency_embedding": True,
    },
    _DEEP,
    # The same maps in all layers: a fraction of the weights, with less to learn by heart.
    _DEEP | {"dropout": 0.0, "weight_period": 1},
    _DEEP | {"gamma": "paper", "aggr": "symmetric"},
    _PLAIN,
    _PLAIN | {"num_layers": 1, "hidden_channels": 128, "alpha": 0.5, "beta": 5.0, "residual": True},
)  # fmt: skip

#: What a preset means that does not name these settings, and a trial of a journal from before they existed.
_UNNAMED: dict[str, Any] = {
    "input_dropout": None, "global_cost_scale": "none", "local_init": "carry", "lr_schedule": "constant",
    "weight_period": None, "mass": "node", "gamma": "exact", "aggr": "mean",
}  # fmt: skip

#: Marks trials that Ctrl-C ended.
_INTERRUPTED = "interrupted"

#: Says which process runs a trial.
_OWNER = "owner"

#: Settings that lost so many trials are not tried again.
_MOST_LOSSES = 3

#: How many settings a step of the search changes, drawn from these.
_CHANGES = (1, 1, 2, 2, 3, 4)

#: No trial is given up before so many have finished.
_BEFORE_PRUNING = 3

#: After these shares of a run's epochs a trial is compared with the finished ones.
_COMPARED_AFTER = (0.4, 0.7, 1.0)

#: A step changes one of so many of the best trials.
_PARENTS = 3

#: Every so many trials TPE draws all settings; the others change a good trial.
_EXPLORE_EVERY = 10


@dataclass(frozen=True)
class Budget:
    """How long a trial may train, and how deep it may be.

    Args:
        epochs: Most epochs of a run.
        patience: Epochs without a better validation metric before a run stops.
        max_layers: Most layers.
        max_channels: Most hidden channels.
    """

    epochs: int = 300
    patience: int = 60
    max_layers: int = 8
    max_channels: int = 256

    def __post_init__(self) -> None:
        for name in ("epochs", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Found:
    """What a search came to; ``validation`` is the mean over ``seeds``."""

    recipe: Recipe
    validation: float
    trials: int
    pruned: int
    seeds: tuple[int, ...]


def search_space(model: str, budget: Budget) -> dict[str, Sequence[Any]]:
    """The choices for every setting of a model."""
    space = dict(_LINKX if model == "linkx" else _SKELETON)
    for name, most in (("num_layers", budget.max_layers), ("hidden_channels", budget.max_channels)):
        smallest = min(space[name])
        space[name] = tuple(value for value in space[name] if value <= most)
        if not space[name]:
            raise ValueError(f"max_{name.split('_')[1]} must be at least {smallest}, got {most}")
    return space | _DCGNN | _TRAINING | _LOSSES if model == "dcgnn" else space | _TRAINING


def recipe_of(model: str, chosen: Mapping[str, Any], num_classes: int, budget: Budget) -> Recipe:
    """The recipe for one point of :func:`search_space`."""
    chosen = dict(chosen)
    names = [name for name in (_TRAINING | _LOSSES) if name in chosen]
    training = {name: chosen.pop(name) for name in names}
    if "clusters_per_class" in chosen:
        chosen["num_global"] = num_classes * chosen.pop("clusters_per_class")
    if chosen.get("alpha") == 0:
        # Without the global problem there are no clusters for these losses.
        training["ortho_weight"] = training["sim_weight"] = 0.0
    return Recipe(model, chosen, training | {"epochs": budget.epochs, "patience": budget.patience})


def point_of(recipe: Recipe, num_classes: int, budget: Budget) -> dict[str, Any]:
    """The point of :func:`search_space` for a recipe, or the nearest one where the limits leave it out."""
    given = _UNNAMED | dict(recipe.options) | dict(recipe.training)
    if "num_global" in given:
        number = given.pop("num_global") or default_num_global(num_classes)
        given["clusters_per_class"] = number / num_classes
    return _fitted(given, search_space(recipe.model, budget))


def _fitted(given: Mapping[str, Any], space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """``given`` on the grid: a number off it becomes the nearest one, another value is left out."""
    point = {}
    for name, values in space.items():
        if name not in given:
            continue
        value = given[name]
        numbers = [each for each in values if _is_number(each)]
        if value in values:
            point[name] = values[list(values).index(value)]
        elif _is_number(value) and numbers:
            point[name] = min(numbers, key=lambda each: abs(each - value))
    return point


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def first_trials(graph: str, model: str, num_classes: int, budget: Budget) -> list[dict[str, Any]]:
    """Where a search begins: the preset of the graph, that of all graphs, and settings known to work."""
    space = search_space(model, budget)
    presets = [find_preset(name, model) for name in (graph, "default")]
    points = [point_of(recipe, num_classes, budget) for recipe in presets if recipe is not None]
    points += [_fitted(first, space) for first in _FIRST_TRIALS]
    distinct = {json.dumps(point, sort_keys=True): point for point in points}
    return list(distinct.values())


def mutated(
    parent: Mapping[str, Any], space: Mapping[str, Sequence[Any]], draw: random.Random
) -> dict[str, Any]:
    """``parent`` with one to four settings changed; numbers move by one or two places in the grid."""
    child = dict(parent)
    for name in draw.sample(sorted(space), min(draw.choice(_CHANGES), len(space))):
        values = list(space[name])
        place = values.index(child[name])
        others = [index for index in range(len(values)) if index != place]
        if all(isinstance(value, int | float) for value in values):
            others = [index for index in others if abs(index - place) <= 2]
        if others:
            child[name] = values[draw.choice(others)]
    return child


def tune(
    splits: Sequence[GraphData],
    model: str = "dcgnn",
    *,
    trials: int,
    budget: Budget | None = None,
    storage: str | Path | None = None,
    seconds: float | None = None,
    seed: int = SEED,
    finalists: int = 1,
    repeats: int = 3,
    progress: bool = False,
) -> Found:
    """Search for the settings with the best mean validation metric over ``splits``.

    The search begins with :func:`first_trials`; after them most trials change a few settings of one of the
    best so far, because a grid of some twenty settings is too large for the few dozen trials of a search to
    learn it as a whole. A trial trains one split after the other. After 40% and 70% of the epochs of each and
    at its end, the mean of its splits so far (of the running one: its best epoch) is compared with the
    finished trials' means at that point; below their median the trial is given up. The best of many noisy
    trials owes much to luck: several ``finalists`` are trained again with other seeds, and the best mean over
    all seeds wins. The test nodes are not looked at.

    Args:
        splits: The same graph in each split to train.
        model: Which model, see :data:`dcgnn.recipe.MODELS`.
        trials: Trials in all; those that ``storage`` holds count.
        budget: Limits of a trial.
        storage: Journal file; a search with the same budget, data, splits and seed continues there, and
            several processes may share it.
        seconds: Begin no trial after this time.
        seed: Seed of training and of the search.
        finalists: How many of the best trials are compared over several seeds; 1: the best trial wins.
        repeats: Seeds in all for each finalist.
        progress: Show a progress bar on stderr.

    Raises:
        ValueError: If Optuna is missing, or no trial could be finished.
    """
    require("optuna")
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    for name, count in (("trials", trials), ("finalists", finalists), ("repeats", repeats)):
        if count < 1:
            raise ValueError(f"{name} must be positive, got {count}")
    budget = budget or Budget()
    space = search_space(model, budget)
    if storage is not None:
        check_writable(storage)
        _check_journal(Path(storage))
    with _quiet(optuna):
        try:
            journal = None if storage is None else JournalStorage(JournalFileBackend(str(storage)))
            study = optuna.create_study(
                study_name=_study_name(splits, model, budget, seed),
                storage=journal,
                load_if_exists=True,
                direction="maximize",
                pruner=optuna.pruners.NopPruner(),  # ours is _falls_behind
            )
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(f"storage {storage} is not a journal of Optuna ({error})") from error
        _give_up_killed(study)
        done = len(_ended(study))
        # Another seed for the continuation: the same one would draw the first trials once more.
        study.sampler = optuna.samplers.TPESampler(seed=seed + done, n_startup_trials=10)
        first = first_trials(splits[0].name, model, splits[0].num_classes, budget)

        def key(chosen: Mapping[str, Any]) -> str:
            recipe = recipe_of(model, chosen, splits[0].num_classes, budget)
            return json.dumps(recipe.to_dict(), sort_keys=True)

        def propose(study: optuna.Study) -> None:
            """Give the next trial its settings, unless it has some or TPE is to draw them: first those that
            lost their trial, then those that a search begins with, then changes of the best.
            """
            if any(trial.state.name == "WAITING" for trial in study.trials):
                return
            lost = [_settings(trial) for trial in study.trials if _is_lost(study, trial)]
            begun = [_settings(trial) for trial in study.trials if not _is_lost(study, trial)]
            for given in [*lost, *first]:
                # What ends its process again and again does so itself.
                losses = sum(given.items() <= other.items() for other in lost)
                known = any(given.items() <= other.items() for other in begun)
                if given and not known and losses < _MOST_LOSSES:
                    study.enqueue_trial(given)
                    return
            number, best = len(study.trials), _best_trials(study)[:_PARENTS]
            if not best or number % _EXPLORE_EVERY == 0:
                return
            draw = random.Random(f"{seed}, {number}")
            tried = {key(trial.params) for trial in study.trials if set(trial.params) == set(space)}
            for _ in range(100):
                given = _UNNAMED | draw.choice(best).params
                child = mutated({name: given[name] for name in space}, space, draw)
                if key(child) not in tried:
                    study.enqueue_trial(child)
                    return

        def objective(trial: optuna.Trial) -> float:
            try:
                trial.set_user_attr(_OWNER, _this_process())
                chosen = {name: trial.suggest_categorical(name, values) for name, values in space.items()}
                recipe = recipe_of(model, chosen, splits[0].num_classes, budget)
                return _mean_validation(recipe, splits, seed, trial, study)
            except KeyboardInterrupt:
                trial.set_user_attr(_INTERRUPTED, True)
                raise

        with tqdm(total=trials, initial=min(done, trials), disable=not progress, unit="trial") as bar:
            bar.set_description(f"{splits[0].name} {model}")

            def show(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
                bar.update()
                if _complete(study):
                    bar.set_postfix({"best validation": f"{100 * study.best_value:.2f}"})

            end = math.inf if seconds is None else time.monotonic() + seconds
            # Counted anew each time: other processes may add to the same journal.
            while len(_ended(study)) < trials and time.monotonic() < end:
                propose(study)
                study.optimize(objective, n_trials=1, callbacks=[show], catch=(TrainingDiverged,))
        if not _complete(study):
            raise ValueError(f"no trial of {study.study_name} could be finished")
        seeds = (seed,) if finalists == 1 else tuple(range(seed, seed + repeats))
        final = _best_trials(study)[:finalists]
        means = []
        for trial in tqdm(final, disable=not progress or finalists == 1, unit="finalist"):
            recipe = recipe_of(model, trial.params, splits[0].num_classes, budget)
            scores = [trial.value, *_repeated(study, trial.number, recipe, splits, seeds[1:])]
            means.append((statistics.fmean(scores), recipe))
        validation, recipe = max(means, key=lambda entry: entry[0])
        return Found(
            recipe=recipe,
            validation=validation,
            trials=len(_ended(study)),
            pruned=sum(trial.state.name == "PRUNED" for trial in study.trials),
            seeds=seeds,
        )


def _check_journal(path: Path) -> None:
    """Raises ValueError where a journal ends within a record: what is appended to that would be lost, too."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        file.seek(-1, 2)
        if file.read() != b"\n":
            raise ValueError(
                f"storage {path} ends in the middle of a line, as after a full disk or a crash; "
                "remove that last line and the search continues with the trials before it"
            )


def _best_trials(study: optuna.Study) -> list[Any]:
    """The trials that ran to their end, best first; of equal settings one."""
    trials: list[Any] = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    distinct = {json.dumps(trial.params, sort_keys=True): trial for trial in trials}
    return sorted(distinct.values(), key=lambda trial: trial.value, reverse=True)


def _repeated(
    study: optuna.Study, number: int, recipe: Recipe, splits: Sequence[GraphData], seeds: Sequence[int]
) -> list[float]:
    """Mean validation of a finalist for each further seed; kept in the journal."""
    scores = []
    for seed in seeds:
        key = f"trial {number}, seed {seed}"
        if key not in study.user_attrs:
            try:
                mean = statistics.fmean(_validations(recipe, splits, seed))
            except TrainingDiverged:
                mean = 0.0
            study.set_user_attr(key, mean)
        scores.append(study.user_attrs[key])
    return scores


def _study_name(splits: Sequence[GraphData], model: str, budget: Budget, seed: int) -> str:
    """Trials compare only under one budget, on the same data, splits and seed: others are another search."""
    numbers = ",".join(str(data.split) for data in splits)
    limits = f"epochs {budget.epochs}, patience {budget.patience}, layers {budget.max_layers}"
    if budget.max_channels < max(_SKELETON["hidden_channels"]):
        limits += f", channels {budget.max_channels}"
    shares = ", ".join(f"{share:.0%}" for share in _COMPARED_AFTER)
    digest = hashlib.sha256("".join(data.fingerprint() for data in splits).encode()).hexdigest()[:12]
    search = f"{limits}, seed {seed}, compared after {shares}"
    return f"{splits[0].name}, {model}: splits {numbers} of data {digest}, {search}"


def _mean_validation(
    recipe: Recipe, splits: Sequence[GraphData], seed: int, trial: optuna.Trial, study: optuna.Study
) -> float:
    import optuna

    epochs = [math.ceil(share * recipe.config(seed).epochs) for share in _COMPARED_AFTER]
    ended: list[float] = []
    place = 0  # of the comparison that is next

    def compare(mean: float) -> None:
        nonlocal place
        if not math.isfinite(mean):
            raise optuna.TrialPruned
        trial.report(mean, place)
        place += 1
        if place < len(splits) * len(epochs) and _falls_behind(study, place - 1, mean):
            raise optuna.TrialPruned

    def after_epoch(epoch: int, best: float) -> None:
        if epoch in epochs[:-1]:
            compare(statistics.fmean([*ended, best]))

    for score in _validations(recipe, splits, seed, after_epoch=after_epoch):
        ended.append(score)
        while place < len(ended) * len(epochs):  # also those that an early stop left out
            compare(statistics.fmean(ended))
    return statistics.fmean(ended)


def _falls_behind(study: optuna.Study, place: int, mean: float) -> bool:
    """Whether a mean at a comparison is below the median of the finished trials' there.

    Optuna's ``MedianPruner`` asks for a trial's best value so far: after one lucky split it gives nothing up.
    """
    means = [trial.intermediate_values[place] for trial in study.trials if trial.state.name == "COMPLETE"]
    return len(means) >= _BEFORE_PRUNING and mean < statistics.median(means)


def _validations(recipe: Recipe, splits: Sequence[GraphData], seed: int, **arguments: Any) -> Iterator[float]:
    """The validation metric of one split after the other; ``arguments`` go to the training."""
    for data in splits:
        try:
            _, result = recipe.run(data, seed, **arguments)
        except TrainingInterrupted:
            raise KeyboardInterrupt("interrupted; the trials that ended are kept") from None
        yield result.val_metric


def _ended(study: optuna.Study) -> list[Any]:
    """The trials that count."""
    return [trial for trial in study.trials if trial.state.is_finished() and not _is_lost(study, trial)]


def _is_lost(study: optuna.Study, trial: Any) -> bool:
    """Whether a trial was interrupted or its process killed; the search tries its settings again."""
    return _INTERRUPTED in trial.user_attrs or _killed(trial.number) in study.user_attrs


def _settings(trial: Any) -> dict[str, Any]:
    """The settings of a trial, also while it waits or has just begun."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _give_up_killed(study: optuna.Study) -> None:
    """End the trials whose process was killed: they would seem to run for ever."""
    import optuna

    for trial in study.trials:
        if trial.state.name != "RUNNING" or not _is_gone(trial.user_attrs.get(_OWNER)):
            continue
        study.set_user_attr(_killed(trial.number), True)
        with suppress(ValueError):  # another process on this journal was faster
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def _killed(number: int) -> str:
    """The attribute of a study that marks a trial whose process was killed."""
    return f"trial {number}, killed"


def _this_process() -> list[Any]:
    """Machine, number and start of this process: numbers alone come again."""
    process = psutil.Process()
    return [platform.node(), process.pid, process.create_time()]


def _is_gone(owner: Sequence[Any] | None) -> bool:
    """Whether it is known that a process has ended; of another machine's it is not."""
    if owner is None or owner[0] != platform.node():
        return False
    try:
        process = psutil.Process(owner[1])
        return abs(process.create_time() - owner[2]) > 1 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _complete(study: optuna.Study) -> bool:
    return any(trial.state.name == "COMPLETE" for trial in study.trials)


@contextmanager
def _quiet(optuna: Any) -> Any:
    """Optuna tells every trial on stderr, in the middle of our progress bar."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
