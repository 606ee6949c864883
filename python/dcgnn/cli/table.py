"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int | None = None) -> str:
    """Columns of equal width under a header.

    Args:
        header: Names of the columns.
        rows: The cells.
        words: Align all columns after the first so many to the right, as numbers are; None: align none.
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def join(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if words is None or column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([join(header), rule, *(join(row) for row in rows)])
