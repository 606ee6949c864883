"""Training with early stopping, checkpoints and an exact resume, on one process or many."""

from __future__ import annotations

import copy
import dataclasses
import math
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dcgnn.checkpoint import CheckpointError, check_same_run, load_checkpoint, save_checkpoint
from dcgnn.data.graph_data import GraphData
from dcgnn.distributed import launch
from dcgnn.engines import BatchConfig, GraphBatches, GraphShare, make_engine
from dcgnn.losses import SIMILARITY_AGGRS, SIMILARITY_METRICS
from dcgnn.metrics import check_scorable

#: How the learning rate goes on over the epochs.
LR_SCHEDULES = ("constant", "cosine")


class TrainingDiverged(RuntimeError):
    """Loss or logits are no longer finite."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; ``path`` is the checkpoint that was left, if any."""

    def __init__(self, path: Path | None, epoch: int) -> None:
        super().__init__(f"interrupted after epoch {epoch}")
        self.path = path
        self.epoch = epoch


@dataclass(frozen=True)
class TrainConfig:
    r"""How to train; :math:`L = \mathrm{CE} + \omega_1 L_{ortho} + \omega_2 L_{sim}`.

    Args:
        epochs: Most epochs to run.
        lr: Learning rate of Adam.
        lr_schedule: ``"constant"``, or ``"cosine"``: half a cosine from ``lr`` down to 0 over ``epochs``.
        weight_decay: L2 penalty of Adam.
        patience: Epochs without a better validation metric before training stops.
        seed: Seed of everything random while training (dropout).
        ortho_weight: :math:`\omega_1`.
        sim_weight: :math:`\omega_2`.
        sim_aggr: How the clusters of a class are joined: ``"max"``, ``"mean"`` or ``"sum"``.
        sim_metric: ``"cosine"`` similarity or ``"distance"``.
        objective_every: Record the clustering objective of every layer after so many epochs; 0: never.
    """

    epochs: int = 500
    lr: float = 0.005
    weight_decay: float = 5e-4
    patience: int = 100
    seed: int = 0
    ortho_weight: float = 0.0
    sim_weight: float = 0.0
    sim_aggr: str = "max"
    sim_metric: str = "cosine"
    objective_every: int = 0
    lr_schedule: str = "constant"

    def __post_init__(self) -> None:
        kinds = {"int": Integral, "float": Real, "str": str}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if not isinstance(value, kinds[str(entry.type)]) or isinstance(value, bool):
                raise TypeError(f"{entry.name} must be of type {entry.type}, got {value!r}")
        for name in ("epochs", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.objective_every < 0:
            raise ValueError(f"objective_every must not be negative, got {self.objective_every}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be positive, got {self.lr}")
        if self.lr_schedule not in LR_SCHEDULES:
            raise ValueError(f"lr_schedule must be one of {LR_SCHEDULES}, got {self.lr_schedule!r}")
        if self.sim_aggr not in SIMILARITY_AGGRS:
            raise ValueError(f"sim_aggr must be one of {SIMILARITY_AGGRS}, got {self.sim_aggr!r}")
        if self.sim_metric not in SIMILARITY_METRICS:
            raise ValueError(f"sim_metric must be one of {SIMILARITY_METRICS}, got {self.sim_metric!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
        for name in ("weight_decay", "ortho_weight", "sim_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must not be negative, got {value}")

    def lr_of(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2

    @property
    def needs_state(self) -> bool:
        """Whether the loss looks at assignments and clusters."""
        return self.ortho_weight > 0 or self.sim_weight > 0


@dataclass
class History:
    """One entry for every epoch; ``objective`` has ``[epoch, value after layer 1, ...]`` where recorded."""

    loss: list[float] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    val_metric: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    objective: list[list[float]] = field(default_factory=list)


@dataclass
class TrainResult:
    """What a run came to; metrics are those of the best epoch on validation."""

    graph: str
    split: int
    seed: int
    metric: str
    train_metric: float
    val_metric: float
    test_metric: float
    best_epoch: int
    epochs: int
    stopped_early: bool
    seconds: float
    seconds_per_epoch: float
    num_parameters: int
    history: History

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, for JSON."""
        return dataclasses.asdict(self)


def train(
    model: nn.Module,
    data: GraphData | GraphShare,
    config: TrainConfig | None = None,
    *,
    graph: Any = None,
    batches: BatchConfig | GraphBatches | None = None,
    model_options: Mapping[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 0,
    resume: bool = False,
    job: Collection[str] = (),
    progress: bool = False,
    after_epoch: Callable[[int, float], None] | None = None,
) -> TrainResult:
    """Train ``model`` and report the epoch that validates best.

    Steps are on the whole graph, on mini-batches (``batches``), or on a graph that is spread over ranks
    (``data`` is this rank's :class:`~dcgnn.engines.GraphShare`). With several ranks all of them call this,
    rank 0 writes the checkpoints, and all return the same result.

    The first Ctrl-C (or SIGTERM) ends training after the running epoch and leaves a checkpoint
    from which ``resume`` continues to the same bits as a run without interruption; a second one
    ends it at once and leaves the checkpoint that was written last.

    Args:
        model: Called as ``model(x, graph)``; it stays on its device and ends with the best
            weights.
        data: Graph, features, labels and split; moved to the device of the model.
        config: How to train.
        graph: Second argument of the model. By default an :class:`~dcgnn_kernels.EgoGraph` for
            :class:`~dcgnn.DCGNN` and ``edge_index`` for any other model.
        batches: Train on mini-batches of sampled neighbourhoods, or of whole graphs.
        model_options: What the model was made from; kept in the checkpoint and compared by
            ``resume``.
        checkpoint: File for checkpoints.
        checkpoint_every: Write it after every so many epochs and at the end; 0: only when
            interrupted.
        resume: Continue from ``checkpoint``. More ``epochs`` than before are allowed while the learning
            rate is constant, and another number of ranks.
        job: Names of what runs this, kept in the checkpoint: a restart finds out whether it wrote it.
        progress: Show a progress bar on stderr.
        after_epoch: Called after every epoch with its number and the best validation metric so far; what it
            raises ends training.

    Raises:
        ValueError: If the data cannot be scored.
        CheckpointError: If there is nothing to resume, or it belongs to another run.
        TrainingDiverged: If loss or logits are no longer finite.
        TrainingInterrupted: After Ctrl-C or SIGTERM.
    """
    config = config or TrainConfig()
    if isinstance(data, GraphData):
        check_scorable(data)
    if resume and checkpoint is None:
        raise ValueError("resume wants the checkpoint to continue from")
    run = TrainingRun(model, data, config, graph, batches)
    identity = _identity(model, data, config, model_options or {}) | run.engine.settings()
    path = Path(checkpoint) if checkpoint is not None else None

    run.seed()
    if resume and path is not None:
        run.restore(path, identity)

    def save() -> None:
        if path is not None:
            state = run.state()
            if launch.rank() == 0:
                save_checkpoint(path, {"identity": identity, "job": sorted(job), **state})

    with (
        _deferred_signals() as stop,
        tqdm(
            total=config.epochs,
            initial=run.epoch,
            disable=not progress or launch.rank() > 0,
            desc=data.name,
            unit="epoch",
        ) as bar,
    ):
        while not run.finished:
            try:
                run.step()
            except TrainingDiverged as error:
                kept = path is not None and path.is_file() and (checkpoint_every > 0 or resume)
                where = f"; the last good checkpoint is {path}" if kept else ""
                raise TrainingDiverged(f"{error}{where}") from None
            bar.update()
            bar.set_postfix(
                {
                    "loss": f"{run.history.loss[-1]:.4f}",
                    f"val {data.metric}": f"{100 * run.history.val_metric[-1]:.2f}",
                    "best": f"{100 * run.best_metric:.2f}",
                },
                refresh=False,
            )
            if after_epoch is not None:
                try:
                    after_epoch(run.epoch, run.best_metric)
                except Exception:
                    if not stop.is_set():  # else who asked to stop is told so
                        raise
            if launch.any_rank(stop.is_set(), run.engine.device):
                save()
                launch.any_rank(False, run.engine.device)  # the file is there before any rank says so
                raise TrainingInterrupted(path, run.epoch)
            if checkpoint_every and run.epoch % checkpoint_every == 0:
                save()
        if checkpoint_every:
            save()
    return run.result()


class TrainingRun:
    """The state of one training run: everything that a checkpoint must hold."""

    def __init__(
        self,
        model: nn.Module,
        data: GraphData | GraphShare,
        config: TrainConfig,
        graph: Any = None,
        batches: BatchConfig | GraphBatches | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.config = config
        self.engine = make_engine(model, data, config, graph, batches)
        # One kernel for all parameters: on small graphs a step of Adam costs as much as the forward.
        self.optimizer = torch.optim.Adam(
            model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        self.epoch = 0
        self.best_epoch = 0
        self.best_metric = -math.inf
        self.best_loss = math.inf
        self.best_weights: dict[str, Tensor] = {}
        self.history = History()

    @property
    def stopped_early(self) -> bool:
        return self.epoch - self.best_epoch >= self.config.patience

    @property
    def finished(self) -> bool:
        return self.epoch >= self.config.epochs or self.stopped_early

    def step(self) -> None:
        """One epoch: gradient steps on the training nodes, then validation."""
        started = time.perf_counter()
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_of(self.epoch)
        losses: list[float] = []
        for loss in self.engine.losses(self.epoch):
            losses.append(self.engine.total(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise self._diverged("training loss is not finite")
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.engine.reduce_gradients()
            self.optimizer.step()

        try:
            logits = self.engine.predict("val_mask")
        except ValueError as error:
            # The arguments were good a moment ago, so it is the new weights that overflow.
            raise self._diverged(f"the model fails after the step ({error})") from error
        # A NaN gradient shows here, before this epoch can reach a checkpoint.
        if not self.engine.finite(logits):
            raise self._diverged("output after the step is not finite")
        val_loss, val_metric = self.engine.score(logits, "val_mask")

        self.epoch += 1
        # Small validation sets tie often; among equals the lower loss is the better model.
        if (val_metric, -val_loss) > (self.best_metric, -self.best_loss):
            self.best_epoch = self.epoch
            self.best_metric, self.best_loss = val_metric, val_loss
            self.best_weights = copy.deepcopy(self.model.state_dict())
        self.history.loss.append(statistics.fmean(losses))
        self.history.val_loss.append(val_loss)
        self.history.val_metric.append(val_metric)
        self.history.seconds.append(time.perf_counter() - started)
        every = self.config.objective_every
        if every and self.epoch % every == 0 and self.engine.holds_graph:
            self.history.objective.append([self.epoch, *self._objectives()])

    def seed(self) -> None:
        """Seed everything random; ranks draw different numbers, rank 0 those of a single process."""
        torch.manual_seed((self.config.seed + 1_000_003 * launch.rank()) % 2**63)

    def predict(self) -> Tensor:
        """Logits of every node (of a partitioned graph: of this rank's), without dropout."""
        return self.engine.predict()

    @torch.no_grad()
    def _objectives(self) -> list[float]:
        """The clustering objective after every layer, as the model stands."""
        _, state = self.model(self.engine.data.x, self.engine.graph, return_state=True)
        return [float(objective.total) for objective in state.objectives]

    def _diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"{what} in epoch {self.epoch + 1}; try a learning rate below {self.config.lr}"
        )

    def state(self) -> dict[str, Any]:
        """Everything that the next epoch depends on."""
        return {
            "config": dataclasses.asdict(self.config),
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self._random_states(),
            "best_epoch": self.best_epoch,
            "best_metric": self.best_metric,
            "best_loss": self.best_loss,
            "best_weights": self.best_weights,
            "history": dataclasses.asdict(self.history),
        }

    def _random_states(self) -> list[Tensor]:
        """Of the CPU, and of the GPU where there is one; each ``[ranks, bytes]``, on rank 0."""
        device = self.engine.device
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        gathered = [launch.gather_rows(state[None].to(device)) for state in states]
        return [state.cpu() for state in gathered if state is not None]

    def _continue_random(self, states: list[Tensor]) -> None:
        """Go on drawing where the states end; with other ranks or devices there is nothing to go on from."""
        device, rank = self.engine.device, launch.rank()
        kinds = 2 if device.type == "cuda" else 1
        if len(states) != kinds or states[0].size(0) != launch.world_size():
            # The epoch keeps the draws from starting over.
            torch.manual_seed((self.config.seed + 1_000_003 * rank + 7919 * self.epoch) % 2**63)
            return
        # Copies: torch 2.13 reads a row of a larger tensor from the wrong place.
        torch.set_rng_state(states[0][rank].clone())
        if kinds == 2:
            torch.cuda.set_rng_state(states[1][rank].clone(), device)

    def restore(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Continue where the checkpoint at ``path`` ends; only rank 0 reads it."""

        def read() -> dict[str, Any]:
            saved = load_checkpoint(path)
            check_same_run(path, saved["identity"], identity)
            return saved

        saved = launch.from_rank_zero(read, self.engine.device)
        if saved["epoch"] > self.config.epochs:
            raise CheckpointError(
                f"{path} has {saved['epoch']} epochs, more than the {self.config.epochs} asked for"
            )
        try:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} does not fit the model: {error}") from error
        self.epoch = saved["epoch"]
        self.best_epoch = saved["best_epoch"]
        self.best_metric = saved["best_metric"]
        self.best_loss = saved["best_loss"]
        self.best_weights = saved["best_weights"]
        self.history = History(**saved["history"])
        self._continue_random(saved["rng"])

    def result(self) -> TrainResult:
        """Restore the best weights and score every mask with them."""
        self.model.load_state_dict(self.best_weights)
        logits = self.engine.predict()
        scores = {name: self.engine.score(logits, name)[1] for name in self.data.masks()}
        return TrainResult(
            graph=self.data.name,
            split=self.data.split,
            seed=self.config.seed,
            metric=self.data.metric,
            train_metric=scores["train_mask"],
            val_metric=scores["val_mask"],
            test_metric=scores["test_mask"],
            best_epoch=self.best_epoch,
            epochs=self.epoch,
            stopped_early=self.stopped_early,
            seconds=sum(self.history.seconds),
            seconds_per_epoch=statistics.median(self.history.seconds),
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            history=self.history,
        )


def _identity(
    model: nn.Module, data: GraphData | GraphShare, config: TrainConfig, model_options: Mapping[str, Any]
) -> dict[str, Any]:
    """What must agree for a checkpoint to be continued; more epochs are welcome, but for a learning rate
    that ends with them.
    """
    settings = dataclasses.asdict(config)
    if config.lr_schedule == "constant":
        del settings["epochs"]
    return {
        "graph": data.name,
        "split": data.split,
        "data": data.fingerprint(),
        "model": type(model).__name__,
        **model_options,
        **settings,
    }


@contextmanager
def _deferred_signals() -> Iterator[threading.Event]:
    """Turn the first SIGINT or SIGTERM into a request; a second one interrupts at once."""
    stop = threading.Event()

    def handler(signum: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        tqdm.write("stopping after this epoch (once more: at once)", file=sys.stderr)

    previous: dict[signal.Signals, Any] = {}
    # Python hands signals to the main thread alone; one that the parent ignores stays ignored.
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                previous[signum] = signal.signal(signum, handler)
    try:
        yield stop
    finally:
        for signum, action in previous.items():
            signal.signal(signum, action)
