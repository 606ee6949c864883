"""Runs GPU code on a CPU, so that kernels are executed and checked, not only compiled.

- :mod:`emulation.triton_guard`: Triton kernels, interpreted, with bounds, races and shuffled programs.
- :mod:`emulation.triton_ptx`: the same launches, compiled for a GPU and executed as PTX.
- :mod:`emulation.ptx`: an interpreter of the PTX that nvcc and Triton emit.
- :mod:`emulation.cuda_host`: CUDA C++ kernels compiled by g++ (``csrc/tests/cuda_host.h``).

What each finds, and what none of them can tell, is in README.md beside this file.
"""
