"""Arrays in files of other programs, and stores made from them."""

__all__ = ["FORMATS"]

FORMATS = ("classic-npz", "torchrec-npy")  # see `convert`
