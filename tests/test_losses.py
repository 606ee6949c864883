"""The training losses: against the loop, their gradients, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import loop_model
import pytest
import torch
from torch import Tensor

from dcgnn import DCGNN, DCMsgPassing, orthogonality_loss, similarity_loss, training_loss

AGGRS = ["max", "mean", "sum"]
METRICS = ["cosine", "distance"]


def draw(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# Orthogonality -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 5), (4, 3), (6, 6)])
@pytest.mark.parametrize("seed", [0, 1])
def test_orthogonality_equals_the_loop(shape: tuple[int, int], seed: int) -> None:
    clusters = draw(*shape, seed=seed)
    got = orthogonality_loss(clusters)
    assert got.shape == ()
    assert got.item() == pytest.approx(loop_model.orthogonality(clusters), rel=1e-9, abs=1e-12)
    assert 0 <= got.item() <= 2


def test_orthogonality_by_hand() -> None:
    """Two equal unit vectors: G/‖G‖ is 1/2 everywhere, I/√2 is 0.7071 on the diagonal."""
    clusters = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    wanted = math.sqrt(2 * (0.5 - 1 / math.sqrt(2)) ** 2 + 2 * 0.25)
    assert orthogonality_loss(clusters).item() == pytest.approx(wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("count", "channels"), [(1, 1), (2, 2), (4, 4), (3, 7)])
def test_orthogonal_clusters_cost_nothing_and_stay_trainable(count: int, channels: int, dtype: Any) -> None:
    """At 0 the norm has no derivative; training must not meet NaN there."""
    clusters = (2.0 * torch.eye(count, channels, dtype=dtype)).requires_grad_()
    loss = orthogonality_loss(clusters)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()
    assert bool(torch.isfinite(clusters.grad).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_orthogonality_of_zero_clusters_is_finite(dtype: Any) -> None:
    """Aggregated clusters are all 0 when all features are: the loss and its gradient stay finite."""
    clusters = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    loss = orthogonality_loss(clusters)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(clusters.grad).all())


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_orthogonality_does_not_see_the_scale(factor: float) -> None:
    clusters = draw(4, 5)
    expected = orthogonality_loss(clusters).item()
    assert orthogonality_loss(factor * clusters).item() == pytest.approx(expected)


def test_orthogonality_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(orthogonality_loss, (draw(3, 4).requires_grad_(),))
    assert torch.autograd.gradcheck(orthogonality_loss, (draw(4, 2).requires_grad_(),))


def test_descending_the_loss_makes_clusters_orthogonal() -> None:
    clusters = draw(3, 5, seed=2).requires_grad_()
    start = orthogonality_loss(clusters).item()
    for _ in range(200):
        (grad,) = torch.autograd.grad(orthogonality_loss(clusters), clusters)
        with torch.no_grad():
            clusters -= 0.05 * grad
    assert orthogonality_loss(clusters).item() < 0.2 * start


@pytest.mark.parametrize("shape", [(3,), (2, 2, 3, 4), (0, 4), (0, 3, 4)])
def test_orthogonality_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="clusters"):
        orthogonality_loss(torch.zeros(shape))


# Similarity --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("num_classes", "per_class"), [(2, 1), (2, 3), (4, 2)])
def test_similarity_equals_the_loop(aggr: str, metric: str, num_classes: int, per_class: int) -> None:
    z, clusters = draw(12, 3), draw(num_classes * per_class, 3, seed=1)
    y = torch.arange(12) % num_classes
    got = similarity_loss(z, clusters, y, num_classes, aggr, metric)
    assert got.shape == ()
    wanted = loop_model.similarity(z, clusters, y, num_classes, aggr, metric)
    assert got.item() == pytest.approx(wanted, rel=1e-9)


def test_similarity_defaults() -> None:
    """Cosine, the most similar cluster, and as many classes as the labels show."""
    z, clusters, y = draw(9, 3), draw(6, 3, seed=1), torch.arange(9) % 3
    wanted = loop_model.similarity(z, clusters, y, 3, "max", "cosine")
    assert similarity_loss(z, clusters, y).item() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_similarity_leaves_unlabelled_nodes_out(metric: str) -> None:
    z, clusters = draw(10, 3).requires_grad_(), draw(4, 3, seed=1)
    y = torch.tensor([0, 1, -1, 1, -1, 0, 1, -5, 0, 1])
    loss = similarity_loss(z, clusters, y, 2, metric=metric)
    labelled = y >= 0
    kept = similarity_loss(z.detach()[labelled], clusters, y[labelled], 2, metric=metric)
    assert loss.item() == pytest.approx(kept.item())
    assert loss.item() == pytest.approx(loop_model.similarity(z, clusters, y, 2, "max", metric), rel=1e-9)
    loss.backward()
    assert bool((z.grad[~labelled] == 0).all())
    assert bool((z.grad[labelled] != 0).any(1).all())


def test_similarity_without_any_label_is_0_and_trainable() -> None:
    z, clusters = draw(4, 3).requires_grad_(), draw(4, 3)
    loss = similarity_loss(z, clusters, torch.full((4,), -1), 2)
    loss.backward()
    assert loss.item() == 0
    assert bool((z.grad == 0).all())


@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("metric", METRICS)
def test_similarity_passes_gradcheck(aggr: str, metric: str) -> None:
    y = torch.tensor([0, 1, 2, 1, -1])

    def run(z: Tensor, clusters: Tensor) -> Tensor:
        return similarity_loss(z, clusters, y, 3, aggr, metric)

    assert torch.autograd.gradcheck(run, (draw(5, 2).requires_grad_(), draw(6, 2, seed=1).requires_grad_()))


@pytest.mark.parametrize("metric", METRICS)
def test_similarity_prefers_the_own_class(metric: str) -> None:
    """Each node on the cluster of its class costs less than on that of another; the sign is right."""
    clusters = torch.eye(3, dtype=torch.float64)
    z = 0.9 * clusters
    right, wrong = torch.arange(3), (torch.arange(3) + 1) % 3
    loss = [similarity_loss(z, clusters, y, 3, metric=metric).item() for y in (right, wrong)]
    assert loss[0] < loss[1] - 0.5


@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("metric", METRICS)
def test_similarity_is_finite_on_a_cluster_and_at_the_origin(aggr: str, metric: str) -> None:
    """Where a distance or a norm is 0 its derivative is not defined; a gradient must be finite still."""
    clusters = draw(4, 3, seed=1)
    z = torch.cat([clusters[:2], torch.zeros(1, 3, dtype=torch.float64)])
    z, clusters = z.clone().requires_grad_(), clusters.requires_grad_()
    loss = similarity_loss(z, clusters, torch.tensor([0, 1, 1]), 2, aggr, metric)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(z.grad).all())
    assert bool(torch.isfinite(clusters.grad).all())


@pytest.mark.parametrize("metric", METRICS)
def test_similarity_in_float32_is_close_for_many_nodes_near_their_cluster(metric: str) -> None:
    """Distances much smaller than the coordinates, and more rows than the size at which PyTorch begins
    to compute distances by a matrix product.
    """
    clusters = 10 + draw(4, 8, seed=1)
    y = torch.arange(60) % 2
    z = clusters[2 * y] + 1e-3 * draw(60, 8)
    wanted = loop_model.similarity(z.float(), clusters.float(), y, 2, "max", metric)
    got = similarity_loss(z.float(), clusters.float(), y, 2, metric=metric).item()
    assert got == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"aggr": "median"}, "aggr"),
        ({"aggr": None}, "aggr"),
        ({"metric": "dot"}, "metric"),
        ({"clusters": draw(5, 3)}, "clusters"),
        ({"clusters": draw(4, 2)}, "clusters"),
        ({"clusters": draw(4)}, "clusters"),
        ({"num_classes": 3}, "num_classes"),
        ({"num_classes": 1, "y": torch.zeros(6, dtype=torch.int64)}, "num_classes"),
        ({"y": torch.arange(6)}, "y"),
        ({"y": torch.arange(5) % 2}, "y"),
        ({"y": torch.zeros(6, 1, dtype=torch.int64)}, "y"),
        ({"y": torch.zeros(6)}, "y"),
        ({"z": draw(6)}, "z"),
    ],
    ids=[
        "aggr",
        "aggr None",
        "metric",
        "5 clusters for 2 classes",
        "narrow clusters",
        "1-dim clusters",
        "4 clusters for 3 classes",
        "one class",
        "label beyond num_classes",
        "too few labels",
        "2-dim labels",
        "float labels",
        "1-dim z",
    ],
)
def test_similarity_refuses_bad_input(change: dict[str, Any], name: str) -> None:
    arguments = {"z": draw(6, 3), "clusters": draw(4, 3), "y": torch.arange(6) % 2, "num_classes": 2}
    similarity_loss(**arguments)
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        similarity_loss(**{**arguments, **change})


# Joined ------------------------------------------------------------------------------------------------


def state_of(seed: int = 0, **options: Any) -> tuple[Tensor, Any]:
    torch.manual_seed(seed)
    x = draw(8, 3, seed=seed)
    ring = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8])
    return DCMsgPassing(3, 4, 2, **options).double()(x, ring, return_state=True)


LABELS = torch.tensor([0, 1, -1, 1, 0, 0, -1, 1])
MASK = torch.tensor([True, True, True, False, True, False, False, True])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ortho_weight": 0.3},
        {"sim_weight": 0.7},
        {"ortho_weight": 0.3, "sim_weight": 0.7},
        {"ortho_weight": 0.3, "sim_weight": 0.7, "sim_aggr": "mean", "sim_metric": "distance"},
    ],
)
def test_training_loss_joins_the_parts(options: dict[str, Any], masked: bool) -> None:
    logits = draw(8, 2, seed=5)
    _, state = state_of()
    chosen = (LABELS >= 0) & MASK if masked else LABELS >= 0
    got = training_loss(logits, LABELS, state, mask=MASK if masked else None, **options)
    wanted = loop_model.cross_entropy(logits[chosen], LABELS[chosen])
    wanted += options.get("ortho_weight", 0) * loop_model.orthogonality(state.global_clusters)
    if "sim_weight" in options:
        wanted += options["sim_weight"] * loop_model.similarity(
            state.z[chosen],
            state.global_clusters,
            LABELS[chosen],
            2,
            options.get("sim_aggr", "max"),
            options.get("sim_metric", "cosine"),
        )
    assert got.item() == pytest.approx(wanted, rel=1e-9)


def test_training_loss_takes_the_number_of_classes_from_the_logits() -> None:
    """A split that misses the last class still has its clusters."""
    _, state = state_of()
    y = torch.tensor([0, 1, 0, 1, 0, 1, 2, 2])
    logits = draw(8, 4, seed=5)
    got = training_loss(logits, y, state, sim_weight=1.0).item()
    wanted = loop_model.cross_entropy(logits, y)
    wanted += loop_model.similarity(state.z, state.global_clusters, y, 4)
    assert got == pytest.approx(wanted, rel=1e-9)


def test_training_loss_needs_no_state_without_weights() -> None:
    logits = draw(8, 2)
    wanted = loop_model.cross_entropy(logits[LABELS >= 0], LABELS[LABELS >= 0])
    assert training_loss(logits, LABELS).item() == pytest.approx(wanted, rel=1e-9)
    _, no_global = state_of(alpha=0.0)
    assert training_loss(logits, LABELS, no_global).item() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("weight", ["ortho_weight", "sim_weight"])
def test_training_loss_needs_global_clusters_for_its_weights(weight: str) -> None:
    logits = draw(8, 2)
    _, no_global = state_of(alpha=0.0)
    for state in (None, no_global):
        with pytest.raises(ValueError, match="state"):
            training_loss(logits, LABELS, state, **{weight: 0.1})


def test_training_loss_refuses_bad_input() -> None:
    logits = draw(8, 2)
    _, state = state_of()
    with pytest.raises(ValueError, match="mask"):
        training_loss(logits, LABELS, mask=torch.zeros(8, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask"):
        training_loss(logits, torch.full((8,), -1), mask=MASK)
    with pytest.raises(ValueError, match="mask"):
        training_loss(logits, LABELS, mask=MASK.long())
    with pytest.raises(ValueError, match="mask"):
        training_loss(logits, LABELS, mask=MASK[:5])
    with pytest.raises(ValueError, match="clusters"):
        training_loss(draw(8, 3), LABELS, state, sim_weight=1.0)
    with pytest.raises(ValueError, match="aggr"):
        training_loss(logits, LABELS, state, sim_weight=1.0, sim_aggr="median")


def test_training_loss_trains_every_part_of_a_model() -> None:
    torch.manual_seed(0)
    x, y = draw(8, 5, dtype=torch.float32), torch.arange(8) % 2
    ring = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8])
    model = DCGNN(5, 6, 2, 4, transform="per-cluster", ego_readout=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        logits, state = model(x, ring, return_state=True)
        loss = training_loss(logits, y, state, ortho_weight=0.1, sim_weight=0.1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_orthogonality_does_not_depend_on_the_size_of_the_clusters(dtype: torch.dtype) -> None:
    """Products of large entries would overflow; a NaN must not pass for a perfect score."""
    clusters = torch.randn(3, 40)
    expected = orthogonality_loss(clusters)
    for size in (1e-3, 20.0, 1e3):
        torch.testing.assert_close(
            orthogonality_loss((clusters * size).to(dtype)).float(), expected, rtol=5e-3, atol=5e-3
        )
    assert bool(orthogonality_loss(torch.full((3, 4), float("nan"), dtype=dtype)).isnan())
