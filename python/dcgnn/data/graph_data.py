"""One graph with one split, ready for training."""

from __future__ import annotations

import dataclasses
import hashlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Metric = Literal["accuracy", "roc_auc"]

#: Unlabelled nodes carry this label and are in no mask.
UNLABELLED = -1


@dataclass
class GraphData:
    r"""A node-classification problem: graph, features, labels and one split.

    Args:
        name: The spec that :func:`dcgnn.data.load_graph` was asked for.
        x: Node features, float32 :math:`[N, F]`.
        edge_index: Edges :math:`j \to i` as int64 :math:`[2, E]`; row 0 holds the sources.
            Parallel edges and self-loops may be present.
        y: Labels, int64 :math:`[N]`; ``-1`` marks a node without a label.
        train_mask: Nodes to train on, bool :math:`[N]`.
        val_mask: Nodes that choose the best epoch, bool :math:`[N]`.
        test_mask: Nodes that are reported, bool :math:`[N]`.
        num_classes: Number of classes.
        metric: What is reported: ``"accuracy"`` or ``"roc_auc"``.
        num_splits: How many splits an average over this graph takes.
        split: Which of them this is.
    """

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    num_classes: int
    metric: Metric
    num_splits: int
    split: int = 0

    def __post_init__(self) -> None:
        num_nodes = self.x.size(0)
        if self.x.dim() != 2 or not self.x.is_floating_point():
            raise ValueError(f"x must be a float matrix [N, F], got {_describe(self.x)}")
        if self.edge_index.dim() != 2 or self.edge_index.size(0) != 2:
            raise ValueError(f"edge_index must be [2, E], got {_describe(self.edge_index)}")
        if self.edge_index.numel() > 0:
            low, high = int(self.edge_index.min()), int(self.edge_index.max())
            if low < 0 or high >= num_nodes:
                raise ValueError(
                    f"edge_index holds nodes {low}..{high}, but {self.name} has {num_nodes} nodes"
                )
        if self.y.shape != (num_nodes,):
            raise ValueError(f"y must be [{num_nodes}], got {_describe(self.y)}")
        if self.metric not in get_args(Metric):
            raise ValueError(f"metric must be one of {get_args(Metric)}, got {self.metric!r}")
        for field, mask in self.masks().items():
            if mask.shape != (num_nodes,) or mask.dtype != torch.bool:
                raise ValueError(f"{field} must be bool [{num_nodes}], got {_describe(mask)}")
            labels = self.y[mask]
            if bool(((labels < 0) | (labels >= self.num_classes)).any()):
                raise ValueError(f"{field} holds labels outside 0..{self.num_classes - 1}")

    @property
    def num_nodes(self) -> int:
        """Number of nodes :math:`N`."""
        return self.x.size(0)

    @property
    def num_features(self) -> int:
        """Number of input channels :math:`F`."""
        return self.x.size(1)

    @property
    def num_edges(self) -> int:
        """Number of columns of ``edge_index`` (an undirected edge counts twice)."""
        return self.edge_index.size(1)

    def masks(self) -> dict[str, Tensor]:
        """The three masks by field name."""
        return {
            "train_mask": self.train_mask,
            "val_mask": self.val_mask,
            "test_mask": self.test_mask,
        }

    def to(self, device: torch.device | str) -> GraphData:
        """The same data with every tensor on ``device``."""
        moved = {name: tensor.to(device) for name, tensor in self._tensors()}
        return dataclasses.replace(self, **typing.cast("dict[str, Any]", moved))

    def with_split(self, masks: tuple[Tensor, Tensor, Tensor], split: int, name: str) -> GraphData:
        """The same graph under another name, with other training, validation and test nodes."""
        train_mask, val_mask, test_mask = masks
        return dataclasses.replace(
            self, name=name, split=split, train_mask=train_mask, val_mask=val_mask, test_mask=test_mask
        )

    def fingerprint(self) -> str:
        """SHA-256 over every tensor: equal exactly when the problem is the same."""
        digest = hashlib.sha256()
        for name, tensor in self._tensors():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value


def random_split(
    y: Tensor, split: int, fractions: tuple[float, float] = (0.5, 0.25)
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Split the labelled nodes at random; the rest after ``fractions`` is the test set.

    The permutation depends on ``split`` and the number of labelled nodes alone, so split 3 of a
    graph is the same whatever the seeds of model and generator are.

    Args:
        y: Labels :math:`[N]`; nodes with ``-1`` are in no mask.
        split: Index of the split, which seeds it.
        fractions: Shares of the labelled nodes for training and validation.

    Returns:
        Train, validation and test mask, each bool :math:`[N]`.
    """
    order = _shuffled_labelled(y, split)
    num_train = round(fractions[0] * order.numel())
    num_val = round(fractions[1] * order.numel())
    parts = order.tensor_split([num_train, num_train + num_val])
    masks = [_mask(y, part) for part in parts]
    return masks[0], masks[1], masks[2]


def balanced_split(
    y: Tensor, split: int, fractions: tuple[float, float] = (0.6, 0.2)
) -> tuple[Tensor, Tensor, Tensor]:
    r"""A random split with as many training nodes of each class.

    Of every class :math:`\mathrm{round}(f N / C)` nodes are for training, :math:`f` the first of
    ``fractions``, or all of them where it has fewer: so validation and test have few nodes of small
    classes, or none.

    Args:
        y: Labels :math:`[N]`; nodes with ``-1`` are in no mask.
        split: Index of the split, which seeds it.
        fractions: Shares of the labelled nodes for training and validation.

    Returns:
        Train, validation and test mask, each bool :math:`[N]`.
    """
    order = _shuffled_labelled(y, split)
    classes = y[order].unique().tolist()
    per_class = round(fractions[0] * order.numel() / max(1, len(classes)))
    train = _mask(y, _first_of_each(y, order, classes, per_class))
    rest = order[~train[order]]
    num_val = round(fractions[1] * order.numel())
    return train, _mask(y, rest[:num_val]), _mask(y, rest[num_val:])


def few_label_split(
    y: Tensor, split: int, per_class: int = 5, num_val: int = 500, num_test: int = 1000
) -> tuple[Tensor, Tensor, Tensor]:
    r"""A random split with few training nodes, as many of each class.

    Args:
        y: Labels :math:`[N]`; nodes with ``-1`` are in no mask.
        split: Index of the split, which seeds it.
        per_class: Training nodes of each class.
        num_val: Validation nodes, from those that are left.
        num_test: Test nodes, from those that are left then.

    Returns:
        Train, validation and test mask, each bool :math:`[N]`.
    """
    order = _shuffled_labelled(y, split)
    classes = y[order].unique().tolist()
    for label in classes:
        if (count := int((y == label).sum())) < per_class:
            raise ValueError(f"per_class is {per_class}, but class {label} has {count} nodes")
    train = _mask(y, _first_of_each(y, order, classes, per_class))
    rest = order[~train[order]]
    if rest.numel() < num_val + num_test:
        raise ValueError(
            f"num_val + num_test is {num_val + num_test}, but only {rest.numel()} labelled nodes are left"
        )
    return train, _mask(y, rest[:num_val]), _mask(y, rest[num_val : num_val + num_test])


def _shuffled_labelled(y: Tensor, split: int) -> Tensor:
    """The labelled nodes in a random order that depends on ``split`` and their number alone."""
    labelled = (y >= 0).nonzero().view(-1)
    # The plain index would draw the same permutation as a generator with the same small seed:
    # all mines of board 0 would be in the training set of split 0.
    seed = int.from_bytes(hashlib.sha256(f"split {split}".encode()).digest()[:7], "little")
    permutation = torch.randperm(labelled.numel(), generator=torch.Generator().manual_seed(seed))
    return labelled[permutation]


def _first_of_each(y: Tensor, order: Tensor, classes: list[int], per_class: int) -> Tensor:
    """The first ``per_class`` nodes of every class, as ``order`` has them."""
    return torch.cat([order[:0], *(order[y[order] == label][:per_class] for label in classes)])


def _mask(y: Tensor, nodes: Tensor) -> Tensor:
    return torch.zeros(y.numel(), dtype=torch.bool).index_fill_(0, nodes, True)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"
