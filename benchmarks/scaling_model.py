"""What 1 to 64 GPUs need for a graph of 10^9 edges: A MODEL, computed from a few numbers, not a measurement.

    python benchmarks/scaling_model.py --slot-ns 100 --stream-gb 10 --device-gb 2000 --halo-share 0.3

One layer in training (forward and backward) on R ranks, F channels, K = 2, with S = edges + nodes slots:

- compute   = slot_ns · stream_gb / device_gb · S / R: the measured time of one slot, forward and backward;
              where it was measured on another machine than the modelled one, the ratio of their memory's
              speeds carries it over: the kernels move bytes, but nobody has seen them on that device;
- exchange  = 4 · halo · F · bytes / link: two exchanges forward, two backward; the halo of a rank is
              halo_share · (1 − 1/R) · N / R · min(mean degree, R − 1) rows, at most all that it does not own;
- global    = 2 · (2 T + 3) · latency · log2(R): small all-reduces, bound by latency;
- memory    = what a rank holds: indices, and activations of a layer for own rows and halo.

The share of halo rows decides; `partition_scaling.py` counts it for a graph and measures a slot and
the copy. Nothing overlaps here.
"""

from __future__ import annotations

import argparse
import math

from dcgnn.cli.table import format_table


def row(ranks: int, given: argparse.Namespace) -> list[str]:
    """One number of ranks."""
    slots = given.edges + given.nodes
    own = given.nodes / ranks
    degree = given.edges / given.nodes
    halo = given.halo_share * (1 - 1 / ranks) * own * max(1.0, min(degree, ranks - 1.0))
    halo = min(halo, given.nodes - own)
    slot = given.slot_ns * 1e-9 * given.stream_gb / given.device_gb
    compute = slot * slots / ranks
    exchange = 4 * halo * given.channels * given.bytes / (given.link_gb * 1e9)
    small = 2 * (2 * given.iters + 3) * given.latency_us * 1e-6 * math.log2(ranks)
    total = compute + exchange + small
    # int32: member, ego and slot of every slot; K float32 of assignment, and as many coefficients.
    per_slot = 3 * 4 + 2 * 2 * given.bytes
    # x, z, its gradient, clusters and their gradient (K = 2) of a layer.
    per_row = given.channels * given.bytes * 8
    memory = slots / ranks * per_slot + (own + halo) * per_row * given.layers
    cells = [compute * 1e3, exchange * 1e3, small * 1e3, total * 1e3, 100 * compute / total]
    return [str(ranks), *(f"{value:.1f}" for value in cells), f"{memory / 2**30:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot-ns", type=float, required=True, help="measured ns a slot, forward + backward")
    parser.add_argument(
        "--stream-gb", type=float, default=1.0, help="GB/s of a copy where --slot-ns was measured"
    )
    parser.add_argument(
        "--device-gb",
        type=float,
        default=1.0,
        help="GB/s of a copy on the modelled device; default: the same",
    )
    parser.add_argument("--halo-share", type=float, default=0.3, help="halo rows by own rows at 2 ranks, ·2")
    parser.add_argument("--link-gb", type=float, default=50.0, help="GB/s that a rank sends (default: 50)")
    parser.add_argument("--latency-us", type=float, default=20.0, help="of a small all-reduce step")
    parser.add_argument("--edges", type=float, default=1e9)
    parser.add_argument("--nodes", type=float, default=5e7)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--iters", type=int, default=5, help="Sinkhorn iterations of the global problem")
    parser.add_argument("--bytes", type=int, default=4, help="of a number (default: 4, float32)")
    given = parser.parse_args()
    print("A MODEL, not a measurement; one layer, forward and backward:")
    print(", ".join(f"{name} {value}" for name, value in vars(given).items()))
    header = ["GPUs", "compute ms", "exchange ms", "global ms", "layer ms", "efficiency %", "GiB a GPU"]
    rows = [row(ranks, given) for ranks in (1, 2, 4, 8, 16, 32, 64)]
    print(format_table(header, rows, words=1))


if __name__ == "__main__":
    main()
