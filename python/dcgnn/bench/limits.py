r"""What the machine allows: measured rates, and the least time of each kernel at these rates.

**Rates**, each the best of several runs, for the graph, width, dtype and threads at hand:

- *gather*: bytes of rows a second that a plain sum over neighbourhoods reads, :math:`S F` elements; the
  best of ``torch.nn.functional.embedding_bag``, the product with a ``torch.sparse`` CSR matrix and
  ``local_centroids``;
- *stream*: bytes a second of a large copy, read and written;
- *gemm*: operations a second of a large square matrix product, in the dtype or in float32, whichever is
  faster.

**Least time** of a kernel: :math:`\max(\text{gathered} / \text{gather} + \text{streamed} / \text{stream},\;
\text{operations} / \text{gemm})`. Gathered are the rows that the formula needs from other nodes, each once
for each slot; streamed are inputs and outputs, each once, but z twice in ``global_sinkhorn`` and its
backward, where sums over all nodes lie between its two uses; operations are those of its dense products.
Exponentials, the T iterations and what lies in caches are not in it, so that a fraction of 1 is out of reach
for most, and a small graph that stays in cache can pass it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from dcgnn.bench.problem import Problem, Settings
from dcgnn.timing import interleaved_samples
from dcgnn_kernels import local_centroids

STREAM_BYTES = 1 << 28
GEMM_SIZE = {"cpu": 1536, "cuda": 8192}
SMALL = 5000  # below this many nodes nobody waits for the rates of a large machine
SMALL_GEMM, SMALL_STREAM_BYTES = 256, 1 << 22


@dataclass(frozen=True)
class Rates:
    """Measured rates a second: bytes gathered, bytes streamed, operations of a matrix product."""

    gather: float
    stream: float
    gemm: float
    gathered_by: str


@dataclass(frozen=True)
class Work:
    """Least work of a kernel, see the module."""

    gathered: float
    streamed: float
    operations: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """Least time at the given rates."""
        moved = self.gathered / rates.gather + self.streamed / rates.stream
        return max(moved, self.operations / rates.gemm)


def measure_rates(
    problem: Problem,
    rounds: int = 5,
    max_seconds: float = 4.0,
    after_run: Callable[[], object] | None = None,
) -> Rates:
    """Rates of the machine on the graph and at the settings of the problem."""
    settings = problem.settings
    dtype, device = settings.torch_dtype, problem.device

    def fastest(candidates: dict[str, Callable[[], object]]) -> dict[str, float]:
        samples = interleaved_samples(
            candidates, rounds=rounds, warmup=1, max_seconds=max_seconds, after_run=after_run
        )
        return {name: min(times.seconds) for name, times in samples.items()}

    small = problem.num_nodes < SMALL
    size = SMALL_GEMM if small else GEMM_SIZE[device.type]
    count = (SMALL_STREAM_BYTES if small else STREAM_BYTES) // dtype.itemsize
    dense = {"stream": _copy(count, dtype, device)}
    # Some processors multiply 16-bit numbers slower than float32, in which the kernels compute anyway.
    for kind in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
        dense[f"gemm {kind}"] = _product(size, kind, device)
    seconds = fastest(dense)
    del dense  # memory
    gathers = fastest(_gathers(problem))
    best = min(gathers, key=lambda name: gathers[name])
    return Rates(
        gather=_rows(problem) / gathers[best],
        stream=2 * count * dtype.itemsize / seconds.pop("stream"),
        gemm=2.0 * size**3 / min(seconds.values()),
        gathered_by=best,
    )


def _copy(count: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    source = torch.ones(count, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _gathers(problem: Problem) -> dict[str, Callable[[], object]]:
    """Plain sums over neighbourhoods that run here, in this dtype."""
    graph, x = problem.graph, problem.x
    values = torch.ones(graph.num_slots, dtype=x.dtype, device=x.device)
    size = problem.num_nodes, problem.num_nodes
    matrix = torch.sparse_csr_tensor(graph.rowptr, graph.member, values, size)
    member, offsets = graph.member, graph.rowptr[:-1]
    candidates: dict[str, Callable[[], object]] = {
        "local_centroids": lambda: local_centroids(x, graph),
        "embedding_bag": lambda: functional.embedding_bag(member, x, offsets, mode="sum"),
        "CSR product": lambda: matrix @ x,
    }
    running = {}
    for name, run in candidates.items():
        try:
            run()
        except (RuntimeError, NotImplementedError):
            continue  # not in this dtype
        running[name] = run
    return running


def _rows(problem: Problem) -> float:
    return float(problem.num_slots * problem.settings.channels * problem.settings.torch_dtype.itemsize)


def kernel_work(problem: Problem) -> dict[str, Work]:
    """Least work of every kernel, by the names of :func:`dcgnn.bench.kernels.kernel_calls`."""
    settings = problem.settings
    nodes, slots, item = problem.num_nodes, problem.num_slots, settings.torch_dtype.itemsize
    rows = _rows(problem)  # one row for every slot
    table = nodes * settings.channels * item  # one row for every node
    local, whole = settings.num_local, settings.num_global
    # At K = 2 the kernel finds the centroids itself; else it reads them, and writes their gradient.
    centroids = 0 if local == 2 else table * local
    assign, index = slots * local * item, slots * 4
    products = 2.0 * nodes * settings.channels * whole
    linear = 2.0 * nodes * settings.channels**2
    return {
        "ego_graph": Work(0, 16 * (slots - nodes) + 3 * index),
        "linear": Work(0, 2 * table, linear),
        "local_centroids": Work(rows, table * local + index),
        "local_sinkhorn": Work(rows, table * local + centroids + assign + index),
        "local_sinkhorn_backward": Work(
            rows + _rows_of_transpose(settings) * rows,
            table * local + 2 * centroids + table + assign + 3 * index,
        ),
        "global_sinkhorn": Work(0, 2 * table + nodes * whole * item, 2 * products),
        "global_sinkhorn_backward": Work(0, 3 * table + nodes * whole * item, 4 * products),
        "cluster_scatter": Work(local * rows, table + assign + 2 * index),
        "cluster_scatter_backward": Work(rows, 2 * local * table + 2 * assign + index),
        "node_update": Work(local * rows, 2 * table + assign + 2 * index, products),
        "node_update_backward": Work(rows, (2 + 2 * local) * table + 2 * assign + index, 2 * products),
    }


def _rows_of_transpose(settings: Settings) -> int:
    """Rows of each of its egos that a node reads in the backward of local_sinkhorn: three at K = 2."""
    return 3 if settings.num_local == 2 else 2 * settings.num_local


FORWARD_KERNELS = ("linear", "local_sinkhorn", "global_sinkhorn", "node_update")


def forward_seconds(problem: Problem, rates: Rates) -> float:
    """Least time of a DCConv layer, forward: its kernels run one after the other."""
    work = kernel_work(problem)
    names = FORWARD_KERNELS if problem.settings.num_local == 2 else (*FORWARD_KERNELS, "local_centroids")
    return sum(work[name].seconds(rates) for name in names)
