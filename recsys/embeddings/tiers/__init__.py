"""Hot and cold tiers: where a row is, and how it gets there."""
