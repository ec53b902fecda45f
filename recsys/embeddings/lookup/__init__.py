"""Lookups: from ids to pooled vectors, from gradients to ledgers."""
