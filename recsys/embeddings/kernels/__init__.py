"""Kernels: a folder per kind of device, the same names in each."""
