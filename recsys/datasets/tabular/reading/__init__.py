"""Yields record batches whose columns have the schema's types."""
