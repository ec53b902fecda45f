"""Numbers that say how good scores are."""
