"""Strong scaling of a partitioned model on one machine, and what the ranks send each other, counted.

    python benchmarks/partition_scaling.py --ranks 1,2,4 --nodes 20000 --edges 200000

A random graph with planted communities (edges stay inside with probability --inside), so that a good cut
exists. Every rank has one thread. A row is a forward and a backward of all layers; bytes are those that the
busiest rank sends for them, by layer. With more ranks than cores the times say nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dcgnn import DCGNN
from dcgnn.cli.table import format_table
from dcgnn.distributed.topology import PartTopology
from dcgnn.partition import edge_cut, make_part, owners
from dcgnn.timing import interleaved_medians
from dcgnn_kernels import EgoGraph


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


def work(rank: int, world: int, arguments: argparse.Namespace, method: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    graph = community_graph(arguments.nodes, arguments.edges, arguments.inside)
    owner = [owners(graph, world, method)] if rank == 0 else [None]
    dist.broadcast_object_list(owner)
    cut = edge_cut(graph, owner[0])
    part = make_part(graph, owner[0], rank)
    del graph
    topology = PartTopology(part)
    torch.manual_seed(0)
    model = DCGNN(arguments.channels, arguments.channels, 4, 8, num_layers=arguments.layers)
    x = torch.randn(topology.num_nodes, arguments.channels)

    def step() -> None:
        model.zero_grad()
        model(x, topology).sum().backward()

    step()  # factors are exchanged once
    topology.halo.traffic.reset()
    step()
    traffic = topology.halo.traffic
    sent = torch.tensor([traffic.bytes.get(kind, 0) for kind in ("gather", "reduce", "all_reduce")])
    halo = torch.tensor([part.halo_rows.numel() / part.own_rows.numel()])
    calls = sum(traffic.calls.values())
    for values in (sent, halo):
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    seconds = interleaved_medians({"step": step}, rounds=arguments.rounds)["step"]
    longest = torch.tensor([seconds])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    if rank == 0:
        by_layer = (sent.double() / arguments.layers / 1024).tolist()
        row = [
            str(world),
            method,
            f"{1000 * longest.item():.1f}",
            f"{100 * cut:.1f}",
            f"{100 * halo.item():.0f}",
        ]
        row += [f"{value:.1f}" for value in by_layer] + [str(calls // arguments.layers)]
        torch.save(row, f"{folder}/row.pt")
    dist.destroy_process_group()


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
    rows = []
    for world in map(int, arguments.ranks.split(",")):
        for method in arguments.methods.split(",")[: None if world > 1 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(work, (world, arguments, method, folder), world)
                rows.append(torch.load(f"{folder}/row.pt", weights_only=True))
    header = [
        "ranks",
        "cut",
        "ms",
        "edges cut %",
        "halo % of own",
        "KiB gather",
        "KiB reduce",
        "KiB all-reduce",
        "calls",
    ]
    sizes = f"{arguments.nodes} nodes, {arguments.edges} edges, {arguments.channels} channels"
    print(f"{sizes}, {os.cpu_count()} cores;")
    print("forward and backward; KiB and calls of the busiest rank for one layer")
    print(format_table(header, rows, words=2))


if __name__ == "__main__":
    main()
