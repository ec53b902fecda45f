"""Who owns tables, what is looked up in them, and which gradients wait for the update."""
