"""What the training loop uses at each step."""
