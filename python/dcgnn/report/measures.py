"""What a report tells about a trained model, as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcgnn.checkpoint import CheckpointError, load_checkpoint
from dcgnn.data import GraphData, load_graph
from dcgnn.metrics import score
from dcgnn.nn.model import DCGNN
from dcgnn.nn.msg_passing import DCState
from dcgnn.recipe import build_model
from dcgnn.training import History, TrainConfig
from dcgnn_kernels import EgoGraph

#: Shares that are equal to this part are called so.
UNIFORM = 0.05


@dataclass
class Trained:
    """A model with its best weights, its graph, and what it computes there."""

    model: DCGNN
    data: GraphData
    graph: EgoGraph
    logits: Tensor  # [N, C]
    state: DCState
    history: History
    best_epoch: int
    options: Mapping[str, Any]
    training: Mapping[str, Any]

    def global_shares(self) -> Tensor | None:
        """``[N, Ω]``, float64: how a node shares itself among the global clusters; rows sum to 1."""
        assign = self.state.global_assign
        return None if assign is None else assign.double() / assign.double().sum(1, keepdim=True)

    def global_contrast(self) -> float:
        """How far a share is from an equal one at most, in parts of it; 0 without global clusters."""
        share = self.global_shares()
        return 0.0 if share is None else float((share * share.size(1) - 1).abs().max())

    def tells_nodes_apart(self) -> bool:
        """Whether the global clusters do: equal shares have a largest one and an order by rounding alone."""
        return self.global_contrast() > UNIFORM

    def scores(self) -> dict[str, float]:
        """The metric on each part of the split."""
        data = self.data
        return {
            name.removesuffix("_mask"): score(self.logits[mask], data.y[mask], data.metric)
            for name, mask in data.masks().items()
        }


def load_trained(path: str | Path, data_root: str | Path | None = None) -> Trained:
    """Read a checkpoint of ``dcgnn train``, load its graph and run the model with the best weights.

    Raises:
        CheckpointError: If the file is not a checkpoint of DC-GNN, or was made on another graph.
    """
    saved = load_checkpoint(path)
    wanted = ("identity", "config", "history", "best_epoch", "best_weights")
    if missing := [name for name in wanted if name not in saved]:
        raise CheckpointError(f"{path} is not a whole checkpoint of dcgnn train: no {', '.join(missing)}")
    identity = saved["identity"]
    if identity["model"] != DCGNN.__name__:
        raise CheckpointError(f"{path} holds a {identity['model']}, a report is about {DCGNN.__name__}")
    if not saved["best_weights"]:
        raise CheckpointError(f"{path} was written before the first epoch ended")
    data = load_graph(identity["graph"], data_root=data_root, split=identity["split"])
    if data.fingerprint() != identity["data"]:
        raise CheckpointError(f"{path} was made on other data than {data.name}, split {data.split}, here")
    settings = {field.name for field in dataclasses.fields(TrainConfig)}
    options = {
        name: value
        for name, value in identity.items()
        if name not in settings | {"graph", "split", "data", "model"}
    }
    model = build_model(options, channels=data.num_features, classes=data.num_classes, nodes=data.num_nodes)
    try:
        model.load_state_dict(saved["best_weights"])
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model: {error}") from error
    graph = EgoGraph.from_edge_index(data.edge_index, data.num_nodes)
    model.eval()
    with torch.no_grad():
        logits, state = model(data.x, graph, return_state=True)
    return Trained(
        model,
        data,
        graph,
        logits,
        state,
        History(**saved["history"]),
        saved["best_epoch"],
        options,
        saved["config"],
    )


def local_homophily(edge_index: Tensor, y: Tensor) -> Tensor:
    """``[N]`` share of a node's labelled in-neighbours that have its label; NaN where it has none."""
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    known = (y[source] >= 0) & (y[target] >= 0)
    source, target = source[known], target[known]
    count = torch.zeros(y.numel(), dtype=torch.float64).index_add(
        0, target, torch.ones(target.numel(), dtype=torch.float64)
    )
    same = torch.zeros_like(count).index_add(0, target, (y[source] == y[target]).double())
    return same / count


def cluster_purity(assign: Tensor, graph: EgoGraph, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    r"""How well the local clusters of every ego separate the classes of its members.

    .. math:: \mathrm{purity}_u = \frac{\sum_j \max_c \sum_{i \in u, y_i = c} P^u_{ij}}{\sum_{ij} P^u_{ij}}

    over labelled members, and the same with one cluster for the whole ego: the share of its most frequent
    class, by the members' mass. No clusters fall below that, and random hard ones exceed it: clusters know
    something only where they exceed :func:`shuffled_purity`.

    Args:
        assign: ``[S, K]`` local assignments.
        graph: the egos, ``S`` slots.
        y: ``[N]`` labels; negative ones are unlabelled.
        num_classes: number of classes.

    Returns:
        Both ``[N]``, NaN where an ego has no labelled member.
    """
    label = y[graph.member.long()]
    known = label >= 0
    cell = graph.ego_of_slot()[known] * num_classes + label[known]
    weights = assign[known].double()
    mass = torch.zeros(graph.num_nodes * num_classes, assign.size(1), dtype=torch.float64)
    mass = mass.index_add(0, cell, weights).view(graph.num_nodes, num_classes, -1)
    total = mass.sum((1, 2))
    return mass.amax(1).sum(1) / total, mass.sum(2).amax(1) / total


def shuffled_purity(assign: Tensor, graph: EgoGraph, y: Tensor, num_classes: int) -> Tensor:
    """``[N]`` purity of clusters that know nothing: the mean over ten shuffles within the egos."""
    shuffles = (shuffle_members(assign, graph, seed) for seed in range(10))
    return torch.stack([cluster_purity(each, graph, y, num_classes)[0] for each in shuffles]).mean(0)


def shuffle_members(assign: Tensor, graph: EgoGraph, seed: int) -> Tensor:
    """``[S, K]`` the rows of ``assign``, dealt at random among the members of the same ego."""
    order = torch.randperm(assign.size(0), generator=torch.Generator().manual_seed(seed))
    # Slots are sorted by ego: a stable sort brings the random order back to the egos, one after the other.
    return assign[order[graph.ego_of_slot()[order].argsort(stable=True)]]


@dataclass(frozen=True)
class Contested:
    """A node that is torn between global clusters."""

    node: int
    entropy: float
    clusters: tuple[int, int]
    shares: tuple[float, float]
    label: int
    predicted: int
    confidence: float
    homophily: float


def most_contested(trained: Trained, count: int = 15) -> list[Contested]:
    r"""The labelled nodes of the highest entropy of the global assignment, over :math:`\log |\Omega|`; none
    where all shares are equal.
    """
    share = trained.global_shares()
    if share is None or share.size(1) < 2 or not trained.tells_nodes_apart():
        return []
    entropy = -torch.xlogy(share, share).sum(1) / torch.log(torch.tensor(float(share.size(1))))
    entropy = entropy.masked_fill(trained.data.y < 0, -1.0)
    confidence, predicted = trained.logits.softmax(1).max(1)
    homophily = local_homophily(trained.data.edge_index, trained.data.y)
    found = []
    for node in entropy.topk(min(count, entropy.numel())).indices.tolist():
        if entropy[node] < 0:
            break
        top = share[node].topk(2)
        found.append(
            Contested(
                node=node,
                entropy=float(entropy[node]),
                clusters=(int(top.indices[0]), int(top.indices[1])),
                shares=(float(top.values[0]), float(top.values[1])),
                label=int(trained.data.y[node]),
                predicted=int(predicted[node]),
                confidence=float(confidence[node]),
                homophily=float(homophily[node]),
            )
        )
    return found


def project(z: Tensor, method: str = "pca", seed: int = 0) -> Tensor:
    """``[N, 2]`` picture of embeddings ``[N, F]`` by ``"pca"`` or ``"tsne"``."""
    if method not in ("pca", "tsne"):
        raise ValueError(f"embedding must be pca or tsne, got {method!r}")
    values = z.double().numpy()
    if method == "tsne":
        from sklearn.manifold import TSNE

        perplexity = min(30.0, max(1.0, (len(values) - 1) / 3))
        return torch.from_numpy(
            TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(values)
        )
    from sklearn.decomposition import PCA

    return torch.from_numpy(PCA(2, random_state=seed).fit_transform(values))
