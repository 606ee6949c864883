"""The Differentiable Cluster Graph Neural Network (DC-GNN) on the kernels of `dcgnn_kernels`."""

from dcgnn.losses import orthogonality_loss, similarity_loss, training_loss
from dcgnn.nn.conv import DCConv
from dcgnn.nn.model import DCGNN
from dcgnn.nn.msg_passing import DCMsgPassing, DCState, LayerState
from dcgnn.nn.objective import ClusterObjective, clustering_objective, objective_lower_bound
from dcgnn_kernels import __version__

__all__ = [
    "DCGNN",
    "ClusterObjective",
    "__version__",
    "DCConv",
    "DCMsgPassing",
    "DCState",
    "LayerState",
    "clustering_objective",
    "objective_lower_bound",
    "orthogonality_loss",
    "similarity_loss",
    "training_loss",
]
