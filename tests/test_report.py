"""The report: its measures against loops, and the page itself."""

from __future__ import annotations

import base64
import itertools
import re
from html.parser import HTMLParser

import pytest
import torch
from matplotlib.figure import Figure

from dcgnn.checkpoint import load_checkpoint, save_checkpoint
from dcgnn.cli import main
from dcgnn.report import load_trained
from dcgnn.report.figures import _LEGEND, _scatter, embedding_plane, objective
from dcgnn.report.measures import (
    cluster_purity,
    local_homophily,
    most_contested,
    project,
    shuffle_members,
    shuffled_purity,
)
from dcgnn_kernels import EgoGraph

GRAPH = "sbm:num_nodes=60,avg_degree=4,signal=2.0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.pt"
    arguments = ["train", GRAPH, "--epochs", "4", "--hidden", "8", "--quiet", "--objective-every", "2"]
    assert main([*arguments, "--checkpoint", str(path)]) == 0
    return path


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.images: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        elif tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("embedding", ["pca", "tsne"])
def test_page_is_whole_and_self_contained(embedding, checkpoint, tmp_path, capsys):
    assert main(["report", str(checkpoint), "--out", str(tmp_path), "--embedding", embedding]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    pictures = [base64.b64decode(source.partition("base64,")[2]) for source in page.images]
    files = {name: (tmp_path / f"{name}.png").read_bytes() for name in
             ("curves", "objective", "assignment", "embedding", "purity")}  # fmt: skip
    assert pictures == list(files.values())
    assert all(png.startswith(b"\x89PNG") for png in pictures)
    assert not re.search(r"https?://|<script|<link", text), "nothing is fetched"
    assert "Most contested nodes" in text


def test_scores_are_those_of_training(checkpoint):
    trained = load_trained(checkpoint)
    saved = load_checkpoint(checkpoint)
    assert trained.scores()["val"] == pytest.approx(saved["best_metric"])
    assert [entry[0] for entry in trained.history.objective] == [2, 4]
    assert all(len(entry) == 3 for entry in trained.history.objective)


def test_local_homophily_and_purity_against_a_loop(checkpoint):
    trained = load_trained(checkpoint)
    y = trained.data.y.clone()
    y[::7] = -1
    graph, assign = trained.graph, trained.state.local_assign
    homophily = local_homophily(trained.data.edge_index, y)
    purity, one = cluster_purity(assign, graph, y, 2)
    for ego in range(graph.num_nodes):
        slots = range(int(graph.rowptr[ego]), int(graph.rowptr[ego + 1]))
        members = [(int(graph.member[slot]), assign[slot].double()) for slot in slots]
        mass = torch.zeros(2, 2, dtype=torch.float64)
        for node, row in members:
            if y[node] >= 0:
                mass[y[node]] += row
        torch.testing.assert_close(purity[ego], mass.max(0).values.sum() / mass.sum(), equal_nan=True)
        torch.testing.assert_close(one[ego], mass.sum(1).max() / mass.sum(), equal_nan=True)
        same = [
            bool(y[node] == y[ego]) for node, _ in members if node != ego and y[node] >= 0 and y[ego] >= 0
        ]
        expected = sum(same) / len(same) if same else float("nan")
        torch.testing.assert_close(homophily[ego].item(), expected, equal_nan=True)


def test_purity_of_perfect_clusters():
    graph = EgoGraph.from_edge_index(torch.tensor([[1, 2], [0, 0]]), 3)
    y = torch.tensor([0, 1, 1])
    assign = torch.nn.functional.one_hot(y[graph.member.long()], 2).double()
    purity, one = cluster_purity(assign, graph, y, 2)
    assert purity.tolist() == [1.0, 1.0, 1.0]
    assert one.tolist() == pytest.approx([2 / 3, 1.0, 1.0])


def test_shuffled_clusters_are_those_of_the_ego_dealt_anew(checkpoint):
    graph = load_trained(checkpoint).graph
    assign = torch.arange(2 * graph.num_slots, dtype=torch.float64).view(-1, 2)
    dealt = shuffle_members(assign, graph, seed=0)
    bounds = graph.rowptr.tolist()
    for start, end in itertools.pairwise(bounds):
        assert sorted(dealt[start:end].tolist()) == assign[start:end].tolist()
    assert not torch.equal(dealt, assign)
    assert torch.equal(dealt, shuffle_members(assign, graph, seed=0))
    assert not torch.equal(dealt, shuffle_members(assign, graph, seed=1))


def test_purity_of_shuffled_clusters_lies_between_one_cluster_and_perfect_ones(checkpoint):
    trained = load_trained(checkpoint)
    graph, y = trained.graph, trained.data.y
    assign = torch.nn.functional.one_hot(y[graph.member.long()], 2).double()
    shuffled = shuffled_purity(assign, graph, y, 2)
    purity, one = cluster_purity(assign, graph, y, 2)
    assert torch.all(purity == 1)
    assert torch.all(shuffled >= one - 1e-12)
    mixed = one < 1
    assert one[mixed].mean() + 0.01 < shuffled[mixed].mean() < 0.95


def test_more_clusters_and_layers_than_a_legend_and_a_palette_hold(tmp_path):
    path = tmp_path / "run.pt"
    options = ["--epochs", "2", "--hidden", "8", "--quiet", "--objective-every", "1", "--layers", "12"]
    assert main(["train", GRAPH, *options, "--checkpoint", str(path)]) == 0
    lines = objective(load_trained(path)).axes[1].lines
    assert len({line.get_color() for line in lines}) == len(lines) == 12
    for count in (_LEGEND, _LEGEND + 1, 40):
        figure = Figure()
        axes = figure.subplots()
        _scatter(axes, torch.zeros(2 * count, 2), 3 * (torch.arange(2 * count) % count), "cluster")
        if count <= _LEGEND:
            assert [text.get_text() for text in axes.get_legend().get_texts()] == [
                str(3 * number) for number in range(count)
            ]
            assert figure.axes == [axes]
        else:
            assert axes.get_legend() is None
            assert len(figure.axes) == 2, "a colour bar"
        drawn = axes.collections[0]
        colours = drawn.to_rgba(drawn.get_array())
        assert len({tuple(colour) for colour in colours.tolist()}) == count


def test_most_contested_are_sorted(checkpoint):
    found = most_contested(load_trained(checkpoint), count=5)
    entropies = [entry.entropy for entry in found]
    assert len(found) == 5
    assert entropies == sorted(entropies, reverse=True)
    assert all(0 <= entry.entropy <= 1 + 1e-9 for entry in found)
    assert all(entry.shares[0] >= entry.shares[1] for entry in found)


@pytest.mark.parametrize(("lam", "told"), [(1e-6, False), (2.0, True)])
def test_equal_shares_are_not_shown_as_clusters(lam, told, tmp_path):
    path = tmp_path / "run.pt"
    options = ["--epochs", "2", "--hidden", "8", "--quiet", "--global-cost-scale", "mean", "--lam", str(lam)]
    assert main(["train", GRAPH, *options, "--checkpoint", str(path)]) == 0
    trained = load_trained(path)
    assert trained.tells_nodes_apart() == told
    assert bool(most_contested(trained)) == told
    titles = [axes.get_title() for axes in embedding_plane(trained, "pca").axes]
    assert ("largest global cluster" in titles) == told
    assert ("predicted class" in titles) != told
    assert main(["report", str(path), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert ("do not tell nodes apart" in text) != told
    assert ("Most contested nodes" in text) == told


def test_model_without_global_clusters(tmp_path):
    path = tmp_path / "run.pt"
    options = ["--epochs", "1", "--hidden", "8", "--quiet", "--alpha", "0"]
    assert main(["train", GRAPH, *options, "--checkpoint", str(path)]) == 0
    assert main(["report", str(path), "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "assignment.png").exists()
    assert "--objective-every" in (tmp_path / "report.html").read_text()


def test_objective_every_must_not_be_negative(capsys):
    assert main(["train", GRAPH, "--objective-every", "-1", "--quiet"]) == 2
    assert "objective_every must not be negative" in capsys.readouterr().err


def test_mistakes(checkpoint, tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.pt")]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    assert main(["report", str(checkpoint), "--out", str(tmp_path), "--embedding", "umap"]) == 2
    assert "embedding must be pca or tsne" in capsys.readouterr().err
    content = load_checkpoint(checkpoint)
    for key, value, message in (("model", "ConvNet", "holds a ConvNet"), ("data", "0", "other data")):
        changed = {**content, "identity": {**content["identity"], key: value}}
        save_checkpoint(tmp_path / "changed.pt", changed)
        assert main(["report", str(tmp_path / "changed.pt")]) == 2
        assert message in capsys.readouterr().err
    save_checkpoint(tmp_path / "part.pt", {key: content[key] for key in content if key != "history"})
    assert main(["report", str(tmp_path / "part.pt")]) == 2
    assert "part.pt is not a whole checkpoint of dcgnn train: no history" in capsys.readouterr().err
    with pytest.raises(ValueError, match="embedding"):
        project(torch.zeros(4, 3), "umap")
