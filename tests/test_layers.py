"""The layers and the model: against the loop, and as citizens of PyTorch."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from typing import Any

import loop_model
import networkx
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from dcgnn import DCGNN, DCConv, DCMsgPassing
from dcgnn.nn.topology import Topology
from dcgnn_kernels import EgoGraph

Edges = list[tuple[int, int]]
CHANNELS, NUM_GLOBAL = 3, 4


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """The problems here are tiny: on a busy machine more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both_ways(edges: Edges) -> Edges:
    return edges + [(target, source) for source, target in edges]


def irregular_directed() -> Edges:
    """Ten nodes: a hub, self-loops, parallel edges, a node that only sends, and 9 isolated."""
    generator = random.Random(7)
    edges = [(source, 0) for source in range(1, 7)]
    edges += [(generator.randrange(8), generator.randrange(1, 8)) for _ in range(14)]
    return [*edges, (3, 3), (3, 3), (8, 2), (8, 2), (8, 2)]


GRAPHS: dict[str, tuple[int, Edges]] = {
    "ring": (7, both_ways([(i, (i + 1) % 7) for i in range(7)])),
    "star": (9, both_ways([(0, i) for i in range(1, 9)])),
    "complete": (5, [(i, j) for i in range(5) for j in range(5) if i != j]),
    "directed": (10, irregular_directed()),
    "path-directed": (4, [(0, 1), (1, 2), (2, 3)]),
    "barabasi-albert": (16, both_ways(list(networkx.barabasi_albert_graph(16, 2, seed=3).edges))),
    "pair-and-isolated": (3, [(0, 1), (1, 0)]),
    "no-edges": (3, []),
    "one-node": (1, []),
    "one-node-self-loop": (1, [(0, 0), (0, 0)]),
}


def edge_tensor(edges: Edges) -> Tensor:
    return torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def features(num_nodes: int, channels: int = CHANNELS, seed: int = 0, dtype: Any = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_nodes, channels, generator=generator, dtype=torch.float64).to(dtype)


def disturb(module: torch.nn.Module, seed: int = 5) -> None:
    """Moves every parameter and running statistic off its initial value, biases and norms too: at their
    initial 0 and 1 a map that is left out would go unnoticed.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if tensor.is_floating_point():
                tensor += 0.3 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)


def make(channels: int = CHANNELS, num_global: int = NUM_GLOBAL, **options: Any) -> DCMsgPassing:
    torch.manual_seed(11)
    module = DCMsgPassing(channels, num_global, **options).double()
    disturb(module)
    return module


def assert_matches_loop(graph: str, training: bool = False, **options: Any) -> None:
    """Output and the whole state of every layer equal the loop's."""
    num_nodes, edges = GRAPHS[graph]
    x = features(num_nodes)
    module = make(**options).train(training)
    before = copy.deepcopy(module)  # batch norm's running statistics move in training
    out, state = module(x, edge_tensor(edges), return_state=True)
    wanted = loop_model.message_passing(x, edges, before, **options)
    assert len(state.layers) == len(wanted) == options.get("num_layers", 1)
    for layer, loop in zip(state.layers, wanted, strict=True):
        pairs = {
            "z": (layer.z, loop.z),
            "global_assign": (layer.global_assign, loop.global_plan),
            "global_clusters": (layer.global_clusters, loop.global_clusters),
            "local_assign": (layer.local_assign, loop.local_assign),
            "local_clusters": (layer.local_clusters, loop.local_clusters),
        }
        for name, (got, want) in pairs.items():
            if want is None:
                assert got is None, f"{name} of a problem that is not computed"
            else:
                np.testing.assert_allclose(
                    loop_model.array(got), want, rtol=1e-9, atol=1e-11, err_msg=f"{name}, {options}"
                )
    np.testing.assert_allclose(loop_model.array(out), wanted[-1].z, rtol=1e-9, atol=1e-11)


# Against the loop --------------------------------------------------------------------------------------

OPTION_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "three layers, carry": {"num_layers": 3},
    "three layers, fresh": {"num_layers": 3, "local_init": "fresh"},
    "alpha 0": {"alpha": 0.0, "num_layers": 2},
    "alpha 1": {"alpha": 1.0, "num_layers": 2},
    "alpha 1 with ego readout": {"alpha": 1.0, "num_layers": 2, "ego_readout": True},
    "beta 0": {"beta": 0.0, "num_layers": 2},
    "uneven weights": {"alpha": 0.3, "beta": 1.7, "lam": 0.8},
    "sharp": {"lam": 40.0, "num_layers": 2},
    "one iteration": {"global_iters": 1, "local_iters": 1},
    "many iterations": {"global_iters": 9, "local_iters": 8},
    "converged": {"global_iters": None, "local_iters": None, "num_layers": 2},
    "converged, unscaled": {"global_iters": None, "local_iters": None, "local_cost_scale": "none"},
    "local cost none": {"local_cost_scale": "none", "num_layers": 2},
    "local cost mean": {"local_cost_scale": "mean", "num_layers": 2},
    "global cost mean": {"global_cost_scale": "mean", "num_layers": 2},
    "global cost max": {"global_cost_scale": "max", "num_layers": 2},
    "tanh": {"activation": "tanh", "num_layers": 2},
    "shared": {"transform": "shared", "num_layers": 2},
    "shared, tanh": {"transform": "shared", "activation": "tanh"},
    "per cluster": {"transform": "per-cluster", "num_layers": 2},
    "per cluster, relu": {"transform": "per-cluster", "activation": "relu"},
    "ego readout": {"ego_readout": True, "num_layers": 2},
    "ego readout, per cluster, tanh": {
        "ego_readout": True,
        "transform": "per-cluster",
        "activation": "tanh",
    },
    "residual": {"residual": True, "num_layers": 2},
    "layer norm": {"norm": "layer", "num_layers": 2},
    "batch norm": {"norm": "batch", "num_layers": 2},
    "node activation": {"node_activation": "relu", "num_layers": 2},
    "repeated maps": {
        "num_layers": 5,
        "weight_period": 2,
        "transform": "per-cluster",
        "ego_readout": True,
        "residual": True,
        "norm": "layer",
    },
    "everything": {
        "num_layers": 3,
        "num_local": 3,
        "alpha": 0.35,
        "local_init": "fresh",
        "mass": "paper",
        "activation": "tanh",
        "transform": "per-cluster",
        "ego_readout": True,
        "residual": True,
        "norm": "layer",
        "node_activation": "relu",
        "dropout": 0.5,
    },
}


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS.keys())
def test_every_option_equals_the_loop(options: dict[str, Any]) -> None:
    assert_matches_loop("directed", **options)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_every_graph_equals_the_loop(graph: str, alpha: float) -> None:
    assert_matches_loop(graph, alpha=alpha, num_layers=2, transform="per-cluster", ego_readout=True)


@pytest.mark.parametrize("graph", ["directed", "star", "one-node"])
@pytest.mark.parametrize("num_local", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("local_init", ["carry", "fresh"])
def test_every_number_of_local_clusters_equals_the_loop(graph: str, num_local: int, local_init: str) -> None:
    assert_matches_loop(
        graph, num_local=num_local, num_layers=2, local_init=local_init, transform="per-cluster"
    )


@pytest.mark.parametrize("num_local", [1, 3])
def test_converged_transport_equals_the_loop(num_local: int) -> None:
    assert_matches_loop(
        "barabasi-albert", num_local=num_local, local_iters=None, global_iters=None, lam=1.0, num_layers=2
    )


@pytest.mark.parametrize("num_global", [1, 2, 7])
def test_every_number_of_global_clusters_equals_the_loop(num_global: int) -> None:
    num_nodes, edges = GRAPHS["ring"]
    x = features(num_nodes)
    module = make(num_global=num_global, num_layers=2)
    wanted = loop_model.message_passing(x, edges, module, num_layers=2)[-1].z
    np.testing.assert_allclose(loop_model.array(module(x, edge_tensor(edges))), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gamma", ["exact", "paper"])
@pytest.mark.parametrize("mass", ["node", "paper"])
@pytest.mark.parametrize("aggr", ["mean", "sum", "symmetric", None])
@pytest.mark.parametrize("graph", ["directed", "star"])
@pytest.mark.parametrize("ego_readout", [False, True])
def test_every_node_update_equals_the_loop(
    gamma: str, mass: str, aggr: str | None, graph: str, ego_readout: bool
) -> None:
    options = {"gamma": gamma, "mass": mass, "aggr": aggr, "ego_readout": ego_readout}
    assert_matches_loop(graph, alpha=0.4, num_layers=2, **options)


@pytest.mark.parametrize("ego_readout", [False, True])
def test_symmetric_aggregation_tells_the_degree(ego_readout: bool) -> None:
    """With equal features every mean is that feature; GCN's weights sum to Σ 1/√(n_u w_i) at node i."""
    num_nodes, edges = GRAPHS["star"]
    x = torch.ones(num_nodes, 3, dtype=torch.float64)
    same = make(3, alpha=0.0, beta=0.0, gamma="paper", ego_readout=ego_readout)(x, edge_tensor(edges))
    assert bool((same - same[0]).abs().max() < 1e-12)
    told = make(3, alpha=0.0, beta=0.0, gamma="paper", ego_readout=ego_readout, aggr="symmetric")(
        x, edge_tensor(edges)
    )
    matrix = torch.eye(num_nodes, dtype=torch.float64)
    matrix[tuple(edge_tensor(edges))] = 1.0
    root = matrix.sum(0).rsqrt()
    shares = (root[:, None] * matrix * root[None, :]).sum(1)
    torch.testing.assert_close(told, shares[:, None] * same, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_norm_in_training_equals_the_loop(norm: str) -> None:
    assert_matches_loop("directed", training=True, norm=norm, residual=True, num_layers=2)


def test_batch_norm_follows_the_batches_in_training_only() -> None:
    num_nodes, edges = GRAPHS["directed"]
    module = make(norm="batch")
    start = module.blocks[0].norm.module.running_mean.clone()
    module.eval()(features(num_nodes), edge_tensor(edges))
    assert torch.equal(module.blocks[0].norm.module.running_mean, start)
    module.train()(features(num_nodes), edge_tensor(edges))
    assert not torch.equal(module.blocks[0].norm.module.running_mean, start)


@pytest.mark.parametrize("bias", [True, False])
def test_conv_equals_the_loop(bias: bool) -> None:
    num_nodes, edges = GRAPHS["directed"]
    x = features(num_nodes, 5)
    torch.manual_seed(2)
    conv = DCConv(5, CHANNELS, NUM_GLOBAL, bias=bias, transform="shared", activation="tanh").double()
    disturb(conv)
    mapped = loop_model.array(x) @ loop_model.array(conv.lin.weight).T
    wanted = loop_model.message_passing(
        mapped, edges, conv.message_passing, transform="shared", activation="tanh"
    )[-1].z
    if bias:
        wanted = wanted + loop_model.array(conv.bias)
    else:
        assert conv.bias is None
    np.testing.assert_allclose(loop_model.array(conv(x, edge_tensor(edges))), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("adjacency", [False, True])
@pytest.mark.parametrize("num_mlp_layers", [1, 2])
def test_model_equals_the_loop(adjacency: bool, num_mlp_layers: int) -> None:
    num_nodes, edges = GRAPHS["directed"]
    x = features(num_nodes, 5)
    torch.manual_seed(2)
    options = {"num_layers": 2, "transform": "per-cluster", "ego_readout": True, "activation": "tanh"}
    model = DCGNN(
        5,
        CHANNELS,
        2,
        NUM_GLOBAL,
        num_mlp_layers=num_mlp_layers,
        dropout=0.5,
        adjacency_embedding=adjacency,
        num_nodes=num_nodes if adjacency else None,
        **options,
    )
    model = model.double().eval()
    disturb(model)
    h = loop_model.array(x)
    for index, linear in enumerate(model.encoder.lins):
        h = loop_model.linear(h, linear)
        if index + 1 < num_mlp_layers:
            h = np.maximum(h, 0)
    if adjacency:
        rows = loop_model.array(model.adjacency.weight)
        for i, members in enumerate(loop_model.egos(edges, num_nodes)):
            for j in members:
                if j != i:
                    h[i] += rows[j]
        h = h + loop_model.array(model.adjacency.bias)
    h = np.maximum(h, 0)
    z = loop_model.message_passing(h, edges, model.message_passing, **options)[-1].z
    wanted = loop_model.linear(z, model.readout)
    logits, state = model(x, edge_tensor(edges), return_state=True)
    np.testing.assert_allclose(loop_model.array(logits), wanted, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(loop_model.array(state.z), z, rtol=1e-9, atol=1e-11)
    assert torch.equal(model(x, edge_tensor(edges)), logits)


def test_random_graphs_equal_the_loop() -> None:
    """Dense to empty, any mixture of loops and parallel edges, from a fixed seed."""
    generator = random.Random(1)
    for trial in range(12):
        num_nodes = generator.randrange(1, 9)
        num_edges = generator.randrange(0, 3 * num_nodes)
        edges = [(generator.randrange(num_nodes), generator.randrange(num_nodes)) for _ in range(num_edges)]
        num_local = generator.randrange(1, 6)
        x = features(num_nodes, seed=trial)
        module = make(num_local=num_local, mass="paper")
        wanted = loop_model.message_passing(x, edges, module, num_local=num_local, mass="paper")[-1].z
        got = loop_model.array(module(x, edge_tensor(edges)))
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11, err_msg=f"{num_nodes}, {edges}")


# Structure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("graph", ["directed", "barabasi-albert"])
def test_relabelled_nodes_give_relabelled_outputs(graph: str, num_local: int) -> None:
    """For K > 2 the groups of neighbours follow the order of the labels, so only K <= 2 is equivariant."""
    num_nodes, edges = GRAPHS[graph]
    x = features(num_nodes)
    module = make(num_local=num_local, num_layers=2, transform="per-cluster", ego_readout=True)
    label = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0))
    relabelled = [(int(label[source]), int(label[target])) for source, target in edges]
    random.Random(0).shuffle(relabelled)
    moved = torch.empty_like(x)
    moved[label] = x
    expected = module(x, edge_tensor(edges))
    got = module(moved, edge_tensor(relabelled))[label]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(got, module(x, edge_tensor(relabelled)))


def test_parallel_edges_and_self_loops_change_nothing() -> None:
    num_nodes, edges = GRAPHS["barabasi-albert"]
    x = features(num_nodes)
    module = make(num_layers=2)
    extended = [*edges, *edges[:5], (2, 2), (2, 2), (4, 4)]
    assert torch.equal(module(x, edge_tensor(edges)), module(x, edge_tensor(extended)))


def test_direction_of_edges_matters() -> None:
    num_nodes, edges = GRAPHS["path-directed"]
    x = features(num_nodes)
    module = make()
    reverse = [(target, source) for source, target in edges]
    assert not torch.allclose(module(x, edge_tensor(edges)), module(x, edge_tensor(reverse)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["graph", "int32", "csr", "coo"])
def test_every_form_of_the_graph_gives_the_same_output(kind: str) -> None:
    num_nodes, edges = GRAPHS["directed"]
    edge_index = edge_tensor(edges)
    x = features(num_nodes)
    module = make(num_layers=2)
    # As in PyG, row i of a sparse matrix holds the sources of target i.
    coo = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(len(edges)), (num_nodes, num_nodes), check_invariants=True
    )
    if kind == "csr":
        dense = (coo.to_dense() > 0).double()
        row, col = dense.nonzero(as_tuple=True)
        pointers = torch.cat([torch.zeros(1, dtype=torch.int64), dense.sum(1).long().cumsum(0)])
        values = torch.ones(len(row))
        form = torch.sparse_csr_tensor(pointers, col, values, dense.shape, check_invariants=True)
    else:
        form = {
            "graph": EgoGraph.from_edge_index(edge_index, num_nodes),
            "int32": edge_index.to(torch.int32),
            "coo": coo,
        }[kind]
    assert torch.equal(module(x, form), module(x, edge_index))


def test_state_holds_every_layer() -> None:
    num_nodes, edges = GRAPHS["directed"]
    graph = EgoGraph.from_edge_index(edge_tensor(edges), num_nodes)
    module = make(num_layers=3, num_local=3)
    out, state = module(features(num_nodes), graph, return_state=True)
    assert len(state.layers) == len(state.objectives) == 3
    for layer in state.layers:
        assert layer.z.shape == (num_nodes, CHANNELS)
        assert layer.global_assign.shape == (num_nodes, NUM_GLOBAL)
        assert layer.global_clusters.shape == (NUM_GLOBAL, CHANNELS)
        assert layer.local_assign.shape == (graph.num_slots, 3)
        assert layer.local_clusters.shape == (num_nodes, 3, CHANNELS)
    last = state.layers[-1]
    assert state.z is last.z
    assert torch.equal(out, last.z)
    assert state.global_assign is last.global_assign
    assert state.global_clusters is last.global_clusters
    assert state.local_assign is last.local_assign
    assert state.local_clusters is last.local_clusters
    assert torch.equal(module(features(num_nodes), graph), out)


@pytest.mark.parametrize(
    ("options", "has_global", "has_local"),
    [
        ({"alpha": 0.0}, False, True),
        ({"alpha": 1.0}, True, False),
        ({"alpha": 1.0, "ego_readout": True}, True, True),
        ({"alpha": 0.2}, True, True),
    ],
)
def test_problems_of_weight_0_are_not_in_the_state(
    options: dict[str, Any], has_global: bool, has_local: bool
) -> None:
    num_nodes, edges = GRAPHS["ring"]
    _, state = make(**options)(features(num_nodes), edge_tensor(edges), return_state=True)
    assert (state.global_assign is not None, state.global_clusters is not None) == (has_global, has_global)
    assert (state.local_assign is not None, state.local_clusters is not None) == (has_local, has_local)
    assert math.isfinite(state.objectives[-1].total.item())


def test_conv_and_model_return_their_state() -> None:
    num_nodes, edges = GRAPHS["ring"]
    x = features(num_nodes, dtype=torch.float32)
    out, state = DCConv(CHANNELS, 6, NUM_GLOBAL)(x, edge_tensor(edges), return_state=True)
    assert out.shape == (num_nodes, 6)
    assert state.global_clusters.shape == (NUM_GLOBAL, 6)
    logits, state = DCGNN(CHANNELS, 6, 2, NUM_GLOBAL)(x, edge_tensor(edges), return_state=True)
    assert logits.shape == (num_nodes, 2)
    assert state.z.shape == (num_nodes, 6)
    assert len(state.layers) == 2


# Modules -----------------------------------------------------------------------------------------------


def full_conv(in_channels: int = 5, dtype: Any = torch.float32, **options: Any) -> DCConv:
    torch.manual_seed(1)
    chosen = {"transform": "per-cluster", "ego_readout": True, "activation": "tanh", "norm": "layer"}
    return DCConv(in_channels, CHANNELS, NUM_GLOBAL, **{**chosen, **options}).to(dtype)


def full_model(**options: Any) -> DCGNN:
    torch.manual_seed(1)
    chosen = {
        "num_mlp_layers": 2,
        "adjacency_embedding": True,
        "num_nodes": 10,
        "transform": "per-cluster",
        "ego_readout": True,
        "residual": True,
        "norm": "batch",
        "activation": "tanh",
    }
    return DCGNN(5, 6, 2, NUM_GLOBAL, **{**chosen, **options})


def directed_input(channels: int = 5, dtype: Any = torch.float32) -> tuple[Tensor, Tensor]:
    num_nodes, edges = GRAPHS["directed"]
    return features(num_nodes, channels, dtype=dtype), edge_tensor(edges)


def test_lazy_input_width() -> None:
    x, edge_index = directed_input()
    conv = DCConv(-1, CHANNELS, NUM_GLOBAL)
    assert conv(x, edge_index).shape == (10, CHANNELS)
    assert conv.lin.weight.shape == (CHANNELS, 5)
    model = DCGNN(-1, 6, 2, NUM_GLOBAL, num_mlp_layers=2)
    assert model(x, edge_index).shape == (10, 2)
    known = DCConv(5, CHANNELS, NUM_GLOBAL)
    known.load_state_dict(conv.state_dict())
    assert torch.equal(known(x, edge_index), conv(x, edge_index))


def test_lazy_module_loads_a_state() -> None:
    x, edge_index = directed_input()
    known, lazy = full_conv(), full_conv(-1)
    lazy.load_state_dict(known.state_dict())
    assert torch.equal(known(x, edge_index), lazy(x, edge_index))


def repeating_model() -> DCGNN:
    return full_model(num_layers=4, weight_period=1)


@pytest.mark.parametrize("build", [full_conv, full_model, repeating_model])
def test_state_dict_round_trip_is_bit_identical(build: Any, tmp_path: Any) -> None:
    x, edge_index = directed_input()
    first = build()
    first(x, edge_index)  # moves running statistics, which must travel too
    disturb(first)
    second = build()
    assert not torch.equal(first.eval()(x, edge_index), second.eval()(x, edge_index))
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    second.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(first(x, edge_index), second(x, edge_index))


@pytest.mark.parametrize("build", [full_conv, full_model, repeating_model])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_bit_identical_and_apart(build: Any, how: str) -> None:
    x, edge_index = directed_input()
    module = build().eval()
    if build is full_conv:
        module.cached = True  # a cached graph travels with the module
    expected = module(x, edge_index)
    twin = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    assert torch.equal(twin(x, edge_index), expected)
    disturb(twin)
    assert not torch.equal(twin(x, edge_index), expected)
    assert torch.equal(module(x, edge_index), expected)


@pytest.mark.parametrize("build", [full_conv, full_model, lambda: make(residual=True, norm="batch")])
def test_reset_parameters_draws_every_parameter_anew(build: Any) -> None:
    module = build()
    with torch.no_grad():
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            tensor.fill_(7)
    module.reset_parameters()
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        assert not bool((tensor == 7).all()), f"{name} kept its value"
        assert bool(torch.isfinite(tensor).all()), name
    first = {name: tensor.clone() for name, tensor in module.named_parameters()}
    module.reset_parameters()
    for name, tensor in module.named_parameters():
        if bool((first[name] != first[name].flatten()[0]).any()):  # not a constant, as biases are
            assert not torch.equal(tensor, first[name]), f"{name} was not drawn"


def test_global_clusters_start_orthonormal() -> None:
    module = DCMsgPassing(8, 5)
    for _ in range(2):
        rows = module.global_embedding.detach()
        torch.testing.assert_close(rows @ rows.T, torch.eye(5), rtol=0, atol=1e-5)
        disturb(module)
        module.reset_parameters()


def test_repr_names_the_sizes() -> None:
    assert repr(DCMsgPassing(16, 8, num_layers=3, num_local=4)) == (
        "DCMsgPassing(16, num_global=8, num_local=4, num_layers=3)"
    )
    assert repr(DCConv(-1, 16, 8)) == "DCConv(-1, 16, num_global=8, num_local=2)"
    assert repr(DCGNN(4, 16, 3, 8, num_layers=5)) == "DCGNN(4, 16, 3, num_global=8, num_layers=5)"


def test_cached_keeps_the_first_graph() -> None:
    x, edge_index = directed_input()
    conv, plain = full_conv(cached=True), full_conv()
    expected = conv(x, edge_index)
    assert torch.equal(plain(x, edge_index), expected)
    other = edge_index.flip(0)
    assert not torch.equal(plain(x, other), expected)
    assert torch.equal(conv(x, other), expected)
    conv.reset_parameters()
    conv.load_state_dict(plain.state_dict())
    assert torch.equal(conv(x, other), plain(x, other)), "reset_parameters forgets the graph"


def test_cached_takes_a_topology_as_it_is() -> None:
    x, edge_index = directed_input()
    conv, plain = full_conv(cached=True), full_conv()
    for edges in (edge_index, edge_index.flip(0)):
        topology = Topology(EgoGraph.from_edge_index(edges, x.size(0)))
        assert torch.equal(conv(x, topology), plain(x, edges))


def test_cached_graph_of_another_size_is_refused() -> None:
    x, edge_index = directed_input()
    conv = full_conv(cached=True)
    conv(x, edge_index)
    with pytest.raises(ValueError, match="nodes"):
        conv(x[:8], edge_index[:, :0])


def test_dropout_acts_in_training_only() -> None:
    x, edge_index = directed_input(CHANNELS, torch.float64)
    module = make(dropout=0.5)
    plain = make().eval()(x, edge_index)
    assert torch.equal(module.eval()(x, edge_index), plain)
    torch.manual_seed(0)
    first, second = module.train()(x, edge_index), module(x, edge_index)
    assert not torch.equal(first, second)
    for out in (first, second):
        kept = out != 0
        assert 0 < int(kept.sum()) < out.numel()
        torch.testing.assert_close(out[kept], 2 * plain[kept])


def test_model_dropout_acts_in_training_only() -> None:
    x, edge_index = directed_input()
    model = full_model(dropout=0.4, norm=None)
    assert not torch.equal(model(x, edge_index), model(x, edge_index))
    assert torch.equal(model.eval()(x, edge_index), model(x, edge_index))


def test_input_dropout_acts_on_the_features_alone() -> None:
    x, edge_index = directed_input()
    model = full_model(dropout=0.0, input_dropout=0.5, norm=None)
    assert not torch.equal(model(x, edge_index), model(x, edge_index))
    bare = full_model(dropout=0.5, input_dropout=0.0, num_mlp_layers=1)
    assert torch.equal(bare.train()._encode(x), bare.eval()._encode(x))
    assert full_model(dropout=0.4).input_dropout == 0.4
    for bad in (1.0, -0.1, "half"):
        with pytest.raises((ValueError, TypeError), match="input_dropout"):
            full_model(input_dropout=bad)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_repeated_maps_are_one_set_of_weights(period: int) -> None:
    """Equal to a model of as many layers whose maps hold the same values; gradients add up over them."""
    options = {"num_layers": 5, "transform": "per-cluster", "ego_readout": True, "residual": True,
               "norm": "layer"}  # fmt: skip
    tied = DCMsgPassing(CHANNELS, NUM_GLOBAL, weight_period=period, **options).double()
    disturb(tied)
    plain = DCMsgPassing(CHANNELS, NUM_GLOBAL, **options).double()
    plain.load_state_dict(tied.state_dict())
    x, edge_index = directed_input(CHANNELS, torch.float64)
    weights = features(10, CHANNELS, seed=3, dtype=torch.float64)
    for module in (tied, plain):
        out = module(x, edge_index)
        (out * weights).sum().backward()
    assert torch.equal(tied(x, edge_index), plain(x, edge_index))

    expected: dict[int, Tensor] = {}
    owners = dict(tied.named_parameters(remove_duplicate=False))
    for name, parameter in plain.named_parameters():
        key = id(owners[name])
        expected[key] = expected.get(key, torch.zeros_like(parameter)) + parameter.grad
    for parameter in tied.parameters():
        torch.testing.assert_close(parameter.grad, expected.pop(id(parameter)))
    assert not expected

    # A copy keeps the ties, and a norm of its own stays with every layer.
    distinct = {id(block.residual) for block in copy.deepcopy(tied).blocks}
    assert len(distinct) == min(period, 5)
    assert len({id(block.norm) for block in tied.blocks}) == 5


# Gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        lambda: DCConv(5, CHANNELS, NUM_GLOBAL),
        full_conv,
        lambda: full_conv(num_local=3, local_iters=None, global_iters=None),
        lambda: full_conv(num_local=1, mass="paper"),
        lambda: full_model(norm="layer"),
        lambda: full_model(norm="layer", num_layers=3, weight_period=1),
        lambda: full_model(norm="layer", local_init="fresh", num_layers=3, transform="shared"),
    ],
)
def test_gradients_reach_every_parameter(module: Any) -> None:
    x, edge_index = directed_input()
    module = module()
    disturb(module)
    x.requires_grad_()
    out = module(x, edge_index)
    weights = features(*out.shape, seed=3, dtype=out.dtype)  # a plain sum would be blind behind a norm
    (out * weights).sum().backward()
    for name, tensor in [("x", x), *module.named_parameters()]:
        assert tensor.grad is not None, f"no gradient reached {name}"
        assert bool(torch.isfinite(tensor.grad).all()), name
        assert bool((tensor.grad != 0).any()), f"the gradient of {name} is 0"


@pytest.mark.parametrize("graph", ["no-edges", "one-node", "pair-and-isolated"])
@pytest.mark.parametrize("scale", ["none", "mean", "max"])
@pytest.mark.parametrize("iters", [3, None])
def test_gradients_are_finite_where_all_costs_are_0(graph: str, scale: str, iters: int | None) -> None:
    """An isolated node has zero distance to both of its clusters."""
    num_nodes, edges = GRAPHS[graph]
    x = features(num_nodes).requires_grad_()
    module = make(num_layers=2, local_cost_scale=scale, local_iters=iters, global_iters=iters)
    module(x, edge_tensor(edges)).square().sum().backward()
    for name, tensor in [("x", x), *module.named_parameters()]:
        assert bool(torch.isfinite(tensor.grad).all()), name


GRADCHECK_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "per cluster and ego readout": {"transform": "per-cluster", "ego_readout": True, "activation": "tanh"},
    "shared, residual, layer norm": {"transform": "shared", "residual": True, "norm": "layer"},
    "batch norm": {"norm": "batch", "node_activation": "tanh"},
    "K = 1": {"num_local": 1},
    "K = 3, unscaled": {"num_local": 3, "local_cost_scale": "none", "mass": "paper"},
    "mean scales": {"local_cost_scale": "mean", "global_cost_scale": "mean", "aggr": "sum"},
    "symmetric": {"aggr": "symmetric", "ego_readout": True},
    "global max scale": {"global_cost_scale": "max", "gamma": "paper"},
    "converged": {"local_iters": None, "global_iters": None},
    "converged, K = 3": {"local_iters": None, "global_iters": None, "num_local": 3, "ego_readout": True},
    "alpha 0": {"alpha": 0.0},
    "alpha 1 with ego readout": {"alpha": 1.0, "ego_readout": True},
}

SMALL_DIRECTED: Edges = [(0, 1), (1, 0), (2, 1), (3, 1), (2, 0), (3, 3)]


@pytest.mark.parametrize("options", GRADCHECK_SETS.values(), ids=GRADCHECK_SETS.keys())
def test_conv_passes_gradcheck(options: dict[str, Any]) -> None:
    torch.manual_seed(8)
    conv = DCConv(2, 2, 2, **options).double()
    disturb(conv)
    # global_embedding is not read at alpha = 0.
    names = [
        name
        for name, _ in conv.named_parameters()
        if not (options.get("alpha") == 0.0 and "global_embedding" in name)
    ]
    parameters = dict(conv.named_parameters())
    x = features(5, 2, seed=9).requires_grad_()
    edge_index = edge_tensor(SMALL_DIRECTED)
    buffers = {name: tensor.clone() for name, tensor in conv.named_buffers()}

    def run(x: Tensor, *values: Tensor) -> Tensor:
        fresh = {name: tensor.clone() for name, tensor in buffers.items()}
        return functional_call(conv, {**fresh, **dict(zip(names, values, strict=True))}, (x, edge_index))

    inputs = [parameters[name].detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, (x, *inputs), eps=1e-6, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("local_init", ["carry", "fresh"])
@pytest.mark.parametrize("num_local", [2, 4])
def test_stacked_layers_pass_gradcheck(local_init: str, num_local: int) -> None:
    module = make(2, 2, num_layers=2, local_init=local_init, num_local=num_local)
    edge_index = edge_tensor(SMALL_DIRECTED)

    def run(x: Tensor, embedding: Tensor) -> Tensor:
        return functional_call(module, {"global_embedding": embedding}, (x, edge_index))

    embedding = module.global_embedding.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (features(5, 2).requires_grad_(), embedding), atol=1e-6, rtol=1e-4)


def test_state_is_differentiable() -> None:
    """The losses on the clusters train the model."""
    x, edge_index = directed_input(CHANNELS, torch.float64)
    module = make(num_layers=2)
    _, state = module(x, edge_index, return_state=True)
    (grad,) = torch.autograd.grad(state.global_clusters.square().sum(), module.global_embedding)
    assert bool((grad != 0).any())


# Precision ---------------------------------------------------------------------------------------------


def relative_error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def test_float32_is_close_to_float64() -> None:
    x, edge_index = directed_input(dtype=torch.float64)
    conv = full_conv(dtype=torch.float64)
    wanted = conv(x, edge_index)
    got = conv.float()(x.float(), edge_index)
    assert got.dtype == torch.float32
    assert relative_error(got, wanted) < 1e-5


def test_bfloat16_runs_and_is_close() -> None:
    x, edge_index = directed_input()
    conv = full_conv(norm=None)
    wanted = conv(x, edge_index)
    got = copy.deepcopy(conv).bfloat16()(x.bfloat16(), edge_index)
    assert got.dtype == torch.bfloat16
    assert 0 < relative_error(got, wanted) < 0.05
    got.float().sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_and_is_close(dtype: Any) -> None:
    x, edge_index = directed_input()
    for module in (full_conv(norm=None), full_model(norm="layer").eval()):
        wanted = module(x, edge_index)
        with torch.autocast("cpu", dtype):
            got = module(x, edge_index)
            loss = got.float().square().sum()
        assert 0 < relative_error(got, wanted) < 0.05
        loss.backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == torch.float32
            assert bool(torch.isfinite(parameter.grad).all()), name


@pytest.mark.parametrize("mass", ["node", "paper"])
def test_autocast_float16_with_a_hub_beyond_the_range_of_float16(mass: str) -> None:
    """An ego of 70 000 nodes: its size has no float16, the messages have."""
    num_nodes = 70_000
    leaves = torch.arange(1, num_nodes)
    edge_index = torch.stack([leaves, torch.zeros_like(leaves)])
    x = features(num_nodes, 2, dtype=torch.float32)
    torch.manual_seed(0)
    conv = DCConv(2, 2, 2, mass=mass, local_iters=2, global_iters=2)
    with torch.no_grad():
        wanted = conv(x, edge_index)
        with torch.autocast("cpu", torch.float16):
            got = conv(x, edge_index)
    assert bool(torch.isfinite(got).all())
    assert relative_error(got, wanted) < 0.05


# Compilation -------------------------------------------------------------------------------------------


def compiled_conv(backend: str, use_graph: bool, **options: Any) -> None:
    torch._dynamo.reset()
    x, edge_index = directed_input()
    graph = EgoGraph.from_edge_index(edge_index, 10) if use_graph else edge_index
    eager = full_conv(**options)
    compiled = torch.compile(copy.deepcopy(eager), backend=backend, fullgraph=True)
    wanted, got = eager(x, graph), compiled(x, graph)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    weights = features(*wanted.shape, seed=3, dtype=torch.float32)
    (wanted * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, left), right in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(
            right.grad, left.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("use_graph", [False, True], ids=["edge_index", "EgoGraph"])
@pytest.mark.parametrize("options", [{}, {"mass": "paper", "num_local": 3}], ids=["defaults", "paper mass"])
def test_compiles_in_one_graph(use_graph: bool, options: dict[str, Any]) -> None:
    compiled_conv("aot_eager", use_graph, **options)


def test_compiles_with_inductor() -> None:
    compiled_conv("inductor", True)


def test_compiled_model_takes_graphs_of_other_sizes() -> None:
    torch._dynamo.reset()
    eager = DCGNN(5, 6, 2, NUM_GLOBAL).eval()
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True, dynamic=True)
    for name in ("directed", "barabasi-albert", "ring"):
        num_nodes, edges = GRAPHS[name]
        x, edge_index = features(num_nodes, 5, dtype=torch.float32), edge_tensor(edges)
        torch.testing.assert_close(compiled(x, edge_index), eager(x, edge_index), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graph", ["directed", "ring"])
def test_exports_with_a_graph(graph: str) -> None:
    num_nodes, edges = GRAPHS[graph]
    ego_graph = EgoGraph.from_edge_index(edge_tensor(edges), num_nodes)
    x = features(num_nodes, 5, dtype=torch.float32)
    conv = full_conv().eval()
    program = torch.export.export(conv, (x, ego_graph))
    torch.testing.assert_close(program.module()(x, ego_graph), conv(x, ego_graph))
    other = features(num_nodes, 5, seed=1, dtype=torch.float32)
    torch.testing.assert_close(program.module()(other, ego_graph), conv(other, ego_graph))


# Bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -0.1),
        ("alpha", 1.1),
        ("alpha", math.nan),
        ("beta", -1.0),
        ("beta", math.inf),
        ("beta", math.nan),
        ("lam", 0.0),
        ("lam", -2.0),
        ("lam", math.inf),
        ("lam", math.nan),
        ("num_layers", 0),
        ("num_local", 0),
        ("num_local", -1),
        ("num_local", 2.0),
        ("weight_period", 0),
        ("weight_period", -1),
        ("weight_period", 1.5),
        ("num_local", True),
        ("local_iters", 0),
        ("local_iters", -3),
        ("local_iters", 1.5),
        ("global_iters", 0),
        ("global_iters", "5"),
        ("local_cost_scale", "median"),
        ("local_cost_scale", None),
        ("global_cost_scale", "sum"),
        ("gamma", "constant"),
        ("mass", "unit"),
        ("aggr", "max"),
        ("local_init", "random"),
        ("transform", "linear"),
        ("norm", "group"),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("activation", "no-such-function"),
        ("activation", 3),
        ("node_activation", "no-such-function"),
        ("node_activation", 3),
        ("alpha", "half"),
        ("alpha", None),
        ("beta", None),
        ("lam", None),
        ("dropout", None),
    ],
)
def test_bad_options_are_named(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        DCMsgPassing(CHANNELS, NUM_GLOBAL, **{name: value})


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_bad_sizes_are_named(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="channels"):
        DCMsgPassing(value, NUM_GLOBAL)
    with pytest.raises((ValueError, TypeError), match="num_global"):
        DCMsgPassing(CHANNELS, value)


def test_unknown_options_are_refused() -> None:
    for build in (
        DCMsgPassing,
        lambda *args, **kw: DCConv(3, *args, **kw),
        lambda *a, **k: DCGNN(3, 3, *a, **k),
    ):
        with pytest.raises(TypeError, match="number_of_wheels"):
            build(CHANNELS, NUM_GLOBAL, number_of_wheels=4)


def test_conv_is_one_layer() -> None:
    with pytest.raises(TypeError, match="num_layers"):
        DCConv(3, 3, NUM_GLOBAL, num_layers=2)


@pytest.mark.parametrize("module", [lambda: make(), lambda: DCConv(3, 3, 2).double()], ids=["stack", "conv"])
@pytest.mark.parametrize(
    ("x", "edge_index", "name"),
    [
        (features(7, 2), edge_tensor(GRAPHS["ring"][1]), "x"),
        (features(7, 3)[0], edge_tensor(GRAPHS["ring"][1]), "x"),
        (features(7, 3)[None], edge_tensor(GRAPHS["ring"][1]), "x"),
        (features(7, 3).tolist(), edge_tensor(GRAPHS["ring"][1]), "x"),
        (torch.full((7, 3), math.nan, dtype=torch.float64), edge_tensor(GRAPHS["ring"][1]), "x"),
        (torch.full((7, 3), math.inf, dtype=torch.float64), edge_tensor(GRAPHS["ring"][1]), "x"),
        (torch.ones(7, 3, dtype=torch.int64), edge_tensor(GRAPHS["ring"][1]), "x"),
        (features(0, 3), edge_tensor([]), "x"),
        (features(7, 3), edge_tensor([(0, 7)]), "edge_index"),
        (features(7, 3), edge_tensor([(7, 0)]), "edge_index"),
        (features(7, 3), edge_tensor([(-1, 0)]), "edge_index"),
        (features(7, 3), torch.zeros(3, 4, dtype=torch.int64), "edge_index"),
        (features(7, 3), torch.zeros(4, dtype=torch.int64), "edge_index"),
        (features(7, 3), torch.zeros(2, 4), "edge_index"),
        (features(7, 3), torch.zeros(2, 4, dtype=torch.bool), "edge_index"),
        (features(7, 3), None, "edge_index"),
        (features(7, 3), [[0, 1], [1, 0]], "edge_index"),
        (features(7, 3), EgoGraph.from_edge_index(edge_tensor([(0, 1)]), 6), "nodes"),
    ],
    ids=[
        "x too narrow",
        "x 1-dim",
        "x 3-dim",
        "x a list",
        "x NaN",
        "x infinite",
        "x int",
        "no nodes",
        "target out of range",
        "source out of range",
        "negative",
        "three rows",
        "one row",
        "float edges",
        "bool edges",
        "no edges given",
        "edges as lists",
        "graph of another size",
    ],
)
def test_bad_input_is_named(module: Any, x: Any, edge_index: Any, name: str) -> None:
    """A node index out of range is an IndexError, everything else a ValueError or TypeError."""
    layer = module()
    with pytest.raises((ValueError, TypeError, IndexError), match=rf"\b{name}\b"):
        layer(x, edge_index)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_one_nan_is_found_by_either_problem(alpha: float) -> None:
    num_nodes, edges = GRAPHS["ring"]
    x = features(num_nodes)
    x[4, 1] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        make(alpha=alpha)(x, edge_tensor(edges))


def test_bad_model_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="num_nodes"):
        DCGNN(3, 4, 2, 2, adjacency_embedding=True)
    with pytest.raises(ValueError, match="num_mlp_layers"):
        DCGNN(3, 4, 2, 2, num_mlp_layers=0)
    with pytest.raises(ValueError, match="num_layers"):
        DCGNN(3, 4, 2, 2, num_layers=0)
    with pytest.raises(ValueError, match="dropout"):
        DCGNN(3, 4, 2, 2, dropout=1.5)
    DCGNN(3, 4, 2, 2, adjacency_embedding=True, num_nodes=0)
    model = DCGNN(3, 4, 2, 2, adjacency_embedding=True, num_nodes=5)
    with pytest.raises(ValueError, match="num_nodes"):
        model(features(7, 3, dtype=torch.float32), edge_tensor([(0, 1)]))
    with pytest.raises((ValueError, TypeError), match=r"\bx\b"):
        DCGNN(3, 4, 2, 2)(features(7, 2, dtype=torch.float32), edge_tensor([(0, 1)]))
