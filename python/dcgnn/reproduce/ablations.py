"""What each part of DC-GNN brings: terms of the objective, losses, aggregator of the similarity loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dcgnn.presets import recipe_for
from dcgnn.recipe import Recipe
from dcgnn.reproduce.classification import GRAPHS
from dcgnn.reproduce.experiment import Context, Outcome, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Graphs of an ablation unless others are asked for.
_DEFAULT_GRAPHS = ("wisconsin", "us-election", "cora", "citeseer", "amherst41")

#: Weight of a loss that the preset has switched off.
_LOSS_WEIGHT = 0.1

_LOSSES_TOLD = f"A loss that the preset has switched off has weight {_LOSS_WEIGHT:g} here, and α = 0 is 0.5."

Variants = Callable[[Recipe], Mapping[str, Recipe]]

#: Test metric of every split, in percent, by graph and by variant or model.
Scores = Mapping[str, Mapping[str, Sequence[float]]]


def objective(context: Context, name: str = "ablation-objective") -> Outcome:
    """Without the global term (α = 0), the local ones (α = 1) or the fidelity to the input (β = 0)."""
    return _ablation(
        context,
        name,
        _objective_variants,
        "Where the preset has α = 0 or 1, or β = 0, it is 0.5 here. α = 0 also switches off both losses: "
        "without global clusters there is nothing to be orthogonal or similar to.",
    )


def losses(context: Context, name: str = "ablation-losses") -> Outcome:
    """Cross entropy alone, with either loss, and with both."""
    return _ablation(context, name, _loss_variants, _LOSSES_TOLD)


def aggregator(context: Context, name: str = "ablation-aggregator") -> Outcome:
    """How similarities to the clusters of a class join in the similarity loss."""
    told = "There are twice as many global clusters as in the preset. " + _LOSSES_TOLD
    return _ablation(context, name, _aggregator_variants, told)


def _preset(context: Context, graph: str) -> Recipe:
    return recipe_for(graph, "dcgnn").with_num_global(context.load(graph).num_classes)


def _objective_variants(recipe: Recipe) -> dict[str, Recipe]:
    base = recipe
    if not 0 < recipe.options.get("alpha", 0.5) < 1:
        base = base.replaced({"alpha": 0.5})
    if recipe.options.get("beta", 0.5) == 0:
        base = base.replaced({"beta": 0.5})
    return {
        "all terms": base,
        "α = 0": base.replaced({"alpha": 0.0}, ortho_weight=0.0, sim_weight=0.0),
        "α = 1": base.replaced({"alpha": 1.0}),
        "β = 0": base.replaced({"beta": 0.0}),
    }


def _loss_variants(recipe: Recipe) -> dict[str, Recipe]:
    base, ortho, sim = _with_losses(recipe)
    return {
        "both": base.replaced(ortho_weight=ortho, sim_weight=sim),
        "no L_ortho": base.replaced(ortho_weight=0.0, sim_weight=sim),
        "no L_sim": base.replaced(ortho_weight=ortho, sim_weight=0.0),
        "neither": base.replaced(ortho_weight=0.0, sim_weight=0.0),
    }


def _aggregator_variants(recipe: Recipe) -> dict[str, Recipe]:
    base, ortho, sim = _with_losses(recipe)
    base = base.replaced({"num_global": 2 * base.options["num_global"]}, ortho_weight=ortho, sim_weight=sim)
    return {aggr: base.replaced(sim_aggr=aggr) for aggr in ("max", "mean", "sum")}


def _with_losses(recipe: Recipe) -> tuple[Recipe, float, float]:
    """The recipe with a global problem, and the weights that its losses have when switched on."""
    if recipe.options.get("alpha", 0.5) == 0:
        recipe = recipe.replaced({"alpha": 0.5})
    weights = [recipe.training.get(name) or _LOSS_WEIGHT for name in ("ortho_weight", "sim_weight")]
    return recipe, weights[0], weights[1]


def _ablation(context: Context, name: str, variants: Variants, told: str) -> Outcome:
    graphs = context.choose_graphs(GRAPHS) if context.datasets else context.choose_graphs(_DEFAULT_GRAPHS)
    order = [
        (graph, split, variant, recipe)
        for graph in graphs
        for split in context.splits_of(graph)
        for variant, recipe in variants(_preset(context, graph)).items()
    ]
    jobs = [context.training_job(recipe, graph, split) for graph, split, _, recipe in order]
    results = context.collect(name, jobs)
    scores: dict[str, dict[str, list[float]]] = {graph: {} for graph in graphs}
    for (graph, _, variant, _), result in zip(order, results, strict=True):
        scores[graph].setdefault(variant, []).append(100 * result["test_metric"])
    means = {
        graph: {key: statistics.fmean(values) for key, values in row.items()} for graph, row in scores.items()
    }
    names = list(means[graphs[0]])
    rows, verdicts = [], {}
    for graph in graphs:
        highest = max(means[graph].values())
        best = [key for key in names if math.isclose(means[graph][key], highest)]
        if best == names[:1]:
            verdicts[graph] = "pass"
        else:
            others = " and ".join(key for key in best if key != names[0])
            verdicts[graph] = f"{others} {'as good' if names[0] in best else 'better'}"
        rows.append([graph, *(spread(scores[graph][key]) for key in names), ", ".join(best)])
    return Outcome(
        header=["graph", *names, "best"],
        rows=rows,
        verdicts=verdicts,
        data={"test": scores, "splits": list(context.splits)},
        draw=lambda figure: _draw(figure, scores),
        notes=[
            "Test metric in percent. The first column is the paper's choice and passes where it is the best; "
            "the paper's numbers are not at hand.",
            told,
        ],
    )


def _draw(figure: Figure, scores: Scores) -> None:
    axes = figure.subplots()
    lowest = draw_bars(axes, scores)
    axes.set_ylim(max(0.0, lowest - 5), None)
    axes.set_ylabel("test metric, %")
    axes.legend(ncols=4, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_bars(axes: Axes, scores: Scores) -> float:
    """Mean and deviation over splits, a group of bars for each graph; returns the lowest end of them all."""
    names = list(next(iter(scores.values())))
    width = 0.8 / len(names)
    lowest = math.inf
    for index, name in enumerate(names):
        values = [row[name] for row in scores.values()]
        means = [statistics.fmean(each) for each in values]
        deviations = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values]
        places = [position + (index - (len(names) - 1) / 2) * width for position in range(len(scores))]
        axes.bar(places, means, width, yerr=deviations, label=name, capsize=2)
        lowest = min(lowest, *(mean - deviation for mean, deviation in zip(means, deviations, strict=True)))
    axes.set_xticks(range(len(scores)), list(scores))
    return lowest
