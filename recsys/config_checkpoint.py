"""The keys of `checkpoint`: how often a run saves everything that it needs to continue."""

from __future__ import annotations

from dataclasses import dataclass

from recsys._support.config_fields import check_fields, key
from recsys._support.sizes import parse_bytes

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run writes checkpoints: after a time or a number of steps, whichever comes first.

    With `every_seconds` and `every_steps` both 0 it writes none, not even after Ctrl-C.
    """

    every_seconds: float = key(600.0, "seconds between checkpoints; 0: not by time", least=0)
    every_steps: int = key(0, "steps between checkpoints; 0: not by steps", least=0)
    buffer: str = key("128MiB", "memory for rows that wait to be written")

    def __post_init__(self) -> None:
        check_fields(self)
        parse_bytes(self.buffer, "buffer")

    @property
    def is_on(self) -> bool:
        """Whether the run writes checkpoints."""
        return bool(self.every_seconds or self.every_steps)

    @property
    def buffer_bytes(self) -> int:
        """The size of `buffer`."""
        return parse_bytes(self.buffer, "buffer")
