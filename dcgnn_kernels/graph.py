"""The graph of ego-neighbourhoods that every kernel works on."""

from __future__ import annotations

from numbers import Integral
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
    epoch; use :meth:`from_edge_index`. The constructor takes the five arrays and checks them, since
    kernels index memory by them; they must not be changed afterwards.
    """

    def __init__(self, rowptr: Tensor, member: Tensor, colptr: Tensor, ego: Tensor, slot: Tensor) -> None:
        self._set(rowptr, member, colptr, ego, slot)
        _check_arrays(self)

    @classmethod
    def _trusted(cls, rowptr: Tensor, member: Tensor, colptr: Tensor, ego: Tensor, slot: Tensor) -> EgoGraph:
        """From arrays that an EgoGraph had or our own construction made; also fake ones."""
        graph = cls.__new__(cls)
        graph._set(rowptr, member, colptr, ego, slot)
        return graph

    def _set(self, rowptr: Tensor, member: Tensor, colptr: Tensor, ego: Tensor, slot: Tensor) -> None:
        self.rowptr = rowptr
        self.member = member
        self.colptr = colptr
        self.ego = ego
        self.slot = slot

    def __setstate__(self, state: dict[str, Tensor]) -> None:
        self.__dict__.update(state)
        _check_arrays(self)  # a file may hold anything

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
        elif isinstance(num_nodes, bool) or not isinstance(num_nodes, (Integral, torch.SymInt)):
            raise ValueError(f"num_nodes must be an int, got {num_nodes!r}")
        elif num_nodes < 0:
            raise ValueError(f"num_nodes must not be negative, got {num_nodes}")
        elif size is not None and size != num_nodes:
            raise ValueError(f"num_nodes is {num_nodes}, but edge_index is a matrix of {size} nodes")
        if num_nodes is None:
            num_nodes = int(edges.max()) + 1 if edges.size(1) else 0
            num_nodes = max(num_nodes, 0)
        rowptr, member, colptr, ego, slot = torch.ops.dcgnn.ego_graph(edges, num_nodes)
        if not torch.compiler.is_compiling() and _equal(rowptr, colptr) and _equal(member, ego):
            colptr, ego = rowptr, member
        return cls._trusted(rowptr, member, colptr, ego, slot)

    @classmethod
    def from_batch(cls, batch: Tensor, num_graphs: int | None = None) -> EgoGraph:
        """The graphs of a disjoint union as egos: one for each, which holds the nodes of that graph.

        With it :func:`~dcgnn_kernels.local_sinkhorn` solves one transport problem for every graph of a
        batch, and :func:`~dcgnn_kernels.cluster_scatter` brings their cluster-nodes back to the nodes.
        The other ops need an ego for every node and refuse it.

        Args:
            batch: ``[N]`` int64, the graph of every node, as in a PyG batch; need not be sorted. An ego has
                members, so every graph must have nodes; see :func:`filled_graphs`.
            num_graphs: Number of graphs; by default one more than the largest entry.

        Raises:
            ValueError: for a wrong shape or dtype, or a graph without nodes.
            IndexError: for an entry that is negative or not below ``num_graphs``.
        """
        num_graphs = _count_graphs(batch, num_graphs)
        num_nodes = batch.numel()
        if num_graphs > num_nodes:  # before anything of that size is made
            raise ValueError(f"batch: {num_graphs} graphs cannot all have nodes, there are {num_nodes}")
        counts = torch.bincount(batch, minlength=num_graphs)
        if bool((counts == 0).any()):
            raise ValueError(f"batch: graph {int((counts == 0).nonzero()[0])} has no nodes")
        dtype = torch.int32 if num_nodes <= INT32_MAX else torch.int64
        rowptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        nodes = torch.arange(num_nodes + 1, device=batch.device)
        member = torch.argsort(batch, stable=True)
        slot = torch.empty_like(member).scatter_(0, member, nodes[:-1])
        return cls._trusted(*(array.to(dtype) for array in (rowptr, member, nodes, batch, slot)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes ``N``."""
        return self.colptr.size(0) - 1

    @property
    def num_egos(self) -> int:
        """Number of egos: ``N``, or the number of graphs for :meth:`from_batch`."""
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
        """``[num_egos]``: the number of members :math:`n_i` of every ego."""
        return self.rowptr.diff()

    def egos_per_node(self) -> Tensor:
        """``[N]``: the number of egos that hold each node."""
        return self.colptr.diff()

    def ego_of_slot(self) -> Tensor:
        """``[S]`` int64: the ego that owns each slot."""
        egos = torch.arange(self.num_egos, device=self.device)
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
            return EgoGraph._trusted(moved, member, moved, member, slot)
        colptr = self.colptr.to(device, non_blocking=non_blocking)
        ego = self.ego.to(device, non_blocking=non_blocking)
        return EgoGraph._trusted(moved, member, colptr, ego, slot)

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


def check_graph(graph: object, *, ego_of_every_node: bool = False) -> None:
    """For the ops, which take a graph that was built before."""
    if not isinstance(graph, EgoGraph):
        raise TypeError(
            f"graph must be an EgoGraph, got {type(graph).__name__}; see EgoGraph.from_edge_index"
        )
    if ego_of_every_node and graph.num_egos != graph.num_nodes:
        raise ValueError(
            f"graph must have an ego for every node, got {graph.num_egos} egos and {graph.num_nodes} nodes"
        )


def filled_graphs(batch: Tensor, num_graphs: int | None = None) -> tuple[EgoGraph, int, Tensor | None]:
    """:meth:`EgoGraph.from_batch` of those graphs of a disjoint union that have nodes.

    Args:
        batch: ``[N]`` int64, the graph of every node.
        num_graphs: Number of graphs, with and without nodes; by default one more than the largest entry,
            which must then be below the number of nodes.

    Returns:
        The graphs that have nodes as egos; the number of all graphs; and the numbers of those that have
        nodes, or None when all have.
    """
    count = _count_graphs(batch, num_graphs)
    if num_graphs is None and count > batch.numel():
        raise IndexError(
            f"batch names graph {count - 1}, but has {batch.numel()} nodes: give num_graphs if most graphs "
            "are empty"
        )
    filled, compact = torch.unique(batch, return_inverse=True)
    graphs = EgoGraph.from_batch(compact, filled.numel())
    return graphs, count, None if filled.numel() == count else filled


def _count_graphs(batch: object, num_graphs: int | None) -> int:
    """The number of graphs of a batch vector, which is checked."""
    if not isinstance(batch, Tensor) or batch.dim() != 1 or batch.dtype != torch.int64:
        given = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else repr(batch)
        raise ValueError(f"batch must be an int64 tensor of shape [num_nodes], got {given}")
    low, high = (int(bound) for bound in torch.aminmax(batch)) if batch.numel() else (0, -1)
    if num_graphs is None:
        num_graphs = high + 1
    if low < 0 or high >= num_graphs:
        raise IndexError(f"batch must be in [0, {num_graphs}), got {low}..{high}")
    return num_graphs


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def _check_arrays(graph: EgoGraph) -> None:
    """Every index in range, rows and columns ascending, the transpose that of the rows."""
    arrays = dict(zip(("rowptr", "member", "colptr", "ego", "slot"), graph.arrays(), strict=True))
    for name, array in arrays.items():
        if array.dim() != 1 or array.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be one-dimensional, int32 or int64, got {array.dtype} {array.shape}"
            )
        if array.dtype != graph.rowptr.dtype or array.device != graph.rowptr.device:
            raise ValueError(f"{name} must have the dtype and device of rowptr")
    if graph.device.type == "meta":
        return
    num_nodes, num_slots = graph.num_nodes, graph.num_slots
    if num_nodes < 0 or graph.num_egos < 0:
        raise ValueError("rowptr must have at least one entry")
    of_batch = graph.num_egos != num_nodes  # whole graphs as egos: every node in one of them
    for name, pointer, index in (("rowptr", graph.rowptr, graph.member), ("colptr", graph.colptr, graph.ego)):
        wrong = pointer.size(0) != num_nodes + 1 and not (of_batch and num_nodes == num_slots)
        if wrong or not index.size(0) == graph.slot.size(0) == num_slots:
            raise ValueError("rowptr and colptr, and member, ego and slot, must have equal lengths")
        rising = bool((pointer.diff() > 0).all())  # every ego holds its own node
        if int(pointer[0]) != 0 or int(pointer[-1]) != num_slots or not rising:
            raise ValueError(f"{name} must rise strictly from 0 to the number of slots, {num_slots}")
    for name, array, bound in (("member", graph.member, num_nodes), ("slot", graph.slot, num_slots)):
        if num_slots and not 0 <= int(array.min()) <= int(array.max()) < bound:
            raise IndexError(f"{name} must be in [0, {bound}), got {int(array.min())}..{int(array.max())}")
    owner = graph.ego_of_slot()
    keys = owner * num_nodes + graph.member
    holds_itself = of_batch or int((graph.member == owner).sum()) == num_nodes
    if not bool((keys.diff() > 0).all()) or not holds_itself:
        raise ValueError("member must be ascending within every ego and hold the ego itself")
    nodes = torch.arange(num_nodes, device=graph.device)
    node_of_entry = torch.repeat_interleave(nodes, graph.egos_per_node(), output_size=num_slots)
    slot = graph.slot.long()
    transposed = torch.equal(graph.member[slot].long(), node_of_entry) and torch.equal(
        owner[slot], graph.ego.long()
    )
    if not transposed or not bool(((node_of_entry * num_nodes + graph.ego).diff() > 0).all()):
        raise ValueError("colptr, ego and slot must be the transpose of rowptr and member, ascending")


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
_UNDIRECTED_FIELDS = "rowptr member slot"
_DIRECTED_FIELDS = "rowptr member colptr ego slot"


def _flatten_with_keys(graph: EgoGraph) -> tuple[list[Any], str]:
    # The context is a string, which a saved program gets back as it was.
    fields = _UNDIRECTED_FIELDS if graph.is_undirected else _DIRECTED_FIELDS
    entries = [(torch.utils._pytree.GetAttrKey(name), getattr(graph, name)) for name in fields.split()]
    return entries, fields


def _flatten(graph: EgoGraph) -> tuple[list[Tensor], str]:
    entries, fields = _flatten_with_keys(graph)
    return [tensor for _, tensor in entries], fields


def _unflatten(arrays: Any, fields: Any) -> EgoGraph:
    by_name: dict[str, Any] = dict(zip(fields.split(), arrays, strict=True))
    return EgoGraph._trusted(
        by_name["rowptr"],
        by_name["member"],
        by_name.get("colptr", by_name["rowptr"]),
        by_name.get("ego", by_name["member"]),
        by_name["slot"],
    )


# A saved program keeps its example inputs; reading them, or a saved graph, executes no code.
torch.serialization.add_safe_globals([EgoGraph])

# torch.export takes an EgoGraph as an input like any container of tensors.
torch.utils._pytree.register_pytree_node(
    EgoGraph,
    _flatten,
    _unflatten,
    serialized_type_name="dcgnn_kernels.EgoGraph",
    flatten_with_keys_fn=_flatten_with_keys,
)
