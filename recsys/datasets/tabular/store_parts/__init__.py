"""Turns spooled rows into the parts of a store."""
