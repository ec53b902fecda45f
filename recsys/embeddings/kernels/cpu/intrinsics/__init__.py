"""What kernels for the CPU share: addresses, copies, prefetches, turns."""
