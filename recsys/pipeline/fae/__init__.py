"""FAE: mini-batches of hot samples alone, and of others alone."""
