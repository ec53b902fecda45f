"""Rows in slots of fast memory, and all others in cold memory."""
