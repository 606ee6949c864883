"""The correctness gate: a case is timed only if its outputs agree with an independent formula."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from dcgnn.bench.cases import Case
from dcgnn.bench.problem import Problem
from dcgnn_kernels import release_memory

# Largest difference relative to the largest value; the roundings of a layer's steps add up.
TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 3e-2}
ZERO = 1e-12  # a float64 result below this is rounding
MAX_NODES = 16
MAX_SLOTS = 50_000


def check(case: Case, problem: Problem) -> str | None:
    """Why the case must not be timed on this problem, or None.

    The rows of some random nodes are compared with the case's formula in float64, on the very graph that
    is timed; where the case says so, also the gradients of a random function of these rows by features and
    weights.
    """
    problem = case.fit(problem)
    layer = case.layer(problem)
    x = problem.x.detach().requires_grad_(case.check_gradients)
    try:
        nodes = sample_nodes(problem)  # reads the built graph, which may be what is wrong
        weight = problem.random(2)[nodes]
        with case.context(problem), torch.set_grad_enabled(case.check_gradients):
            rows = layer(x, case.graph(problem))[nodes]
            grads = _gradients(rows, weight, x, layer) if case.check_gradients else {}
    except Exception as error:
        return f"does not run: {one_line(error)}"

    release_memory()  # of the kernels: the formula has its own
    exact_layer = copy.deepcopy(layer).double()
    exact = problem.with_settings(problem.settings)
    exact.__dict__["x"] = problem.x.detach().double().requires_grad_(case.check_gradients)
    with torch.set_grad_enabled(case.check_gradients):
        wanted = case.formula(exact_layer, exact, nodes)
        wanted_grads = (
            _gradients(wanted, weight.double(), exact.x, exact_layer) if case.check_gradients else {}
        )
    tolerance = TOLERANCES[problem.settings.dtype]
    found = {"output": rows, **grads}
    for name, value in {"output": wanted, **wanted_grads}.items():
        off = relative_error(found[name], value)
        if not off <= tolerance:  # also NaN
            return f"{name} disagrees with the reference: relative error {off:.2g}, allowed {tolerance:g}"
    return None


def sample_nodes(problem: Problem) -> Tensor:
    """Up to MAX_NODES random nodes whose egos and the egos around them stay within MAX_SLOTS slots."""
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(problem.num_nodes, generator=generator)[: 8 * MAX_NODES].to(problem.device)
    # The built graph only chooses nodes; what is right is read from the edges.
    graph, sizes = problem.graph, problem.graph.ego_sizes()
    chosen: list[Tensor] = []
    slots = 0
    for node in order:
        reached = int(sizes[graph.ego[graph.colptr[node] : graph.colptr[node + 1]].long()].sum())
        if not chosen or slots + reached <= MAX_SLOTS:
            chosen.append(node)
            slots += reached
        if len(chosen) == MAX_NODES:
            break
    return torch.stack(chosen)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted value, or the difference itself where the value is 0."""
    scale = float(wanted.detach().abs().max())
    difference = float((found.detach().double() - wanted.detach()).abs().max())
    return difference / scale if scale > ZERO else difference


def _gradients(rows: Tensor, weight: Tensor, x: Tensor, layer: torch.nn.Module) -> dict[str, Tensor]:
    inputs = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(rows, list(inputs.values()), weight)
    return {f"gradient of {name}": grad for name, grad in zip(inputs, grads, strict=True)}


def one_line(error: BaseException) -> str:
    """An error as a reason in a table."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
