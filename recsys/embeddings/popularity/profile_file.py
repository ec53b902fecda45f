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
    if not file.is_file():  # to open a pipe waits for a writer
        raise _no_profile(file, "it is not a plain file")
    with file.open("rb") as stream:
        try:
            arrays = np.load(stream, allow_pickle=False)
            found = arrays if isinstance(arrays, np.ndarray) else {**arrays}
        except Exception as error:  # numpy and zipfile raise many classes for damaged files
            raise ProfileError(
                f"{file} cannot be read as a profile ({error or type(error).__name__}): it is "
                "damaged or another file; make one by `recsys profile STORE --out PROFILE.npz`, "
                "and name that file"
            ) from error
    if isinstance(found, np.ndarray):
        raise _no_profile(file, "it is a single array")
    for name in ("meta", "counts"):
        if not isinstance(found.get(name), np.ndarray):  # numpy gives other members as bytes
            raise _no_profile(file, f"it has no array {name!r}")
    meta = _read_meta(file, found["meta"])
    _check_counts(file, found["counts"], _check_meta(file, meta))
    return meta, found["counts"]


def _read_meta(file: Path, text: NDArray[Any]) -> dict[str, Any]:
    if text.dtype != np.uint8:
        raise _no_profile(file, "its array 'meta' is not text")
    try:
        meta = parse_json(text.tobytes())
    except ValueError as error:
        raise _no_profile(file, f"its array 'meta' is not JSON: {error}") from error
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


def _check_counts(file: Path, counts: NDArray[Any], num_rows: int) -> None:
    if counts.dtype not in _COUNT_DTYPES or counts.shape != (num_rows,):
        raise ProfileError(
            f"{file}: counts must be ({num_rows},) uint32 or int64 for its tables, got "
            f"{counts.shape} {counts.dtype}; count again"
        )
    if counts.dtype == np.int64 and counts.min() < 0:
        raise ProfileError(f"{file}: counts must not be negative, got {counts.min()}; count again")
    if counts.sum(dtype=np.float64) >= 2**62:
        raise ProfileError(f"{file}: counts must sum to less than 2**62, got more; count again")
