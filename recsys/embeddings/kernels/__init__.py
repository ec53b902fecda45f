"""Kernels by device."""
