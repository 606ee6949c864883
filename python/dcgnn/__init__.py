"""The Differentiable Cluster Graph Neural Network (DC-GNN) on the kernels of `dcgnn_kernels`."""
