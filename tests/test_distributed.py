"""Ranks compute what one process computes: layers, gradients, 20 steps; lost ranks and restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from graphs import awkward, both_ways
from torch import Tensor

from dcgnn import DCGNN, DCMsgPassing
from dcgnn.checkpoint import CheckpointError, load_checkpoint
from dcgnn.cli import main
from dcgnn.data import GraphData, load_graph
from dcgnn.distributed import launch
from dcgnn.distributed.halo import sum_over_ranks
from dcgnn.distributed.topology import PartTopology
from dcgnn.distributed.transport import sharded_sinkhorn
from dcgnn.engines import BatchConfig, GraphShare
from dcgnn.metrics import score
from dcgnn.nn.inference import chunked_propagate
from dcgnn.partition import make_part, owners
from dcgnn.training import TrainConfig, train
from dcgnn_kernels import EgoGraph, reference

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

LAYERS = [
    {},
    {
        "num_local": 3,
        "local_cost_scale": "none",
        "global_cost_scale": "max",
        "transform": "per-cluster",
        "activation": "tanh",
        "ego_readout": True,
        "norm": "batch",
        "residual": True,
    },
    {"mass": "paper", "global_iters": None, "global_cost_scale": "mean", "local_iters": None},
    {"mass": "paper", "gamma": "paper", "alpha": 0.0, "norm": "layer", "local_init": "fresh"},
    {"aggr": "symmetric", "ego_readout": True},
    {"alpha": 1.0, "global_momentum": 0.9},
]


def graphs() -> dict[str, EgoGraph]:
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(0, 40, (2, 90), generator=generator)
    hub = torch.stack([torch.arange(40), torch.full((40,), 7)])
    return {
        "undirected": EgoGraph.from_edge_index(both_ways(torch.cat([edges, hub], dim=1)), 40),
        "directed": EgoGraph.from_edge_index(*awkward()),
    }


def problem() -> GraphData:
    data = load_graph("sbm:num_nodes=90,num_classes=3,homophily=0.7,signal=2.0,num_features=6")
    return replace(data, x=data.x.double())


def model_for(data: GraphData) -> DCGNN:
    torch.manual_seed(4)
    options = {"norm": "batch", "transform": "per-cluster", "ego_readout": True, "residual": True}
    return DCGNN(data.num_features, 8, data.num_classes, 6, num_layers=2, **options).double()


CONFIG = TrainConfig(epochs=20, lr=0.02, ortho_weight=0.3, sim_weight=0.2)
BATCHES = BatchConfig(num_neighbors=(4, 4), batch_size=8, chunk_size=20)


def work(rank: int, world: int, folder: str) -> None:
    """Everything that is asserted on ``world`` ranks; one start of processes for all of it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        check_layers(world)
        check_equal_rows(world)
        check_transport()
        check_helpers(world)
        check_scores(world)
        check_memory(world)
        check_training(Path(folder), world)
        check_data_parallel(Path(folder), world)
    finally:
        dist.destroy_process_group()


def check_layers(world: int) -> None:
    for name, graph in graphs().items():
        for options in LAYERS:
            for method in ("range", "hash", "auto")[: 3 if name == "undirected" else 1]:
                check_layer(graph, world, method, options)


def check_equal_rows(world: int) -> None:
    """Egos whose rows are all equal, on a ring with 6 neighbours: their gradient is that of cost 0."""
    nodes = torch.arange(40)
    edges = torch.cat([torch.stack([nodes, (nodes + step) % 40]) for step in (1, 2, 3)], dim=1)
    graph = EgoGraph.from_edge_index(both_ways(edges), 40)
    torch.manual_seed(5)
    x = torch.randn(2, 5, dtype=torch.float64)[nodes // 20]
    for scale in ("mean", "max"):
        options = {"local_cost_scale": scale, "transform": "per-cluster", "ego_readout": True}
        for method in ("range", "hash"):
            check_layer(graph, world, method, options, x)


def check_layer(graph: EgoGraph, world: int, method: str, options: dict, given: Tensor | None = None) -> None:
    torch.manual_seed(1)
    whole = DCMsgPassing(5, 4, 2, **options).double()
    split = DCMsgPassing(5, 4, 2, **options).double()
    split.load_state_dict(whole.state_dict())
    x = torch.randn(graph.num_nodes, 5, dtype=torch.float64) if given is None else given.clone()
    x.requires_grad_()
    weight = torch.randn(graph.num_nodes, 5, dtype=torch.float64)
    expected = whole(x, graph)
    (expected * weight).sum().backward()

    part = make_part(graph, owners(graph, world, method), dist.get_rank())
    topology = PartTopology(part)
    own = x.detach()[part.own].requires_grad_()
    out = split(own, topology)
    (out * weight[part.own]).sum().backward()
    torch.testing.assert_close(out, expected[part.own], **TOLERANCE)
    torch.testing.assert_close(own.grad, x.grad[part.own], **TOLERANCE)
    launch.sum_gradients(split.parameters())
    for (name, left), right in zip(whole.named_parameters(), split.parameters(), strict=True):
        if left.grad is None:
            assert right.grad is None, name
        else:
            torch.testing.assert_close(right.grad, left.grad, **TOLERANCE, msg=name)
    for left, right in zip(whole.buffers(), split.buffers(), strict=True):
        torch.testing.assert_close(right, left, **TOLERANCE)

    # Two exchanges a layer in forward and in backward, and what they carry: F numbers for a halo row.
    traffic = topology.halo.traffic
    rows = [torch.tensor([part.halo_rows.numel()]) for _ in range(2)]
    dist.all_reduce(rows[0])
    sent = torch.tensor([traffic.bytes["gather"]])
    dist.all_reduce(sent)
    channels = 5 * 2 * 2  # two layers, forward and backward
    factors = 2 if options.get("aggr") == "symmetric" else 1
    assert int(sent) == 8 * int(rows[0]) * (channels + factors)

    # Inference in chunks, of 4, 1, all and 3 nodes on the ranks: they need not have equally many.
    found = chunked_propagate(split.eval(), own.detach(), topology, (4, 1, 40, 3)[dist.get_rank()])
    torch.testing.assert_close(found, whole.eval()(x, graph)[part.own].detach(), **TOLERANCE)


def check_transport() -> None:
    """The sharded problem with rows that are far apart, in every cost scale."""
    graph = graphs()["undirected"]
    topology = PartTopology(make_part(graph, owners(graph, dist.get_world_size(), "hash"), dist.get_rank()))
    nodes = topology.part.own
    torch.manual_seed(2)
    z = (10 * torch.randn(40, 3, dtype=torch.float64)).requires_grad_()
    centroids = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(40, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    for scale in ("none", "mean", "max"):
        for iters in (1, 4, None):
            assign, clusters = reference.global_sinkhorn(z, centroids, 0.5, iters, scale)
            loss = (assign * weights[0]).sum() + (clusters * weights[1]).sum()
            wanted = torch.autograd.grad(loss, (z, centroids))
            own = z.detach()[nodes].requires_grad_()
            assign_here, clusters_here = sharded_sinkhorn(own, centroids, topology.rows, 0.5, iters, scale)
            torch.testing.assert_close(assign_here, assign[nodes], **TOLERANCE)
            torch.testing.assert_close(clusters_here, clusters, **TOLERANCE)
            # The clusters are on all ranks; each holds a share of what they are worth.
            share = (clusters_here * weights[1]).sum() / dist.get_world_size()
            grads = torch.autograd.grad((assign_here * weights[0][nodes]).sum() + share, (own, centroids))
            torch.testing.assert_close(grads[0], wanted[0][nodes], rtol=1e-8, atol=1e-8)
            total = sum_over_ranks(grads[1], topology.halo)
            torch.testing.assert_close(total, wanted[1], rtol=1e-8, atol=1e-8)


def check_helpers(world: int) -> None:
    rank, device = dist.get_rank(), torch.device("cpu")
    assert launch.any_rank(rank == world - 1, device)
    assert not launch.any_rank(False, device)
    assert launch.sum_of_ranks([1.5, -1], device) == [1.5 * world, -world]
    gathered = launch.gather_rows(torch.full((rank, 2), float(rank)))
    if rank == 0:
        assert gathered is not None
        assert gathered[:, 0].tolist() == [float(r) for r in range(world) for _ in range(r)]
    assert launch.broadcast_object({"rank": rank}, device) == {"rank": 0}
    assert launch.from_rank_zero(dist.get_rank, device) == 0
    # What is wrong is said by all ranks, not by rank 0 while the others wait.
    few = load_graph("minesweeper-synthetic:rows=1,cols=3")
    wrong = r"num_parts must be in \[1, 3\], got 4" if world > few.num_nodes else "ROC AUC needs both classes"
    with pytest.raises(ValueError, match=wrong):
        GraphShare.of(few)
    with pytest.raises(CheckpointError, match="no checkpoint at nowhere"):
        train(model_for(problem()), GraphShare.of(problem()), checkpoint="nowhere", resume=True)


def check_training(folder: Path, world: int) -> None:
    """20 steps against those of one process, with both further losses; a resume from its checkpoint."""
    wanted = torch.load(folder / "expected.pt", weights_only=True)
    data = problem()
    model = model_for(data)
    share = GraphShare.of(data, "auto")
    assert share.x.size(0) < data.num_nodes or world == 1
    with pytest.raises(ValueError, match="objective_every needs the whole graph in one process"):
        train(model, share, replace(CONFIG, objective_every=1))
    result = train(model, share, CONFIG)
    for name in ("loss", "val_loss", "val_metric"):
        torch.testing.assert_close(
            torch.tensor(getattr(result.history, name), dtype=torch.float64), wanted[name], **TOLERANCE
        )
    assert result.test_metric == wanted["test_metric"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, wanted["weights"][name], **TOLERANCE)
    model = model_for(data)
    resumed = train(model, share, CONFIG, checkpoint=folder / "half.pt", resume=True)
    torch.testing.assert_close(
        torch.tensor(resumed.history.loss, dtype=torch.float64), wanted["loss"], **TOLERANCE
    )


def check_memory(world: int) -> None:
    """What a rank keeps from forward to backward is its share, on a graph that can be cut well."""
    nodes = torch.arange(4000)
    graph = EgoGraph.from_edge_index(both_ways(torch.stack([nodes, (nodes + 1) % 4000])), 4000)
    topology = PartTopology(make_part(graph, owners(graph, world, "range"), dist.get_rank()))
    torch.manual_seed(7)
    model, x = DCMsgPassing(16, 4, 2), torch.randn(4000, 16, requires_grad=True)
    whole = kept_for_backward(lambda: model(x, graph))
    own = x.detach()[topology.part.own].requires_grad_()
    kept = kept_for_backward(lambda: model(own, topology))
    # A part keeps some rows twice: with the halo for the egos, without it for the global problem.
    assert kept < 1.5 * whole / world, f"{kept} of {whole} bytes on one of {world} ranks"


def kept_for_backward(forward: Callable[[], Tensor]) -> int:
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward()
    assert out.requires_grad
    return sum(sizes.values())


def check_scores(world: int) -> None:
    """Sums over ranks, of which some have nothing to score, give what one process finds; ROC AUC collects."""
    collected = []
    gather_rows = launch.gather_rows
    for name in ("sbm:num_nodes=96,num_classes=4,num_features=5", "minesweeper-synthetic:rows=8,cols=12"):
        data = load_graph(name)
        mask = torch.arange(data.num_nodes) < 20  # of ranges: all of them at rank 0
        share = GraphShare.of(replace(data, val_mask=mask), "range")
        torch.manual_seed(6)
        logits = torch.randn(data.num_nodes, data.num_classes)
        wanted = torch.nn.functional.cross_entropy(logits[mask], data.y[mask]).item()
        metric = score(logits[mask], data.y[mask], data.metric)
        launch.gather_rows = lambda rows: collected.append(rows.dim()) or gather_rows(rows)
        try:
            found = share.score(logits[share.topology.part.own], "val_mask")
        finally:
            launch.gather_rows = gather_rows
        assert found == pytest.approx((wanted, metric), rel=1e-6)
        assert collected == ([] if data.metric == "accuracy" else [1, 1])


def check_data_parallel(folder: Path, world: int) -> None:
    """Ranks end with the same weights, and score as one process does."""
    data = problem()
    torch.manual_seed(0)
    model = DCGNN(data.num_features, 8, data.num_classes, 6, num_layers=1).double()
    path = folder / f"ddp{world}.pt"
    result = train(
        model, data, replace(CONFIG, epochs=3), batches=BATCHES, checkpoint=path, checkpoint_every=1
    )
    assert len(result.history.loss) == 3
    # On as many ranks, dropout and samples included, the bits of a run that was never interrupted.
    curves = []
    for epochs, resume in ((2, False), (4, True), (4, False)):
        torch.manual_seed(0)
        other = DCGNN(data.num_features, 8, data.num_classes, 6, num_layers=1, dropout=0.3).double()
        target = folder / f"{'whole' if (epochs, resume) == (4, False) else 'parts'}{world}.pt"
        options = {"checkpoint": target, "checkpoint_every": 1, "resume": resume}
        run = train(other, data, replace(CONFIG, epochs=epochs), batches=BATCHES, **options)
        curves.append(run.history.loss)
    assert curves[1] == curves[2]
    fewer = folder / f"whole{world // 2}.pt"
    if fewer.is_file():  # of the test on half as many ranks, where it was selected
        more = train(
            other, data, replace(CONFIG, epochs=5), batches=BATCHES, checkpoint=fewer, resume=True
        ).history.loss
        assert len(more) == 5
        assert more[:4] == load_checkpoint(fewer)["history"]["loss"]
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    total = flat.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, world * flat)
    # Scores are those of the whole graph on one process; a rank has its part of it in chunks, too.
    logits = model.inference(data.x, data.edge_index)
    right = (logits.argmax(1) == data.y)[data.test_mask].double().mean()
    assert result.test_metric == pytest.approx(float(right), abs=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process computes, for the ranks to compare with."""
    path = tmp_path_factory.mktemp("ranks")
    data = problem()
    model = model_for(data)
    train(model, data, replace(CONFIG, epochs=10), checkpoint=path / "half.pt", checkpoint_every=10)
    model = model_for(data)
    result = train(model, data, CONFIG)
    history = {
        name: torch.tensor(getattr(result.history, name), dtype=torch.float64)
        for name in ("loss", "val_loss", "val_metric")
    }
    expected = {**history, "test_metric": result.test_metric, "weights": model.state_dict()}
    torch.save(expected, path / "expected.pt")
    return path


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_compute_what_one_process_computes(world, folder):
    multiprocessing.spawn(work, (world, str(folder)), world)


def test_resume_of_a_data_parallel_run_on_one_process(folder):
    """After the ranks: their checkpoint, continued here."""
    path = folder / "ddp2.pt"
    if not path.is_file():
        pytest.skip("the run on 2 ranks was not selected")
    assert load_checkpoint(path)["epoch"] == 3
    data = problem()
    model = DCGNN(data.num_features, 8, data.num_classes, 6, num_layers=1).double()
    result = train(model, data, replace(CONFIG, epochs=5), batches=BATCHES, checkpoint=path, resume=True)
    assert result.epochs == 5


GRAPH = "minesweeper-synthetic:rows=14,cols=14"
OPTIONS = ["--hidden", "8", "--layers", "1", "--dropout", "0", "--quiet"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def torchrun(arguments: list[str], *options: str, folder: Path | None = None) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), *options]
    command += ["-m", "dcgnn", "train", GRAPH, *OPTIONS, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, cwd=folder, **pipes)


def children(parent: subprocess.Popen) -> list[int]:
    """The ranks that are alive; others wait for their parent to look at them."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=", "--ppid", str(parent.pid)], capture_output=True, text=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for pid, state in rows if "Z" not in state and rank_of(int(pid)) is not None]


def rank_of(pid: int) -> int | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None  # it has ended
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)


def process_of_rank(parent: subprocess.Popen, rank: int) -> int:
    for pid in children(parent):
        if rank_of(pid) == rank:
            return pid
    raise AssertionError(f"no rank {rank} among the processes of torchrun")


def kill_rank(parent: subprocess.Popen, rank: int) -> None:
    os.kill(process_of_rank(parent, rank), signal.SIGKILL)


def wait_until(done: Callable[[], bool], process: subprocess.Popen) -> None:
    for _ in range(2400):
        if done():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("training does not get on")


def wait_for_ranks(process: subprocess.Popen, count: int, but: Collection[int] = ()) -> list[int]:
    """Ranks that are there; those of before, ``but``, are gone."""
    wait_until(lambda: len(set(children(process)) - set(but)) == count, process)
    return children(process)


def wait_for_epoch(path: Path, epoch: int, process: subprocess.Popen) -> None:
    wait_until(lambda: path.is_file() and load_checkpoint(path)["epoch"] >= epoch, process)


def losses(path: Path) -> torch.Tensor:
    return torch.tensor(json.loads(path.read_text())["runs"][0]["history"]["loss"])


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
def test_a_killed_rank_leaves_a_checkpoint_and_a_restart_goes_on(tmp_path, capfd):
    epochs = ["--epochs", "60", "--patience", "60"]
    alone, spread, path = tmp_path / "alone.json", tmp_path / "spread.json", tmp_path / "run.pt"
    assert main(["train", GRAPH, *OPTIONS, *epochs, "--json", str(alone)]) == 0

    saving = ["--partition", "--checkpoint", str(path), "--checkpoint-every", "5", *epochs]
    process = torchrun(saving, "--max-restarts", "0")
    wait_for_epoch(path, 5, process)
    kill_rank(process, 1)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    left = path.read_bytes()
    reached = load_checkpoint(path)["epoch"]
    assert 5 <= reached < 60
    (line,) = (line for line in errors.splitlines() if "dcgnn[rank 0]: rank 0 of 2 lost rank 1 (" in line)
    assert f"); {path} holds epoch {reached}: continue with --resume, or start with" in line
    # On one process, from what the two have left.
    resumed = tmp_path / "resumed.json"
    assert (
        main(
            ["train", GRAPH, *OPTIONS, *epochs, "--checkpoint", str(path), "--resume", "--json", str(resumed)]
        )
        == 0
    )
    torch.testing.assert_close(losses(resumed), losses(alone), rtol=1e-3, atol=1e-4)

    # What an earlier job has left under the same name is not what a restart goes on from.
    path.write_bytes(left)
    process = torchrun([*saving, "--json", str(spread)], "--max-restarts", "2")
    lost = wait_for_ranks(process, 2)
    kill_rank(process, 1)
    wait_for_ranks(process, 2, but=lost)
    assert path.read_bytes() == left
    wait_until(lambda: path.read_bytes() != left, process)
    assert load_checkpoint(path)["epoch"] < 60
    kill_rank(process, 0)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert out.count("test roc_auc") == 1
    told = [line for line in errors.splitlines() if "restarted by torchrun" in line]
    assert told == [
        "dcgnn: restarted by torchrun: begins anew, nothing was saved before",
        f"dcgnn: restarted by torchrun: goes on from {path}",
    ]
    # The curve of one process, rounding of float32 aside, through a lost rank and a restart.
    torch.testing.assert_close(losses(spread), losses(alone), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
def test_machines_whose_restart_counts_differ_find_each_other_again(tmp_path):
    """One torchrun a machine: the one whose rank was lost counts a restart, the other one does not."""
    path = tmp_path / "run.pt"
    saving = ["--partition", "--checkpoint", str(path), "--checkpoint-every", "5"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--nnodes", "2"]
    options = [*meeting, "--nproc-per-node", "1", "--max-restarts", "1"]
    command = [*saving, "--epochs", "150", "--patience", "150", "--rank-timeout", "60"]
    machines = [torchrun(command, *options) for _ in range(2)]
    wait_for_epoch(path, 5, machines[0])
    (second,) = (machine for machine in machines if rank_of(children(machine)[0]) == 1)
    kill_rank(second, 1)
    found = [machine.communicate(timeout=240) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], found
    assert sum(errors.count("restarted by torchrun: goes on from") for _, errors in found) == 1
    assert load_checkpoint(path)["epoch"] == 150


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
def test_without_checkpoints_a_restart_begins_anew_and_says_so(tmp_path):
    out = tmp_path / "out.json"
    options = ["--loader", "neighbor", "--batch-size", "20", "--epochs", "3", "--json", str(out)]
    process = torchrun(options, "--max-restarts", "1", folder=tmp_path)
    wait_for_ranks(process, 2)
    kill_rank(process, 1)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert errors.count("restarted by torchrun: begins anew (--checkpoint FILE keeps what is done)") == 1
    assert "holds epoch" not in errors
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
def test_a_rank_that_stands_still_does_not_hold_the_others_for_ever(tmp_path):
    path = tmp_path / "run.pt"
    options = ["--partition", "--checkpoint", str(path), "--checkpoint-every", "1", "--rank-timeout", "5"]
    process = torchrun([*options, "--epochs", "100000", "--patience", "100000"], "--max-restarts", "0")
    wait_for_epoch(path, 1, process)
    others, still = (Path(f"/proc/{process_of_rank(process, rank)}") for rank in (0, 1))
    os.kill(int(still.name), signal.SIGSTOP)
    while others.exists() and "Z" not in (others / "stat").read_text().rsplit(")", 1)[1].split()[0]:
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(int(still.name), signal.SIGCONT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "dcgnn[rank 0]: rank 0 of 2 lost rank 1 (Timed out waiting" in errors
    assert load_checkpoint(path)["epoch"] >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
def test_an_interrupt_of_torchrun_leaves_a_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    options = ["--partition", "--checkpoint", str(path), "--checkpoint-every", "1"]
    process = torchrun([*options, "--epochs", "100000", "--patience", "100000"], "--max-restarts", "1")
    wait_for_epoch(path, 1, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    epoch = load_checkpoint(path)["epoch"]
    for rank in range(2):
        message = f"interrupted after epoch {epoch}; checkpoint: {path} (continue with --resume)"
        assert f"dcgnn[rank {rank}]: {message}" in errors
    assert "restarted" not in errors


def test_ranks_must_share_work(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", GRAPH]) == 2
    assert "choose --loader neighbor (data parallel) or --partition" in capsys.readouterr().err
    assert main(["train", GRAPH, "--loader", "neighbor", "--partition"]) == 2
    assert "cannot be joined" in capsys.readouterr().err
    for seconds in ("0", "-1", "nan", "inf"):
        assert main(["train", GRAPH, "--partition", f"--rank-timeout={seconds}"]) == 2
        assert "--rank-timeout must be positive and at most 1000000, got" in capsys.readouterr().err


def test_a_partition_needs_ranks(capsys):
    assert main(["train", GRAPH, "--partition"]) == 2
    assert "--partition needs several ranks: torchrun" in capsys.readouterr().err


def test_options_that_would_do_nothing_are_refused(capsys):
    for option in (["--batch-size", "20"], ["--num-neighbors", "4,4"]):
        assert main(["train", GRAPH, *option]) == 2
        assert f"{option[0]} is for mini-batches: add --loader neighbor" in capsys.readouterr().err


def test_mini_batches_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["--epochs", "2", "--loader", "neighbor", "--num-neighbors", "4,-1", "--batch-size", "20"]
    assert main(["train", GRAPH, *OPTIONS, *options, "--json", str(path)]) == 0
    assert len(losses(path)) == 2
    for wrong in (["--num-neighbors", "0"], ["--batch-size", "0"], ["--adjacency-embedding"]):
        assert main(["train", GRAPH, *OPTIONS, *options, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
