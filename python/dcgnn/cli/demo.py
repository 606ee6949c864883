"""``dcgnn demo``: DC-GNN beside GCN and GAT on a generated Minesweeper board, in about a minute."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv

from dcgnn import baselines
from dcgnn.cli.table import format_table
from dcgnn.data import GraphData, load_graph
from dcgnn.nn.conv import DCConv
from dcgnn.nn.model import DCGNN
from dcgnn.timing import interleaved_medians
from dcgnn.training import TrainConfig, train
from dcgnn_kernels import EgoGraph, backends

#: The skeleton that all three models share.
_SKELETON: dict[str, Any] = {"num_layers": 5, "norm": "batch", "residual": True}

#: What Minesweeper asks of DC-GNN: the own ego's clusters, told apart.
_DCGNN: dict[str, Any] = {
    "transform": "per-cluster",
    "ego_readout": True,
    "node_activation": "relu",
}
_NUM_GLOBAL = 8


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="DC-GNN beside GCN and GAT on Minesweeper")
    parser.add_argument(
        "--graph",
        help="graph to train on (default: a Minesweeper board, smaller without native kernels)",
    )
    parser.add_argument("--epochs", type=int, default=80, metavar="N", help="epochs (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=32, metavar="N", help="width (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train the three models, then time one layer of each."""
    config = TrainConfig(epochs=arguments.epochs, patience=arguments.epochs, lr=0.01, weight_decay=0.0)
    data = load_graph(arguments.graph or _default_graph())
    print(
        f"{data.name}: {data.num_nodes} nodes, {data.num_edges // 2} edges, "
        f"{arguments.epochs} epochs, width {arguments.hidden}, "
        f"{_SKELETON['num_layers']} layers, {torch.get_num_threads()} threads"
    )
    print(f"backends:\n{_indented(str(backends()))}\n")
    print(_train_table(data, config, arguments), flush=True)
    print(f"\none layer, {arguments.hidden} channels, milliseconds (and ratio to GCNConv)\n")
    print(_layer_table(data, arguments.hidden))


def _default_graph() -> str:
    """A board on which the demo takes about a minute on two cores."""
    side = 70 if backends()["native-cpu"].available else 40
    return f"minesweeper-synthetic:rows={side},cols={side}"


def _train_table(data: GraphData, config: TrainConfig, arguments: argparse.Namespace) -> str:
    channels, hidden, classes = data.num_features, arguments.hidden, data.num_classes
    models: dict[str, Callable[[], nn.Module]] = {
        "DC-GNN": lambda: DCGNN(channels, hidden, classes, _NUM_GLOBAL, **_SKELETON, **_DCGNN),
        "GCN": lambda: baselines.gcn(channels, hidden, classes, **_SKELETON),
        "GAT": lambda: baselines.gat(channels, hidden, classes, **_SKELETON),
    }
    results = {}
    for name, make in models.items():
        torch.manual_seed(config.seed)
        results[name] = train(make(), data, config, progress=not arguments.quiet)
    baseline = results["GCN"].seconds_per_epoch
    rows = [
        [
            name,
            f"{100 * result.test_metric:.2f}",
            f"{1000 * result.seconds_per_epoch:.1f}",
            f"{result.seconds_per_epoch / baseline:.2f}",
            str(result.num_parameters),
        ]
        for name, result in results.items()
    ]
    metric = {"roc_auc": "test ROC AUC", "accuracy": "test accuracy"}[data.metric]
    return format_table(["model", metric, "ms/epoch", "ratio to GCN", "parameters"], rows, words=1)


def _layer_table(data: GraphData, channels: int) -> str:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(data.num_nodes, channels, generator=generator, requires_grad=True)
    graph = EgoGraph.from_edge_index(data.edge_index, data.num_nodes)
    dc = DCConv(channels, channels, _NUM_GLOBAL)
    gcn, gat = GCNConv(channels, channels, cached=True), GATConv(channels, channels)
    layers: dict[str, Callable[[], Tensor]] = {
        "DCConv": lambda: dc(x, graph),
        "GCNConv": lambda: gcn(x, data.edge_index),
        "GATConv": lambda: gat(x, data.edge_index),
    }

    def forward(layer: Callable[[], Tensor]) -> Callable[[], object]:
        def call() -> None:
            with torch.no_grad():
                layer()

        return call

    def both(layer: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: layer().sum().backward()

    columns = [
        interleaved_medians({name: wrap(layer) for name, layer in layers.items()}, max_seconds=4.0)
        for wrap in (forward, both)
    ]
    rows = [
        [name] + [f"{1000 * times[name]:.2f} ({times[name] / times['GCNConv']:.2f})" for times in columns]
        for name in layers
    ]
    return format_table(["layer", "forward", "forward + backward"], rows, words=1)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
