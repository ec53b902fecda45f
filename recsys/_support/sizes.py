"""Memory sizes such as 256MiB or 1.5 GiB, read and written, numbers of things, and of blocks."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Integral
from typing import Final, SupportsIndex

from recsys.errors import ConfigError

__all__ = [
    "cdiv",
    "counted",
    "format_bytes",
    "next_power_of_2",
    "parse_bytes",
    "round_up_as_written",
]

_UNITS: Final = ("", "Ki", "Mi", "Gi", "Ti")
# A number with a unit, or a whole number of bytes.
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(K|M|G|T)(i?)B?|(\d+) ?B?", re.IGNORECASE | re.ASCII)
_MOST: Final = 2**63 - 1


def parse_bytes(size: str | SupportsIndex, name: str = "size") -> int:
    """Number of bytes of a size; KiB to TiB are powers of 1024, KB to TB are powers of 1000.

    Args:
        size: A number of bytes, or text.
        name: Name of the setting, for messages.

    Raises:
        ConfigError: the size is negative, above 2**63 - 1, or no number of bytes; a fraction needs
            a unit.
    """
    if not isinstance(size, bool) and isinstance(size, Integral):  # also one of numpy
        size = str(int(size))
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if not found:
        raise ConfigError(
            f"{name} must be a number of bytes such as 256MiB or 0.5GiB, got {size!r}"
        )
    number, prefix, binary, whole = found.groups()
    power = "KMGT".index(prefix.upper()) + 1 if prefix else 0
    # Not a float, which would make 1000 of 1.001KB, and change numbers above 2**53.
    num_bytes = Decimal(number or whole) * (1024 if binary else 1000) ** power
    if num_bytes > _MOST:
        raise ConfigError(f"{name} must be at most {_MOST} bytes, got {found[0][:40]!r}")
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


def cdiv(dividend: int, divisor: int) -> int:
    """As `triton.cdiv`, which takes 20 times as long because kernels may call it, too."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """As `triton.next_power_of_2`, which takes as long as `triton.cdiv`."""
    return 1 << (number - 1).bit_length()
