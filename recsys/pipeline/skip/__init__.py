"""Skipping: leaves samples, or updates of rows, out of training."""
