"""Nested keys of a configuration as dotted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["flat"]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested keys, by dotted key: `{"eval": {"split": x}}` has `eval.split`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
