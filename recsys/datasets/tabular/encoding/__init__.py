"""Gives each value of a column its row."""
