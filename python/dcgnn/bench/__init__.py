"""Benchmarks: layers, kernels and sweeps on graphs of published shapes; ``dcgnn bench`` is their command."""
