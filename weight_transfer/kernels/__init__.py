"""Kernels over every weight: compiled loops, by numba on the CPU and by Triton on a GPU.

They know arrays of unsigned integers and nothing of chunks or formats. All run without the GIL, so
that threads work on chunks side by side; none of them allocates more than its caller handed in,
beyond some KiB. Backends are imported on first use: compilers are slow to import.
"""
