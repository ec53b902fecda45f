"""From ids to pooled vectors, and from their gradient to the ledger."""
