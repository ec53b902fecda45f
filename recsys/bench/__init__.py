"""Benchmarks: `recsys bench NAME` measures recsys and alternatives in the same run."""
