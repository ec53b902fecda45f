"""Rows in slots of fast memory, and all others in the cold tier."""

__all__ = ["COLD_TIERS"]

COLD_TIERS = ("host", "file")
