"""The file format of profiles: an .npz archive of two arrays, without pickles.

    meta    JSON text as bytes: `format`, `version`, and all of a profile except its counts
    counts  (R,) uint32 or int64, table after table

The archive has a checksum for each array, so truncated and damaged files are detected.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.files import appearing_whole, as_argument
from recsys._support.machine import memory_bytes
from recsys._support.npy_files import NpzFile, read_array
from recsys._support.sizes import format_bytes
from recsys._support.untrusted import is_count, is_text, parse_json
from recsys.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["read_profile", "write_profile"]

_FORMAT = "recsys-profile"
_VERSION = 1
_COUNT_DTYPES = (np.dtype(np.uint32), np.dtype(np.int64))
_MOST_META_BYTES = 16 * 2**20
# What each key of `meta` must hold.
_KEYS: dict[str, Callable[[Any], bool]] = {
    "tables": lambda value: isinstance(value, dict),
    "features": lambda value: isinstance(value, dict),
    "num_samples": is_count,
}


def write_profile(file: Path, about: dict[str, Any], counts: NDArray[Any]) -> None:
    """Write a profile. A complete file replaces an existing one in one step.

    Args:
        file: The file to write.
        about: Everything except the counts; see `PopularityProfile.about`.
        counts: (R,).
    """
    meta = json.dumps({"format": _FORMAT, "version": _VERSION, **about})
    file.parent.mkdir(parents=True, exist_ok=True)
    with appearing_whole(file) as partial, partial.open("wb") as stream:
        np.savez_compressed(stream, meta=np.frombuffer(meta.encode(), np.uint8), counts=counts)


def read_profile(file: Path) -> tuple[dict[str, Any], NDArray[Any]]:
    """Read a file of `write_profile`: `about` and the counts.

    The sizes of both arrays are checked before they are read, and the counts must fit in memory.

    Raises:
        FileNotFoundError: it does not exist.
        ProfileError: it is damaged, not a profile, or of a version that this library cannot read.
    """
    if not file.exists():
        raise FileNotFoundError(
            f"{file}: there is no such file; name one that `recsys profile` or `recsys plan` wrote"
        )
    if file.is_dir():
        raise ProfileError(
            f"{file} is a folder, not a profile; if it is a store, count its lookups with "
            f"`recsys profile {as_argument(file)} --out PROFILE.npz`, and name that file"
        )
    try:
        with NpzFile(file) as archive:
            meta = _read_meta(file, archive)
            num_rows = _check_meta(file, meta)
            counts = _read_counts(file, archive, num_rows)
    except ProfileError:
        raise
    except ValueError as error:
        if _is_array(file):
            raise _no_profile(file, "it is a single array") from error
        raise ProfileError(
            f"{file} cannot be read as a profile ({error}): it is damaged or another file; make "
            "one by `recsys profile STORE --out PROFILE.npz`, and name that file"
        ) from error
    return meta, counts


def _is_array(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX


def _read_meta(file: Path, archive: NpzFile) -> dict[str, Any]:
    for name in ("meta", "counts"):
        if name not in archive.names:
            raise _no_profile(file, f"it has no array {name!r}")
    text = archive.open_array("meta")
    if text.dtype != np.uint8:
        raise _no_profile(file, "its array 'meta' is not text")
    if text.num_bytes > _MOST_META_BYTES:
        raise _no_profile(file, f"its array 'meta' has {text.num_bytes} bytes")
    meta = parse_json(read_array(text).tobytes())
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise _no_profile(file, f"its array 'meta' does not name the format {_FORMAT}")
    return meta


def _no_profile(file: Path, fault: str) -> ProfileError:
    return ProfileError(
        f"{file} is not a profile ({fault}); make one with "
        f"`recsys profile STORE --out {as_argument(file)}`"
    )


def _check_meta(file: Path, meta: dict[str, Any]) -> int:
    """Check everything except the counts; returns the number of rows of all tables."""
    if meta.get("version") != _VERSION:
        raise ProfileError(
            f"{file}: a profile's version must be {_VERSION} for this version of recsys, got "
            f"{meta.get('version')!r}; count again, or use the recsys that wrote it"
        )
    wrong = [key for key, holds in _KEYS.items() if not holds(meta.get(key))]
    if wrong:
        raise ProfileError(
            f"{file}: {wrong[0]} is missing or of another type, or out of range; count again"
        )
    tables, features = meta["tables"], meta["features"]
    if (
        not tables
        or list(features) != list(tables)
        or not all(is_text(name) and is_count(size, 1) for name, size in tables.items())
        or not all(
            isinstance(own, list) and own and all(map(is_text, own)) for own in features.values()
        )
    ):
        raise ProfileError(
            f"{file}: every table must have features and at least one row, got sizes {tables} and "
            f"features {features}; count again"
        )
    return sum(tables.values())


def _read_counts(file: Path, archive: NpzFile, num_rows: int) -> NDArray[Any]:
    found = archive.open_array("counts")
    if found.dtype not in _COUNT_DTYPES or found.shape != (num_rows,):
        raise ProfileError(
            f"{file}: counts must be ({num_rows},) uint32 or int64 for its tables, got "
            f"{found.shape} {found.dtype}; count again"
        )
    memory = memory_bytes()
    if memory is not None and found.num_bytes > memory:
        raise ProfileError(
            f"{file}: its counts take {format_bytes(found.num_bytes)}, and this machine has "
            f"{format_bytes(memory)}; use a machine with more memory, or profile fewer tables"
        )
    counts = read_array(found)
    if counts.dtype == np.int64 and counts.min() < 0:
        raise ProfileError(f"{file}: counts must not be negative, got {counts.min()}; count again")
    if counts.sum(dtype=np.float64) >= 2**62:
        raise ProfileError(f"{file}: counts must sum to less than 2**62, got more; count again")
    return counts
