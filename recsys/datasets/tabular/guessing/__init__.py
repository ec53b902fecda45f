"""Drafts a schema from the first rows of a file."""
