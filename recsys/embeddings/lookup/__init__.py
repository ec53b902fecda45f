"""Lookups: ids become pooled vectors, and gradients become ledger entries."""
