"""Callbacks: code that a run calls while it trains, for logging and early stopping.

A package that a callback logs to is imported when the callback is made.
"""
