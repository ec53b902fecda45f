"""Memory sizes such as 256MiB or 1.5 GiB, read and written, and numbers of things."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Integral
from typing import Final, SupportsIndex

from recsys.errors import ConfigError

__all__ = ["counted", "format_bytes", "parse_bytes", "round_up_as_written"]

_UNITS: Final = ("", "Ki", "Mi", "Gi", "Ti")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:(K|M|G|T)(i?))?B?", re.IGNORECASE | re.ASCII)
_MOST: Final = 2**63 - 1


def parse_bytes(size: str | SupportsIndex, name: str = "size") -> int:
    """Number of bytes of a size; KiB to TiB are powers of 1024, KB to TB are powers of 1000.

    Args:
        size: A number of bytes, or text.
        name: Name of the setting, for messages.

    Raises:
        ConfigError: the size is negative or above 2**63 - 1, is a fraction without a unit, or is
            neither a number of bytes nor text.
    """
    if not isinstance(size, bool) and isinstance(size, Integral):  # also one of numpy
        size = int(size)
        if size < 0:
            raise ConfigError(f"{name} must be at least 0 bytes, got {size}")
        if size > _MOST:
            raise ConfigError(f"{name} must be at most {_MOST} bytes, got more; is it in bytes?")
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if not found:
        raise ConfigError(f"{name} must be a number of bytes such as 256MiB or 2GiB, got {size!r}")
    number, prefix, binary = found.groups()
    if prefix is None and "." in number:
        raise ConfigError(
            f"{name} must be a number of bytes such as 256MiB or 2GiB, got {size!r}, which is a "
            "fraction without a unit; add one, as in 0.5GiB"
        )
    power = "KMGT".index(prefix.upper()) + 1 if prefix else 0
    # Not a float, which would make 1000 of 1.001KB, and change numbers above 2**53.
    num_bytes = Decimal(number) * (1024 if binary else 1000) ** power
    if num_bytes > _MOST:
        raise ConfigError(
            f"{name} must be at most {_MOST} bytes, got {number[:40]!r} {prefix or ''}"
        )
    return int(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """Text of a size, in the largest binary unit that gives at least 1."""
    power = 0
    while num_bytes >= 1024 and power + 1 < len(_UNITS):
        num_bytes, power = num_bytes / 1024, power + 1
    digits = f"{num_bytes:.0f}" if not power or num_bytes >= 100 else f"{num_bytes:.3g}"
    return f"{digits} {_UNITS[power]}B"


def round_up_as_written(num_bytes: int) -> int:
    """The least size of at least `num_bytes` that is read again as `format_bytes` writes it."""
    unit = 1
    while num_bytes >= 1024 * unit and unit < 1024 ** (len(_UNITS) - 1):
        unit *= 1024
    parts = 1 if unit == 1 or num_bytes >= 100 * unit else 10 if num_bytes >= 10 * unit else 100
    return -(-num_bytes * parts // unit) * unit // parts


def counted(number: int, thing: str) -> str:
    """A number of things: "1 table", "2 tables", "1,000 tables" for the thing "table"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
