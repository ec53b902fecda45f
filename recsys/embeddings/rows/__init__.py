"""The rows of tables, and the data types that all kernels share."""
