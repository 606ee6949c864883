"""Loss curves and test metrics of several ``dcgnn train --json`` files, side by side.

python benchmarks/compare_runs.py one.json parts.json ddp.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dcgnn.cli.table import format_table


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        raise SystemExit(__doc__)
    runs = {path.stem: json.loads(path.read_text())["runs"][0] for path in paths}
    curves = [run["history"]["loss"] for run in runs.values()]
    shortest = min(map(len, curves))
    shown = sorted({*range(0, shortest, max(1, shortest // 10)), shortest - 1})
    rows = [[f"loss, epoch {epoch + 1}", *(f"{curve[epoch]:.6f}" for curve in curves)] for epoch in shown]
    largest = [max(abs(a - b) for a, b in zip(curves[0], curve, strict=False)) for curve in curves]
    rows.append(["largest difference", *(f"{value:.1e}" for value in largest)])
    metric = next(iter(runs.values()))["metric"]
    rows.append([f"test {metric}", *(f"{100 * run['test_metric']:.2f}" for run in runs.values())])
    print(format_table(["", *runs], rows, words=1))


if __name__ == "__main__":
    main()
