"""What a schema says: columns, splits, negatives, and the named ones."""
