"""Checkpoints of a training run: written while it goes on, and restored exactly.

format     the files, written durably: manifest, pieces, blocks
save       `Checkpoints`: where a checkpoint is cut
restore    `load_checkpoint`, and what a checkpoint holds
"""

from recsys.train.checkpoint.format import newest
from recsys.train.checkpoint.restore import load_checkpoint
from recsys.train.checkpoint.save import Checkpoints, save_checkpoint

__all__ = ["Checkpoints", "load_checkpoint", "newest", "save_checkpoint"]
