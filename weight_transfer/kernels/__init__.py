"""Kernels: compiled loops over arrays of weights, by numba on the CPU and by Triton on a GPU.

They work on arrays of unsigned integers, without chunks or formats. All run without the GIL, so
that threads work on chunks side by side; none allocates more than its caller handed in, beyond some
KiB. Backends are imported on first use, since compilers are slow to import.
"""
