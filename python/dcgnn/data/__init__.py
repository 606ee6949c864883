"""Graphs to train on: generators and published datasets, by name.

.. code-block:: python

    from dcgnn.data import load_graph

    board = load_graph("minesweeper-synthetic:rows=40,cols=40", split=0)
    cora = load_graph("cora", data_root="~/graphs", split=3)
"""

from dcgnn.data.graph_data import GraphData, random_split
from dcgnn.data.minesweeper import minesweeper
from dcgnn.data.real import DATA_ROOT_VARIABLE, DatasetUnavailable, default_data_root
from dcgnn.data.registry import GraphInfo, draws_splits, list_graphs, load_graph, num_splits
from dcgnn.data.sbm import stochastic_block_model
from dcgnn.data.tree import tree_neighbors_match

__all__ = [
    "DATA_ROOT_VARIABLE",
    "DatasetUnavailable",
    "GraphData",
    "GraphInfo",
    "default_data_root",
    "draws_splits",
    "list_graphs",
    "load_graph",
    "minesweeper",
    "num_splits",
    "random_split",
    "stochastic_block_model",
    "tree_neighbors_match",
]
