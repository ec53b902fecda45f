"""Models that exist already: accelerated, restored, verified."""
