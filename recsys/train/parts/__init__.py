"""The objects that a configuration names."""
