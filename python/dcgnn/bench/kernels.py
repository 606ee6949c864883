"""The registered ops one by one, forward and backward, with the arguments that a DCConv layer gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcgnn.bench.formulas import plain_graph
from dcgnn.bench.gate import TOLERANCES, one_line, relative_error
from dcgnn.bench.problem import Problem
from dcgnn_kernels import fallback, linear, reference

LAM = 2.0
KERNELS = (
    "linear",
    "local_centroids",
    "local_sinkhorn",
    "global_sinkhorn",
    "node_update",
    "cluster_scatter",
    "local_sinkhorn_backward",
    "global_sinkhorn_backward",
    "node_update_backward",
    "cluster_scatter_backward",
)


@dataclass(frozen=True)
class KernelCall:
    """One op and its arguments."""

    op: str
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return getattr(torch.ops.dcgnn, self.op)(*self.arguments)

    def plainly(self) -> Any:
        """The same by the plain PyTorch kernel, in float64."""
        wide = [
            value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in self.arguments
        ]
        plain = {"linear": torch.nn.functional.linear}
        return (plain.get(self.op) or getattr(fallback, self.op))(*wide)


@torch.no_grad()
def kernel_calls(problem: Problem) -> dict[str, KernelCall]:
    """Every kernel of KERNELS."""
    settings, arrays = problem.settings, problem.graph.arrays()
    dtype, device, nodes = settings.torch_dtype, problem.device, problem.num_nodes
    generator = torch.Generator().manual_seed(5)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator).to(device, dtype)

    weight = (uniform(settings.channels, settings.channels) - 0.5) / settings.channels**0.5
    z = linear(problem.x, weight)
    own_start = settings.num_local == 2  # the kernel finds the centroids itself
    centroids = None if own_start else torch.ops.dcgnn.local_centroids(z, *arrays, settings.num_local)
    whole = uniform(settings.num_global, settings.channels)
    limits = reference.DEFAULT_TOL, reference.DEFAULT_MAX_ITERS
    local_options = settings.num_local, LAM, settings.local_iters, "max"
    global_options = LAM, settings.global_iters, "none"
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factors = [torch.rand(nodes, generator=generator).to(device, wide) for _ in range(4)]

    local = KernelCall("local_sinkhorn", (z, centroids, *arrays, *local_options, *limits))
    assign, clusters, potentials = local()
    everywhere = KernelCall("global_sinkhorn", (z, whole, *global_options, *limits))
    global_assign, global_clusters, global_potentials = everywhere()
    messages = global_assign, global_clusters, assign, clusters
    calls = (
        KernelCall("linear", (problem.x, weight, None)),
        KernelCall("local_centroids", (z, *arrays, settings.num_local)),
        local,
        everywhere,
        KernelCall("node_update", (z, *messages, *factors, *arrays, "none")),
        KernelCall("cluster_scatter", (assign, clusters, *arrays)),
        KernelCall(
            "local_sinkhorn_backward", (assign, clusters, z, centroids, potentials, *arrays, *local_options)
        ),
        KernelCall(
            "global_sinkhorn_backward",
            (global_assign, global_clusters, z, whole, global_potentials, *global_options),
        ),
        KernelCall("node_update_backward", (z, *messages, *factors, *arrays)),
        KernelCall("cluster_scatter_backward", (z, assign, clusters, *arrays)),
    )
    by_name = {call.op: call for call in calls}
    return {name: by_name[name] for name in KERNELS}


def check_ego_graph(problem: Problem) -> str | None:
    """Why the construction of the graph must not be timed: its arrays are not those of a plain sort."""
    loops = torch.arange(problem.num_nodes, device=problem.device)
    member, ego = torch.cat([problem.edge_index, loops.expand(2, -1)], 1)
    wanted = plain_graph(member, ego, problem.num_nodes)
    try:
        found = torch.ops.dcgnn.ego_graph(problem.edge_index, problem.num_nodes)
    except Exception as error:
        return f"does not run: {one_line(error)}"
    for name, array in zip(("rowptr", "member", "colptr", "ego", "slot"), found, strict=True):
        if not torch.equal(array.long(), getattr(wanted, name).long()):
            return f"{name} disagrees with plain PyTorch"
    return None


def check_kernel(call: KernelCall, dtype: str) -> str | None:
    """Why the kernel must not be timed: it disagrees with plain PyTorch in float64. For small graphs."""
    try:
        found, wanted = (
            result if isinstance(result, tuple) else (result,) for result in (call(), call.plainly())
        )
    except Exception as error:
        return f"does not run: {one_line(error)}"
    for place, (got, right) in enumerate(zip(found, wanted, strict=True)):
        if not right.numel():
            continue
        off = relative_error(got, right.double())
        if not off <= TOLERANCES[dtype]:
            return (
                f"result {place} disagrees with plain PyTorch: relative error {off:.2g}, allowed "
                f"{TOLERANCES[dtype]:g}"
            )
    return None
