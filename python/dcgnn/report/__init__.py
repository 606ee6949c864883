"""A trained model on one page: curves, objective, clusters, embeddings, contested nodes."""

from __future__ import annotations

import io
from pathlib import Path

from dcgnn.checkpoint import atomic_write, check_writable
from dcgnn.extras import require
from dcgnn.report.measures import Trained, load_trained, most_contested
from dcgnn.report.page import render

__all__ = ["Trained", "load_trained", "write_report"]


def write_report(trained: Trained, out: str | Path, embedding: str = "pca") -> Path:
    """Write ``report.html``, with everything inside, and its pictures as PNG files into the folder ``out``.

    Args:
        trained: From :func:`load_trained`.
        out: The folder.
        embedding: ``"pca"`` or ``"tsne"``.

    Returns:
        The HTML file.
    """
    require("matplotlib")
    path = Path(out) / "report.html"
    check_writable(path)
    from dcgnn.report.figures import all_figures

    pictures = {}
    for name, figure in all_figures(trained, embedding).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        pictures[name] = buffer.getvalue()
    page = render(trained, pictures, most_contested(trained)).encode()
    for name, png in pictures.items():
        atomic_write(Path(out) / f"{name}.png", lambda file, png=png: file.write(png))  # type: ignore[misc]
    atomic_write(path, lambda file: file.write(page))
    return path
