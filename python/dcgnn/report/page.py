"""A report as one HTML file: no links, no scripts, pictures inside."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence

from dcgnn.report.measures import Contested, Trained

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 1080px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.small { color: #57606a; margin-top: 0; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d0d7de; text-align: right; }
th:first-child, td:first-child { text-align: left; } td.wrong { color: #b42318; }
.numbers { display: flex; gap: 1rem; flex-wrap: wrap; }
.numbers div { background: #f3f5f7; border-radius: 8px; padding: .6rem 1.1rem; }
.numbers b { display: block; font-size: 1.5rem; }
details { margin: 1rem 0; }
"""

_CAPTIONS = {
    "curves": ("Training", "Loss on the training nodes, cross entropy and metric on the validation nodes."),
    "objective": (
        "Clustering objective",
        "Its three terms after every layer. A layer with norms, maps or few iterations need not lower it.",
    ),
    "assignment": (
        "Global clusters",
        "How nodes share themselves among the global clusters; nodes are sorted by class.",
    ),
    "embedding": ("Embeddings", "The nodes before the readout, in two dimensions."),
    "purity": (
        "Local clusters",
        "How well the two or more clusters of a node's neighbourhood separate the classes in it, by how many "
        "neighbours share the node's class. Shuffled clusters have the same assignments, dealt at random "
        "among the members of each neighbourhood: clusters say something only above that line. One cluster "
        "for the ego is the share of its largest class, which no clusters fall below.",
    ),
}


def render(trained: Trained, pictures: Mapping[str, bytes], contested: Sequence[Contested]) -> str:
    """The page, from PNG pictures by name."""
    data = trained.data
    metric = {"accuracy": "accuracy", "roc_auc": "ROC AUC"}[data.metric]
    boxes = "".join(
        f"<div>{html.escape(part)} {metric}<b>{100 * value:.2f}%</b></div>"
        for part, value in trained.scores().items()
    )
    sections = []
    for name, png in pictures.items():
        title, caption = _CAPTIONS[name]
        if name == "objective" and not trained.history.objective:
            caption += " Train with --objective-every N to see it by epoch, too."
        if name == "assignment" and not trained.tells_nodes_apart():
            caption += (
                f" Here all shares are equal to within {100 * trained.global_contrast():.2g}%: the clusters "
                "do not tell nodes apart, so no node is called contested and none coloured by its cluster."
            )
        encoded = base64.b64encode(png).decode()
        sections.append(
            f'<h2>{title}</h2><p class="small">{caption}</p>'
            f'<img alt="{title}" src="data:image/png;base64,{encoded}">'
        )
    if contested:
        sections.append(_contested_table(contested))
    sections.append(_settings(trained))
    name = html.escape(data.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>DC-GNN on {name}</title><style>{_STYLE}</style></head><body>'
        f"<h1>DC-GNN on {name}</h1>"
        f'<p class="small">{data.num_nodes} nodes, {data.num_edges} directed edges, '
        f"{data.num_classes} classes, split {data.split}; "
        f"best epoch {trained.best_epoch} of {len(trained.history.loss)}</p>"
        f'<div class="numbers">{boxes}</div>{"".join(sections)}</body></html>\n'
    )


def _contested_table(contested: Sequence[Contested]) -> str:
    rows = []
    for entry in contested:
        right = entry.label == entry.predicted
        homophily = "–" if math.isnan(entry.homophily) else f"{entry.homophily:.2f}"
        wrong = "" if right else ' class="wrong"'
        rows.append(
            f"<tr><td>{entry.node}</td><td>{entry.entropy:.3f}</td>"
            f"<td>{entry.clusters[0]} ({100 * entry.shares[0]:.1f}%)</td>"
            f"<td>{entry.clusters[1]} ({100 * entry.shares[1]:.1f}%)</td><td>{entry.label}</td>"
            f"<td{wrong}>{entry.predicted}</td><td>{entry.confidence:.2f}</td><td>{homophily}</td></tr>"
        )
    head = "".join(
        f"<th>{title}</th>"
        for title in (
            "node",
            "entropy",
            "first cluster",
            "second cluster",
            "label",
            "predicted",
            "confidence",
            "homophily",
        )
    )
    return (
        '<h2>Most contested nodes</h2><p class="small">Highest entropy of the global assignment; 1 is '
        "an equal share of every cluster. A wrong prediction is red.</p>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    )


def _settings(trained: Trained) -> str:
    def table(values: Mapping[str, object]) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>"
            for key, value in values.items()
        )
        return f"<table>{rows}</table>"

    return (
        f"<details><summary>Settings of the model</summary>{table(trained.options)}</details>"
        f"<details><summary>Settings of training</summary>{table(trained.training)}</details>"
    )
