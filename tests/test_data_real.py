"""Published graphs: loaders on small files in the raw formats, and on the real ones if present."""

from __future__ import annotations

import contextlib
import os
import pickle
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch

from dcgnn.data import DATA_ROOT_VARIABLE, DatasetUnavailable, default_data_root, load_graph
from dcgnn.data.real import REAL_GRAPHS

NUM_NODES = 12
RING = np.array([[node, (node + 1) % NUM_NODES] for node in range(NUM_NODES)])


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch_geometric.io.fs.cp", refuse)


def folder(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir(parents=True)
    return path


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def write_heterophilous(path: Path, labels=tuple(range(NUM_NODES))) -> None:
    """A ring of 12 nodes and others alone, with two classes: the even and the odd ``labels``."""
    num_nodes = len(labels)
    masks = np.zeros((3, 10, num_nodes), dtype=bool)
    for split in range(10):
        for node in range(num_nodes):
            masks[(node + split) % 3, split, node] = True
    np.savez(
        path,
        node_features=np.eye(num_nodes, 5, dtype=np.float32),
        node_labels=np.array(labels) % 2,
        edges=RING,
        train_masks=masks[0],
        val_masks=masks[1],
        test_masks=masks[2],
    )


def write_geom_gcn_splits(path: Path, name: str, num_nodes: int) -> None:
    for split in range(10):
        part = (np.arange(num_nodes) + split) % 3
        np.savez(
            path / f"{name}_split_0.6_0.2_{split}.npz",
            train_mask=part == 0,
            val_mask=part == 1,
            test_mask=part == 2,
        )


def write_wisconsin(root) -> None:
    """Wisconsin with a ring of 12 nodes and a self-loop, below a data root."""
    raw = folder(root, "wisconsin")
    lines = [f"{node}\t{node % 2},1,0\t{node % 5}" for node in range(NUM_NODES)]
    (raw / "out1_node_feature_label.txt").write_text("\n".join(["header", *lines, ""]))
    edges = [f"{a}\t{b}" for a, b in RING]
    (raw / "out1_graph_edges.txt").write_text("\n".join(["header", *edges, "3\t3", ""]))
    write_geom_gcn_splits(raw, "wisconsin", NUM_NODES)


def write_facebook(path: Path) -> None:
    adjacency = scipy.sparse.csc_matrix(
        (np.ones(NUM_NODES), (RING[:, 0], RING[:, 1])), shape=(NUM_NODES, NUM_NODES)
    )
    info = np.ones((NUM_NODES, 7), dtype=np.int64)
    info[:, 1] = np.arange(NUM_NODES) % 3  # 0 is "no gender given"
    info[:, 5] = np.arange(NUM_NODES) % 4
    scipy.io.savemat(path / "data.mat", {"A": adjacency + adjacency.T, "local_info": info})


@pytest.mark.parametrize("layout", ["flat", "pyg"])
@pytest.mark.parametrize(
    ("name", "file", "metric"),
    [
        ("minesweeper", "minesweeper", "roc_auc"),
        ("tolokers", "tolokers", "roc_auc"),
        ("questions", "questions", "roc_auc"),
        ("roman-empire", "roman_empire", "accuracy"),
        ("amazon-ratings", "amazon_ratings", "accuracy"),
    ],
)
def test_heterophilous(tmp_path, name, file, metric, layout):
    raw = folder(tmp_path, name) if layout == "flat" else folder(tmp_path, f"{file}/raw")
    write_heterophilous(raw / f"{file}.npz")
    before = contents(tmp_path)
    data = load_graph(name, data_root=tmp_path, split=4)
    assert contents(tmp_path) == before, "nothing may be written to the data root"
    assert data.metric == metric
    assert data.x.shape == (NUM_NODES, 5)
    assert data.num_edges == 2 * NUM_NODES
    assert data.train_mask.nonzero().view(-1).tolist() == [2, 5, 8, 11]
    with pytest.raises(ValueError, match=r"splits 0\.\.9, got split 10"):
        load_graph(name, data_root=tmp_path, split=10)


def test_planetoid_uses_the_geom_gcn_splits_and_keeps_features(tmp_path):
    # PyG marks 500 nodes after the training ones, so the smallest graph has a few more.
    num_nodes, num_test = 512, 4
    raw = folder(tmp_path, "cora")
    features = np.zeros((num_nodes, 4), dtype=np.float32)
    features[:, 1] = 1.0
    features[np.arange(num_nodes), np.arange(num_nodes) % 4] = 1.0
    labels = np.eye(3, dtype=np.int32)[np.arange(num_nodes) % 3]
    seen = num_nodes - num_test
    parts = {
        "x": scipy.sparse.csr_matrix(features[:3]),
        "y": labels[:3],
        "allx": scipy.sparse.csr_matrix(features[:seen]),
        "ally": labels[:seen],
        "tx": scipy.sparse.csr_matrix(features[seen:]),
        "ty": labels[seen:],
        "graph": {node: [(node + 1) % num_nodes] for node in range(num_nodes)},
    }
    for part, value in parts.items():
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(value))
    test_index = "".join(f"{node}\n" for node in range(seen, num_nodes))
    (raw / "ind.cora.test.index").write_text(test_index)
    write_geom_gcn_splits(raw, "cora", num_nodes)
    data = load_graph("cora", data_root=tmp_path, split=1)
    assert torch.equal(data.x, torch.from_numpy(features)), "no row normalisation"
    assert data.y.tolist() == [node % 3 for node in range(num_nodes)]
    assert data.num_edges == 2 * num_nodes
    assert data.val_mask.nonzero().view(-1)[:3].tolist() == [0, 3, 6]


def test_wisconsin_is_undirected_and_split_at_random(tmp_path):
    write_wisconsin(tmp_path)
    data = load_graph("wisconsin", data_root=tmp_path)
    assert data.num_classes == 5
    assert data.num_edges == 2 * NUM_NODES + 1
    assert [int(mask.sum()) for mask in data.masks().values()] == [6, 3, 3]


@pytest.mark.parametrize("name", ["cornell5", "amherst41", "penn94"])
def test_facebook_masks_the_unlabelled(tmp_path, name):
    write_facebook(folder(tmp_path, name))
    told = pytest.warns(
        UserWarning, match=r"penn94: without fb100-Penn94-splits.npy its splits are random ones"
    )
    with told if name == "penn94" else contextlib.nullcontext():
        data = load_graph(name, data_root=tmp_path, split=123)
    unlabelled = data.y == -1
    assert int(unlabelled.sum()) == NUM_NODES // 3
    covered = data.train_mask | data.val_mask | data.test_mask
    assert torch.equal(covered, ~unlabelled)
    assert data.num_classes == 2
    assert data.num_edges == 2 * NUM_NODES
    assert set(data.x.unique().tolist()) == {0.0, 1.0}


def test_penn94_uses_its_own_splits_when_they_are_there(tmp_path):
    raw = folder(tmp_path, "penn94")
    write_facebook(raw)
    parts = [{"train": [1, 2], "valid": [4, 5], "test": [7, 8]} for _ in range(5)]
    np.save(raw / "fb100-Penn94-splits.npy", np.array(parts, dtype=object), allow_pickle=True)
    data = load_graph("penn94", data_root=tmp_path, split=4)
    assert data.num_splits == 5
    assert data.test_mask.nonzero().view(-1).tolist() == [7, 8]


def test_genius(tmp_path):
    scipy.io.savemat(
        folder(tmp_path, "genius") / "data.mat",
        {
            "edge_index": RING.T,
            "node_feat": np.arange(2.0 * NUM_NODES).reshape(NUM_NODES, 2),
            "label": np.arange(NUM_NODES) % 2,
        },
    )
    data = load_graph("genius", data_root=tmp_path)
    assert (data.metric, data.num_edges, data.num_features) == ("roc_auc", 2 * NUM_NODES, 2)


def write_us_election(raw: Path) -> None:
    (raw / "adjacency.txt").write_text(
        '"B, XX"\t01003\t"B, XX"\t01003\n\t\t"A, XX"\t01001\n"A, XX"\t01001\t"A, XX"\t01001\n'
        '\t\t"B, XX"\t01003\n\t\t"C, XX"\t72005\n"C, XX"\t72005\t"A, XX"\t01001\n'
    )
    (raw / "election.csv").write_text("fips_code,county,dem_2012,gop_2012\n01003,B,10,30\n01001,A,50,20\n")
    (raw / "income.csv").write_text('FIPS,MedianIncome2012\n0,"9,999"\n1001,"1,000"\n1003,"3,000"\n')
    (raw / "population.csv").write_text(
        "FIPS,R_birth_2012,R_death_2012,R_NET_MIG_2012\n1001,1,5,7\n1003,2,5,8\n72005,3,5,\n"
    )
    (raw / "education.csv").write_text("FIPS,BachelorRate2012\n1001,20\n1003,10\n72005,30\n")
    (raw / "unemployment.csv").write_text("FIPS, Unemployment_rate_2012 \n1001, 4.0\n1003,6.0\n72005,5.0\n")


def test_us_election(tmp_path):
    write_us_election(folder(tmp_path, "us-election"))
    data = load_graph("us-election", data_root=tmp_path)
    assert data.y.tolist() == [0, 1, 0], "no votes: means of both columns, DEM ahead"
    assert data.edge_index.t().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0]]
    expected = [[-1, -1, -1, 0, 0, -1], [1, 1, 0, 0, -1, 1], [0, 0, 1, 0, 1, 0]]
    torch.testing.assert_close(data.x, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("adjacency.txt", "a\tb\n", "adjacency.txt, line 1: four tab-separated fields"),
        ("adjacency.txt", '\t\t"A"\t01001\n', "no county to continue"),
        ("income.csv", "FIPS,Other\n1001,1\n", "no column 'MedianIncome2012'"),
        ("income.csv", "FIPS,MedianIncome2012\n1001,many\n", "income.csv, line 2"),
    ],
)
def test_us_election_names_a_bad_file(tmp_path, file, text, message):
    raw = folder(tmp_path, "us-election")
    write_us_election(raw)
    (raw / file).write_text(text)
    with pytest.raises(DatasetUnavailable, match=message):
        load_graph("us-election", data_root=tmp_path)


@pytest.mark.parametrize("name", sorted(REAL_GRAPHS))
def test_without_files_and_network_the_error_says_what_to_do(tmp_path, name):
    with pytest.raises(DatasetUnavailable) as caught:
        load_graph(name, data_root=tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / name) in message
    assert "no network in tests" in message
    assert DATA_ROOT_VARIABLE in message
    assert REAL_GRAPHS[name].files[0] in message
    assert list(tmp_path.iterdir()) == [], "a failed download leaves nothing behind"


def test_a_download_is_kept_complete(tmp_path, monkeypatch):
    def fetch(url: str, raw_dir: str) -> None:
        assert url.endswith("/questions.npz")
        write_heterophilous(Path(raw_dir) / "questions.npz")

    monkeypatch.setattr("torch_geometric.datasets.heterophilous_graph_dataset.download_url", fetch)
    first = load_graph("questions", data_root=tmp_path)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.npz")] == [
        Path("questions/raw/questions.npz")
    ]
    monkeypatch.undo()
    assert load_graph("questions", data_root=tmp_path).fingerprint() == first.fingerprint()


def test_a_download_that_cannot_be_kept_still_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch_geometric.datasets.heterophilous_graph_dataset.download_url",
        lambda url, raw_dir: write_heterophilous(Path(raw_dir) / "questions.npz"),
    )
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(UserWarning, match="downloaded, but not kept"):
        assert load_graph("questions", data_root=blocked).num_nodes == NUM_NODES


def test_a_part_of_the_files_is_not_enough(tmp_path):
    (folder(tmp_path, "wisconsin") / "out1_graph_edges.txt").write_text("header\n")
    with pytest.raises(DatasetUnavailable, match=r"lacks out1_node_feature_label\.txt"):
        load_graph("wisconsin", data_root=tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_file_is_named(tmp_path):
    raw = folder(tmp_path, "tolokers")
    write_heterophilous(raw / "tolokers.npz")
    whole = (raw / "tolokers.npz").read_bytes()
    (raw / "tolokers.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetUnavailable, match="could not be read"):
        load_graph("tolokers", data_root=tmp_path)


def test_the_data_root_is_found_in_this_order(tmp_path, monkeypatch):
    monkeypatch.delenv(DATA_ROOT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_data_root() == tmp_path / "cache" / "dcgnn"
    monkeypatch.setenv(DATA_ROOT_VARIABLE, str(tmp_path / "data"))
    assert default_data_root() == tmp_path / "data"
    write_heterophilous(folder(tmp_path, "data/minesweeper") / "minesweeper.npz")
    assert load_graph("minesweeper").num_nodes == NUM_NODES


# Nodes, columns of edge_index, features, classes, sizes of the masks of split 0.
PUBLISHED = {
    "cora": (2708, 2 * 5278, 1433, 7, [1192, 796, 497]),
    "citeseer": (3327, 2 * 4552, 3703, 6, [1596, 1065, 666]),
    "pubmed": (19717, 2 * 44324, 500, 3, [9463, 6310, 3944]),
    "wisconsin": (251, 2 * 450 + 16, 1703, 5, [126, 63, 62]),
    "us-election": (3234, 22200, 6, 2, [1940, 647, 647]),
    "minesweeper": (10000, 2 * 39402, 7, 2, [5000, 2500, 2500]),
    "tolokers": (11758, 2 * 519000, 10, 2, [5879, 2939, 2940]),
    "cornell5": (18660, 2 * 790777, 4735, 2, [8411, 4206, 4205]),
    "amherst41": (2235, 2 * 90954, 1193, 2, [1016, 508, 508]),
}


def real_root(name: str) -> Path:
    root = os.environ.get(DATA_ROOT_VARIABLE)
    if not root:
        pytest.skip(f"{DATA_ROOT_VARIABLE} is not set: no real files")
    if not (Path(root) / name).is_dir():
        pytest.skip(f"{root} has no {name}")
    return Path(root)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_files(name):
    data = load_graph(name, data_root=real_root(name))
    num_nodes, num_edges, num_features, num_classes, sizes = PUBLISHED[name]
    assert data.x.shape == (num_nodes, num_features)
    assert (data.num_edges, data.num_classes) == (num_edges, num_classes)
    assert [int(mask.sum()) for mask in data.masks().values()] == sizes
    assert int(sum(mask.long() for mask in data.masks().values()).max()) == 1


def test_us_election_equals_the_derived_file():
    root = real_root("us-election")
    derived = np.load(root / "us-election" / "us_election_2012.npz", allow_pickle=False)
    data = load_graph("us-election", data_root=root)
    np.testing.assert_allclose(data.x.numpy(), derived["node_features"], atol=1e-6)
    assert np.array_equal(data.y.numpy(), derived["node_labels"])
    assert np.array_equal(data.edge_index.t().numpy(), derived["edges"])
