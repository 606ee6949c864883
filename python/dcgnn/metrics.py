"""What is reported: accuracy or area under the ROC curve."""

from __future__ import annotations

from sklearn.metrics import roc_auc_score
from torch import Tensor

from dcgnn.data.graph_data import GraphData, Metric


def score(logits: Tensor, y: Tensor, metric: Metric) -> float:
    r"""Accuracy, or for two classes the area under the ROC curve of the logit difference.

    Args:
        logits: Logits :math:`[n, C]`.
        y: Labels :math:`[n]`.
        metric: ``"accuracy"`` or ``"roc_auc"``.

    Returns:
        A number between 0 and 1.
    """
    if metric == "accuracy":
        return float((logits.argmax(dim=1) == y).double().mean())
    return area_under_roc(margins(logits), y)


def margins(logits: Tensor) -> Tensor:
    """What ROC AUC looks at, ``[n]``: the softmax of two logits grows with their difference."""
    return logits[:, 1] - logits[:, 0]


def area_under_roc(margin: Tensor, y: Tensor) -> float:
    """The area under the ROC curve of :func:`margins`."""
    return float(roc_auc_score(y.cpu().numpy(), margin.double().cpu().numpy()))


def check_scorable(data: GraphData) -> None:
    """Check before training that every mask of ``data`` can be scored.

    Raises:
        ValueError: If a mask is empty, or ROC AUC is asked for other than two classes or on a
            mask that holds one class alone.
    """
    if data.metric == "roc_auc" and data.num_classes != 2:
        raise ValueError(f"ROC AUC is for two classes, {data.name} has {data.num_classes}")
    for field, mask in data.masks().items():
        labels = data.y[mask].unique()
        if labels.numel() == 0:
            raise ValueError(f"{field} of {data.name}, split {data.split}, is empty")
        if data.metric == "roc_auc" and labels.numel() < 2:
            raise ValueError(
                f"ROC AUC needs both classes, but {field} of {data.name}, split {data.split}, "
                f"holds only class {int(labels[0])}"
            )
