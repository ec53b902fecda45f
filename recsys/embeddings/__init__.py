"""Embedding tables and those who look up and update their rows."""

from recsys.embeddings.table import TableConfig

__all__ = ["TableConfig"]
