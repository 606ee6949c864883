"""Loss curves and test metrics of several ``dcgnn train --json`` files, side by side.

python benchmarks/compare_runs.py one.json parts.json ddp.json

The curves are those of the first seed. A difference is the largest one to the first file, over all epochs of
all seeds that both have; nan: they have none in common.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from dcgnn.cli.table import format_table


def largest_difference(first: dict[str, Any], other: dict[str, Any]) -> float:
    """Of the losses, over epochs and over the runs of the same split and seed."""
    curves = {(run["split"], run["seed"]): run["history"]["loss"] for run in first["runs"]}
    differences = (
        abs(a - b)
        for run in other["runs"]
        for a, b in zip(curves.get((run["split"], run["seed"]), ()), run["history"]["loss"], strict=False)
    )
    return max(differences, default=math.nan)


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        raise SystemExit(__doc__)
    reports = [json.loads(path.read_text()) for path in paths]
    curves = [report["runs"][0]["history"]["loss"] for report in reports]
    shortest = min(map(len, curves))
    shown = sorted({*range(0, shortest, max(1, shortest // 10)), shortest - 1})
    rows = [[f"loss, epoch {epoch + 1}", *(f"{curve[epoch]:.6f}" for curve in curves)] for epoch in shown]
    rows.append(
        ["largest difference", *(f"{largest_difference(reports[0], report):.1e}" for report in reports)]
    )
    rows.append(
        [
            f"test {reports[0]['metric']}",
            *(f"{100 * report['test_mean']:.2f} ± {100 * report['test_std']:.2f}" for report in reports),
        ]
    )
    rows.append(["seeds", *(str(len(report["runs"])) for report in reports)])
    print(format_table(["", *(path.stem for path in paths)], rows, words=1))


if __name__ == "__main__":
    main()
