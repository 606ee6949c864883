"""EgoGraph: against sets built by hand, native against plain PyTorch, every input format, every bad input."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from graphs import awkward, random_graphs, ring, star
from hypothesis import given
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor

from dcgnn_kernels import EgoGraph, backends, graph


def members_by_hand(edge_index: Tensor, num_nodes: int) -> list[list[int]]:
    members = [{i} for i in range(num_nodes)]
    for source, target in edge_index.T.tolist():
        members[target].add(source)
    return [sorted(ego) for ego in members]


def check_against_sets(built: EgoGraph, edge_index: Tensor, num_nodes: int) -> None:
    expected = members_by_hand(edge_index, num_nodes)
    rowptr, member, colptr, ego, slot = (array.tolist() for array in built.arrays())
    assert built.num_nodes == num_nodes
    assert built.num_slots == sum(map(len, expected))
    assert [member[a:b] for a, b in pairwise(rowptr)] == expected
    holders = [[u for u in range(num_nodes) if i in expected[u]] for i in range(num_nodes)]
    assert [ego[a:b] for a, b in pairwise(colptr)] == holders
    for node in range(num_nodes):
        for k in range(colptr[node], colptr[node + 1]):
            assert member[slot[k]] == node
            assert rowptr[ego[k]] <= slot[k] < rowptr[ego[k] + 1]


def test_the_native_construction_is_what_runs():
    state = backends()["native-cpu"]
    if not state.available:
        pytest.skip(f"native kernels are not built here: {state.reason}")
    assert "ego_graph" in state.ops


@given(random_graphs())
def test_matches_sets(case):
    edge_index, num_nodes = case
    check_against_sets(EgoGraph.from_edge_index(edge_index, num_nodes), edge_index, num_nodes)


@given(random_graphs())
def test_plain_pytorch_gives_identical_arrays(case):
    edge_index, num_nodes = case
    native = torch.ops.dcgnn.ego_graph(edge_index, num_nodes)
    plain = graph._fallback_ego_graph(edge_index, num_nodes)
    for left, right in zip(native, plain, strict=True):
        assert left.dtype == right.dtype == torch.int32
        assert torch.equal(left, right)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_large_graph_is_the_same_for_any_number_of_threads(threads):
    generator = torch.Generator().manual_seed(1)
    edge_index = (torch.rand(2, 200_000, generator=generator).square() * 3000).long()
    plain = graph._fallback_ego_graph(edge_index, 3000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        native = torch.ops.dcgnn.ego_graph(edge_index, 3000)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(left, right) for left, right in zip(native, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes_and_strides(dtype):
    edge_index, num_nodes = awkward()
    strided = edge_index.T.contiguous().T.to(dtype)  # column-major
    check_against_sets(EgoGraph.from_edge_index(strided, num_nodes), edge_index, num_nodes)


def test_undirected_graphs_share_the_index_arrays():
    built = EgoGraph.from_edge_index(*ring(6))
    assert built.is_undirected
    assert built.ego is built.member
    assert built.colptr is built.rowptr
    directed = EgoGraph.from_edge_index(*awkward())
    assert not directed.is_undirected
    assert directed.ego is not directed.member


def test_a_directed_ring_is_not_undirected_although_all_degrees_agree():
    nodes = torch.arange(6)
    built = EgoGraph.from_edge_index(torch.stack([nodes, (nodes + 1) % 6]))
    assert not built.is_undirected


def test_number_of_nodes_is_taken_from_the_edges():
    assert EgoGraph.from_edge_index(torch.tensor([[0], [1]]), np.int64(7)).num_nodes == 7
    assert EgoGraph.from_edge_index(torch.tensor([[0, 4], [2, 1]])).num_nodes == 5
    assert EgoGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64)).num_nodes == 0


@pytest.mark.parametrize("convert", [to_torch_coo_tensor, to_torch_csr_tensor, to_torch_csc_tensor])
def test_sparse_matrices_are_transposed_adjacencies_as_in_pyg(convert):
    edge_index, num_nodes = awkward()
    # PyG's adj_t has targets as rows.
    matrix = convert(edge_index.flip(0).unique(dim=1), size=(num_nodes, num_nodes))
    assert EgoGraph.from_edge_index(matrix) == EgoGraph.from_edge_index(edge_index, num_nodes)


def test_pyg_edge_index():
    edge_index, num_nodes = awkward()
    wrapped = EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes))
    assert EgoGraph.from_edge_index(wrapped) == EgoGraph.from_edge_index(edge_index, num_nodes)
    unsized = EdgeIndex(edge_index)
    assert EgoGraph.from_edge_index(unsized, num_nodes) == EgoGraph.from_edge_index(edge_index, num_nodes)


def test_sparse_tensor_through_its_interface():
    """torch_sparse is optional; the class is recognised by name and read through coo() and size()."""

    class SparseTensor:
        is_cuda = False

        def __init__(self, row: Tensor, col: Tensor, sizes: tuple[int, int]):
            self._row, self._col, self._sizes = row, col, sizes

        def coo(self):
            return self._row, self._col, None

        def size(self, dim: int) -> int:
            return self._sizes[dim]

        def sizes(self):
            return list(self._sizes)

    edge_index, num_nodes = awkward()
    matrix = SparseTensor(edge_index[1], edge_index[0], (num_nodes, num_nodes))
    assert EgoGraph.from_edge_index(matrix) == EgoGraph.from_edge_index(edge_index, num_nodes)
    with pytest.raises(ValueError, match="square"):
        EgoGraph.from_edge_index(SparseTensor(edge_index[1], edge_index[0], (10, 12)))


def test_a_graph_passes_through():
    built = EgoGraph.from_edge_index(*star(5))
    assert EgoGraph.from_edge_index(built) is built
    assert EgoGraph.from_edge_index(built, 5) is built
    with pytest.raises(ValueError, match="num_nodes is 6"):
        EgoGraph.from_edge_index(built, 6)


@pytest.mark.parametrize("case", [awkward(), star(5)], ids=["directed", "undirected"])
def test_copies_equal_the_original_and_keep_sharing(case):
    built = EgoGraph.from_edge_index(*case)
    buffer = io.BytesIO()
    torch.save(built, buffer)
    buffer.seek(0)
    copies = [
        pickle.loads(pickle.dumps(built)),
        copy.deepcopy(built),
        torch.load(buffer, weights_only=True),
        torch.utils._pytree.tree_map(torch.clone, built),
    ]
    for other in copies:
        assert other is not built
        assert other == built
        assert other.is_undirected == built.is_undirected
        assert torch.equal(other.slot, built.slot)


def test_to():
    built = EgoGraph.from_edge_index(*star(5))
    assert built.to("cpu") is built
    moved = built.to("meta")
    assert moved.device == torch.device("meta")
    assert moved.is_undirected
    directed = EgoGraph.from_edge_index(*awkward()).to("meta")
    assert all(array.device.type == "meta" for array in directed.arrays())


def test_equality_and_hash():
    built = EgoGraph.from_edge_index(*star(5))
    assert built == EgoGraph.from_edge_index(*star(5))
    assert built != EgoGraph.from_edge_index(*star(6))
    assert built != EgoGraph.from_edge_index(*ring(5))
    assert built != "a graph"
    with pytest.raises(TypeError, match="unhashable"):
        hash(built)


def test_repr():
    text = repr(EgoGraph.from_edge_index(*star(5)))
    assert text == "EgoGraph(num_nodes=5, num_slots=13, undirected, int32, device='cpu')"


def test_sizes_of_egos():
    built = EgoGraph.from_edge_index(*awkward())
    assert built.ego_sizes().tolist() == [7, 2, 1, 1, 2, 1, 2, 1, 1, 1]
    assert built.egos_per_node().tolist() == [2, 2, 1, 3, 2, 2, 2, 3, 1, 1]
    by_hand = [ego for ego, size in enumerate(built.ego_sizes().tolist()) for _ in range(size)]
    assert built.ego_of_slot().tolist() == by_hand


BAD_INPUTS = [
    (torch.tensor([[0, 3], [1, 1]]), 3, IndexError, "node index 3, out of range for num_nodes = 3"),
    (torch.tensor([[0, -1], [1, 1]]), 3, IndexError, "negative node index -1"),
    (torch.tensor([[0, -1], [1, 1]]), None, IndexError, "negative node index -1"),
    (torch.tensor([[0], [0]]), 0, IndexError, "out of range for num_nodes = 0"),
    (torch.zeros(3, 4, dtype=torch.int64), None, ValueError, r"shape \[2, num_edges\], got \[3, 4\]"),
    (torch.zeros(4, dtype=torch.int64), None, ValueError, r"shape \[2, num_edges\], got \[4\]"),
    (torch.zeros(2, 4), None, ValueError, "int32 or int64, got torch.float32"),
    (torch.zeros(2, 4, dtype=torch.bool), None, ValueError, "int32 or int64, got torch.bool"),
    ([[0], [1]], None, ValueError, "must be a tensor.*got list"),
    (None, None, ValueError, "got NoneType"),
    (torch.tensor([[0], [0]]), -1, ValueError, "num_nodes must not be negative, got -1"),
    (torch.tensor([[0], [0]]), 2.5, ValueError, "num_nodes must be an int, got 2.5"),
    (torch.tensor([[0], [0]]), True, ValueError, "num_nodes must be an int, got True"),
    (torch.eye(3)[:, :2].to_sparse(), None, ValueError, r"square, got \[3, 2\]"),
]


@pytest.mark.parametrize(("edge_index", "num_nodes", "error", "message"), BAD_INPUTS)
def test_bad_input(edge_index, num_nodes, error, message):
    with pytest.raises(error, match=message):
        EgoGraph.from_edge_index(edge_index, num_nodes)


@pytest.mark.parametrize("bad", [torch.tensor([[0, 3], [1, 1]]), torch.tensor([[0, -1], [1, 1]])])
def test_plain_pytorch_checks_the_range_too(bad):
    with pytest.raises(IndexError, match="edge_index holds"):
        graph._fallback_ego_graph(bad, 3)


def test_a_size_that_contradicts_the_matrix_is_refused():
    edge_index, num_nodes = awkward()
    matrix = to_torch_coo_tensor(edge_index.unique(dim=1), size=(num_nodes, num_nodes))
    for sized in (matrix, EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes))):
        with pytest.raises(ValueError, match="num_nodes is 40, but edge_index is a matrix of 10 nodes"):
            EgoGraph.from_edge_index(sized, 40)


def test_the_constructor_takes_right_arrays_and_refuses_wrong_ones():
    """Kernels index memory by these arrays, so every kind of damage must be found."""
    good = EgoGraph.from_edge_index(*awkward())
    assert EgoGraph(*good.arrays()) == good
    for position in range(5):
        for entry in range(good.arrays()[position].numel()):
            for value in (10**9, -1, int(good.arrays()[position][entry]) + 1):
                arrays = [array.clone() for array in good.arrays()]
                arrays[position][entry] = value
                with pytest.raises((ValueError, IndexError)):
                    EgoGraph(*arrays)
    with pytest.raises(ValueError, match="equal lengths"):
        EgoGraph(*good.arrays()[:4], good.slot[:-1])
    with pytest.raises(ValueError, match="dtype and device"):
        EgoGraph(*good.arrays()[:4], good.slot.long())


def test_opcheck():
    edge_index, num_nodes = awkward()
    torch.library.opcheck(torch.ops.dcgnn.ego_graph.default, (edge_index, num_nodes))


def test_import_does_not_need_torch_sparse():
    assert "torch_sparse" not in sys.modules
