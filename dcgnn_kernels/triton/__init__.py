"""GPU kernels in Triton, for CUDA and ROCm."""
