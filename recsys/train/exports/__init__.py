"""A saved model in files for other programs."""

__all__ = ["FORMATS", "QUANTIZATIONS"]

FORMATS = ("safetensors", "torch-export")  # see `export`
QUANTIZATIONS = ("int8",)  # see `program`
