"""Kernels of the Differentiable Cluster Graph Neural Network (DC-GNN) for PyTorch."""

from importlib.metadata import PackageNotFoundError, version

from dcgnn_kernels import reference
from dcgnn_kernels._native_loader import release_memory
from dcgnn_kernels.backends import backends
from dcgnn_kernels.cluster_scatter import cluster_scatter
from dcgnn_kernels.global_sinkhorn import global_sinkhorn
from dcgnn_kernels.graph import EgoGraph
from dcgnn_kernels.linear import linear
from dcgnn_kernels.local_centroids import local_centroids
from dcgnn_kernels.local_sinkhorn import local_sinkhorn
from dcgnn_kernels.node_update import node_update
from dcgnn_kernels.triton import registry as _registry  # noqa: F401  (registers what CUDA tensors run)

try:
    __version__ = version("dcgnn-kernels")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "EgoGraph",
    "backends",
    "cluster_scatter",
    "global_sinkhorn",
    "linear",
    "local_centroids",
    "local_sinkhorn",
    "node_update",
    "reference",
    "release_memory",
]
