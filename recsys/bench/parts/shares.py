"""Budgets of benchmarks: shares of the bytes of all rows, or the least that training needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EVERYTHING", "FLOOR", "parse_shares"]

FLOOR, EVERYTHING = "floor", "1"


def parse_shares(shares: Sequence[str]) -> tuple[str, ...]:
    """The values of the option `--shares`, with "1" for every number that is 1.

    Args:
        shares: Shares as text, or "floor".

    Raises:
        ConfigError: one is neither "floor" nor a number above 0 and at most 1.
    """
    for share in shares:
        if share != FLOOR and not _is_share(share):
            raise ConfigError(f"--shares must be {FLOOR!r} or above 0 and at most 1, got {share!r}")
    return tuple(EVERYTHING if share != FLOOR and float(share) == 1 else share for share in shares)


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False
