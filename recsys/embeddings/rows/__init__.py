"""Rows of tables and the data that all kernels share."""
