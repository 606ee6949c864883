"""Baselines and the sparse first layer that they share with DC-GNN."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from torch_geometric.nn import LINKX

from dcgnn.baselines import BASELINES
from dcgnn.data import load_graph
from dcgnn.nn import sparse_input
from dcgnn.nn.prepared_convs import (
    PreparedGATConv,
    PreparedGCNConv,
    PreparedGINConv,
    PreparedLINKX,
    PreparedMatrix,
    PreparedSAGEConv,
    prepared_graph,
    source_egos,
)
from dcgnn.nn.sparse_input import dropout_linear
from dcgnn.recipe import Recipe
from dcgnn_kernels import EgoGraph

OPTIONS = {"hidden_channels": 16, "num_layers": 2, "dropout": 0.2}


@pytest.mark.parametrize("model", BASELINES)
def test_baselines_learn_separable_classes(model):
    data = load_graph("sbm:num_nodes=200,avg_degree=4,signal=4.0,homophily=0.9")
    _, result = Recipe(model, OPTIONS, {"epochs": 40, "lr": 0.02}).run(data)
    assert result.test_metric > 0.85


def test_mlp_ignores_the_graph():
    data = load_graph("sbm:num_nodes=50,avg_degree=4")
    model = Recipe("mlp", OPTIONS).build(data).eval()
    assert torch.equal(model(data.x, data.edge_index), model(data.x, data.edge_index[:, :0]))


def test_input_dropout_acts_on_the_features_alone():
    data = load_graph("sbm:num_nodes=50,avg_degree=4")
    model = Recipe("mlp", OPTIONS | {"dropout": 0.0, "input_dropout": 0.5}).build(data).train()
    assert not torch.equal(model(data.x, data.edge_index), model(data.x, data.edge_index))
    assert Recipe("gcn", OPTIONS).build(data).input_dropout == OPTIONS["dropout"]
    with pytest.raises(ValueError, match="input_dropout"):
        Recipe("gcn", OPTIONS | {"input_dropout": 1.0}).build(data)


@pytest.mark.parametrize("model", ["mlp", "gcn", "gat", "sage", "gin"])
def test_repeated_maps_are_one_set_of_weights(model):
    data = load_graph("sbm:num_nodes=50,avg_degree=4")
    options = OPTIONS | {"num_layers": 4, "norm": "batch", "residual": True}
    tied, shallow = (
        Recipe(model, options | {"weight_period": 1, "num_layers": layers}).build(data) for layers in (4, 1)
    )
    own_norms = 3 * sum(parameter.numel() for parameter in tied.blocks[0].norm.parameters())
    count = [sum(parameter.numel() for parameter in net.parameters()) for net in (tied, shallow)]
    assert count[0] == count[1] + own_norms
    plain = Recipe(model, options).build(data)
    plain.load_state_dict(tied.state_dict())
    assert torch.equal(tied.eval()(data.x, data.edge_index), plain.eval()(data.x, data.edge_index))
    with pytest.raises(ValueError, match="weight_period"):
        Recipe(model, options | {"weight_period": 0}).build(data)


@pytest.fixture
def edges_of_all_kinds():
    """Edges in both directions and in one, a node without any, and self-loops at some nodes."""
    data = load_graph("sbm:num_nodes=60,avg_degree=4")
    loops = torch.arange(0, 60, 2).repeat(2, 1)
    one_way = torch.tensor([[0, 1, 2], [3, 3, 3]])
    edge_index = torch.cat([data.edge_index, loops, one_way], dim=1).unique(dim=1)
    edge_index = edge_index[:, (edge_index != 59).all(0)]
    return data, edge_index[:, torch.randperm(edge_index.size(1))]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((model, {}) for model in ("gcn", "gat", "sage", "gin", "linkx")),
        *((model, {"num_layers": 3, "weight_period": 1}) for model in ("gcn", "gat", "sage", "gin")),
        ("linkx", {"num_edge_layers": 2, "num_node_layers": 2}),
    ],
)
def test_a_prepared_graph_gives_what_the_edges_give(model, options, edges_of_all_kinds):
    data, edge_index = edges_of_all_kinds
    results = []
    for prepared in (False, True):
        torch.manual_seed(0)
        net = Recipe(model, OPTIONS | options).build(data).double().eval()
        graph = net.graph_of(edge_index, 60) if prepared else edge_index
        assert isinstance(graph, EgoGraph) is (prepared and model == "gat")
        x = data.x.double().requires_grad_()
        logits = net(x, graph)
        logits.square().sum().backward()
        results.append([logits, x.grad, *(parameter.grad for parameter in net.parameters())])
    for edges, prepared in zip(*results, strict=True):
        torch.testing.assert_close(prepared, edges, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["gcn", "mean", "sum", "egos"])
def test_gradients_on_a_prepared_graph(form, edges_of_all_kinds):
    _, edge_index = edges_of_all_kinds
    edge_index = edge_index[:, (edge_index < 12).all(0)]
    layer = {
        "gcn": lambda: PreparedGCNConv(4),
        "mean": lambda: PreparedSAGEConv(4),
        "sum": lambda: PreparedGINConv(torch.nn.Linear(4, 4)),
        "egos": lambda: PreparedGATConv(4, 2),
    }[form]().double()
    graph = prepared_graph(form, edge_index, 13)
    assert graph is not edge_index
    x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    parameters = tuple(layer.parameters())
    # In place of the parameters themselves, whose values gradcheck moves in turn.
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, graph))

    assert torch.autograd.gradcheck(run, (x, *parameters))


def test_attention_scores_do_not_overflow():
    data = load_graph("sbm:num_nodes=40,avg_degree=4")
    conv = PreparedGATConv(8, 2)
    x = 1e4 * torch.randn(40, 8)
    prepared = conv(x, source_egos(data.edge_index, 40))
    torch.testing.assert_close(prepared, conv(x, data.edge_index))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # where dynamo resumes after what it does not trace
@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gin", "linkx"])
def test_a_model_that_has_run_can_be_copied_and_compiled(model, edges_of_all_kinds):
    data, edge_index = edges_of_all_kinds
    net = Recipe(model, OPTIONS).build(data).eval()
    graph = net.graph_of(edge_index, 60)
    logits = net(data.x, graph)
    assert torch.equal(copy.deepcopy(net)(data.x, graph), logits)
    torch.testing.assert_close(net.double()(data.x.double(), graph).float(), logits)
    torch.testing.assert_close(torch.compile(net.float(), backend="eager")(data.x, graph), logits)


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gin", "linkx"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_prepared_graph_takes_bfloat16(model, autocast, edges_of_all_kinds):
    data, edge_index = edges_of_all_kinds
    torch.manual_seed(0)
    net = Recipe(model, OPTIONS).build(data).eval()
    graph = net.graph_of(edge_index, 60)
    expected = net(data.x, graph)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        half = net(data.x, graph) if autocast else net.bfloat16()(data.x.bfloat16(), graph)
        half.float().sum().backward()
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)


def test_unknown_form():
    with pytest.raises(ValueError, match="form must be sum, mean or gcn, got 'max'"):
        PreparedMatrix("max", torch.tensor([[0], [1]]), 2)


def test_what_has_no_prepared_form_stays_edges():
    data = load_graph("sbm:num_nodes=60,avg_degree=4")
    twice = torch.cat([data.edge_index, data.edge_index[:, :1]], dim=1)
    for model in ("sage", "gat", "linkx"):
        net = Recipe(model, OPTIONS).build(data)
        assert net.graph_of(twice, 60) is twice
        none = data.edge_index[:, :0]
        assert net.graph_of(none, 60) is none
    assert Recipe("mlp", OPTIONS).build(data).graph_of(data.edge_index, 60) is data.edge_index


def test_linkx_is_pygs(monkeypatch):
    """The same weights for the same seed, and the same logits, also over bags of words."""
    monkeypatch.setattr(sparse_input, "MIN_ENTRIES", 0)
    data = load_graph("sbm:num_nodes=60,avg_degree=4")
    x = (torch.rand(60, 40) < 0.1).float()
    for seed, node_layers in ((0, 1), (1, 2)):
        sizes = (60, 40, 16, 2, 2, 2, node_layers, 0.0)
        torch.manual_seed(seed)
        theirs = LINKX(*sizes)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        ours = PreparedLINKX(*sizes)
        assert torch.equal(torch.get_rng_state(), state)
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value)
        expected = theirs(x, data.edge_index)
        torch.testing.assert_close(ours(x, ours.graph_of(data.edge_index, 60)), expected)
        assert sparse_input._bags(x) is not None


def test_unknown_model():
    with pytest.raises(ValueError, match="model must be one of"):
        Recipe("bert")


@pytest.fixture
def sparse_x(monkeypatch):
    monkeypatch.setattr(sparse_input, "MIN_ENTRIES", 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 40, generator=generator, dtype=torch.float64)
    x[torch.rand(30, 40, generator=generator) > 0.05] = 0.0
    x[7] = 0.0
    return x


def test_sparse_first_layer_is_the_dense_one(sparse_x):
    weight = torch.randn(8, 40, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert sparse_input._bags(sparse_x) is not None
    out = dropout_linear(sparse_x, weight, bias, 0.5, False)
    expected = functional.linear(sparse_x, weight, bias)
    assert torch.allclose(out, expected)
    gradient = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (weight, bias), gradient),
        torch.autograd.grad(expected, (weight, bias), gradient),
        strict=True,
    ):
        assert torch.allclose(ours, theirs)
    assert torch.autograd.gradcheck(lambda w, b: dropout_linear(sparse_x, w, b, 0.0, True), (weight, bias))


def test_sparse_dropout_keeps_the_mean(sparse_x):
    weight = torch.eye(40, dtype=torch.float64)
    torch.manual_seed(0)
    drawn = torch.stack([dropout_linear(sparse_x, weight, None, 0.5, True) for _ in range(2000)])
    present = sparse_x > 0
    assert (drawn[:, ~present] == 0).all()
    values = drawn[:, present]
    assert torch.isclose(values, 2 * sparse_x[present]).logical_or(values == 0).all()
    assert torch.allclose(values.mean(0), sparse_x[present], rtol=0.15)


def test_sparse_first_layer_sees_changes_in_place(sparse_x):
    weight = torch.eye(40, dtype=torch.float64)
    dropout_linear(sparse_x, weight, None, 0.0, False)
    sparse_x[3, 3] = 5.0
    assert torch.equal(dropout_linear(sparse_x, weight, None, 0.0, False), sparse_x)


def test_dense_features_and_their_gradient_take_the_dense_way(sparse_x):
    assert sparse_input._bags(torch.ones(10, 10)) is None
    x = sparse_x.clone().requires_grad_()
    assert sparse_input._bags(x) is None
    dropout_linear(x, torch.eye(40, dtype=torch.float64), None, 0.0, False).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
