"""Cold stores: slower memory that holds every row and its state."""

__all__ = ["COLD_TIERS"]

COLD_TIERS = ("host", "file")
