"""Kernels on the CPU, compiled by numba."""
