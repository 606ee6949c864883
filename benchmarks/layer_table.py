"""Prints the runtime table of one DCConv layer against its baselines, interleaved in one process.

    python benchmarks/layer_table.py [--shapes penn94 genius] [--channels 64] [--rounds 7]

Medians in milliseconds, their ratios, the bytes that the kernels gather, and the bandwidth that a plain
gather of rows reaches on the same graph.
"""

from __future__ import annotations

import argparse
import ctypes
import platform

import torch
from layer_cases import NUM_GLOBAL, SHAPES, Case, PlainPyTorch, forward, forward_backward

from dcgnn import DCConv
from dcgnn.timing import interleaved_medians
from dcgnn_kernels import backends, linear, local_centroids, release_memory

GIGA = 1e9


def peak_bytes() -> int:
    """Largest resident size of this process since the last reset."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def extra_peak(run) -> int:
    """How far the resident size rises above its level before `run`."""
    run()
    release_memory()  # what is kept for later would hide a rise
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")
    before = peak_bytes()
    run()
    return peak_bytes() - before


def gathered_bytes(case: Case, num_local: int, backward: bool) -> dict[str, int]:
    """Bytes of rows that each kernel reads at random places, float32."""
    row = case.graph.num_slots * case.x.size(1) * 4
    sizes = {"local_sinkhorn": row, "node_update": num_local * row}
    if backward:
        sizes |= {
            "node_update backward": row,
            "local_sinkhorn backward, egos": row,
            "local_sinkhorn backward, transpose": (num_local + 1) * row,
        }
    return sizes


def report(shape: str, channels: int, rounds: int, plain_rounds: int) -> None:
    case = Case.of_shape(shape, channels)
    x, graph = case.x, case.graph
    print(f"\n## {shape}, F = {channels}: {graph.num_nodes} nodes, {graph.num_slots} slots")
    layers = case.layers()
    half = DCConv(channels, channels, NUM_GLOBAL).bfloat16()
    x_half = x.bfloat16()
    runs = {f"{name} forward": forward(layer, x) for name, layer in layers.items()}
    runs["DCConv bfloat16 forward"] = forward(lambda x: half(x, graph), x_half)
    runs |= {f"{name} forward+backward": forward_backward(layer, x) for name, layer in layers.items()}
    gathered = linear(x, torch.eye(channels))  # where the layer has its rows
    runs["gather of rows"] = lambda: local_centroids(gathered, graph)
    medians = interleaved_medians(runs, rounds=rounds, warmup=1)
    plain = None
    if plain_rounds:
        with PlainPyTorch():
            plain = interleaved_medians({"plain": runs["DCConv forward"]}, rounds=plain_rounds, warmup=0)

    for name, seconds in medians.items():
        print(f"{name:<40}{seconds * 1e3:10.1f} ms")
    dc, both = medians["DCConv forward"], medians["DCConv forward+backward"]
    csr = medians["GCNConv(CSR) forward"]
    ratios = {
        "forward / GCNConv(edge_index)": dc / medians["GCNConv(edge_index) forward"],
        "forward / GATConv": dc / medians["GATConv forward"],
        "forward / GCNConv(CSR)": dc / csr,
        "forward+backward / GCNConv(CSR)": both / medians["GCNConv(CSR) forward+backward"],
        "bfloat16 forward / GCNConv(CSR) float32": medians["DCConv bfloat16 forward"] / csr,
    }
    if plain is not None:
        ratios["forward / plain PyTorch"] = dc / plain["plain"]
    for name, ratio in ratios.items():
        print(f"{name:<40}{ratio:10.3f}")
    bandwidth = graph.num_slots * channels * 4 / medians["gather of rows"]
    print(f"{'measured gather bandwidth':<40}{bandwidth / GIGA:10.1f} GB/s")
    for backward, seconds in ((False, dc), (True, both)):
        total = sum(gathered_bytes(case, 2, backward).values())
        what = "forward+backward" if backward else "forward"
        print(
            f"{what + ': gathered':<40}{total / GIGA:10.2f} GB, at that bandwidth "
            f"{total / bandwidth * 1e3:.0f} of {seconds * 1e3:.0f} ms"
        )
    floats = extra_peak(runs["DCConv forward+backward"]) / 4
    unit = graph.num_nodes * 2 * channels + graph.num_slots * 2
    print(f"{'extra peak memory / (N K F + S K) floats':<42}{floats / unit:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--channels", nargs="+", type=int, default=[64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain-rounds", type=int, default=1, help="0: leave plain PyTorch out")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = backends()["native-cpu"].reason
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, {native}")
    for channels in options.channels:
        for shape in options.shapes:
            report(shape, channels, options.rounds, options.plain_rounds)


if __name__ == "__main__":
    main()
