"""The version, where both the build and the package read it."""

__version__ = "0.2.0.dev0"
