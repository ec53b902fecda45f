"""Benchmarks: `recsys bench NAME`, each beside what others offer, in the same run."""
