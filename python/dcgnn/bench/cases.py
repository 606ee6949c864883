"""The layers that are compared: DCConv, what a PyG user runs today, and optional peers."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from dcgnn.baselines import ConvNet
from dcgnn.bench import formulas
from dcgnn.bench.problem import NUM_CLASSES, Problem, Settings, ego_graph
from dcgnn.nn.conv import DCConv
from dcgnn.nn.model import DCGNN
from dcgnn.nn.prepared_convs import PreparedGCNConv, prepared_graph
from dcgnn_kernels import fallback
from dcgnn_kernels.backends import OPS

LAYER_PHASES = ("build", "forward", "backward", "forward+backward")
MODEL_PHASES = ("epoch", "inference")
PHASES = LAYER_PHASES + MODEL_PHASES
MODEL_LAYERS = 2


@dataclass(frozen=True)
class Case:
    """One layer under comparison.

    Args:
        name: Name in the tables.
        make_layer: Makes the layer, called as ``layer(x, graph)``.
        formula: Its output in float64 by other means: ``formula(layer, problem, nodes)`` gives the
            rows of some nodes. ``layer`` is a float64 copy and ``problem.x`` may require a gradient.
        make_graph: What the layer takes as its graph; None: ``edge_index`` as it is, with no cost.
        check_gradients: Whether the gate also compares the gradients with the formula's.
        working_floats: About how many floats forward and backward hold at once.
        make_model: Makes the model of the phases "epoch" and "inference"; by default a
            :class:`~dcgnn.baselines.ConvNet` of this layer.
        phases: What can be timed.
        dtype: A dtype of its own instead of the settings'.
        context: Entered around every run.
        needs: Package that must be installed.
    """

    name: str
    make_layer: Callable[[Settings], nn.Module]
    formula: Callable[[nn.Module, Problem, Tensor], Tensor]
    make_graph: Callable[[Problem], Any] | None = None
    check_gradients: bool = False
    working_floats: Callable[[Problem], float] = lambda p: 6.0 * p.num_nodes * p.settings.channels
    make_model: Callable[[Settings], nn.Module] | None = None
    phases: tuple[str, ...] = PHASES
    dtype: str | None = None
    context: Callable[[Problem], AbstractContextManager[Any]] = lambda problem: nullcontext()
    needs: str | None = None

    def missing(self) -> str | None:
        """Why the case cannot run here, if so."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return f"the package {self.needs} is not installed"
        return None

    def fit(self, problem: Problem) -> Problem:
        """The problem in the dtype of the case."""
        if self.dtype is None or self.dtype == problem.settings.dtype:
            return problem
        return problem.with_settings(replace(problem.settings, dtype=self.dtype))

    def graph(self, problem: Problem) -> Any:
        """The graph as the layer takes it, made once for each problem."""
        return problem.edge_index if self.make_graph is None else problem.once(self.make_graph)

    def layer(self, problem: Problem) -> nn.Module:
        """The layer with its weights drawn from a fixed seed."""
        torch.manual_seed(0)
        return self.make_layer(problem.settings).to(problem.device, problem.settings.torch_dtype)

    def model(self, problem: Problem) -> nn.Module:
        """A model of MODEL_LAYERS layers, drawn from a fixed seed."""
        torch.manual_seed(0)
        make = self.make_model or self._conv_net
        return make(problem.settings).to(problem.device, problem.settings.torch_dtype)

    def _conv_net(self, settings: Settings) -> nn.Module:
        return ConvNet(
            lambda channels: self.make_layer(settings),
            settings.channels,
            settings.channels,
            NUM_CLASSES,
            num_layers=MODEL_LAYERS,
        )


def _dc_conv(settings: Settings) -> nn.Module:
    return DCConv(settings.channels, settings.channels, **_options(settings))


def _dc_gnn(settings: Settings) -> nn.Module:
    return DCGNN(
        settings.channels, settings.channels, NUM_CLASSES, num_layers=MODEL_LAYERS, **_options(settings)
    )


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "num_global": settings.num_global,
        "num_local": settings.num_local,
        "local_iters": settings.local_iters,
        "global_iters": settings.global_iters,
    }


class WeightedGCNConv(GCNConv):
    """GCNConv on a pair of edges and their normalised weights."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, normalize=False)

    def forward(self, x: Tensor, graph: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(x, *graph)


class Dense(nn.Linear):
    """The same width without a graph."""

    def forward(self, x: Tensor, graph: object) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class DGLGraphConv(nn.Module):
    """DGL's GCN layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        from dgl.nn import GraphConv

        self.conv = GraphConv(channels, channels)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        return self.conv(graph, x)


def _normalised(problem: Problem) -> tuple[Tensor, Tensor]:
    """Edges with self-loops and their weights 1 / sqrt(n_i n_j)."""
    edges, weight = gcn_norm(
        problem.edge_index, None, problem.num_nodes, add_self_loops=True, dtype=problem.settings.torch_dtype
    )
    return edges, weight


def _csr(problem: Problem) -> Tensor:
    edges, weight = _normalised(problem)
    size = problem.num_nodes, problem.num_nodes
    return torch.sparse_coo_tensor(edges.flip(0), weight, size).coalesce().to_sparse_csr()


def _prepared(problem: Problem) -> Any:
    return prepared_graph("gcn", problem.edge_index, problem.num_nodes)


def _edge_index(problem: Problem) -> tuple[EdgeIndex, Tensor]:
    """Sorted by target, so that PyG sums segments instead of scattering."""
    edges, weight = _normalised(problem)
    sparse = EdgeIndex(edges, sparse_size=(problem.num_nodes, problem.num_nodes))
    by_target, order = sparse.sort_by("col")
    by_target.get_csc()  # kept inside
    return by_target, weight if order is None else weight[order]


def _sparse_tensor(problem: Problem) -> Any:
    from torch_sparse import SparseTensor

    edges, weight = _normalised(problem)
    size = problem.num_nodes, problem.num_nodes
    return SparseTensor(row=edges[1], col=edges[0], value=weight, sparse_sizes=size)


def _dgl_graph(problem: Problem) -> Any:
    import dgl

    graph = dgl.graph((problem.edge_index[0], problem.edge_index[1]), num_nodes=problem.num_nodes)
    return dgl.add_self_loop(graph).formats(["csc", "csr"])


class PlainPyTorch:
    """While entered, the ops run their plain PyTorch kernels: the reference of the same maths."""

    def __init__(self, device: torch.device) -> None:
        self.key = {"cpu": "CPU", "cuda": "CUDA"}[device.type]

    def __enter__(self) -> None:
        self.library = torch.library.Library("dcgnn", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for op in (*OPS, *(f"{op}_backward" for op in OPS)):
                self.library.impl(op, getattr(fallback, op), self.key, allow_override=True)

    def __exit__(self, *_: object) -> None:
        self.library._destroy()


def _slots_times_channels(times: float) -> Callable[[Problem], float]:
    return lambda problem: times * problem.num_slots * problem.settings.channels


def _dc_floats(problem: Problem) -> float:
    settings = problem.settings
    return 6.0 * settings.num_local * (problem.num_nodes * settings.channels + problem.num_slots)


def _sparse_floats(problem: Problem) -> float:
    """Edges and weights are int64 and float32, copied a few times while they are sorted."""
    return 20.0 * problem.num_slots + 6.0 * problem.num_nodes * problem.settings.channels


DC_CONV = Case(
    "DCConv",
    _dc_conv,
    formulas.dc_rows,
    make_graph=ego_graph,
    check_gradients=True,
    working_floats=_dc_floats,
    make_model=_dc_gnn,
)
DC_CONV_HALF = replace(DC_CONV, name="DCConv bfloat16", dtype="bfloat16")
PLAIN = replace(
    DC_CONV,
    name="plain PyTorch",
    working_floats=lambda p: 14.0 * p.settings.num_local * p.num_slots * p.settings.channels,
    phases=("forward", "backward", "forward+backward"),
    context=lambda problem: PlainPyTorch(problem.device),
)
GCN = Case(
    "GCNConv(edge_index)",
    lambda s: GCNConv(s.channels, s.channels, cached=True),
    formulas.gcn_rows,
    working_floats=_slots_times_channels(4.0),
)
GCN_CSR = Case(
    "GCNConv(CSR)",
    lambda s: GCNConv(s.channels, s.channels, normalize=False),
    formulas.gcn_rows,
    make_graph=_csr,
    working_floats=_sparse_floats,
)
GCN_KEPT = replace(
    GCN_CSR,
    name="GCNConv(kept transpose)",
    make_layer=lambda s: PreparedGCNConv(s.channels),
    make_graph=_prepared,
    working_floats=lambda p: 2.0 * _sparse_floats(p),
)
GCN_EDGE_INDEX = Case(
    "GCNConv(EdgeIndex)",
    lambda s: WeightedGCNConv(s.channels),
    formulas.gcn_rows,
    make_graph=_edge_index,
    working_floats=_slots_times_channels(4.0),
)
GAT = Case(
    "GATConv",
    lambda s: GATConv(s.channels, s.channels),
    formulas.gat_rows,
    working_floats=_slots_times_channels(5.0),
)
SAGE = Case(
    "SAGEConv",
    lambda s: SAGEConv(s.channels, s.channels),
    formulas.sage_rows,
    working_floats=_slots_times_channels(3.0),
)
MLP = Case("MLP", lambda s: Dense(s.channels, s.channels), formulas.dense_rows)
DGL = Case(
    "DGL GraphConv",
    lambda s: DGLGraphConv(s.channels),
    formulas.dgl_rows,
    make_graph=_dgl_graph,
    working_floats=_sparse_floats,
    needs="dgl",
)
TORCH_SPARSE = Case(
    "GCNConv(SparseTensor)",
    lambda s: GCNConv(s.channels, s.channels, normalize=False),
    formulas.gcn_rows,
    make_graph=_sparse_tensor,
    working_floats=_sparse_floats,
    needs="torch_sparse",
)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        DC_CONV,
        DC_CONV_HALF,
        GCN,
        GCN_CSR,
        GCN_KEPT,
        GCN_EDGE_INDEX,
        GAT,
        SAGE,
        MLP,
        PLAIN,
        DGL,
        TORCH_SPARSE,
    )
}


def find_cases(names: Iterable[str]) -> list[Case]:
    """Cases by name, in the given order."""
    found = []
    for name in names:
        if name not in CASES:
            raise ValueError(f"unknown case {name!r}; known are {', '.join(CASES)}")
        found.append(CASES[name])
    return found
