"""A saved model in files for other programs."""
