"""Values of records as texts for readers, and pictures as texts for HTML."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import TYPE_CHECKING, Any

from recsys._support.nested_keys import flat
from recsys._support.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["as_base64", "as_text", "flat_texts"]


def as_base64(png: bytes | None) -> str:
    """A picture as base64; empty without one."""
    return b64encode(png or b"").decode()


def flat_texts(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Nested keys as pairs of a dotted key and a text."""
    for key, value in flat(tree).items():
        if key.endswith("_bytes") and isinstance(value, int):
            yield key.removesuffix("_bytes"), format_bytes(value)
        else:
            yield key, as_text(value)


def as_text(value: Any) -> str:
    """A value of a record for readers."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{key} = {as_text(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value))
    return "-" if value is None else json.dumps(value)
