"""CUDA: launches of Triton kernels, and memory of the host that a GPU reaches."""
