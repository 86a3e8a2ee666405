"""KV memory on an NVIDIA GPU: virtual addresses that stay, physical pages that come and go.

Nothing in here imports a CUDA package before a driver is opened: an engine without a GPU, and a
machine without the packages, can import all of it.
"""
