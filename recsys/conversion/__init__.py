"""Accelerates, restores and verifies existing models."""
