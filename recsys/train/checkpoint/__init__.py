"""Checkpoints of a training run: written while it goes on, and restored exactly."""

from recsys.train.checkpoint.by_hand import load_checkpoint, save_checkpoint
from recsys.train.checkpoint.checkpoints import Checkpoints
from recsys.train.checkpoint.manifest import newest

__all__ = ["Checkpoints", "load_checkpoint", "newest", "save_checkpoint"]
