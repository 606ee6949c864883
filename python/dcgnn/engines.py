"""How an epoch runs: what a step sees of the graph, and on how many processes.

The trainer asks its engine for the losses of an epoch's steps and for scores; it knows neither batches nor
ranks. All ranks see the same scores, so that all of them stop in the same epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dcgnn.baselines import ConvNet
from dcgnn.data.graph_data import GraphData
from dcgnn.distributed import launch
from dcgnn.losses import orthogonality_loss, training_loss
from dcgnn.metrics import area_under_roc, check_scorable, margins, score
from dcgnn.nn.model import DCGNN
from dcgnn.nn.prepared_convs import PreparedLINKX
from dcgnn.nn.topology import as_topology
from dcgnn.partition import make_part, owners
from dcgnn_kernels import EgoGraph

if TYPE_CHECKING:
    from dcgnn.distributed.topology import PartTopology
    from dcgnn.training import TrainConfig


@dataclass(frozen=True)
class BatchConfig:
    """Mini-batches of sampled neighbourhoods.

    Args:
        num_neighbors: In-neighbours to sample for each node, one number for every hop; -1: all.
        batch_size: Training nodes of a step, on every rank.
        chunk_size: Nodes that inference handles at a time.
    """

    num_neighbors: tuple[int, ...] = (10, 10)
    batch_size: int = 1024
    chunk_size: int = 65536

    def __post_init__(self) -> None:
        for name in ("batch_size", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class GraphBatches:
    """Mini-batches of whole graphs of a disjoint union; a DCGNN solves a global problem for each of them.

    Args:
        batch: The graph of every node, ascending, as in PyG's batches.
        batch_size: Graphs of a step.
    """

    batch: Tensor
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        if self.batch.dim() != 1 or bool((self.batch.diff() < 0).any()):
            raise ValueError("batch must be a vector in ascending order: the graph of every node")


class FullBatch:
    """One process; every step sees the whole graph."""

    def __init__(self, model: nn.Module, data: GraphData, config: TrainConfig, graph: Any = None) -> None:
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        self.data = data.to(self.device)
        if graph is None:
            graph = self.data.edge_index
            if isinstance(model, DCGNN):
                graph = EgoGraph.from_edge_index(graph, data.num_nodes)
            elif isinstance(model, ConvNet | PreparedLINKX):
                graph = model.graph_of(graph, data.num_nodes)
        self.graph = graph

    @property
    def holds_graph(self) -> bool:
        """Whether the objective of the whole graph can be evaluated here."""
        return isinstance(self.model, DCGNN)

    def losses(self, epoch: int) -> Iterator[Tensor]:
        """The loss of every step of an epoch; its gradient is taken before the next one."""
        yield self._loss(self.model, self.data.x, self.graph, self.data.y, self.data.train_mask)

    def _loss(
        self, model: nn.Module, x: Tensor, graph: Any, y: Tensor, mask: Tensor, **change: Any
    ) -> Tensor:
        state = None
        if self.config.needs_state:
            logits, state = model(x, graph, return_state=True)
        else:
            logits = model(x, graph)
        names = ("ortho_weight", "sim_weight", "sim_aggr", "sim_metric")
        options = {name: getattr(self.config, name) for name in names} | change
        return training_loss(logits, y, state, mask=mask, **options)

    def total(self, loss: Tensor) -> float:
        """What the loss of a step is over all ranks."""
        return loss.item()

    def reduce_gradients(self) -> None:
        """After the backward of a step: gradients of all ranks."""

    @torch.no_grad()
    def predict(self, field: str | None = None) -> Tensor:
        """Logits of the nodes that this rank scores; where only a mask's are wanted, others may be 0."""
        self.model.eval()
        return self.model(self.data.x, self.graph)

    def score(self, logits: Tensor, field: str) -> tuple[float, float]:
        """Cross entropy and metric of the nodes of a mask."""
        mask = self.data.masks()[field]
        return _score(logits[mask], self.data.y[mask], self.data.metric)

    def finite(self, logits: Tensor) -> bool:
        """Whether all logits, of all ranks, are."""
        return bool(torch.isfinite(logits).all())

    def settings(self) -> dict[str, Any]:
        """What the engine adds to the run's identity: all that changes what is computed."""
        return {}


class MiniBatches(FullBatch):
    """Steps on sampled neighbourhoods of some training nodes; scores on the whole graph, exactly.

    With several ranks each takes its share of the training nodes, gradients are averaged
    (``DistributedDataParallel``), and each rank scores its share of the graph.
    """

    def __init__(self, model: nn.Module, data: GraphData, config: TrainConfig, batches: BatchConfig) -> None:
        from torch_geometric.data import Data

        from dcgnn.data.loaders import neighbor_loader

        if not isinstance(model, DCGNN):
            raise ValueError(f"mini-batches train a DCGNN, got {type(model).__name__}")
        if model.adjacency is not None:
            raise ValueError("adjacency_embedding needs the whole graph in every step, not mini-batches")
        super().__init__(model, data, config, data.edge_index)
        self.batches = batches
        whole = Data(x=data.x, edge_index=data.edge_index, y=data.y)
        self.loader = neighbor_loader(
            whole,
            batches.num_neighbors,
            batch_size=batches.batch_size,
            input_nodes=data.train_mask.nonzero()[:, 0],
            seed=config.seed,
            rank=launch.rank(),
            world_size=launch.world_size(),
        )
        graph = EgoGraph.from_edge_index(data.edge_index, data.num_nodes)
        self.wrapped: nn.Module = model
        self.share: GraphShare | None = None
        if launch.connected():
            # The static graph lets parameters go without a gradient (a problem of weight 0).
            self.wrapped = DistributedDataParallel(model, static_graph=True)
            self.share = GraphShare.of(data, "range", graph).to(self.device)
        self.graph = graph.to(self.device)

    def losses(self, epoch: int) -> Iterator[Tensor]:
        self.loader.sampler.set_epoch(epoch)
        for batch in self.loader:
            batch = batch.to(self.device)
            seeds = torch.arange(batch.num_nodes, device=self.device) < batch.batch_size
            yield self._loss(self.wrapped, batch.x, batch.edge_index, batch.y, seeds)

    def total(self, loss: Tensor) -> float:
        return launch.sum_of_ranks([loss.item()], self.device)[0] / launch.world_size()

    @torch.no_grad()
    def predict(self, field: str | None = None) -> Tensor:
        self.model.eval()
        if self.share is not None:
            # Running statistics differ between ranks after a step; rank 0's model is scored and saved.
            launch.broadcast_module(self.model)
            x, graph = self.share.x, self.share.topology
        else:
            x, graph = self.data.x, self.graph
        return self.model.inference(x, graph, self.batches.chunk_size)  # type: ignore[operator]

    def score(self, logits: Tensor, field: str) -> tuple[float, float]:
        return super().score(logits, field) if self.share is None else self.share.score(logits, field)

    def finite(self, logits: Tensor) -> bool:
        return not launch.any_rank(not super().finite(logits), self.device)

    def settings(self) -> dict[str, Any]:
        given = dataclasses.asdict(self.batches)
        del given["chunk_size"]
        return {"loader": "neighbor", **given}


class WholeGraphs(FullBatch):
    """Steps on some graphs of a disjoint union, those with training nodes; each is seen once an epoch."""

    def __init__(self, model: nn.Module, data: GraphData, config: TrainConfig, batches: GraphBatches) -> None:
        from torch_geometric.data import Data
        from torch_geometric.utils import unbatch, unbatch_edge_index

        batch = batches.batch.cpu()
        if batch.numel() != data.num_nodes:
            raise ValueError(f"batch has {batch.numel()} entries, but {data.name} has {data.num_nodes} nodes")
        owner, target = batch[data.edge_index]
        if not torch.equal(owner, target):
            raise ValueError("batch puts the ends of an edge into different graphs")
        if isinstance(model, DCGNN) and model.adjacency is not None:
            raise ValueError("adjacency_embedding needs the whole graph in every step, not mini-batches")
        if config.objective_every:
            raise ValueError(
                "objective_every needs one whole graph in every step, not mini-batches of graphs"
            )
        super().__init__(model, data, config, data.edge_index)
        self.batch_size = batches.batch_size
        # Graphs without nodes are left out.
        number = batch.unique(return_inverse=True)[1]
        self.counts = number.bincount().tolist()
        edges = data.edge_index[:, owner.argsort(stable=True)]
        parts = (unbatch(rows, number) for rows in (data.x, data.y, data.train_mask))
        self.graphs = [
            Data(x=x, y=y, train_mask=mask, edge_index=edge_index)
            for x, y, mask, edge_index in zip(
                *parts, unbatch_edge_index(edges, number, len(self.counts)), strict=True
            )
        ]
        self.numbers = {name: number[mask].unique() for name, mask in data.masks().items()}

    def losses(self, epoch: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed((self.config.seed + 1_000_003 * epoch) % 2**63)
        numbers = self.numbers["train_mask"]
        for chosen in numbers[torch.randperm(numbers.numel(), generator=generator)].split(self.batch_size):
            union, graph = self._union(chosen)
            yield self._loss(self.model, union.x, graph, union.y, union.train_mask)

    def _union(self, chosen: Tensor) -> tuple[Any, Any]:
        """Some graphs as one, and the model's second argument for it."""
        from torch_geometric.data import Batch

        union: Any = Batch.from_data_list([self.graphs[number] for number in chosen.tolist()])
        union = union.to(self.device)
        if isinstance(self.model, DCGNN):
            return union, as_topology(union.edge_index, union.num_nodes, union.batch)
        return union, union.edge_index

    @torch.no_grad()
    def predict(self, field: str | None = None) -> Tensor:
        self.model.eval()
        numbers = torch.arange(len(self.graphs)) if field is None else self.numbers[field]
        rows = list(self.data.x.new_zeros(self.data.num_nodes, self.data.num_classes).split(self.counts))
        for chosen in numbers.split(self.batch_size):
            union, graph = self._union(chosen)
            logits = self.model(union.x, graph).split([self.counts[number] for number in chosen.tolist()])
            for number, part in zip(chosen.tolist(), logits, strict=True):
                rows[number] = part
        return torch.cat(rows)

    def settings(self) -> dict[str, Any]:
        return {"loader": "graphs", "batch_size": self.batch_size, "num_graphs": len(self.graphs)}


@dataclass(frozen=True)
class GraphShare:
    """What a rank keeps of a graph: the rows of its own nodes, and the egos around them."""

    name: str
    split: int
    metric: Any
    num_classes: int
    digest: str
    num_train: int
    x: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    topology: PartTopology

    @classmethod
    def of(cls, data: GraphData, method: str = "auto", graph: EgoGraph | None = None) -> GraphShare:
        """This rank's share; all ranks must call it, with the same data.

        The cut is rank 0's, so that the ranks agree on it whatever is installed elsewhere.
        """
        from dcgnn.distributed.topology import PartTopology

        if graph is None:
            graph = EgoGraph.from_edge_index(data.edge_index, data.num_nodes)
        whole, world = graph, launch.world_size()
        owner = launch.from_rank_zero(lambda: owners(whole, world, method), torch.device("cpu"))
        check_scorable(data)
        part = make_part(graph, owner, launch.rank())
        return cls(
            name=data.name,
            split=data.split,
            metric=data.metric,
            num_classes=data.num_classes,
            digest=data.fingerprint(),
            num_train=int((data.train_mask & (data.y >= 0)).sum()),
            x=data.x[part.own],
            y=data.y[part.own],
            train_mask=data.train_mask[part.own],
            val_mask=data.val_mask[part.own],
            test_mask=data.test_mask[part.own],
            topology=PartTopology(part),
        )

    def masks(self) -> dict[str, Tensor]:
        """The three masks by field name."""
        return {name: getattr(self, name) for name in ("train_mask", "val_mask", "test_mask")}

    def fingerprint(self) -> str:
        """That of the whole graph."""
        return self.digest

    def to(self, device: torch.device) -> GraphShare:
        """The same on another device."""
        names = ("x", "y", "train_mask", "val_mask", "test_mask")
        moved: Mapping[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return dataclasses.replace(self, topology=self.topology.to(device), **moved)

    def score(self, logits: Tensor, field: str) -> tuple[float, float]:
        """Cross entropy and metric of the masked nodes of all ranks, from sums over the ranks' own nodes.

        ROC AUC has no such sums: rank 0 gets a number and a label for every node of the mask.
        """
        mask, device = self.masks()[field], logits.device
        chosen, labels = logits[mask], self.y[mask]
        losses = nn.functional.cross_entropy(chosen.double(), labels, reduction="sum")
        right = (chosen.argmax(1) == labels).sum()
        sums = launch.sum_of_ranks([losses.item(), right.item(), labels.numel()], device)
        loss, accuracy = sums[0] / sums[2], sums[1] / sums[2]
        if self.metric == "accuracy":
            return loss, accuracy
        margin, classes = launch.gather_rows(margins(chosen)), launch.gather_rows(labels)
        found = None if margin is None or classes is None else area_under_roc(margin, classes)
        return loss, launch.broadcast_object(found, device)


class Partitioned(FullBatch):
    """Every rank holds a part of the graph; together the ranks compute what one process computes."""

    def __init__(self, model: nn.Module, data: GraphShare, config: TrainConfig) -> None:
        if not isinstance(model, DCGNN):
            raise ValueError(f"a partitioned graph is for a DCGNN, got {type(model).__name__}")
        if model.adjacency is not None:
            raise ValueError("adjacency_embedding needs the whole graph on every rank, not a part")
        if config.objective_every:
            raise ValueError("objective_every needs the whole graph in one process, not a part")
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        self.share = data.to(self.device)
        launch.broadcast_module(model)

    def losses(self, epoch: int) -> Iterator[Tensor]:
        share, config = self.share, self.config
        logits, state = self.model(share.x, share.topology, return_state=True)
        chosen = share.train_mask & (share.y >= 0)
        # Means over all training nodes from this rank's sums; the sum of the ranks' losses is the loss.
        loss = logits.sum() * 0.0
        if bool(chosen.any()):
            means = training_loss(
                logits,
                share.y,
                state,
                mask=chosen,
                sim_weight=config.sim_weight,
                sim_aggr=config.sim_aggr,
                sim_metric=config.sim_metric,
            )
            loss = loss + means * (int(chosen.sum()) / share.num_train)
        if config.ortho_weight:
            if state.global_clusters is None:
                raise ValueError("global clusters (alpha > 0) are needed when ortho_weight is not 0")
            # Every rank has the clusters; together they count once.
            weight = config.ortho_weight / launch.world_size()
            loss = loss + weight * orthogonality_loss(state.global_clusters)
        yield loss

    def total(self, loss: Tensor) -> float:
        return launch.sum_of_ranks([loss.item()], self.device)[0]

    def reduce_gradients(self) -> None:
        launch.sum_gradients(self.model.parameters())

    @torch.no_grad()
    def predict(self, field: str | None = None) -> Tensor:
        self.model.eval()
        return self.model(self.share.x, self.share.topology)

    def score(self, logits: Tensor, field: str) -> tuple[float, float]:
        return self.share.score(logits, field)

    def finite(self, logits: Tensor) -> bool:
        return not launch.any_rank(not super().finite(logits), self.device)


def make_engine(
    model: nn.Module,
    data: GraphData | GraphShare,
    config: TrainConfig,
    graph: Any = None,
    batches: BatchConfig | GraphBatches | None = None,
) -> FullBatch:
    """The engine for this data: a share is trained by all ranks together; ``batches`` ask for batches."""
    if isinstance(data, GraphShare):
        if batches is not None:
            raise ValueError("a partitioned graph is trained as a whole, not in mini-batches")
        return Partitioned(model, data, config)
    if isinstance(batches, BatchConfig):
        return MiniBatches(model, data, config, batches)
    if launch.world_size() > 1:
        raise ValueError(
            f"{launch.world_size()} ranks would all compute the same: choose mini-batches or a partition"
        )
    if batches is not None:
        return WholeGraphs(model, data, config, batches)
    return FullBatch(model, data, config, graph)


def _score(logits: Tensor, y: Tensor, metric: Any) -> tuple[float, float]:
    return nn.functional.cross_entropy(logits, y).item(), score(logits, y, metric)
