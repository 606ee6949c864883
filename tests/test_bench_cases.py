"""Cases, phases and the gate in front of them: what is wrong gets a reason and no figure."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from tqdm import tqdm

from dcgnn import DCConv
from dcgnn.bench import gate, memory, plan, sweeps
from dcgnn.bench.cases import CASES, DC_CONV, GAT, GCN, PHASES, PlainPyTorch
from dcgnn.bench.phases import make_runs
from dcgnn.bench.problem import Problem, Settings, loaded_problem, shaped_problem
from dcgnn.bench.rows import Context
from dcgnn.bench.runner import Bar, Effort, Runner
from dcgnn.bench.shapes import Shape, scaled_shape
from dcgnn.bench.tables import all_tables, left_out
from dcgnn_kernels import EgoGraph, backends, local_sinkhorn
from dcgnn_kernels._library import LIBRARY  # noqa: F401

TINY = Shape(120, 700, 0.4)
CPU = torch.device("cpu")
FACTS = dict.fromkeys(("machine", "python", "torch", "backend", "commit", "date"), "x")


def tiny(device=CPU, **settings) -> Problem:
    return shaped_problem("tiny", Settings(channels=8, **settings), device, shape=TINY)


def runner() -> Runner:
    effort = Effort(rounds=2, warmup=0, memory=())
    return Runner(Context(FACTS), effort, tqdm(disable=True))


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("settings", [{}, {"num_local": 3, "num_global": 5}, {"dtype": "float64"}], ids=str)
def test_every_case_agrees_with_its_formula(device, name, settings):
    case = CASES[name]
    if case.missing():
        assert case.missing() == f"the package {case.needs} is not installed"
        return
    assert gate.check(case, tiny(device, **settings)) is None


def test_a_case_in_a_dtype_that_it_cannot_do_says_so():
    reason = gate.check(CASES["GCNConv(CSR)"], tiny(dtype="bfloat16"))
    assert reason is None or reason.startswith("does not run")


class Wrong(DCConv):
    """Off by one per cent at every node."""

    def forward(self, x, graph):
        return 1.01 * super().forward(x, graph)


class WrongBackward(DCConv):
    """Right values; the input's gradient is doubled."""

    def forward(self, x, graph):
        return super().forward(2 * x - x.detach(), graph)


@pytest.mark.parametrize(
    ("layer", "what"), [(Wrong, "output"), (WrongBackward, "gradient of x")], ids=["output", "gradient"]
)
def test_a_wrong_case_prints_its_reason_and_no_figure(layer, what):
    planted = replace(
        DC_CONV, name="planted", make_layer=lambda s: layer(s.channels, s.channels, s.num_global)
    )
    worker = runner()
    worker.layers("layers", tiny(), [planted, GCN], ("forward", "forward+backward"))
    bad = [row for row in worker.rows if row.case == "planted"]
    assert len(bad) == 1
    assert bad[0].reason.startswith(f"{what} disagrees with the reference: relative error")
    assert bad[0].median_ms is None
    assert bad[0].peak_bytes is None
    assert [row.case for row in worker.rows if row.median_ms is not None] == [GCN.name] * 2
    shown = [cell for table in all_tables(worker.rows) for line in table.rows for cell in line]
    assert "planted" not in shown
    assert any("planted" in line and "disagrees" in line for line in left_out(worker.rows))


def test_a_case_that_does_not_fit_into_memory_says_how_much_it_needs(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2e9)
    worker = runner()
    worker.layers("layers", tiny(), [replace(GAT, working_floats=lambda problem: 1e9)], ("forward",))
    assert worker.rows[0].reason == (
        "forward and backward would need about 4.0 GB of memory, "
        "1.8 GB are available (90% of 2.0 GB that are free)"
    )
    assert left_out(worker.rows)[0].startswith("tiny, layers: GATConv: forward and backward would need")


def test_one_case_that_does_not_fit_does_not_stop_a_sweep(monkeypatch):
    # DCConv and GCNConv(CSR) fit, GCNConv(edge_index) does not.
    free = 4 * max(case.working_floats(edges_sizes()) for case in (DC_CONV, CASES["GCNConv(CSR)"]))
    assert GCN.working_floats(edges_sizes()) * 4 > free
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1.2 * free)
    monkeypatch.setattr(sweeps, "generation_bytes", lambda shape: 0)
    worker = runner()
    sweeps.sweep_edges(worker, Settings(), CPU, (10_000,), 0)
    assert {row.case for row in worker.rows if row.median_ms is not None} == {"DCConv", "GCNConv(CSR)"}
    (reason,) = [row.reason for row in worker.rows if row.median_ms is None]
    assert reason.startswith("forward and backward would need about")


def edges_sizes() -> Problem:
    shape = scaled_shape(5_000)
    return Problem("sizes", torch.empty(2, 10_000, device="meta"), shape.num_nodes, Settings())


def test_a_graph_that_cannot_be_made_does_not_stop_a_sweep(monkeypatch):
    def made(name, *arguments, **options):
        if name == "1e+04 edges":
            raise MemoryError("no room for edges")
        return shaped_problem(name, *arguments, **options)

    monkeypatch.setattr(sweeps, "shaped_problem", made)
    worker = runner()
    sweeps.sweep_edges(worker, Settings(channels=8), CPU, (10_000, 12_000), 0)
    assert left_out(worker.rows) == ["1e+04 edges, sweep edges: all: does not run: no room for edges"]
    assert {row.graph for row in worker.rows if row.median_ms is not None} == {"1.2e+04 edges"}


def test_a_graph_is_built_once_for_check_and_times(monkeypatch):
    built: list[str] = []
    build, csr = EgoGraph.from_edge_index, CASES["GCNConv(CSR)"]

    def counting(edges, nodes=None):
        if not isinstance(edges, EgoGraph):
            built.append("ego")
        return build(edges, nodes)

    def counting_csr(problem):
        built.append("csr")
        return csr.make_graph(problem)

    monkeypatch.setattr(EgoGraph, "from_edge_index", counting)
    problem, worker = tiny(), runner()
    cases = [DC_CONV, CASES["DCConv bfloat16"], replace(csr, make_graph=counting_csr)]
    worker.layers("layers", problem, cases, ("forward", "forward+backward"))
    assert built == ["ego", "csr"]
    assert list(problem.made.values()) == [problem.graph], "the others are dropped"
    run = make_runs(DC_CONV, problem, ("build",))["build"].timed
    assert run() is not run(), "the phase builds anew"


def test_phases_of_a_case(device):
    problem = tiny(device)
    assert list(make_runs(DC_CONV, problem, PHASES)) == list(PHASES)
    assert "build" not in make_runs(GAT, problem, PHASES), "edge_index is taken as it is"
    assert list(make_runs(CASES["plain PyTorch"], problem, PHASES)) == [
        "forward",
        "backward",
        "forward+backward",
    ]
    for run in make_runs(DC_CONV, problem, PHASES).values():
        for _ in range(2):
            if run.prepare is not None:
                run.prepare()
            run.timed()
    assert isinstance(make_runs(DC_CONV, problem, ("build",))["build"].timed(), EgoGraph)


def test_plain_pytorch_is_entered_and_left_again():
    problem = tiny(dtype="float64")
    before = local_sinkhorn(problem.x, None, problem.graph)
    with PlainPyTorch(CPU):
        inside = torch._C._dispatch_dump("dcgnn::local_sinkhorn")
        plain = local_sinkhorn(problem.x, None, problem.graph)
    assert "bench/cases.py" in inside
    assert "bench/cases.py" not in torch._C._dispatch_dump("dcgnn::local_sinkhorn")
    for left, right in zip(before, plain, strict=True):
        torch.testing.assert_close(left, right)
    after = local_sinkhorn(problem.x, None, problem.graph)
    if backends()["native-cpu"].available:
        assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_a_graph_by_name_has_simple_edges():
    problem = loaded_problem("sbm:num_nodes=60,avg_degree=4", Settings(channels=4), CPU)
    assert problem.num_slots == problem.graph.num_slots
    assert problem.x.shape == (60, 4)
    assert problem.data().x.shape == (60, 4)


def test_peak_memory_of_a_child_process():
    problem = shaped_problem("tiny", Settings(channels=64), CPU, shape=Shape(3000, 60_000, 0.3))
    with memory.edges_file(problem) as path:
        peak = memory.peak_bytes(GCN, problem, ("forward",), path)
        # At least the messages, one row for every slot, and not a hundred times that.
        messages = problem.num_slots * 64 * 4
        assert 0.9 * messages < peak["forward"] < 20 * messages
        broken = memory.peak_bytes(replace(GCN, name="no such case"), problem, ("forward",), path)
    assert "unknown case 'no such case'" in broken["forward"]


class RaisesInBackward(DCConv):
    """Right in the gate, which is told not to look at gradients."""

    def forward(self, x, graph):
        out = super().forward(x, graph)
        if out.requires_grad:
            out.register_hook(lambda grad: 1 / 0)
        return out


def test_a_case_that_raises_later_gets_a_reason_and_the_others_go_on():
    planted = replace(
        DC_CONV,
        name="planted",
        make_layer=lambda s: RaisesInBackward(s.channels, s.channels, s.num_global),
        check_gradients=False,
    )
    worker = runner()
    worker.layers("layers", tiny(), [planted, GCN], ("forward", "backward"))
    found = {(row.case, row.phase): row for row in worker.rows}
    assert found["planted", "forward"].median_ms is not None
    assert found["planted", "backward"].median_ms is None
    assert found["planted", "backward"].reason == "backward: does not run: division by zero"
    assert found[GCN.name, "backward"].median_ms is not None


def test_a_graph_that_loses_edges_is_noticed(monkeypatch):
    build = EgoGraph.from_edge_index

    def losing(edges, nodes=None):
        return edges if isinstance(edges, EgoGraph) else build(edges[:, ::2], nodes)

    monkeypatch.setattr(EgoGraph, "from_edge_index", losing)
    assert gate.check(DC_CONV, tiny()).startswith("output disagrees with the reference")


def test_a_graph_that_cannot_be_built_gets_a_reason(monkeypatch):
    def broken(edges, nodes=None):
        raise RuntimeError("no graph today")

    monkeypatch.setattr(EgoGraph, "from_edge_index", broken)
    assert gate.check(DC_CONV, tiny()) == "does not run: no graph today"


def test_a_child_process_that_fails_leaves_the_times(monkeypatch):
    monkeypatch.setattr(memory, "peak_bytes", lambda case, problem, phases, *_: dict.fromkeys(phases, "died"))
    worker = runner()
    worker.effort = replace(worker.effort, memory=None)
    worker.layers("layers", tiny(), [CASES["plain PyTorch"]], ("forward", "epoch"))
    assert [(row.phase, row.reason) for row in worker.rows] == [("forward", "memory was not measured: died")]
    assert worker.rows[0].median_ms is not None


def test_the_progress_bar_ends_at_its_total():
    seen = []
    bar = tqdm(disable=True)
    bar.update = lambda seconds: (setattr(bar, "n", bar.n + seconds), seen.append(bar.n / bar.total))
    worker = Runner(Context(FACTS), Effort(rounds=1, warmup=0), bar)
    graph = plan.Plan(
        shapes=[],
        graphs=["sbm:num_nodes=60,avg_degree=4"],
        cases=["DGL GraphConv", "GATConv", "GCNConv(CSR)"],
        suites=["layers"],
        channels=[8],
        memory=False,
    )
    plan.measure(graph, worker)
    assert max(seen) <= 1 + 1e-6
    assert seen[-1] == pytest.approx(1.0)
    assert bar.total < plan.estimate(graph, worker.effort), "the size is known once the graph is read"


def test_the_remaining_time_begins_at_the_estimate():
    now = [0.0]
    bar = Bar(total=1000.0, file=io.StringIO(), bar_format="{remaining}", mininterval=0)
    bar._time = lambda: bar.start_t + now[0]
    assert str(bar) == "16:40", "the estimate, before anything is known"
    now[0] = 60.0
    bar.update(1.0)  # a first step that took far longer than it should
    assert str(bar) == "26:22"
    now[0] = 500.0
    bar.update(499.0)
    assert str(bar) == "08:20", "as fast as estimated"
    bar.close()
