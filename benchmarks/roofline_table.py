"""Prints the roofline page's tables: `python benchmarks/roofline_table.py`. A model, never a measurement."""

from __future__ import annotations

import torch

from dcgnn.bench.shapes import SHAPES, make_edges
from dcgnn_kernels import EgoGraph
from dcgnn_kernels.triton.roofline import A100, H100, Gpu, Kernel, Layer, seconds

OTHERS = {"gcn": "GCN, cuSPARSE", "gcn_unfused": "GCNConv unfused", "gat_unfused": "GATConv unfused"}
# What the layer must stay below (GATConv, and the paper's own ratio to GCNConv), and the aim (cuSPARSE).
BOUNDS = {"gat_unfused": 1.0, "gcn_unfused": 3.4, "gcn": 1.5}
NAMES = {"penn94": "Penn94", "cornell5": "Cornell5", "genius": "Genius"}


def degrees(shape: str) -> torch.Tensor:
    """Ego sizes of the random graph of that shape, which the other benchmarks use too."""
    return EgoGraph.from_edge_index(make_edges(SHAPES[shape]), SHAPES[shape].num_nodes).ego_sizes()


def row(name: str, cells: list[str]) -> str:
    """One line of a Markdown table."""
    return f"| {name} | {' | '.join(cells)} |"


def milliseconds(kernels: list[Kernel], gpu: Gpu) -> str:
    """Rounded for the page."""
    return f"{1e3 * seconds(kernels, gpu):.3f}"


def main() -> None:
    """Print the tables."""
    sizes = {shape: degrees(shape) for shape in NAMES}
    layers = {
        (shape, dtype): Layer(sizes[shape], dtype=dtype)
        for shape in NAMES
        for dtype in (torch.float32, torch.bfloat16)
    }
    head = [f"{NAMES[shape]}, {gpu.name}" for shape in NAMES for gpu in (A100, H100)]
    print(row("milliseconds (model)", head))
    print(row("---", ["---"] * len(head)))
    places = [(shape, gpu) for shape in NAMES for gpu in (A100, H100)]
    rows = {
        "GCN, cuSPARSE, float32": ("gcn", torch.float32),
        "GCN, cuSPARSE, bfloat16": ("gcn", torch.bfloat16),
        "DCConv forward, float32": ("forward", torch.float32),
        "DCConv forward, bfloat16": ("forward", torch.bfloat16),
        "GCNConv unfused, float32": ("gcn_unfused", torch.float32),
        "GATConv unfused, float32": ("gat_unfused", torch.float32),
        "DCConv backward, float32": ("backward", torch.float32),
        "DCConv backward, bfloat16": ("backward", torch.bfloat16),
    }
    for name, (what, dtype) in rows.items():
        print(row(name, [milliseconds(getattr(layers[s, dtype], what)(), gpu) for s, gpu in places]))

    print()
    print(row("ratio (model)", head))
    print(row("---", ["---"] * len(head)))
    largest = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for other, label in OTHERS.items():
            ratios = []
            for shape, gpu in places:
                ours = seconds(layers[shape, dtype].forward(), gpu)
                theirs = seconds(getattr(layers[shape, torch.float32], other)(), gpu)
                ratios.append(ours / theirs)
            print(row(f"DCConv {name} / {label} float32", [f"{ratio:.2f}" for ratio in ratios]))
            largest[name, other] = max(ratios)

    print()
    for other, bound in BOUNDS.items():
        found = {name: largest[name, other] for name in ("float32", "bfloat16")}
        states = [
            f"{name} {'yes' if found[name] < bound else 'no'}, at most {found[name]:.2f}" for name in found
        ]
        print(f"- below {bound} times {OTHERS[other]} everywhere: {'; '.join(states)}")

    print()
    print(row("MB through L2, forward", [f"{NAMES[s]} {n}" for s in NAMES for n in ("float32", "bfloat16")]))
    print(row("---", ["---"] * 6))
    both = [layers[s, dtype] for s in NAMES for dtype in (torch.float32, torch.bfloat16)]
    for index, kernel in enumerate(both[0].forward()):
        print(row(kernel.name, [f"{layer.forward()[index].bytes() / 1e6:.0f}" for layer in both]))
    print(row("SpMM of a GCN", [f"{layer.spmm().bytes() / 1e6:.0f}" for layer in both]))
    print(
        row(
            "slots of egos beyond registers",
            [f"{layer.hub_slots(False) / layer.slots:.0%}" for layer in both],
        )
    )


if __name__ == "__main__":
    main()
