"""The manifest of a folder of arrays, `arrays.json`: what each array is, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from recsys._support.untrusted import is_count, is_finite_number, parse_json
from recsys.errors import ColdTierError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["DTYPES", "VERSION", "Kind", "read_manifest"]

VERSION = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


@dataclass(frozen=True)
class Kind:
    """The shape and dtype of an array, as in `arrays.json`."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> Kind:
        """The kind of an array with this shape and dtype."""
        return cls(tuple(shape), str(dtype).removeprefix("torch."))

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def read_manifest(
    file: Path,
) -> tuple[dict[tuple[str, str], Kind], dict[str, dict[str, float]], bool]:
    """Read a manifest: the kind of each array by table and name, numbers, and whether it is dirty.

    Raises:
        FileNotFoundError: there is no manifest.
        ColdTierError: another version of recsys wrote it.
        ValueError: it is damaged.
    """
    if file.exists() and not file.is_file():
        raise ValueError("it is not a plain file")  # to open a pipe waits for a writer
    content = parse_json(file.read_bytes())
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError("it has no version")
    if content["version"] != VERSION:
        raise ColdTierError(
            f"{file}: version {content['version']} is not known, {VERSION} is; open it with the "
            "release of recsys that made it"
        )
    arrays, numbers, is_dirty = (content.get(key) for key in ("arrays", "numbers", "is_dirty"))
    kinds: dict[tuple[str, str], Kind] = {}
    for each in arrays if isinstance(arrays, list) else [None]:
        key, kind = _array(each)
        if key in kinds:
            raise ValueError(f"it lists {key[1]!r} of table {key[0]!r} twice")
        kinds[key] = kind
    for (table, name), kind in kinds.items():
        weight = kinds.get((table, "weight"))
        if (
            weight is None
            or kind.shape[:1] != weight.shape[:1]
            or bool(kind.num_bytes) != bool(weight.num_bytes)
        ):
            raise ValueError(f"{name!r} of table {table!r} must have an entry for each of its rows")
    if not isinstance(numbers, dict) or not all(
        isinstance(own, dict) and all(map(is_finite_number, own.values()))
        for own in numbers.values()
    ):
        raise ValueError("its numbers are not numbers by table and name")
    if is_dirty not in (True, False):
        raise ValueError("it does not say whether it is dirty")
    return kinds, numbers, bool(is_dirty)


def _array(entry: Any) -> tuple[tuple[str, str], Kind]:
    """One entry of the list of arrays; raises `ValueError` if it is not one."""
    if isinstance(entry, dict):
        table, name, shape, dtype = (entry.get(key) for key in ("table", "name", "shape", "dtype"))
        if (
            _is_name(table)
            and _is_name(name)
            and isinstance(shape, list)
            and all(map(is_count, shape))
            and isinstance(dtype, str)
            and dtype in DTYPES
        ):
            return (table, name), Kind(tuple(shape), dtype)
    raise ValueError("an array must have a table, a name, a shape and a dtype of floats")


def _is_name(value: Any) -> TypeGuard[str]:
    """Whether a parsed value is text that a file's name can hold: not half of a surrogate pair.

    It need not be printable: a table may have its name from a column with a no-break space.
    """
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
