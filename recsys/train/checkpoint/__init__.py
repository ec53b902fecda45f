"""Checkpoints of a training run: written while it goes on, and restored exactly.

format     the files: manifest, pieces, blocks
contents   what is saved: tables, and everything else as one state
writer     the background thread that writes them, durably
save       `Checkpoints`: where a checkpoint is cut
restore    `load_checkpoint`
"""

from recsys.train.checkpoint.format import newest
from recsys.train.checkpoint.restore import load_checkpoint
from recsys.train.checkpoint.save import Checkpoints, save_checkpoint

__all__ = ["Checkpoints", "load_checkpoint", "newest", "save_checkpoint"]
