"""Hotline: popular samples of a mini-batch first."""
