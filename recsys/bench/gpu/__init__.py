"""`recsys bench gpu`: correctness, speed and memory on one GPU, in a few minutes."""
