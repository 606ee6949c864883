"""Runtime of cluster_scatter and node_update, forward and backward, beside plain PyTorch, on any device.

    python benchmarks/scatter_ops.py --device cuda --shapes penn94 --channels 64 128 --dtypes float32 bfloat16

GB/s counts the rows that a gather reads (slots × K × F elements forward, slots × F backward), whether from
cache or memory: compare it with the device's bandwidth.
"""

from __future__ import annotations

import argparse

import torch
from layer_cases import NUM_GLOBAL, SHAPES, power_law_edges

from dcgnn.timing import interleaved_medians
from dcgnn_kernels import EgoGraph, backends, fallback

NUM_CLUSTERS = 2


def measure(graph: EgoGraph, channels: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Median seconds of each op; plain PyTorch, which materialises slots × K × F, once."""
    num_nodes, device = graph.num_nodes, graph.device
    options = {"dtype": dtype, "device": device}
    assign = torch.rand(graph.num_slots, NUM_CLUSTERS, **options)
    clusters = torch.randn(num_nodes, NUM_CLUSTERS, channels, **options)
    x = torch.randn(num_nodes, channels, **options)
    global_assign = torch.rand(num_nodes, NUM_GLOBAL, **options)
    global_message = torch.randn(NUM_GLOBAL, channels, **options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factors = [torch.rand(num_nodes, dtype=wide, device=device) for _ in range(4)]
    arrays = graph.arrays()
    ops = torch.ops.dcgnn
    medians = interleaved_medians(
        {
            "cluster_scatter": lambda: ops.cluster_scatter(assign, clusters, *arrays),
            "cluster_scatter_backward": lambda: ops.cluster_scatter_backward(x, assign, clusters, *arrays),
            "node_update": lambda: ops.node_update(
                x, global_assign, global_message, assign, clusters, *factors, *arrays, "tanh"
            ),
            "node_update_backward": lambda: ops.node_update_backward(
                x, global_assign, global_message, assign, clusters, *factors, *arrays
            ),
        },
        rounds=rounds,
    )
    plain = interleaved_medians(
        {"plain cluster_scatter": lambda: fallback.cluster_scatter(assign, clusters, *arrays)},
        rounds=1,
        warmup=1,
    )
    return medians | plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--channels", nargs="+", type=int, default=[64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.device}\n{backends()}\n")
    print(f"{'shape':<10}{'F':>5} {'dtype':<10}{'op':<26}{'ms':>10}{'GB/s':>8}")
    for shape in arguments.shapes:
        num_nodes, num_edges = SHAPES[shape]
        graph = EgoGraph.from_edge_index(power_law_edges(num_nodes, num_edges), num_nodes).to(
            arguments.device
        )
        for channels in arguments.channels:
            for name in arguments.dtypes:
                dtype = getattr(torch, name)
                row = graph.num_slots * channels * dtype.itemsize
                for op, seconds in measure(graph, channels, dtype, arguments.rounds).items():
                    read = row if "backward" in op else row * NUM_CLUSTERS
                    speed = read / seconds / 1e9
                    print(f"{shape:<10}{channels:>5} {name:<10}{op:<26}{seconds * 1e3:>10.3f}{speed:>8.0f}")


if __name__ == "__main__":
    main()
