"""Strong scaling of a partitioned model on one machine, and what the ranks send each other, counted.

    python benchmarks/partition_scaling.py --ranks 1,2,4 --nodes 20000 --edges 200000

A random graph with planted communities (edges stay inside with probability --inside), so that a good cut
exists. Every rank has one thread. A row is a forward and a backward of all layers; bytes are those that the
busiest rank sends for them, by layer. All rows are measured in turns: every round runs each of them once
while the other ranks wait, and a speed-up is the median over rounds of the first row's time by the row's
own. CPU ms is the processor time of the busiest rank: what it computes, without its waiting and without what
other programs take; the time of a slot and of the copy are processor times, too. With more ranks than free
cores the other times say nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dcgnn import DCGNN
from dcgnn.cli.info import environment
from dcgnn.cli.table import format_table
from dcgnn.distributed.topology import PartTopology
from dcgnn.partition import edge_cut, make_part, owners
from dcgnn_kernels import EgoGraph

KINDS = ("gather", "reduce", "all_reduce")
COPIED = 1 << 26  # bytes, beyond any cache


def community_graph(num_nodes: int, num_edges: int, inside: float, communities: int = 64) -> EgoGraph:
    """Undirected, nodes of a community apart from each other in their numbers."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, num_nodes, (num_edges // 2,), generator=generator)
    anywhere = torch.randint(0, num_nodes, source.shape, generator=generator)
    size = num_nodes // communities
    same = (source % communities) + communities * torch.randint(0, size, source.shape, generator=generator)
    stays = torch.rand(source.shape, generator=generator) < inside
    edges = torch.stack([source, torch.where(stays, same, anywhere)])
    return EgoGraph.from_edge_index(torch.cat([edges, edges.flip(0)], dim=1), num_nodes)


@dataclass
class Case:
    """One number of ranks and one way to cut."""

    ranks: int
    method: str
    cut: float
    step: Callable[[], object]
    counts: torch.Tensor  # bytes by kind, calls, halo rows by own rows; of the busiest rank


def make_case(graph: EgoGraph, ranks: int, method: str, arguments: argparse.Namespace) -> Case:
    """All processes call this; those beyond ``ranks`` have nothing to do in a step."""
    rank = dist.get_rank()
    group = dist.new_group(list(range(ranks)))
    owner = [owners(graph, ranks, method)] if rank == 0 else [None]
    dist.broadcast_object_list(owner)
    counts = torch.zeros(len(KINDS) + 2, dtype=torch.float64)
    step: Callable[[], object] = int
    if rank < ranks:
        part = make_part(graph, owner[0], rank)
        topology = PartTopology(part, group)
        torch.manual_seed(0)
        model = DCGNN(arguments.channels, arguments.channels, 4, 8, num_layers=arguments.layers)
        x = torch.randn(topology.num_nodes, arguments.channels)

        def step() -> None:
            model.zero_grad()
            model(x, topology).sum().backward()

        step()  # factors are exchanged once
        traffic = topology.halo.traffic
        traffic.reset()
        step()
        sent = [traffic.bytes.get(kind, 0) for kind in KINDS]
        share = part.halo_rows.numel() / part.own_rows.numel()
        counts = torch.tensor([*sent, sum(traffic.calls.values()), share], dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return Case(ranks, method, edge_cut(graph, owner[0]), step, counts)


def work(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Measures all cases; rank 0 writes their rows."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    graph = community_graph(arguments.nodes, arguments.edges, arguments.inside)
    cases = [
        make_case(graph, ranks, method, arguments)
        for ranks in arguments.ranks
        for method in (arguments.methods if ranks > 1 else arguments.methods[:1])
    ]
    source, target = torch.ones(COPIED, dtype=torch.uint8), torch.ones(COPIED, dtype=torch.uint8)
    steps = [(case.ranks, case.step) for case in cases] + [(1, lambda: target.copy_(source))]
    seconds = torch.zeros(2, arguments.rounds, len(steps), dtype=torch.float64)  # of the clock, of the CPU
    for round_ in range(arguments.rounds):
        for index, (ranks, step) in enumerate(steps):
            dist.barrier()
            if rank < ranks:
                begin = time.perf_counter(), time.process_time()
                step()
                seconds[0, round_, index] = time.perf_counter() - begin[0]
                seconds[1, round_, index] = time.process_time() - begin[1]
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if rank == 0:
        rows = [table_row(case, seconds, index, arguments) for index, case in enumerate(cases)]
        slot = median(seconds[1, :, 0]) / (graph.num_slots * arguments.layers)
        torch.save([rows, 1e9 * slot, 2 * COPIED / median(seconds[1, :, -1]) / 1e9], f"{folder}/found")
    dist.destroy_process_group()


def median(values: torch.Tensor) -> float:
    """The middle one, or the mean of the two in the middle."""
    return statistics.median(values.tolist())


def table_row(case: Case, seconds: torch.Tensor, index: int, arguments: argparse.Namespace) -> list[str]:
    """One line of the table."""
    *sent, calls, halo = case.counts.tolist()
    return [
        str(case.ranks),
        case.method,
        f"{1000 * median(seconds[0, :, index]):.1f}",
        f"{median(seconds[0, :, 0] / seconds[0, :, index]):.2f}",
        f"{1000 * median(seconds[1, :, index]):.1f}",
        f"{100 * case.cut:.1f}",
        f"{100 * halo:.0f}",
        *(f"{count / arguments.layers / 1024:.1f}" for count in sent),
        f"{calls / arguments.layers:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks (default: 1,2)")
    parser.add_argument("--methods", default="auto,hash", help="cuts to compare (default: auto,hash)")
    parser.add_argument("--nodes", type=int, default=20000)
    parser.add_argument("--edges", type=int, default=200000)
    parser.add_argument("--inside", type=float, default=0.9, help="share of edges inside communities")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    arguments.ranks = [int(ranks) for ranks in arguments.ranks.split(",")]
    arguments.methods = arguments.methods.split(",")
    world = max(arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (world, arguments, folder), world)
        rows, slot_ns, stream = torch.load(f"{folder}/found", weights_only=True)
    header = ["ranks", "cut", "ms", "speed-up", "CPU ms", "edges cut %", "halo % of own"]
    header += ["KiB gather", "KiB reduce", "KiB all-reduce", "calls"]
    print(
        f"{arguments.nodes} nodes, {arguments.edges} edges, {arguments.channels} channels, "
        f"{arguments.layers} layers, {arguments.rounds} rounds; "
        f"{environment()['cpu']}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print("forward and backward; KiB and calls of the busiest rank for one layer")
    print(format_table(header, rows, words=2))
    print(f"first row: {slot_ns:.1f} ns a slot and layer; a copy on one thread: {stream:.1f} GB/s")


if __name__ == "__main__":
    main()
