"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: bool = False) -> str:
    """Columns of equal width under a header.

    Args:
        header: Names of the columns.
        rows: The cells.
        numeric: Align all columns but the first to the right.
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def join(line: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if numeric and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([join(header), rule, *(join(row) for row in rows)])
