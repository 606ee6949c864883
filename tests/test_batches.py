"""Batches of graphs, sampled neighbourhoods, and inference in chunks: equal to the graphs on their own."""

from __future__ import annotations

import pytest
import torch
from graphs import awkward, both_ways, random_graphs, star
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import COST_SCALES, ITERS, TOLERANCE, compare_with_reference
from torch_geometric import typing as installed
from torch_geometric.data import Batch, Data
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    NeighborLoader,
    NodeLoader,
)
from torch_geometric.sampler import NeighborSampler
from torch_geometric.utils import coalesce, subgraph

import dcgnn_kernels
from dcgnn import DCGNN, DCConv, DCMsgPassing, orthogonality_loss, similarity_loss, training_loss
from dcgnn.baselines import BASELINES
from dcgnn.data import GraphData, load_graph
from dcgnn.data.loaders import InMemoryNeighborSampler, neighbor_loader
from dcgnn.engines import BatchConfig, GraphBatches, make_engine
from dcgnn.partition import owners
from dcgnn.training import TrainConfig, train
from dcgnn_kernels import EgoGraph, reference


@st.composite
def batches(draw: st.DrawFn) -> torch.Tensor:
    """Some graphs, none without nodes, sorted or not."""
    num_graphs = draw(st.integers(1, 4))
    rest = draw(st.lists(st.integers(0, num_graphs - 1), max_size=8))
    batch = torch.tensor([*range(num_graphs), *rest])
    return batch.sort().values if draw(st.booleans()) else batch.flip(0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    batch=batches(),
    num_global=st.integers(1, 4),
    num_iters=st.sampled_from(ITERS),
    cost_scale=st.sampled_from(COST_SCALES),
    shared=st.booleans(),
)
@settings(max_examples=25)
def test_every_graph_is_a_global_problem_of_its_own(
    batch, num_global, num_iters, cost_scale, shared, dtype, device
):
    batch = batch.to(device)
    shape = (num_global, 3) if shared else (int(batch.max()) + 1, num_global, 3)
    inputs = tuple(torch.randn(s, dtype=torch.float64, device=device) for s in ((batch.numel(), 3), shape))
    options = (0.7, num_iters, cost_scale)
    compare_with_reference(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, *options, batch=batch),
        lambda z, c: reference.global_sinkhorn(z, c, *options, batch=batch),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_gradcheck_and_opcheck_with_fewer_egos_than_nodes(num_clusters, device):
    graphs = EgoGraph.from_batch(torch.tensor([1, 0, 1, 1, 0, 2], device=device))
    make = {"dtype": torch.float64, "device": device, "requires_grad": True}
    z, centroids = torch.randn(6, 3, **make), torch.randn(3, num_clusters, 3, **make)
    assign = torch.rand(6, num_clusters, **make)
    solve = dcgnn_kernels.local_sinkhorn
    torch.autograd.gradcheck(lambda z, c: solve(z, c, graphs, 0.7, 2, "max"), (z, centroids))
    torch.autograd.gradcheck(lambda p, c: dcgnn_kernels.cluster_scatter(p, c, graphs), (assign, centroids))
    arguments = (z, centroids, *graphs.arrays(), num_clusters, 0.7, 2, "max", 1e-10, 10)
    torch.library.opcheck(torch.ops.dcgnn.local_sinkhorn.default, arguments)
    torch.library.opcheck(torch.ops.dcgnn.cluster_scatter.default, (assign, centroids, *graphs.arrays()))


def test_bad_batches_are_named():
    with pytest.raises(ValueError, match=r"batch: graph 1 has no nodes"):
        EgoGraph.from_batch(torch.tensor([0, 2, 2]))
    with pytest.raises(IndexError, match=r"batch must be in \[0, 2\)"):
        EgoGraph.from_batch(torch.tensor([0, 2]), num_graphs=2)
    huge = torch.tensor([0, 2**60])  # nothing of that size is made
    with pytest.raises(ValueError, match="graphs cannot all have nodes, there are 2"):
        EgoGraph.from_batch(huge)
    no_edges = torch.zeros(2, 0, dtype=torch.int64)
    for call in (
        lambda: dcgnn_kernels.global_sinkhorn(torch.randn(2, 2), torch.randn(3, 2), batch=huge),
        lambda: DCMsgPassing(2, 2)(torch.randn(2, 2), no_edges, batch=huge),
    ):
        with pytest.raises(IndexError, match=f"batch names graph {2**60}, but has 2 nodes: give num_graphs"):
            call()
    with pytest.raises(ValueError, match="num_graphs must be given with batch"):
        DCMsgPassing(2, 2)(torch.randn(2, 2), no_edges, num_graphs=2)
    with pytest.raises(ValueError, match="batch must be an int64 tensor"):
        EgoGraph.from_batch(torch.tensor([0.0]))
    graphs = EgoGraph.from_batch(torch.tensor([0, 0, 1]))
    z = torch.randn(3, 2)
    for call in (
        lambda: dcgnn_kernels.local_sinkhorn(z, None, graphs),
        lambda: dcgnn_kernels.local_centroids(z, graphs),
        lambda: DCMsgPassing(2, 2)(z, graphs),
    ):
        with pytest.raises(ValueError, match="graph must have an ego for every node, got 2 egos and 3 nodes"):
            call()
    with pytest.raises(
        ValueError, match=r"centroids must have shape \[N, K, F\] = \[2, 2, 2\], got \[3, 2, 2\]"
    ):
        dcgnn_kernels.local_sinkhorn(z, torch.randn(3, 2, 2), graphs)
    with pytest.raises(ValueError, match="an ego for every node"):
        torch.ops.dcgnn.local_centroids(z, *graphs.arrays(), 2)
    with pytest.raises(ValueError, match="batch must have an entry for each of the 3 nodes"):
        DCMsgPassing(2, 2)(z, torch.zeros(2, 0, dtype=torch.int64), batch=torch.tensor([0]))


def disjoint_union() -> tuple[list[Data], Batch]:
    graphs = [awkward(), star(6), (torch.zeros(2, 0, dtype=torch.int64), 1)]
    data = [Data(x=torch.randn(n, 4, dtype=torch.float64), edge_index=e, num_nodes=n) for e, n in graphs]
    return data, Batch.from_data_list(data)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mass": "paper", "gamma": "exact", "num_local": 3, "global_cost_scale": "max"},
        {"transform": "per-cluster", "activation": "tanh", "ego_readout": True, "norm": "layer"},
        {"aggr": "symmetric", "ego_readout": True},
        {"alpha": 1.0},
        {"alpha": 0.0},
    ],
    ids=str,
)
def test_a_batch_computes_every_graph_as_if_it_were_alone(options):
    data, batch = disjoint_union()
    model = DCGNN(4, 6, 2, 4, num_layers=2, **options).double()
    out, state = model(batch.x, batch.edge_index, return_state=True, batch=batch.batch)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = [model(graph.x, graph.edge_index, return_state=True) for graph in data]
    expected = torch.cat([part for part, _ in parts])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    (expected * weight).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-11)
    if model.message_passing.alpha > 0:
        clusters = torch.stack([part.global_clusters for _, part in parts])
        torch.testing.assert_close(state.global_clusters, clusters, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="the objective is that of one whole graph"):
        state.layers[0].objective  # noqa: B018


def empty_graph() -> Data:
    return Data(x=torch.zeros(0, 4, dtype=torch.float64), edge_index=torch.zeros(2, 0, dtype=torch.int64))


@pytest.mark.parametrize("options", [{}, {"transform": "per-cluster", "global_momentum": 0.5}], ids=str)
def test_graphs_without_nodes_have_no_rows_and_clusters_of_zero(options):
    data, _ = disjoint_union()
    batch = Batch.from_data_list([empty_graph(), data[0], empty_graph(), data[1], data[2], empty_graph()])
    full = Batch.from_data_list(data)
    y = torch.randint(0, 2, (full.num_nodes,))
    found = []
    for union, num_graphs in ((batch, batch.num_graphs), (full, None)):
        torch.manual_seed(0)
        model = DCGNN(4, 6, 2, 4, num_layers=2, **options).double()
        given = {"batch": union.batch, "num_graphs": num_graphs}
        out, state = model(union.x, union.edge_index, return_state=True, **given)
        training_loss(out, y, state, ortho_weight=0.5, sim_weight=0.5).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        chunked = model.inference(union.x, union.edge_index, 4, **given)
        found.append((out, model.message_passing.global_embedding, chunked, *grads))
        clusters = state.global_clusters
        if union is batch:
            assert clusters.shape == (6, 4, 6)
            assert not clusters[[0, 2, 5]].any()
            clusters = clusters[[1, 3, 4]]
        found[-1] = (clusters, *found[-1])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_the_op_gives_clusters_of_zero_to_graphs_without_nodes(shared):
    batch = torch.tensor([3, 1, 3, 3, 1])
    inputs = (torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64))
    if not shared:
        inputs = inputs[0], torch.randn(6, 2, 3, dtype=torch.float64)
    _, clusters = dcgnn_kernels.global_sinkhorn(*inputs, batch=batch)
    assert clusters.shape == (4 if shared else 6, 2, 3)
    assert clusters.flatten(1).any(1).nonzero()[:, 0].tolist() == [1, 3]
    compare_with_reference(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, batch=batch),
        lambda z, c: reference.global_sinkhorn(z, c, batch=batch),
        inputs,
        torch.float64,
    )


@pytest.mark.parametrize("mass", ["node", "paper"])
def test_one_graph_in_many_batches(mass):
    """What is kept between calls belongs to a batch, not to the place in memory where one stood."""
    edge_index = torch.tensor([[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]])
    graph, x = EgoGraph.from_edge_index(edge_index, 12), torch.randn(12, 4, dtype=torch.float64)
    layer = DCMsgPassing(4, num_global=2, mass=mass).double()
    for _ in range(20):
        batch = torch.randint(0, 3, (6,)).repeat_interleave(2)
        batch[:6] = torch.tensor([0, 0, 1, 1, 2, 2])
        fresh = layer(x, edge_index, batch=batch)
        torch.testing.assert_close(layer(x, graph, batch=batch), fresh, rtol=0, atol=0)


def test_losses_of_a_batch_are_means_over_its_graphs():
    data, batch = disjoint_union()
    model = DCMsgPassing(4, 4).double()
    _, state = model(batch.x, batch.edge_index, return_state=True, batch=batch.batch)
    y = torch.randint(0, 2, (batch.num_nodes,))
    logits = torch.randn(batch.num_nodes, 2, dtype=torch.float64)
    both = training_loss(logits, y, state, ortho_weight=1.0, sim_weight=1.0)
    total = torch.nn.functional.cross_entropy(logits, y)
    each = [model(graph.x, graph.edge_index, return_state=True)[1] for graph in data]
    total = total + sum(orthogonality_loss(one.global_clusters) for one in each) / len(each)
    labels = y.split([graph.num_nodes for graph in data])
    pull = [
        similarity_loss(one.z, one.global_clusters, own, 2) * own.numel()
        for one, own in zip(each, labels, strict=True)
    ]
    torch.testing.assert_close(both, total + sum(pull) / y.numel())


def test_conv_takes_a_batch():
    data, batch = disjoint_union()
    conv = DCConv(4, 5, num_global=3).double()
    out = conv(batch.x, batch.edge_index, batch=batch.batch)
    torch.testing.assert_close(out, torch.cat([conv(graph.x, graph.edge_index) for graph in data]))


def test_the_moving_average_follows_the_clusters_of_training():
    x, (edge_index, _) = torch.randn(6, 4), star(6)
    layers = DCMsgPassing(4, 3, num_layers=2, global_momentum=0.75)
    assert "global_embedding" in dict(layers.named_buffers())
    before = layers.global_embedding.clone()
    _, state = layers(x, edge_index, return_state=True)
    torch.testing.assert_close(
        layers.global_embedding, 0.75 * before + 0.25 * state.layers[0].global_clusters.detach()
    )
    layers.eval()
    kept = layers.global_embedding.clone()
    layers(x, edge_index)
    assert torch.equal(layers.global_embedding, kept)
    with pytest.raises(ValueError, match=r"global_momentum must be in \[0, 1\)"):
        DCMsgPassing(4, 3, global_momentum=1.0)


def sampled_graph(num_nodes: int = 40) -> Data:
    edge_index = both_ways(torch.randint(0, num_nodes, (2, 60)))
    return Data(x=torch.randn(num_nodes, 4, dtype=torch.float64), edge_index=edge_index)


def numbered_graph() -> Data:
    data = sampled_graph()
    data.number = torch.arange(40)
    return data


@given(
    case=random_graphs(),
    limits=st.lists(st.sampled_from([1, 2, -1]), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_sampled_edges_exist_and_keep_the_limits(case, limits, seed):
    edge_index, num_nodes = case
    if num_nodes == 0:
        return
    torch.manual_seed(seed)
    data = Data(x=torch.arange(num_nodes, dtype=torch.float64)[:, None], edge_index=edge_index)
    loader = neighbor_loader(data, limits, batch_size=2, input_nodes=torch.arange(num_nodes), seed=seed)
    seeds = []
    for batch in loader:
        seeds += batch.n_id[: batch.batch_size].tolist()
        assert batch.n_id.unique().numel() == batch.n_id.numel()
        torch.testing.assert_close(batch.x[:, 0].long(), batch.n_id)
        assert torch.equal(batch.n_id[batch.edge_index], edge_index[:, batch.e_id])
        assert batch.e_id.unique().numel() == batch.e_id.numel()
        wanted = torch.bincount(edge_index[1], minlength=num_nodes)[batch.n_id[: batch.batch_size]]
        if limits[0] != -1:
            wanted = wanted.clamp(max=limits[0])
        found = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)[: batch.batch_size]
        assert torch.equal(found, wanted)
    assert sorted(seeds) == list(range(num_nodes))


def test_the_sampler_is_that_of_pyg_where_pyg_lib_is_installed():
    data = sampled_graph()
    loader = neighbor_loader(data, [2], batch_size=4, input_nodes=torch.arange(40))
    wanted = NeighborSampler if installed.WITH_PYG_LIB else InMemoryNeighborSampler
    assert type(loader.node_sampler) is wanted


@pytest.mark.parametrize("own", [True, False])
def test_samples_are_uniform(own):
    """Those of the sampler here, and those of the one that is chosen."""
    edge_index, num_nodes = star(6)
    data, seeds = Data(edge_index=edge_index, num_nodes=num_nodes), torch.tensor([0])
    loader = neighbor_loader(data, [2], batch_size=1, input_nodes=seeds)
    if own:
        sampler = InMemoryNeighborSampler(edge_index, num_nodes, [2])
        loader = NodeLoader(data, sampler, input_nodes=seeds)
    counts = torch.zeros(num_nodes)
    for _ in range(500):
        for batch in loader:
            counts[batch.n_id[1:]] += 1
    # 500 draws of 2 out of 5: 200 each, standard deviation 11.
    assert counts[0] == 0
    assert (counts[1:] - 200).abs().max() < 60


def test_a_complete_sample_gives_what_the_whole_graph_gives():
    data = sampled_graph()
    local = DCGNN(4, 6, 2, 4, num_layers=2, alpha=0.0, transform="per-cluster", ego_readout=True).double()
    whole = local(data.x, data.edge_index)
    # A layer reads the egos of a node and their members: two hops.
    for batch in neighbor_loader(data, [-1] * 4, batch_size=7, input_nodes=torch.arange(40)):
        out = local(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(out, whole[batch.n_id[: batch.batch_size]], rtol=1e-10, atol=1e-12)
    # The global problem is that of the batch's nodes: with all of them, that of the graph.
    model = DCGNN(4, 6, 2, 4, num_layers=2).double()
    (batch,) = neighbor_loader(data, [-1], batch_size=40, input_nodes=torch.arange(40))
    out = model(batch.x, batch.edge_index)
    torch.testing.assert_close(out, model(data.x, data.edge_index)[batch.n_id], rtol=1e-10, atol=1e-12)


def check_induced(model: DCGNN, data: Data, batch: Data) -> None:
    """A batch has all edges between its nodes, and the model computes on it what it computes on those."""
    edges, _ = subgraph(batch.number, data.edge_index, relabel_nodes=False, num_nodes=40)
    found = batch.number[batch.edge_index]
    assert sorted(zip(*found.tolist(), strict=True)) == sorted(zip(*edges.tolist(), strict=True))
    out = model(batch.x, batch.edge_index)
    place = torch.full((40,), -1)
    place[batch.number] = torch.arange(batch.num_nodes)
    torch.testing.assert_close(out, model(data.x[batch.number], place[edges]), rtol=1e-10, atol=1e-12)
    model.zero_grad()
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


class Clusters(ClusterData):
    """PyG's clusters; METIS by pymetis, or ranges, where neither pyg-lib nor torch-sparse has it."""

    def _metis(self, edge_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
        try:
            return super()._metis(edge_index, num_nodes)
        except ImportError:
            return owners(EgoGraph.from_edge_index(edge_index, num_nodes), self.num_parts, "auto")


@pytest.mark.parametrize(("parts", "together"), [(1, 1), (4, 1), (4, 3), (4, 4)])
def test_batches_of_cluster_loader(parts, together):
    data, model = numbered_graph(), DCGNN(4, 6, 2, 4).double()
    loader = ClusterLoader(Clusters(data, parts, log=False), batch_size=together, shuffle=True)
    numbers = []
    for batch in loader:
        check_induced(model, data, batch)
        numbers += batch.number.tolist()
    assert sorted(numbers) == list(range(40))
    if parts == together:
        whole = model(data.x, data.edge_index)[batch.number]
        torch.testing.assert_close(model(batch.x, batch.edge_index), whole, rtol=1e-10, atol=1e-12)


SAINT = {
    "node": lambda data: GraphSAINTNodeSampler(data, batch_size=12, num_steps=3),
    "edge": lambda data: GraphSAINTEdgeSampler(data, batch_size=12, num_steps=3),
    "walk": lambda data: GraphSAINTRandomWalkSampler(data, batch_size=5, walk_length=3, num_steps=3),
}


@pytest.mark.skipif(not installed.WITH_TORCH_SPARSE, reason="GraphSAINT needs torch-sparse")
@pytest.mark.parametrize("kind", SAINT)
def test_batches_of_graph_saint(kind):
    data, model = numbered_graph(), DCGNN(4, 6, 2, 4).double()
    data.edge_index = coalesce(data.edge_index)
    for batch in SAINT[kind](data):
        assert 0 < batch.num_nodes < 40
        check_induced(model, data, batch)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
@pytest.mark.skipif(
    not (installed.WITH_PYG_LIB or installed.WITH_TORCH_SPARSE),
    reason="NeighborLoader needs pyg-lib or torch-sparse",
)
def test_batches_of_neighbor_loader():
    data = sampled_graph()
    model = DCGNN(4, 6, 2, 4, num_layers=2, alpha=0.0).double()
    whole = model(data.x, data.edge_index)
    for batch in NeighborLoader(data, num_neighbors=[-1] * 4, batch_size=7):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(out, whole[batch.n_id[: batch.batch_size]], rtol=1e-10, atol=1e-12)
    for batch in NeighborLoader(data, num_neighbors=[2, 2], batch_size=7):
        out = model(batch.x, batch.edge_index)
        out.sum().backward()
        assert torch.isfinite(out).all()


def test_induced_subgraphs():
    """What the loaders above give, on any nodes: without edges, and a single edge."""
    data, model = numbered_graph(), DCGNN(4, 6, 2, 4).double()
    for count in (1, 2, 25, 40):
        nodes = torch.randperm(40)[:count].sort().values
        edges, _ = subgraph(nodes, data.edge_index, relabel_nodes=True, num_nodes=40)
        check_induced(model, data, Data(x=data.x[nodes], edge_index=edges, number=nodes))
    twin = both_ways(torch.tensor([[0], [1]]))
    assert model(data.x[:2], twin).shape == (2, 2)


@pytest.mark.parametrize("chunk_size", [1, 7, 40])
def test_inference_in_chunks_is_the_forward(chunk_size):
    data = sampled_graph()
    directed = torch.cat([data.edge_index[:, :30], awkward()[0]], dim=1)
    for options in (
        {},
        {"num_local": 3, "ego_readout": True, "norm": "batch", "mass": "paper", "aggr": "mean"},
        {"ego_readout": True, "aggr": "symmetric"},
    ):
        model = DCGNN(4, 6, 2, 4, num_layers=3, transform="per-cluster", **options).double()
        model(data.x, data.edge_index)
        expected = model.eval()(data.x, directed)
        out = model.train().inference(data.x, directed, chunk_size)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        assert model.training
        assert not out.requires_grad
        batch = torch.arange(40) % 3
        batch[data.edge_index.flatten().unique()] = 0  # only nodes without edges are apart
        expected = model.eval()(data.x, data.edge_index, batch=batch)
        out = model.inference(data.x, data.edge_index, chunk_size, batch=batch)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"ego_readout": True, "norm": "batch", "residual": True}], ids=str)
def test_inference_in_chunks_under_autocast(options):
    data = sampled_graph()
    torch.manual_seed(0)
    model = DCGNN(4, 6, 2, 4, num_layers=2, **options).eval()
    for batch in (None, torch.zeros(40, dtype=torch.int64)):
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(data.x.float(), data.edge_index, batch=batch)
            out = model.inference(data.x.float(), data.edge_index, 7, batch=batch)
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02)


def test_training_on_batches_learns_resumes_and_is_told_apart(tmp_path):
    data = load_graph("sbm:num_nodes=120,homophily=0.9,signal=2.0,num_features=8")
    batches = BatchConfig(num_neighbors=(5, 5), batch_size=16, chunk_size=50)

    def run(epochs, path=None, **kwargs):
        torch.manual_seed(0)
        model = DCGNN(8, 16, 2, 4, dropout=0.2)
        return train(model, data, TrainConfig(epochs=epochs, lr=0.02), checkpoint=path, **kwargs)

    path = tmp_path / "run.pt"
    whole = run(6, batches=batches)
    assert whole.test_metric > 0.8
    run(3, path, batches=batches, checkpoint_every=1)
    again = run(6, path, batches=batches, resume=True)
    assert again.history.loss == whole.history.loss
    assert again.test_metric == whole.test_metric
    with pytest.raises(RuntimeError, match="loader is 'neighbor' in the checkpoint and None here"):
        run(6, path, resume=True)
    for name in ("batch_size", "chunk_size"):
        with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
            BatchConfig(**{name: 0})


def union_of_graphs() -> tuple[GraphData, torch.Tensor]:
    """Five graphs, one of them without edges, with a gap in their numbers and edges in any order."""
    data = load_graph("sbm:num_nodes=60,num_features=4")
    batch = torch.tensor([0, 1, 2, 4, 5]).repeat_interleave(torch.tensor([20, 1, 9, 14, 16]))
    edges = data.edge_index[:, torch.randperm(data.num_edges)]
    ends = batch[edges]
    data.edge_index = edges[:, ends[0] == ends[1]]
    for mask in data.masks().values():
        mask[batch == 4] = False  # not trained, not scored
    data.val_mask[batch == 5] = False
    return data, batch


@pytest.mark.parametrize("name", ["dcgnn", "gcn"])
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_batches_of_whole_graphs(name, batch_size):
    data, batch = union_of_graphs()
    data.x = data.x.double()
    if name == "dcgnn":
        model = DCGNN(4, 6, 2, 3, alpha=0.6).double()
        expected = model(data.x, data.edge_index, batch=batch)
    else:
        model = BASELINES[name](4, 6, 2, cached=False).double()
        expected = model(data.x, data.edge_index)
    engine = make_engine(model, data, TrainConfig(), None, GraphBatches(batch, batch_size))
    same = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(engine.predict(), expected, **same)
    scored = engine.predict("val_mask")
    torch.testing.assert_close(scored[data.val_mask], expected[data.val_mask], **same)
    assert not scored[(batch == 4) | (batch == 5)].any(), "only what is asked for is computed"

    trained = [number for number in (0, 1, 2, 5) if data.train_mask[batch == number].any()]
    losses = [loss.item() for loss in engine.losses(0)]
    assert len(losses) == -(-len(trained) // batch_size)
    if batch_size == 1:
        masks = [data.train_mask & (batch == number) for number in trained]
        one_by_one = [training_loss(expected, data.y, mask=mask).item() for mask in masks]
        assert sorted(losses) == pytest.approx(sorted(one_by_one))
    if batch_size == 100:
        assert losses == pytest.approx([training_loss(expected, data.y, mask=data.train_mask).item()])


def test_training_on_whole_graphs_resumes_and_is_told_apart(tmp_path):
    data = load_graph("tree-neighborsmatch:depth=2")
    batches = GraphBatches(torch.arange(data.num_nodes) // 7, batch_size=16)

    def run(epochs, path=None, **kwargs):
        torch.manual_seed(0)
        model = DCGNN(10, 16, 4, 8, num_layers=1, alpha=1.0, dropout=0.2)
        return train(model, data, TrainConfig(epochs=epochs, lr=0.02), checkpoint=path, **kwargs)

    path = tmp_path / "run.pt"
    whole = run(6, batches=batches)
    assert whole.history.loss[-1] < whole.history.loss[0]
    run(3, path, batches=batches, checkpoint_every=1)
    again = run(6, path, batches=batches, resume=True)
    assert again.history.loss == whole.history.loss
    assert again.test_metric == whole.test_metric
    with pytest.raises(RuntimeError, match="loader is 'graphs' in the checkpoint and None here"):
        run(6, path, resume=True)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"batch_size": 0}, {}, "batch_size must be positive, got 0"),
        ({"batch": torch.tensor([1, 0])}, {}, "ascending"),
        ({"batch": torch.zeros(2, 2)}, {}, "batch must be a vector"),
        ({"batch": torch.zeros(3)}, {}, "batch has 3 entries, but sbm.* has 60 nodes"),
        ({"batch": torch.arange(60)}, {}, "different graphs"),
        ({}, {"objective_every": 1}, "objective_every needs one whole graph"),
    ],
)
def test_mistakes_about_whole_graphs(change, options, message):
    data = load_graph("sbm:num_nodes=60,num_features=4")

    def engine():
        batches = GraphBatches(**{"batch": torch.zeros(60, dtype=torch.int64), **change})
        return make_engine(DCGNN(4, 6, 2, 3), data, TrainConfig(**options), None, batches)

    with pytest.raises(ValueError, match=message):
        engine()


def test_whole_graphs_without_adjacency_embedding():
    data, batch = union_of_graphs()
    model = DCGNN(4, 6, 2, 3, adjacency_embedding=True, num_nodes=60)
    with pytest.raises(ValueError, match="adjacency_embedding needs the whole graph"):
        make_engine(model, data, TrainConfig(), None, GraphBatches(batch))
