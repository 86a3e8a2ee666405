"""The same kernels for weights on an NVIDIA GPU, in Triton; bit for bit what the CPU's give.

Loops over all weights are Triton's and read each weight once. What follows works on the changed
ones alone, and only that goes to the host. Imported where it is used: without a GPU nobody needs
torch or Triton for weights.
"""
