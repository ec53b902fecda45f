"""The file format of profiles: an .npz archive of two arrays, without pickles.

    meta    JSON text as bytes: `format`, `version`, and all of a profile except its counts
    counts  (R,) uint32 or int64, table after table

The archive has a checksum for each array, so truncated and damaged files are detected.
"""

from __future__ import annotations

import json
import zlib
from typing import IO, TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from recsys._support.files import appearing_whole
from recsys.errors import ProfileError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["read_profile", "write_profile"]

_FORMAT = "recsys-profile"
_VERSION = 1
_COUNT_DTYPES = (np.dtype(np.uint32), np.dtype(np.int64))
# The errors of numpy and zipfile for files that they cannot read.
_READ_ERRORS = (BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError)
_KEYS: dict[str, tuple[type, ...]] = {
    "tables": (dict,),
    "features": (dict,),
    "rate": (int, float),
    "seed": (int,),
    "num_samples": (int,),
    "num_samples_seen": (int,),
    "num_decays": (int,),
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
    with file.open("rb") as stream:
        try:
            meta, counts = _read_arrays(stream)
        except _NotAProfile as error:
            raise ProfileError(
                f"{file} is not a profile ({error}); make one with `recsys profile STORE --out "
                f"{file}`"
            ) from error
        except _READ_ERRORS as error:
            raise ProfileError(
                f"{file} cannot be read as a profile ({error}): it is damaged or another file; "
                f"make it again with `recsys profile STORE --out {file}`"
            ) from error
    _check(file, meta, counts)
    return meta, counts


class _NotAProfile(Exception):
    """A readable array or archive that is not a profile."""


def _read_arrays(stream: IO[bytes]) -> tuple[dict[str, Any], NDArray[Any]]:
    archive = np.load(stream, allow_pickle=False)
    if not hasattr(archive, "files"):
        raise _NotAProfile("it is a single array")
    missing = [name for name in ("meta", "counts") if name not in archive.files]
    if missing:
        raise _NotAProfile(f"it has no array {missing[0]!r}")
    text = archive["meta"]
    if text.dtype != np.uint8:
        raise _NotAProfile("its array 'meta' is not text")
    meta: Any = json.loads(text.tobytes().decode())
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise _NotAProfile(f"its array 'meta' does not name the format {_FORMAT}")
    # Other versions may keep their counts in another way.
    is_known = meta.get("version") == _VERSION
    return meta, archive["counts"] if is_known else np.empty(0)


def _check(file: Path, meta: dict[str, Any], counts: NDArray[Any]) -> None:
    if meta.get("version") != _VERSION:
        raise ProfileError(
            f"{file}: a profile's version must be {_VERSION} for this version of recsys, got "
            f"{meta.get('version')!r}; count again, or use the recsys that wrote it"
        )
    wrong = [key for key, kinds in _KEYS.items() if not isinstance(meta.get(key), kinds)]
    if wrong:
        raise ProfileError(f"{file}: {wrong[0]} is missing or of another type; count again")
    tables, features = meta["tables"], meta["features"]
    if list(features) != list(tables) or not all(
        isinstance(size, int) and size > 0 for size in tables.values()
    ):
        raise ProfileError(
            f"{file}: every table must have features and at least one row, got sizes {tables} and "
            f"features {features}; count again"
        )
    if counts.dtype not in _COUNT_DTYPES or counts.shape != (sum(tables.values()),):
        raise ProfileError(
            f"{file}: counts must be ({sum(tables.values())},) uint32 or int64 for its tables, got "
            f"{counts.shape} {counts.dtype}; count again"
        )
    if counts.dtype == np.int64 and len(counts) and counts.min() < 0:
        raise ProfileError(f"{file}: counts must not be negative, got {counts.min()}; count again")
