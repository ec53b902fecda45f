"""The file format of profiles and plans: an .npz archive of three arrays, without pickles.

meta    JSON text as bytes: `format`, `version`, and all of a profile except its counts
counts  (R,) uint32 or int64, table after table
sha256  the digest of both, so a file that was truncated or changed is detected
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.files import appearing_whole, as_argument
from recsys.errors import ProfileError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["read_profile", "require_profile", "write_profile"]

_FORMAT, _VERSION = "recsys-profile", 2


def write_profile(file: Path, about: dict[str, Any], counts: NDArray[Any]) -> None:
    """Write a profile. A complete file replaces an existing one in one step.

    Args:
        file: The file to write.
        about: Everything except the counts; see `PopularityProfile.about`.
        counts: (R,).
    """
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **about})
    meta = np.frombuffer(text.encode(), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with appearing_whole(file) as partial, partial.open("wb") as stream:
        np.savez_compressed(stream, meta=meta, counts=counts, sha256=_digest(meta, counts))


def require_profile(file: Path) -> None:
    """Check that a file is there.

    Raises:
        FileNotFoundError: it does not exist.
        ProfileError: it is a folder, such as a store.
    """
    if not file.exists():
        raise FileNotFoundError(
            f"{file}: there is no such file; name one that `recsys profile` or `recsys plan` wrote"
        )
    if not file.is_file():
        raise ProfileError(
            f"{file} is not a plain file; if it is a store, count its lookups with "
            f"`recsys profile {as_argument(file)} --out PROFILE.npz`, and name that file"
        )


def read_profile(file: Path) -> tuple[dict[str, Any], NDArray[Any]]:
    """Read a file of `write_profile`: `about` and the counts.

    Raises:
        FileNotFoundError: it does not exist.
        ProfileError: it is damaged, not a profile, or of a version that this library cannot read.
    """
    require_profile(file)
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            meta, counts, digest = (archive[name] for name in ("meta", "counts", "sha256"))
        is_whole = np.array_equal(digest, _digest(meta, counts))
        about = json.loads(meta.tobytes()) if is_whole else {}
    # Readers of archives raise errors of many classes.
    except Exception as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error
    if not is_whole:
        raise _unreadable(file, "its contents do not have its checksum")
    if (about.get("format"), about.get("version")) != (_FORMAT, _VERSION):
        raise _unreadable(
            file,
            f"its format and version must be {_FORMAT} {_VERSION} for this version of recsys, got "
            f"{about.get('format')} {about.get('version')}",
        )
    return about, counts


def _digest(meta: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.uint8]:
    digest = hashlib.sha256(meta.tobytes())
    digest.update(repr((meta.shape, counts.dtype.str, counts.shape)).encode())
    digest.update(np.ascontiguousarray(counts).data)
    return np.frombuffer(digest.digest(), np.uint8)


def _unreadable(file: Path, fault: str) -> ProfileError:
    return ProfileError(
        f"{file} cannot be read as a profile ({fault}): it is damaged or another file; make one by "
        "`recsys profile STORE --out PROFILE.npz`, and name that file"
    )
