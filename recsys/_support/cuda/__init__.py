"""CUDA: graphs, replays and launches of kernels, and memory of the host that a GPU reaches."""
