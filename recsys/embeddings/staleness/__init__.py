"""Finds rows that have stopped changing although they are trained."""
