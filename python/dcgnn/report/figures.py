"""The pictures of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from dcgnn.report.measures import Trained, cluster_purity, local_homophily, project, shuffled_purity

#: Points of a scatter plot and rows of a heat map at most; more hide each other.
_SHOWN = 3000

#: Entries of a legend at most; more get a colour bar.
_LEGEND = 16

_METRICS = {"accuracy": "accuracy", "roc_auc": "ROC AUC"}


def all_figures(trained: Trained, embedding: str = "pca") -> dict[str, Figure]:
    """Every picture by name, in the order of the page; what the model does not have is left out."""
    makers: Mapping[str, Callable[[], Figure | None]] = {
        "curves": lambda: curves(trained),
        "objective": lambda: objective(trained),
        "assignment": lambda: assignment(trained),
        "embedding": lambda: embedding_plane(trained, embedding),
        "purity": lambda: purity(trained),
    }
    made = {name: make() for name, make in makers.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def curves(trained: Trained) -> Figure:
    """Losses and the validation metric by epoch."""
    figure, (left, right) = _figure(2)
    epochs = range(1, len(trained.history.loss) + 1)
    left.plot(epochs, trained.history.loss, label="training loss")
    left.plot(epochs, trained.history.val_loss, label="validation loss (cross entropy)")
    left.set_ylabel("loss")
    right.plot(epochs, [100 * value for value in trained.history.val_metric], color="C2", label="validation")
    right.set_ylabel(f"{_METRICS[trained.data.metric]}, %")
    for axes in (left, right):
        axes.axvline(trained.best_epoch, color="grey", linestyle="--", linewidth=1, label="best epoch")
        axes.set_xlabel("epoch")
        axes.legend()
        axes.grid(alpha=0.3)
    return figure


def objective(trained: Trained) -> Figure:
    """The clustering objective after every layer, now and over the epochs."""
    recorded = trained.history.objective
    figure, panels = _figure(2 if recorded else 1)
    values = trained.state.objectives
    layers = [str(index + 1) for index in range(len(values))]
    parts = {
        "global": [float(value.global_term) for value in values],
        "local": [float(value.local_term) for value in values],
        "fidelity": [float(value.fidelity) for value in values],
    }
    for index, (name, terms) in enumerate(parts.items()):
        places = [layer + 0.27 * (index - 1) for layer in range(len(layers))]
        panels[0].bar(places, terms, 0.25, label=name)
    panels[0].set_xticks(range(len(layers)), layers)
    panels[0].axhline(0, color="black", linewidth=0.8)
    panels[0].set_xlabel("layer")
    panels[0].set_ylabel("term of the objective")
    panels[0].set_title("best epoch")
    panels[0].legend()
    panels[0].ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    if recorded:
        panels[1].ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
        for layer in range(len(layers)):
            line = [entry[1 + layer] for entry in recorded]
            panels[1].plot(
                [entry[0] for entry in recorded],
                line,
                label=f"layer {layer + 1}",
                marker=".",
                # Layers have an order; the last tenth is too bright for a line on white.
                color=colormaps["viridis"](0.9 * layer / max(1, len(layers) - 1)),
            )
        totals = [value for entry in recorded for value in entry[1:]]
        # The objective grows with the embeddings, at times by orders of magnitude while a model trains.
        if min(totals) > 0 and max(totals) > 100 * min(totals):
            panels[1].set_yscale("log")
        panels[1].set_xlabel("epoch")
        panels[1].set_ylabel("objective")
        panels[1].set_title("by epoch")
        panels[1].legend(ncols=2)
        panels[1].grid(alpha=0.3)
    return figure


def assignment(trained: Trained) -> Figure | None:
    """Global assignments of nodes sorted by class, and their mean by class."""
    share = trained.global_shares()
    if share is None:
        return None
    figure, (left, right) = _figure(2)
    y = trained.data.y
    labelled = (y >= 0).nonzero().view(-1)
    order = labelled[y[labelled].argsort(stable=True)]
    order = order[torch.linspace(0, order.numel() - 1, min(_SHOWN, order.numel())).long()]
    image = left.imshow(
        share[order].numpy(), aspect="auto", vmin=0.0, cmap="viridis", interpolation="nearest"
    )
    figure.colorbar(image, ax=left, label="share of the node")
    counts = torch.bincount(y[order], minlength=trained.data.num_classes)
    edges = counts.cumsum(0)
    for edge in edges[:-1].tolist():
        left.axhline(edge - 0.5, color="white", linewidth=0.8)
    middles = (edges - counts / 2).tolist()
    left.set_yticks(middles, [f"class {label}" for label in range(len(middles))])
    left.set_xlabel("global cluster")
    left.set_title("nodes by class")
    by_class = torch.stack(
        [share[y == label].mean(0) for label in range(trained.data.num_classes)]
    ).nan_to_num()
    image = right.imshow(by_class.numpy(), vmin=0.0, cmap="viridis", aspect="auto")
    figure.colorbar(image, ax=right, label="mean share")
    right.set_yticks(range(trained.data.num_classes))
    right.set_xlabel("global cluster")
    right.set_ylabel("class")
    right.set_title("mean of each class")
    for axes in (left, right):
        if share.size(1) <= 20:
            axes.set_xticks(range(share.size(1)))
    return figure


def embedding_plane(trained: Trained, method: str) -> Figure:
    """The node embeddings in two dimensions, coloured by class and by cluster, or where the clusters do not
    tell nodes apart by the prediction.
    """
    figure, (left, right) = _figure(2)
    y, assign = trained.data.y, trained.state.global_assign
    chosen = (y >= 0).nonzero().view(-1)
    if chosen.numel() > _SHOWN:
        chosen = chosen[torch.randperm(chosen.numel(), generator=torch.Generator().manual_seed(0))[:_SHOWN]]
    points = project(trained.state.z[chosen], method)
    _scatter(left, points, y[chosen], "class")
    if assign is None or not trained.tells_nodes_apart():
        _scatter(right, points, trained.logits[chosen].argmax(1), "predicted class")
    else:
        _scatter(right, points, assign[chosen].argmax(1), "largest global cluster")
    figure.suptitle({"pca": "principal components", "tsne": "t-SNE"}[method])
    return figure


def purity(trained: Trained) -> Figure | None:
    """Purity of the local clusters by the homophily of the ego."""
    assign = trained.state.local_assign
    if assign is None:
        return None
    homophily = local_homophily(trained.data.edge_index, trained.data.y)
    ours, one = cluster_purity(assign, trained.graph, trained.data.y, trained.data.num_classes)
    usable = homophily.isfinite() & ours.isfinite()
    bins = (homophily[usable] * 5).long().clamp(max=4)
    figure, (left, right) = _figure(2)
    centres = [0.1 + 0.2 * index for index in range(5)]

    def means(values: Tensor) -> list[float]:
        return [float(values[usable][bins == index].mean()) for index in range(5)]

    shuffled = shuffled_purity(assign, trained.graph, trained.data.y, trained.data.num_classes)
    left.plot(centres, means(ours), "o-", label="local clusters")
    # Hollow, because soft clusters are often no better than shuffled ones: the markers coincide.
    left.plot(
        centres,
        means(shuffled),
        "s--",
        color="C1",
        markersize=10,
        fillstyle="none",
        label="shuffled clusters",
    )
    left.plot(centres, means(one), "x--", color="grey", label="one cluster for the ego")
    left.set_ylim(0, 1.02)
    left.set_ylabel("mean purity")
    left.legend()
    right.bar(centres, torch.bincount(bins, minlength=5).tolist(), width=0.17, color="C7")
    right.set_ylabel("nodes")
    for axes in (left, right):
        axes.set_xlim(0, 1)
        axes.set_xlabel("homophily of the node (share of neighbours of its class)")
    return figure


def _figure(panels: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(5.4 * panels, 4.2), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _scatter(axes: Axes, points: Tensor, label: Tensor, title: str) -> None:
    names = label.unique().tolist()
    many = len(names) > _LEGEND
    palette = [*colormaps["tab10"].colors, *colormaps["tab20b"].colors]  # type: ignore[attr-defined]
    drawn = axes.scatter(
        points[:, 0].numpy(),
        points[:, 1].numpy(),
        c=label.numpy() if many else torch.searchsorted(torch.tensor(names), label).numpy(),
        cmap="turbo" if many else ListedColormap(palette[: len(names)]),
        vmin=None if many else -0.5,
        vmax=None if many else len(names) - 0.5,
        s=6 if len(points) > 1000 else 16,
        linewidths=0,
        alpha=0.8,
    )
    axes.set_title(f"{title}, {len(names)} occur" if many else title)
    axes.set_xticks([])
    axes.set_yticks([])
    if many:
        axes.figure.colorbar(drawn, ax=axes, label=title)
    else:
        handles = [
            Line2D([], [], marker="o", linestyle="", color=colour, label=str(name))
            for name, colour in zip(names, palette, strict=False)
        ]
        axes.legend(handles=handles, fontsize="small", ncols=2, loc="best")
