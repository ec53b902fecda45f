"""Sizes of memory as people write them: 256MiB, 1.5 GiB, or a number of bytes."""

from __future__ import annotations

import re
from typing import Final

from recsys.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS: Final = ("", "Ki", "Mi", "Gi", "Ti")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:(K|M|G|T)(i?))?B?", re.IGNORECASE)


def parse_bytes(size: str | int, name: str = "size") -> int:
    """The number of bytes; KiB, MiB, GiB and TiB are powers of 1024, KB to TB of 1000.

    Args:
        size: A number of bytes, or text.
        name: What messages call it.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"{name} must be at least 0 bytes, got {size}")
        return size
    found = _SIZE.fullmatch(size.strip())
    if not found:
        raise ConfigError(f"{name} must be a number of bytes such as 256MiB or 2GiB, got {size!r}")
    number, prefix, binary = found.groups()
    power = "KMGT".index(prefix.upper()) + 1 if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def format_bytes(num_bytes: float) -> str:
    """In the largest unit of which there is one."""
    power = 0
    while num_bytes >= 1024 and power + 1 < len(_UNITS):
        num_bytes, power = num_bytes / 1024, power + 1
    digits = f"{num_bytes:.0f}" if not power or num_bytes >= 100 else f"{num_bytes:.3g}"
    return f"{digits} {_UNITS[power]}B"
