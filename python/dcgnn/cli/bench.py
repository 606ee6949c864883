"""``dcgnn bench``: time layers, kernels and sweeps; print, store, plot and compare the results."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from dcgnn.bench import page, plan, rows, runner, tables
from dcgnn.bench.cases import CASES, PHASES
from dcgnn.bench.compare import compare
from dcgnn.bench.fill import fill
from dcgnn.bench.gate import TOLERANCES
from dcgnn.bench.merge import merged
from dcgnn.bench.problem import Settings
from dcgnn.bench.shapes import SHAPES
from dcgnn.bench.sweeps import SWEEPS
from dcgnn.checkpoint import check_writable
from dcgnn.cli.checks import find_device
from dcgnn.cli.info import environment
from dcgnn.cli.table import format_table
from dcgnn.data import DATA_ROOT_VARIABLE

MOST_THREADS = 1024

_EPILOG = f"""\
shapes:  {", ".join(SHAPES)}
cases:   {", ".join(CASES)}
phases:  {", ".join(PHASES)}
sweeps:  {", ".join(SWEEPS)}

  dcgnn bench --quick                                the paper's runtime table, in about two minutes
  dcgnn bench --sweeps all --json new.json --html new.html
  dcgnn bench --from new.json --compare old.json     two stored runs, nothing is measured
  dcgnn bench --from new.json --fill docs/benchmarks.md
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="time layers and kernels against GCNConv, GATConv and the machine's limits",
        description="Time DCConv beside other layers, its kernels beside the machine's limits, and sweeps of "
        "sizes. No figure is printed for a case whose outputs disagree with the reference.",
        epilog=_EPILOG.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--quick", action="store_true", help="the paper's runtime table and no more")
    what.add_argument(
        "--shapes",
        nargs="*",
        metavar="SHAPE",
        help=f"random graphs of published shapes, or all (default: {' '.join(plan.PAPER_SHAPES)})",
    )
    what.add_argument(
        "--graphs", nargs="+", default=[], metavar="GRAPH", help="graphs by name, see dcgnn graphs"
    )
    what.add_argument(
        "--data-root", metavar="DIR", help=f"folder of their raw files (default: {DATA_ROOT_VARIABLE})"
    )
    what.add_argument("--cases", nargs="+", metavar="CASE", help="layers to compare (default: all)")
    what.add_argument("--phases", nargs="+", metavar="PHASE", help="what to time of them (default: all)")
    what.add_argument(
        "--suites",
        nargs="*",
        metavar="SUITE",
        help="layers, kernels (default: both; none with a list of none)",
    )
    what.add_argument(
        "--sweeps", nargs="+", default=[], metavar="SWEEP", help="sizes to sweep, or all (default: none)"
    )
    what.add_argument(
        "--sweep-shape",
        default="cornell5",
        metavar="SHAPE",
        help="graph of the sweeps (default: %(default)s)",
    )
    what.add_argument(
        "--edges", nargs="+", type=_count, metavar="N", help="edges of that sweep (default: 1e4 to 1e8)"
    )
    what.add_argument(
        "--channels", nargs="+", type=int, default=[64], metavar="F", help="widths (default: 64)"
    )
    what.add_argument("--num-local", type=int, default=2, metavar="K", help="local clusters (default: 2)")
    what.add_argument("--num-global", type=int, default=8, metavar="N", help="global clusters (default: 8)")
    what.add_argument("--dtype", default="float32", metavar="WORD", help="dtype (default: float32)")

    how = parser.add_argument_group("how to measure")
    how.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, auto, ... (default: %(default)s)")
    how.add_argument("--threads", type=int, metavar="N", help="threads (default: those of torch)")
    how.add_argument("--rounds", type=int, metavar="N", help="measured rounds (default: 7; quick: 5)")
    how.add_argument("--warmup", type=int, metavar="N", help="rounds before them (default: 1)")
    how.add_argument(
        "--max-seconds", type=float, metavar="X", help="longest time of a group (default: 60; quick: 12)"
    )
    how.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the graphs (default: 0)")
    how.add_argument("--quiet", action="store_true", help="no progress bar")

    results = parser.add_argument_group("results")
    results.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="FILE",
        help="measure nothing, read the JSON files of runs",
    )
    results.add_argument("--compare", metavar="FILE", help="compare with the JSON file of an older run")
    results.add_argument("--json", metavar="FILE", help="write the rows as JSON, after every step")
    results.add_argument("--csv", metavar="FILE", help="write them as CSV")
    results.add_argument("--html", metavar="FILE", help="write one page with tables and plots")
    results.add_argument("--plots", metavar="DIR", help="write the plots as PNG files")
    results.add_argument(
        "--fill", nargs="+", default=[], metavar="FILE", help="fill the marked places of Markdown pages"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure or read, then report."""
    _check_outputs(arguments)
    _check_numbers(arguments)
    older = rows.read_json(arguments.compare) if arguments.compare else None
    if arguments.sources:
        found = merged({name: rows.read_json(name) for name in arguments.sources})
        if not found:
            raise ValueError(f"--from: no rows in {', '.join(arguments.sources)}")
        if older is not None:
            compare(older, found)  # an error here ends the command, before anything is printed
        _report(arguments, found, older)
        return
    chosen, effort = _plan(arguments), _effort(arguments)
    before = torch.get_num_threads()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    context = rows.Context.of(environment(), chosen.device.type)
    bar = runner.Bar(
        disable=arguments.quiet,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed} passed, about {remaining} left",
    )

    def keep(found: list[rows.Row]) -> None:
        if arguments.json:
            rows.write_json(arguments.json, found)

    worker = runner.Runner(context, effort, bar, keep)
    try:
        with bar, runner.quiet_libraries(), _current(chosen.device):
            plan.measure(chosen, worker)
    except BaseException as error:
        _report(arguments, worker.rows, older, finished=False)
        if not isinstance(error, KeyboardInterrupt):
            raise
        where = f"; kept in {arguments.json}" if arguments.json and worker.rows else ""
        raise KeyboardInterrupt(f"interrupted; {len(worker.rows)} rows were done{where}") from None
    finally:
        torch.set_num_threads(before)
    _report(arguments, worker.rows, older)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Clocks and memory counters read the current device, so that the chosen one must be it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("threads", "num_local", "num_global"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
    if arguments.threads is not None and arguments.threads > MOST_THREADS:
        raise ValueError(f"--threads must be at most {MOST_THREADS}, got {arguments.threads}")
    if arguments.sources and arguments.quick:
        raise ValueError("--from measures nothing: leave --quick out")
    if arguments.sweeps and len(set(arguments.channels)) > 1:
        raise ValueError("--channels: sweeps have one width; measure others with --sweeps channels")
    for name in ("rounds", "warmup", "max_seconds"):
        value = getattr(arguments, name)
        if value is not None and not value >= (1 if name == "rounds" else 0):  # also NaN
            raise ValueError(f"--{name.replace('_', '-')} is too small: {value}")


def _plan(arguments: argparse.Namespace) -> plan.Plan:
    quick = arguments.quick
    shapes = arguments.shapes
    if shapes is None:
        shapes = [] if arguments.graphs else list(plan.PAPER_SHAPES)
    suites = arguments.suites
    if suites is None:
        suites = ["layers"] if quick else list(plan.SUITES)
    if arguments.dtype not in TOLERANCES:  # by its full name, under which rows are compared
        raise ValueError(f"--dtype wants float64, float32, bfloat16 or float16, got {arguments.dtype!r}")
    if arguments.edges is not None and not {"edges", "all"} & set(arguments.sweeps):
        raise ValueError("--edges are the sizes of a sweep: add --sweeps edges")
    settings = Settings(num_local=arguments.num_local, num_global=arguments.num_global, dtype=arguments.dtype)
    return plan.Plan(
        shapes=list(SHAPES) if shapes == ["all"] else shapes,
        graphs=arguments.graphs,
        data_root=arguments.data_root,
        cases=arguments.cases or (plan.QUICK_CASES if quick else tuple(CASES)),
        phases=arguments.phases or (plan.QUICK_PHASES if quick else PHASES),
        suites=suites,
        sweeps=list(SWEEPS) if arguments.sweeps == ["all"] else arguments.sweeps,
        sweep_shape=arguments.sweep_shape,
        edges=arguments.edges,
        channels=arguments.channels,
        settings=settings,
        device=find_device(arguments.device),
        seed=arguments.seed,
        memory=not arguments.no_memory,
    )


def _effort(arguments: argparse.Namespace) -> runner.Effort:
    effort = plan.QUICK_EFFORT if arguments.quick else runner.Effort()
    given = {
        name: getattr(arguments, name)
        for name in ("rounds", "warmup", "max_seconds")
        if getattr(arguments, name) is not None
    }
    return replace(effort, **given)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Before the work: can everything be written that was asked for?"""
    for name in (arguments.json, arguments.csv, arguments.html):
        if name:
            check_writable(Path(name))
    for name in arguments.fill:
        if not Path(name).is_file():
            raise ValueError(f"--fill: there is no file {name}")
    if arguments.plots and Path(arguments.plots).exists() and not Path(arguments.plots).is_dir():
        raise ValueError(f"--plots: {arguments.plots} is a file, a folder is wanted")
    wants_plots = arguments.html or arguments.plots or arguments.fill
    if wants_plots and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install 'dcgnn-kernels[study]'")


def _report(
    arguments: argparse.Namespace,
    found: list[rows.Row],
    older: list[rows.Row] | None,
    *,
    finished: bool = True,
) -> None:
    """What was measured is kept and printed first; documents are filled from a whole run alone."""
    if found and arguments.json:
        rows.write_json(arguments.json, found)
    for line in tables.machine_lines(found):
        print(line)
    for table in tables.all_tables(found):
        _print_table(table)
    if reasons := tables.left_out(found):
        print("\nNot measured:")
        for reason in reasons:
            print(f"  {reason}")
    if not found:
        return
    if arguments.csv:
        rows.write_csv(arguments.csv, found)
    compared = None
    if older is not None:
        try:
            compared = compare(older, found)
            _print_table(compared)
        except ValueError as error:  # the new run stands for itself
            print(f"\n{arguments.compare}: {error}")
    if arguments.html:
        page.write_page(arguments.html, found, compared)
    if arguments.plots:
        page.write_plots(arguments.plots, found)
    for name in arguments.fill if finished else ():
        print(f"{name}: filled {', '.join(fill(name, found))}", file=sys.stderr)


def _print_table(table: tables.Table) -> None:
    print(f"\n{table.title}\n\n{format_table(table.header, table.rows, words=table.words)}")
    if table.note:
        print(f"\n{table.note}")


def _count(text: str) -> int:
    """A number of edges, also as 1e6."""
    try:
        number = float(text)
        if number.is_integer():
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"a whole number such as 20000 or 1e6 is wanted, got {text!r}")
