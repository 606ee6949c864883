"""What is made of the rows: files, tables, slopes, comparisons, plots, the page and filled documents."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest

from dcgnn.bench import page, plots, tables
from dcgnn.bench.compare import compare
from dcgnn.bench.fill import PLACE, fill, known_places, markdown
from dcgnn.bench.merge import merged
from dcgnn.bench.rows import Row, commit, read_json, write_csv, write_json
from dcgnn.bench.sweeps import SWEEPS, edge_values, edges_name, fit_edges, thread_values
from dcgnn.timing import Samples

BASE = Row(
    suite="layers",
    graph="penn94 shape",
    num_nodes=100,
    num_slots=1100,
    case="DCConv",
    phase="forward",
    channels=64,
    num_local=2,
    num_global=8,
    local_iters=3,
    global_iters=5,
    dtype="float32",
    device="cpu",
    threads=2,
    machine="a machine",
    torch="2.0",
    commit="abc",
)


def row(milliseconds: float, **changes) -> Row:
    spread = {"p20_ms": 0.9 * milliseconds, "p80_ms": 1.1 * milliseconds}
    return dataclasses.replace(BASE, median_ms=milliseconds, rounds=5, **{**spread, **changes})


@pytest.fixture
def rows() -> list[Row]:
    """A run with every suite; times are those of a simple rule, so that ratios are known."""
    found = []
    for graph in ("penn94 shape", "genius shape"):
        for phase, factor in (("forward", 1.0), ("forward+backward", 3.0), ("epoch", 8.0)):
            for case, own in (
                ("DCConv", 10.0),
                ("DCConv bfloat16", 8.0),
                ("GCNConv(edge_index)", 40.0),
                ("GATConv", 50.0),
                ("GCNConv(CSR)", 5.0),
                ("plain PyTorch", 500.0),
            ):
                peak = 4 * 2 * (100 * 64 + 1100) * 5 if phase == "forward+backward" else None
                found.append(row(own * factor, graph=graph, case=case, phase=phase, peak_bytes=peak))
        for name in ("linear", "local_sinkhorn", "local_sinkhorn_backward"):
            found.append(row(10.0, suite="kernels", graph=graph, case=name, limit_ms=4.0, fraction=0.4))
        found.append(
            dataclasses.replace(
                BASE, suite="limits", graph=graph, case="stream, GB/s", phase="kernels", rate=12.5
            )
        )
    for edges in (10**4, 10**5, 10**6, 10**7):
        for phase in ("forward", "forward+backward"):
            time = 0.5 + 1e-5 * edges
            found.append(
                row(
                    time,
                    suite="sweep edges",
                    phase=phase,
                    num_nodes=edges // 50,
                    num_slots=edges + edges // 50,
                )
            )
    for sweep in SWEEPS.values():
        values = {"threads": thread_values()}.get(sweep.name, sweep.values)
        for value in values if sweep.name != "edges" else ():
            size = {"threads": value} if sweep.name == "threads" else dict.fromkeys(sweep.fields, value)
            for case in ("DCConv", "linear", "node_update_backward"):
                phases = ("forward", "forward+backward") if case == "DCConv" else ("forward",)
                for phase in phases:
                    found.append(row(7.0, suite=sweep.suite, case=case, phase=phase, fraction=0.3, **size))
    found.append(dataclasses.replace(BASE, case="DGL GraphConv", reason="the package dgl is not installed"))
    return found


def test_quantiles():
    samples = Samples((5.0, 1.0, 2.0, 3.0, 4.0, 6.0))
    assert samples.median == 3.5
    assert samples.quantile(0.2) == 2.0
    assert samples.quantile(0.8) == 5.0
    timed = BASE.timed(samples, least=0.7)
    assert (timed.median_ms, timed.p20_ms, timed.p80_ms, timed.rounds) == (3500.0, 2000.0, 5000.0, 6)
    assert timed.fraction == pytest.approx(0.2)


def test_json_and_csv_hold_every_row_with_its_context(rows, tmp_path):
    write_json(tmp_path / "a.json", rows)
    assert read_json(tmp_path / "a.json") == rows
    write_csv(tmp_path / "a.csv", rows)
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert {"machine", "torch", "commit", "threads", "p20_ms", "p80_ms", "peak_bytes"} <= set(lines[0])
    assert lines[0]["machine"] == "a machine"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "other"}', '{"format": "dcgnn-bench", "version": 1}']
)
def test_a_file_that_is_not_ours_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match="is not a JSON file of dcgnn bench"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("median_ms", "fast", 'a number from 0 or null, got "fast"'),
        ("median_ms", -1.0, "a number from 0 or null, got -1.0"),
        ("p80_ms", float("nan"), "a number from 0 or null, got NaN"),
        ("peak_bytes", 1.5, "a whole number from 0 or null, got 1.5"),
        ("num_slots", None, "a whole number from 0, got null"),
        ("rounds", True, "a whole number from 0, got true"),
        ("graph", ["a"], r'text, got \["a"\]'),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(rows, field, value, wanted, tmp_path):
    content = {"format": "dcgnn-bench", "version": 1, "rows": [dataclasses.asdict(row) for row in rows]}
    content["rows"][2][field] = value
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"a\.json: rows\[2\]\.{field} must be {wanted}"):
        read_json(tmp_path / "a.json")


def test_ratios(rows):
    table = tables.ratio_table(rows)
    assert table.header == ["DCConv", "penn94 shape, F = 64", "genius shape, F = 64"]
    shares = {line[0]: line[1] for line in table.rows}
    assert shares["forward / GCNConv(edge_index)"] == "0.25"
    assert shares["forward / GATConv"] == "0.2"
    assert shares["forward+backward / GCNConv(CSR)"] == "2"
    assert shares["bfloat16 forward / GCNConv(CSR)"] == "1.6"
    assert shares["forward / plain PyTorch"] == "0.02"
    assert shares["epoch, 2 layers / GATConv"] == "0.2"
    assert shares["peak memory / (N·K·F + S·K) floats"] == "5"


def test_goals_are_bold_where_they_are_reached(rows):
    table = tables.goal_table(rows)
    cells = {line[0]: line[1:] for line in table.rows}
    assert cells["forward / GCNConv(edge_index)"] == ["≤ 0.15, Genius 0.3", "0.25", "**0.25**"]
    assert cells["forward / plain PyTorch"] == ["≤ 0.05", "**0.02**", "**0.02**"]
    assert tables.goal_table([row(1.0, channels=16)]) is None


def test_the_papers_table_stands_beside_ours(rows):
    table = tables.paper_table(rows)
    line = next(line for line in table.rows if line[:2] == ["penn94 shape, F = 64", "forward"])
    assert line[2:] == ["10", "40", "50", "0.25", "3.4 to 3.9", "0.20", "0.43 to 0.69"]


def test_layers_and_kernels(rows):
    first = tables.layer_tables(rows)[0]
    assert first.rows[0] == ["forward", "DCConv", "10", "9", "11", "5", "1", "-"]
    kernels = tables.kernel_tables(rows)[0]
    assert kernels.rows[1] == ["local_sinkhorn", "10", "9", "11", "4", "40%"]
    assert kernels.note == "measured: stream 12.5 GB/s"


def test_slope_of_linear_time_is_one():
    points = [row(2e-5 * edges, num_nodes=10, num_slots=edges + 10) for edges in (10**6, 10**7, 10**8)] + [
        row(5.0, num_nodes=10, num_slots=10**4 + 10)
    ]
    fit = fit_edges(points)
    assert fit.slope == pytest.approx(1.0)
    assert fit.points == 3, "small graphs, where calls cost more than edges, stay out"
    assert fit.milliseconds(10**7) == pytest.approx(200.0)
    assert fit_edges(points[:1]) is None
    square = [row(1e-12 * edges**2, num_nodes=10, num_slots=edges + 10) for edges in (10**6, 10**7)]
    assert fit_edges(square).slope == pytest.approx(2.0)


def test_sweep_tables(rows):
    edges = tables.sweep_table(rows, SWEEPS["edges"])
    assert edges.header == ["edges", "10,000", "100,000", "1,000,000", "10,000,000"]
    assert edges.rows[0] == ["DCConv forward, ms", "0.6", "1.5", "10.5", "100.5"]
    assert edges.rows[1][0] == "DCConv forward, ns for each slot"
    assert edges.rows[1][-1] == "9.85"
    assert "from 1,000,000 to 10,000,000 edges DCConv forward 0.98" in edges.note
    iterations = tables.sweep_table(rows, SWEEPS["iterations"])
    assert iterations.header == ["iterations", "1", "2", "3", "5", "10", "20"]
    assert [line[0] for line in iterations.rows[-2:]] == [
        "linear, share of the limit",
        "node_update_backward, share of the limit",
    ]
    assert iterations.rows[-1][1:] == ["30%"] * 6


def test_values_of_sweeps():
    assert edge_values([10**6, 10**4]) == (10**4, 10**6)
    assert edge_values(None)[-1] == 10**8
    with pytest.raises(ValueError, match="at least 10000 are wanted, got 500"):
        edge_values([500])
    assert thread_values()[0] == 1


def test_names_of_sizes_differ_where_the_sizes_do():
    assert [edges_name(count) for count in (10**4, 6 * 10**7, 10**8)] == [
        "1e+04 edges",
        "6e+07 edges",
        "1e+08 edges",
    ]
    assert edges_name(1_600_000) == "1.6e+06 edges"
    assert edges_name(2_400_000) == "2.4e+06 edges"
    assert edges_name(99_999_999) == "9.9999999e+07 edges"


def test_compare_counts_what_is_beyond_the_spread(rows):
    quicker = [
        row(0.5 * known.median_ms, **_context(known)) if known.case == "DCConv" and known.median_ms else known
        for known in rows
    ]
    table = compare(rows, quicker)
    changes = {(line[2], line[3]): line[-3:] for line in table.rows if line[0] == "layers"}
    assert changes["DCConv", "forward"] == ["0.50", "1.00", "faster"]
    assert changes["GATConv", "forward"] == ["1.00", "1.00", "within the spread"]
    assert compare(quicker, rows).rows[0][-3:] == ["2.00", "1.00", "slower"]
    assert "layers that our code does not touch" in table.note
    other = [dataclasses.replace(known, commit="def") for known in rows]
    assert "commit: abc before, def now" in compare(rows, other).note
    with pytest.raises(ValueError, match="no measurement in common"):
        compare(rows, [row(1.0, channels=3)])


def test_a_slow_moment_shows_beside_the_rows_that_it_met(rows):
    slow = [
        row(3.0 * known.median_ms, **_context(known))
        if (known.graph, known.phase) == ("genius shape", "forward") and known.median_ms
        else known
        for known in rows
    ]
    slow[1] = dataclasses.replace(slow[1], machine="another machine")
    table = compare(rows, slow)
    others = {(line[1], line[3]): line[-2] for line in table.rows if line[0] == "layers"}
    assert others["genius shape", "forward"] == "3.00"
    assert others["genius shape", "epoch"] == others["penn94 shape", "forward"] == "1.00"
    assert "machine: a machine before, another machine now" in table.note
    kernels = [line[-2] for line in table.rows if line[0] == "kernels"]
    assert set(kernels) == {"-"}, "nobody else's layer runs beside kernels"


def test_runs_are_merged_only_where_tables_can_tell_them_apart(rows):
    sweeps = [known for known in rows if known.suite.startswith("sweep")]
    layers = [known for known in rows if not known.suite.startswith("sweep")]
    assert merged({"a.json": layers, "b.json": sweeps}) == [*layers, *sweeps]
    with pytest.raises(ValueError, match=r"a\.json and b\.json both have DCConv, forward, on penn94 shape"):
        merged({"a.json": layers, "b.json": layers})
    for name, value in (("num_local", 8), ("num_global", 9), ("dtype", "float64"), ("threads", 1)):
        other = [row(1.0, case="DCConv", graph="arxiv shape", **{name: value})]
        with pytest.raises(ValueError, match=rf"{name} = .* in a\.json and {value} in b\.json"):
            merged({"a.json": layers, "b.json": other})
    wider = [dataclasses.replace(known, channels=7, graph="other edges") for known in sweeps]
    with pytest.raises(ValueError, match="channels = "):
        merged({"a.json": sweeps, "b.json": wider})
    widths = [known for known in sweeps if known.suite == "sweep channels"]
    assert merged({"a.json": widths[:1], "b.json": widths[1:]}) == widths


def test_compare_names_what_is_not_measured_any_more(rows):
    broken = [
        dataclasses.replace(known, phase="all", median_ms=None, reason="disagrees")
        if known.suite == "layers" and known.case == "DCConv"
        else known
        for known in rows
    ]
    note = compare(rows, broken).note
    assert "measured before, not now: " in note
    assert "layers: DCConv" in note
    assert note.count("DCConv") == len({known.graph for known in rows if known.suite == "layers"})
    assert "measured before" not in compare(rows, rows).note


def test_one_round_has_no_spread():
    old, new = (dataclasses.replace(row(value), rounds=1) for value in (1.0, 1.1))
    assert compare([old], [new]).rows[0][-1] == "too few rounds"


def _context(known: Row) -> dict:
    names = [field.name for field in dataclasses.fields(Row)]
    kept = names[: names.index("median_ms")]
    return {name: getattr(known, name) for name in kept}


def test_whose_code_a_row_shows():
    is_ours = tables.is_ours
    assert is_ours(row(1.0))
    assert is_ours(row(1.0, case="node_update_backward", suite="kernels"))
    assert is_ours(row(1.0, case="local_sinkhorn", suite="sweep channels"))
    assert is_ours(row(1.0, case="linear", suite="sweep channels"))
    assert is_ours(row(1.0, case="plain PyTorch"))
    assert not is_ours(row(1.0, case="GCNConv(edge_index)"))


def test_every_plot_is_drawn(rows, tmp_path):
    written = page.write_plots(tmp_path, rows)
    assert {path.stem for path in written} == set(plots.PLOTS)
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000, "small enough for a repository"
    assert plots.make_plots([BASE]) == {}


def test_the_page_is_self_contained(rows):
    text = page.make_page(rows, compare(rows, rows))
    images = re.findall(r'<img src="([^"]{30})', text)
    assert len(images) == len(plots.PLOTS)
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
    outside = re.sub(r"data:[^\"]*", "", text)
    assert not re.search(r"https?://|<script|<link", outside)
    assert "DGL GraphConv: the package dgl is not installed" in text
    assert "The paper&#x27;s runtime table" in text
    assert "Compared with the older run" in text


def test_marked_places_of_a_document_are_filled(rows, tmp_path):
    document = tmp_path / "page.md"
    end = "<!-- /bench -->"
    document.write_text(f"<!-- bench ratios -->\nold\n{end}\ntext\n<!-- bench plot-edges -->\n{end}\n")
    assert fill(document, rows) == ["ratios", "plot-edges"]
    text = document.read_text()
    assert "old" not in text
    assert "text" in text
    assert "| forward / GATConv | 0.2 | 0.2 |" in text
    assert "(figures/bench-edges.png)" in text
    assert (tmp_path / "figures" / "bench-edges.png").is_file()
    fill(document, rows)
    assert document.read_text() == text, "filling again changes nothing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "has no place such as"),
        ("<!-- bench nonsense -->\n<!-- /bench -->", "unknown place 'nonsense'"),
        ("<!-- bench plot-nonsense -->\n<!-- /bench -->", "unknown plot 'nonsense'"),
        ("<!-- bench sweep-edges -->\n<!-- /bench -->", "the run has nothing for sweep-edges"),
    ],
)
def test_a_place_that_cannot_be_filled_leaves_the_document(content, message, tmp_path):
    document = tmp_path / "page.md"
    document.write_text(content)
    with pytest.raises(ValueError, match=message):
        fill(document, [row(1.0)])
    assert document.read_text() == content


def test_plots_are_written_only_with_the_page(rows, tmp_path):
    document = tmp_path / "page.md"
    places = ("plot-ratios", "sweep-iterations")
    document.write_text("\n".join(f"<!-- bench {name} -->\n<!-- /bench -->" for name in places))
    layers = [known for known in rows if known.suite == "layers"]
    with pytest.raises(ValueError, match="nothing for sweep-iterations"):
        fill(document, layers)
    assert not (tmp_path / "figures").exists()


def test_markdown_escapes_bars():
    table = tables.Table("title", ["|Ω|", "ms"], [["a", "1"]], "note")
    assert markdown(table) == "| \\|Ω\\| | ms |\n| --- | ---: |\n| a | 1 |\n\nnote"


def test_commit_is_that_of_these_sources():
    assert re.fullmatch(r"[0-9a-f]{12}\+?|unknown", commit())


def test_the_documents_of_the_project_have_only_known_places():
    documents = list((Path(__file__).parents[1] / "docs").glob("*.md"))
    places = [match[2] for page in documents for match in PLACE.finditer(page.read_text(encoding="utf-8"))]
    assert "paper" in places
    assert set(places) <= set(known_places())
