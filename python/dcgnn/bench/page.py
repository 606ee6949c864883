"""One HTML page with all tables and plots inside, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from dcgnn.bench import plots, tables
from dcgnn.bench.rows import Row
from dcgnn.checkpoint import atomic_write

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
figure { margin: 1.5rem 0; } img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th { background: #f3f3f3; } .word { text-align: left; } .note { color: #555; font-size: .9rem; }
"""


def make_page(rows: Sequence[Row], compared: tables.Table | None = None) -> str:
    """The page as text."""
    parts = ["<h1>dcgnn bench</h1>"]
    parts += [f'<p class="note">{escape(line)}</p>' for line in tables.machine_lines(rows)]
    for title, figure in plots.make_plots(rows).values():
        image = f'<img src="{plots.svg_data(figure)}" alt="{escape(title)}">'
        parts.append(f"<figure><h2>{escape(title)}</h2>{image}</figure>")
    shown = tables.all_tables(rows)
    parts += [_table(table) for table in ([compared] if compared is not None else []) + shown]
    if reasons := tables.left_out(rows):
        items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        parts.append(f"<h2>Not measured</h2><ul>{items}</ul>")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>dcgnn bench</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def write_page(path: str | Path, rows: Sequence[Row], compared: tables.Table | None = None) -> None:
    """Write the page as a whole or not at all."""
    text = make_page(rows, compared)
    atomic_write(path, lambda file: file.write(text.encode()))


def write_plots(folder: str | Path, rows: Sequence[Row]) -> list[Path]:
    """Every plot as a PNG file."""
    written = []
    for name, (_, figure) in plots.make_plots(rows).items():
        path = Path(folder) / f"{name}.png"
        image = plots.png(figure)
        atomic_write(path, lambda file, image=image: file.write(image))  # type: ignore[misc]
        written.append(path)
    return written


def _table(table: tables.Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(
            f"<{tag}{' class=word' if place < table.words else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{inner}</tr>"

    rows = "\n".join(line(cells, "td") for cells in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h2>{escape(table.title)}</h2>\n<div class=wide><table>\n{line(table.header, 'th')}\n{rows}\n"
        f"</table></div>{note}"
    )
