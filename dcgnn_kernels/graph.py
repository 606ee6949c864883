"""The graph of ego-neighbourhoods that every kernel works on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import _native_loader  # noqa: F401  (registers the native construction)
from dcgnn_kernels._library import define

INT32_MAX = 2**31 - 1


def _fallback_ego_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """Plain PyTorch construction on any device; gives the same arrays as the native one."""
    num_edges = edge_index.size(1)
    if num_edges:
        low, high = (int(bound) for bound in torch.aminmax(edge_index))
        if low < 0:
            raise IndexError(f"edge_index holds the negative node index {low}")
        if high >= num_nodes:
            raise IndexError(f"edge_index holds node index {high}, out of range for num_nodes = {num_nodes}")
    dtype = torch.int32 if num_edges + num_nodes <= INT32_MAX else torch.int64
    loops = torch.arange(num_nodes, device=edge_index.device)
    source, target = edge_index.to(torch.int64)
    keys = torch.cat([target * num_nodes + source, loops * (num_nodes + 1)])
    keys = torch.unique(keys, sorted=True)
    target, source = keys.div(max(num_nodes, 1), rounding_mode="floor"), keys % max(num_nodes, 1)
    slot = torch.argsort(source, stable=True)

    def offsets(index: Tensor) -> Tensor:
        counts = torch.bincount(index, minlength=num_nodes)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    arrays = (offsets(target), source, offsets(source), target[slot], slot)
    return tuple(array.to(dtype) for array in arrays)


def _fake_ego_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    # The number of slots depends on the edges' values: a traced graph keeps it as an unknown size.
    num_slots = torch.library.get_ctx().new_dynamic_size()
    pointers = [edge_index.new_empty(num_nodes + 1, dtype=torch.int32) for _ in range(2)]
    slots = [edge_index.new_empty(num_slots, dtype=torch.int32) for _ in range(3)]
    return pointers[0], slots[0], pointers[1], slots[1], slots[2]


define(
    "ego_graph(Tensor edge_index, SymInt num_nodes)"
    " -> (Tensor rowptr, Tensor member, Tensor colptr, Tensor ego, Tensor slot)",
    fallback=_fallback_ego_graph,
    fake=_fake_ego_graph,
)


def _edges_of_sparse(matrix: Tensor) -> tuple[Tensor, int]:
    """Edges of a sparse matrix in PyG's convention: row i holds the sources of target i."""
    if matrix.dim() != 2 or matrix.size(0) != matrix.size(1):
        raise ValueError(f"edge_index: a sparse matrix must be square, got {list(matrix.shape)}")
    if matrix.layout == torch.sparse_coo:
        row, col = matrix._indices()  # duplicates are harmless, so no coalescing
    elif matrix.layout in (torch.sparse_csr, torch.sparse_csc):
        by_row = matrix.layout == torch.sparse_csr
        pointers = matrix.crow_indices() if by_row else matrix.ccol_indices()
        plain = matrix.col_indices() if by_row else matrix.row_indices()
        outer = torch.arange(matrix.size(0), device=matrix.device, dtype=plain.dtype)
        compressed = torch.repeat_interleave(outer, pointers.diff(), output_size=plain.numel())
        row, col = (compressed, plain) if by_row else (plain, compressed)
    else:
        raise ValueError(f"edge_index: sparse layout {matrix.layout} is not supported")
    return torch.stack([col, row]), matrix.size(0)


class EgoGraph:
    r"""Ego-neighbourhoods :math:`\mathcal N_i^+ = \{i\} \cup \{j : j \to i\}` of a graph.

    A *slot* is one membership "node u in ego i"; there are :math:`S = \sum_i |\mathcal N_i^+|` of them.

    Attributes:
        rowptr: ``[N + 1]``, ego ``i`` owns the slots ``rowptr[i]:rowptr[i + 1]``.
        member: ``[S]``, the members of every ego, ascending, the ego itself among them.
        colptr: ``[N + 1]``, node ``i`` owns the entries ``colptr[i]:colptr[i + 1]`` of the transpose.
        ego: ``[S]``, the egos that hold each node, ascending.
        slot: ``[S]``, the slot of that membership: ``member[slot[k]] == i`` for the entries of ``i``.

    All five are int32 when they fit, else int64. In an undirected graph ``colptr`` and ``ego`` are the
    very tensors ``rowptr`` and ``member``. An ``EgoGraph`` is made once and used by every layer and
    epoch; use :meth:`from_edge_index`.
    """

    def __init__(self, rowptr: Tensor, member: Tensor, colptr: Tensor, ego: Tensor, slot: Tensor) -> None:
        self.rowptr = rowptr
        self.member = member
        self.colptr = colptr
        self.ego = ego
        self.slot = slot

    @classmethod
    def from_edge_index(cls, edge_index: Any, num_nodes: int | None = None) -> EgoGraph:
        """Builds the graph in time linear in edges.

        Args:
            edge_index: ``[2, E]`` int64 or int32 tensor of (source, target) rows, a PyG
                :class:`~torch_geometric.EdgeIndex`, a square :mod:`torch.sparse` matrix (CSR, CSC or
                COO) or a ``torch_sparse.SparseTensor``. As in PyG a sparse matrix is the transposed
                adjacency: row ``i`` holds the sources of target ``i``; its values are not read.
                Parallel edges count once; a self-loop is the ego itself.
            num_nodes: Number of nodes; by default the size of the sparse matrix, or one more than
                the largest index.

        Raises:
            ValueError: for a wrong shape or dtype.
            IndexError: for a node index that is negative or not below ``num_nodes``.
        """
        if isinstance(edge_index, EgoGraph):
            if num_nodes is not None and num_nodes != edge_index.num_nodes:
                raise ValueError(f"num_nodes is {num_nodes}, but the graph has {edge_index.num_nodes} nodes")
            return edge_index
        edges, size = _as_edges(edge_index)
        if num_nodes is None:
            num_nodes = size
        elif isinstance(num_nodes, bool) or not isinstance(num_nodes, (int, torch.SymInt)):
            raise ValueError(f"num_nodes must be an int, got {num_nodes!r}")
        elif num_nodes < 0:
            raise ValueError(f"num_nodes must not be negative, got {num_nodes}")
        if num_nodes is None:
            num_nodes = int(edges.max()) + 1 if edges.size(1) else 0
            num_nodes = max(num_nodes, 0)
        rowptr, member, colptr, ego, slot = torch.ops.dcgnn.ego_graph(edges, num_nodes)
        if not torch.compiler.is_compiling() and _equal(rowptr, colptr) and _equal(member, ego):
            colptr, ego = rowptr, member
        return cls(rowptr, member, colptr, ego, slot)

    @property
    def num_nodes(self) -> int:
        """Number of nodes ``N``, which is also the number of egos."""
        return self.rowptr.size(0) - 1

    @property
    def num_slots(self) -> int:
        """Number of memberships ``S``."""
        return self.member.size(0)

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.member.device

    @property
    def is_undirected(self) -> bool:
        """Whether every edge has its reverse, so that the transpose shares its index arrays."""
        return self.ego is self.member

    def ego_sizes(self) -> Tensor:
        """``[N]``: the number of members :math:`n_i` of every ego."""
        return self.rowptr.diff()

    def egos_per_node(self) -> Tensor:
        """``[N]``: the number of egos that hold each node."""
        return self.colptr.diff()

    def ego_of_slot(self) -> Tensor:
        """``[S]`` int64: the ego that owns each slot."""
        egos = torch.arange(self.num_nodes, device=self.device)
        return torch.repeat_interleave(egos, self.ego_sizes(), output_size=self.num_slots)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The five arrays in the order in which the ops take them."""
        return self.rowptr, self.member, self.colptr, self.ego, self.slot

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EgoGraph:
        """The same graph on another device; itself when it is there already."""
        device = torch.device(device)
        moved = self.rowptr.to(device, non_blocking=non_blocking)
        if moved is self.rowptr:
            return self
        member = self.member.to(device, non_blocking=non_blocking)
        slot = self.slot.to(device, non_blocking=non_blocking)
        if self.is_undirected:
            return EgoGraph(moved, member, moved, member, slot)
        colptr = self.colptr.to(device, non_blocking=non_blocking)
        ego = self.ego.to(device, non_blocking=non_blocking)
        return EgoGraph(moved, member, colptr, ego, slot)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EgoGraph):
            return NotImplemented
        # The transpose follows from the rows.
        return (
            self.device == other.device
            and _equal(self.rowptr, other.rowptr)
            and _equal(self.member, other.member)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind = "undirected" if self.is_undirected else "directed"
        return (
            f"EgoGraph(num_nodes={self.num_nodes}, num_slots={self.num_slots}, {kind}, "
            f"{str(self.member.dtype).removeprefix('torch.')}, device='{self.device}')"
        )


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def _as_edges(edge_index: Any) -> tuple[Tensor, int | None]:
    """``[2, E]`` (source, target) and the number of nodes, where the input tells it."""
    if hasattr(edge_index, "is_cuda") and type(edge_index).__name__ == "SparseTensor":
        row, col, _ = edge_index.coo()
        if edge_index.size(0) != edge_index.size(1):
            raise ValueError(f"edge_index: a SparseTensor must be square, got {edge_index.sizes()}")
        return torch.stack([col, row]), int(edge_index.size(0))
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            "edge_index must be a tensor, an EgoGraph, a sparse matrix or a SparseTensor, got "
            f"{type(edge_index).__name__}"
        )
    if edge_index.layout != torch.strided:
        return _edges_of_sparse(edge_index)
    size = None
    if type(edge_index).__name__ == "EdgeIndex":
        sizes = [known for known in edge_index.sparse_size() if known is not None]  # type: ignore[attr-defined]
        size = max(sizes) if sizes else None
        edge_index = edge_index.as_tensor()  # type: ignore[attr-defined]
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}")
    if edge_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"edge_index must be int32 or int64, got {edge_index.dtype}")
    return edge_index, size


# In an undirected graph the transpose's index arrays are the rows' own and travel only once.
_UNDIRECTED_FIELDS = ("rowptr", "member", "slot")
_DIRECTED_FIELDS = ("rowptr", "member", "colptr", "ego", "slot")


def _flatten_with_keys(graph: EgoGraph) -> tuple[list[Any], tuple[str, ...]]:
    fields = _UNDIRECTED_FIELDS if graph.is_undirected else _DIRECTED_FIELDS
    return [(torch.utils._pytree.GetAttrKey(name), getattr(graph, name)) for name in fields], fields


def _flatten(graph: EgoGraph) -> tuple[list[Tensor], tuple[str, ...]]:
    entries, fields = _flatten_with_keys(graph)
    return [tensor for _, tensor in entries], fields


def _unflatten(arrays: Any, fields: Any) -> EgoGraph:
    by_name: dict[str, Any] = dict(zip(fields, arrays, strict=True))
    return EgoGraph(
        by_name["rowptr"],
        by_name["member"],
        by_name.get("colptr", by_name["rowptr"]),
        by_name.get("ego", by_name["member"]),
        by_name["slot"],
    )


# torch.export takes an EgoGraph as an input like any container of tensors.
torch.utils._pytree.register_pytree_node(
    EgoGraph,
    _flatten,
    _unflatten,
    serialized_type_name="dcgnn_kernels.EgoGraph",
    flatten_with_keys_fn=_flatten_with_keys,
)
