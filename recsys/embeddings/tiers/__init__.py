"""Rows in slots of fast memory, and all others in cold memory."""

__all__ = ["COLD_TIERS"]

COLD_TIERS = ("host", "file")
