"""The clustering objective, and the property that the layers rest on: every half-step descends it."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import loop_model
import networkx
import numpy as np
import pytest
import torch
from torch import Tensor

from dcgnn import DCMsgPassing, clustering_objective, objective_lower_bound
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


def random_directed(num_nodes: int, num_edges: int, seed: int) -> Edges:
    generator = random.Random(seed)
    return [(generator.randrange(num_nodes), generator.randrange(num_nodes)) for _ in range(num_edges)]


GRAPHS: dict[str, tuple[int, Edges]] = {
    "ring": (12, both_ways([(i, (i + 1) % 12) for i in range(12)])),
    "star": (30, both_ways([(0, i) for i in range(1, 30)])),
    "irregular": (30, both_ways(list(networkx.barabasi_albert_graph(30, 2, seed=1).edges))),
    "directed": (20, random_directed(20, 45, seed=2)),
    "directed-star": (15, [(i, 0) for i in range(1, 15)]),
}

# Under these options every step of a layer is the exact minimiser of its block.
EXACT: dict[str, Any] = {
    "global_iters": None,
    "local_iters": None,
    "local_cost_scale": "none",
    "global_cost_scale": "none",
    "gamma": "exact",
    "aggr": "sum",
    "local_init": "carry",
}


def edge_tensor(edges: Edges) -> Tensor:
    return torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def features(num_nodes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_nodes, CHANNELS, generator=generator, dtype=torch.float64)


def run(graph: str, seed: int, num_layers: int, **options: Any) -> tuple[DCMsgPassing, Tensor, Any]:
    num_nodes, edges = GRAPHS[graph]
    torch.manual_seed(seed)
    module = DCMsgPassing(CHANNELS, NUM_GLOBAL, num_layers, **options).double()
    x = features(num_nodes, seed)
    with torch.no_grad():
        _, state = module(x, edge_tensor(edges), return_state=True)
    return module, x, state


def half_steps(
    graph: str, module: DCMsgPassing, x: Tensor, state: Any, *, num_local: int, mass: str, **weights: float
) -> list[float]:
    """The loop's objective after the assignment, the aggregation and the node update of every layer."""
    members = loop_model.egos(GRAPHS[graph][1], len(x))
    z = loop_model.array(x)
    global_clusters = loop_model.array(module.global_embedding)
    local_clusters = loop_model.initial_centroids(z, members, num_local)
    values = []

    def measure() -> None:
        values.append(
            sum(
                loop_model.objective(
                    z,
                    x,
                    members,
                    global_plan,
                    global_clusters,
                    local_plans,
                    local_clusters,
                    mass=mass,
                    **weights,
                )
            )
        )

    for layer in state.layers:
        global_plan = local_plans = None
        if layer.global_assign is not None:
            global_plan = loop_model.array(layer.global_assign)
        if layer.local_assign is not None:
            local_plans = loop_model.split_slots(layer.local_assign, members)
        measure()
        if layer.global_clusters is not None:
            global_clusters = loop_model.array(layer.global_clusters)
        if layer.local_clusters is not None:
            local_clusters = loop_model.array(layer.local_clusters)
        measure()
        z = loop_model.array(layer.z)
        measure()
    return values


def assert_descends(values: list[float], bound: float) -> None:
    for step, (before, after) in enumerate(itertools.pairwise(values)):
        assert after <= before + 1e-9 * max(1.0, abs(before)), f"half-step {step + 1}: {before} -> {after}"
    assert values[-1] < values[0] - 1e-3, "nothing descended"
    assert min(values) >= bound


# The value ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mass", ["paper", "node"])
@pytest.mark.parametrize("num_local", [1, 2, 3])
@pytest.mark.parametrize("graph", ["directed", "star"])
def test_objective_equals_the_loop(graph: str, num_local: int, mass: str) -> None:
    num_nodes, edges = GRAPHS[graph]
    ego_graph = EgoGraph.from_edge_index(edge_tensor(edges), num_nodes)
    members = loop_model.egos(edges, num_nodes)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    # Any numbers will do: the value must not rest on exact marginals or on being at a minimum.
    z, x = draw(num_nodes, CHANNELS), draw(num_nodes, CHANNELS)
    global_assign, global_clusters = draw(num_nodes, NUM_GLOBAL), draw(NUM_GLOBAL, CHANNELS)
    local_assign = draw(ego_graph.num_slots, num_local)
    local_clusters = draw(num_nodes, num_local, CHANNELS)
    weights = {"alpha": 0.3, "beta": 0.7, "lam": 1.5, "mass": mass}
    got = clustering_objective(
        z, x, ego_graph, global_assign, global_clusters, local_assign, local_clusters, **weights
    )
    wanted = loop_model.objective(
        z,
        x,
        members,
        global_assign,
        global_clusters,
        loop_model.split_slots(local_assign, members),
        local_clusters,
        **weights,
    )
    terms = [got.global_term, got.local_term, got.fidelity]
    for term in [*terms, got.total]:
        assert term.dtype == torch.float64
        assert term.shape == ()
        assert not term.requires_grad
    np.testing.assert_allclose([term.item() for term in terms], wanted, rtol=1e-11)
    assert got.total.item() == pytest.approx(sum(wanted), rel=1e-11)


def test_objective_of_a_sharp_plan_counts_0_log_0_as_0() -> None:
    graph = EgoGraph.from_edge_index(edge_tensor([(0, 1), (1, 0)]), 2)
    plan = torch.tensor([[0.5, 0.0], [0.0, 0.5]], dtype=torch.float64)
    z = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    got = clustering_objective(
        z, z, graph, plan, z, torch.cat([plan, plan]), torch.stack([z, z]), alpha=0.5, beta=1.0, lam=2.0
    )
    # No cost anywhere; the three plans have entropy log 2, weighted 0.5 each.
    assert got.total.item() == pytest.approx(-3 * 0.5 * math.log(2) / 2.0)


def test_left_out_problems_count_0() -> None:
    num_nodes, edges = GRAPHS["ring"]
    graph = EgoGraph.from_edge_index(edge_tensor(edges), num_nodes)
    z, x = features(num_nodes, 0), features(num_nodes, 1)
    got = clustering_objective(z, x, graph, None, None, None, None, alpha=0.5, beta=2.0, lam=1.0)
    assert got.global_term.item() == got.local_term.item() == 0
    assert got.total.item() == pytest.approx(2.0 * float((z - x).square().sum()))


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_objective_does_not_change_when_everything_moves(offset: float) -> None:
    """Only differences enter; squares of large coordinates must not swallow them."""
    _, x, state = run("irregular", 0, 2, mass="paper", **EXACT)
    last = state.layers[-1]
    num_nodes, edges = GRAPHS["irregular"]
    graph = EgoGraph.from_edge_index(edge_tensor(edges), num_nodes)
    moved = clustering_objective(
        last.z + offset,
        x + offset,
        graph,
        last.global_assign,
        last.global_clusters + offset,
        last.local_assign,
        last.local_clusters + offset,
        alpha=0.5,
        beta=0.5,
        lam=2.0,
    )
    assert moved.total.item() == pytest.approx(last.objective.total.item(), rel=1e-7)


@pytest.mark.parametrize("mass", ["paper", "node"])
def test_state_holds_the_objective_of_every_layer(mass: str) -> None:
    weights = {"alpha": 0.4, "beta": 0.3, "lam": 1.5}
    _, x, state = run("directed", 0, 3, mass=mass, num_local=3, **weights)
    members = loop_model.egos(GRAPHS["directed"][1], len(x))
    for layer, value in zip(state.layers, state.objectives, strict=True):
        wanted = loop_model.objective(
            layer.z,
            x,
            members,
            layer.global_assign,
            layer.global_clusters,
            loop_model.split_slots(layer.local_assign, members),
            layer.local_clusters,
            mass=mass,
            **weights,
        )
        got = (value.global_term.item(), value.local_term.item(), value.fidelity.item())
        np.testing.assert_allclose(got, wanted, rtol=1e-10)


@pytest.mark.parametrize("mass", ["paper", "node"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_lower_bound_equals_the_loop(graph: str, mass: str) -> None:
    num_nodes, edges = GRAPHS[graph]
    ego_graph = EgoGraph.from_edge_index(edge_tensor(edges), num_nodes)
    got = objective_lower_bound(ego_graph, NUM_GLOBAL, 3, alpha=0.3, lam=1.7, mass=mass)
    members = loop_model.egos(edges, num_nodes)
    wanted = loop_model.lower_bound(members, NUM_GLOBAL, 3, alpha=0.3, lam=1.7, mass=mass)
    assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("mass", ["paper", "node"])
def test_lower_bound_is_reached_when_all_points_are_equal(mass: str) -> None:
    """Equal points: no cost, uniform plans, the greatest entropy. A looser bound would not be met."""
    num_nodes, edges = GRAPHS["directed"]
    torch.manual_seed(0)
    module = DCMsgPassing(CHANNELS, NUM_GLOBAL, num_local=3, mass=mass, alpha=0.3).double()
    x = torch.ones(num_nodes, CHANNELS, dtype=torch.float64)
    with torch.no_grad():
        module.global_embedding.fill_(1.0)
        _, state = module(x, edge_tensor(edges), return_state=True)
    graph = EgoGraph.from_edge_index(edge_tensor(edges), num_nodes)
    bound = objective_lower_bound(graph, NUM_GLOBAL, 3, alpha=0.3, lam=2.0, mass=mass)
    # The node update with exact γ is a convex combination: equal points stay equal, at no cost.
    value = state.objectives[-1]
    assert value.global_term.item() + value.local_term.item() == pytest.approx(bound, rel=1e-9)


# Marginals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_local", [2, 3])
@pytest.mark.parametrize(("iters", "converged"), [(1, False), (4, False), (None, True)])
def test_marginals_of_a_layer(iters: int | None, converged: bool, num_local: int) -> None:
    """Columns are exact after any number of iterations, rows only in the limit."""
    _, x, state = run(
        "directed", 1, 2, num_local=num_local, global_iters=iters, local_iters=iters, mass="node"
    )
    members = loop_model.egos(GRAPHS["directed"][1], len(x))
    largest_row_error = 0.0
    for layer in state.layers:
        plans = [loop_model.array(layer.global_assign), *loop_model.split_slots(layer.local_assign, members)]
        for plan in plans:
            rows, columns = plan.shape
            assert (plan >= 0).all()
            np.testing.assert_allclose(plan.sum(axis=0), 1 / columns, rtol=1e-12)
            largest_row_error = max(largest_row_error, float(np.abs(plan.sum(axis=1) * rows - 1).max()))
    assert (largest_row_error < 1e-8) == converged


@pytest.mark.parametrize("num_local", [2, 3])
@pytest.mark.parametrize("scale", [10.0, 30.0, 300.0])
def test_converged_marginals_with_large_features(scale: float, num_local: int) -> None:
    """Sharp problems, whose plans are almost 0 and 1, have a solution like any other; "to convergence"
    must reach it.
    """
    num_nodes, edges = GRAPHS["directed"]
    torch.manual_seed(0)
    module = DCMsgPassing(CHANNELS, NUM_GLOBAL, num_local=num_local, **EXACT).double()
    with torch.no_grad():
        module.global_embedding.mul_(scale)
        _, state = module(scale * features(num_nodes, 0), edge_tensor(edges), return_state=True)
    members = loop_model.egos(edges, num_nodes)
    plans = [loop_model.array(state.global_assign), *loop_model.split_slots(state.local_assign, members)]
    for plan in plans:
        np.testing.assert_allclose(plan.sum(axis=1) * len(plan), 1, atol=1e-6)
        np.testing.assert_allclose(plan.sum(axis=0) * plan.shape[1], 1, atol=1e-6)


@pytest.mark.parametrize(("scale", "seed"), [(3.0, 0), (10.0, 0), (30.0, 1)])
def test_converged_marginals_of_a_tall_sharp_problem(scale: float, seed: int) -> None:
    """Many nodes for few clusters: a handful of nodes on the borders decide the potentials."""
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(1000, CHANNELS, generator=generator, dtype=torch.float64)
    embedding = scale * torch.randn(7, CHANNELS, generator=generator, dtype=torch.float64)
    module = DCMsgPassing(CHANNELS, 7, alpha=1.0, **EXACT).double()
    with torch.no_grad():
        module.global_embedding.copy_(embedding)
        _, state = module(x, edge_tensor([]), return_state=True)
    plan = loop_model.array(state.global_assign)
    np.testing.assert_allclose(plan.sum(axis=1) * len(plan), 1, atol=1e-6)
    np.testing.assert_allclose(plan.sum(axis=0) * plan.shape[1], 1, atol=1e-6)


# Descent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mass", ["paper", "node"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("graph", GRAPHS)
def test_no_half_step_increases_the_objective(graph: str, seed: int, mass: str) -> None:
    weights = {"alpha": 0.5, "beta": 0.5, "lam": 2.0}
    module, x, state = run(graph, seed, 12, mass=mass, **EXACT, **weights)
    members = loop_model.egos(GRAPHS[graph][1], len(x))
    bound = loop_model.lower_bound(members, NUM_GLOBAL, 2, alpha=0.5, lam=2.0, mass=mass)
    values = half_steps(graph, module, x, state, num_local=2, mass=mass, **weights)
    assert_descends(values, bound)
    assert state.objectives[-1].total.item() == pytest.approx(values[-1], rel=1e-9)


@pytest.mark.parametrize("mass", ["paper", "node"])
@pytest.mark.parametrize(
    ("graph", "num_local", "weights"),
    [
        ("irregular", 1, {"alpha": 0.5, "beta": 0.5, "lam": 2.0}),
        ("irregular", 3, {"alpha": 0.2, "beta": 0.1, "lam": 0.7}),
        ("star", 4, {"alpha": 0.8, "beta": 1.5, "lam": 1.0}),
        ("directed", 2, {"alpha": 0.0, "beta": 0.2, "lam": 5.0}),
        ("directed", 2, {"alpha": 1.0, "beta": 0.05, "lam": 1.0}),
    ],
)
def test_descent_for_other_weights(graph: str, num_local: int, weights: dict[str, float], mass: str) -> None:
    module, x, state = run(graph, 4, 8, mass=mass, num_local=num_local, **EXACT, **weights)
    members = loop_model.egos(GRAPHS[graph][1], len(x))
    bound = loop_model.lower_bound(
        members, NUM_GLOBAL, num_local, alpha=weights["alpha"], lam=weights["lam"], mass=mass
    )
    assert_descends(half_steps(graph, module, x, state, num_local=num_local, mass=mass, **weights), bound)


@pytest.mark.parametrize("mass", ["paper", "node"])
def test_every_step_is_the_minimiser_of_its_block(mass: str) -> None:
    """Descent alone also holds for a step that is merely short enough; no small change of any block
    may lower the objective.
    """
    weights = {"alpha": 0.4, "beta": 0.6, "lam": 2.0}
    _, x, state = run("directed", 3, 2, mass=mass, **EXACT, **weights)
    members = loop_model.egos(GRAPHS["directed"][1], len(x))
    first, last = state.layers
    before = loop_model.array(first.z)
    plan = loop_model.array(last.global_assign)
    plans = loop_model.split_slots(last.local_assign, members)
    generator = np.random.default_rng(0)

    def value(z: Any, global_plan: Any, local_plans: Any, global_clusters: Any, local_clusters: Any) -> float:
        terms = loop_model.objective(
            z,
            x,
            members,
            global_plan,
            global_clusters,
            local_plans,
            local_clusters,
            mass=mass,
            **weights,
        )
        return sum(terms)

    def noise(like: Any) -> Any:
        return 1e-4 * generator.standard_normal(like.shape)

    def turned(p: Any) -> Any:
        """The same marginals: mass moves around a 2 × 2 cycle."""
        if p.shape[0] < 2:
            return p
        p = p.copy()
        u, v = generator.choice(p.shape[0], 2, replace=False)
        j, k = generator.choice(p.shape[1], 2, replace=False)
        amount = generator.choice([-1e-3, 1e-3]) * min(p[u, j], p[v, k], p[u, k], p[v, j])
        p[u, j] += amount
        p[v, k] += amount
        p[u, k] -= amount
        p[v, j] -= amount
        return p

    old_global, old_local = loop_model.array(first.global_clusters), loop_model.array(first.local_clusters)
    new_global, new_local = loop_model.array(last.global_clusters), loop_model.array(last.local_clusters)
    after = loop_model.array(last.z)
    assigned = value(before, plan, plans, old_global, old_local)
    aggregated = value(before, plan, plans, new_global, new_local)
    updated = value(after, plan, plans, new_global, new_local)
    for _ in range(20):
        turned_plans = [turned(p) for p in plans]
        assert value(before, turned(plan), turned_plans, old_global, old_local) >= assigned - 1e-11
        moved = (new_global + noise(new_global), new_local + noise(new_local))
        assert value(before, plan, plans, *moved) > aggregated
        assert value(after + noise(after), plan, plans, new_global, new_local) > updated


def test_the_printed_gamma_grows_on_the_star_where_the_exact_one_descends() -> None:
    weights = {"alpha": 0.5, "beta": 0.5, "lam": 2.0}
    totals = {}
    for gamma in ("paper", "exact"):
        options = {**EXACT, "gamma": gamma}
        _, _, state = run("star", 0, 12, mass="paper", **options, **weights)
        totals[gamma] = [value.total.item() for value in state.objectives]
    assert all(after <= before for before, after in itertools.pairwise(totals["exact"]))
    assert totals["exact"][-1] < totals["exact"][0]
    assert max(totals["paper"]) > 1e6 * abs(totals["paper"][0])


def test_the_printed_gamma_is_exact_on_regular_graphs() -> None:
    for mass in ("paper", "node"):
        outputs = []
        for gamma in ("paper", "exact"):
            options = {**EXACT, "gamma": gamma, "aggr": None}
            outputs.append(run("ring", 0, 3, mass=mass, **options)[2].z)
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)
