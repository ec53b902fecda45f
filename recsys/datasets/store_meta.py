"""Reads a store's `meta.json`, and checks everything in it that a reader of the store uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys._support.untrusted import is_count, is_int, is_text, parse_json
from recsys.datasets.source import SPLITS
from recsys.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DENSE_DTYPES", "UNDERSTOOD", "dtypes_of", "read_meta"]

_DTYPES = {"labels": "<i1", "dense": "<i4", "sparse": "<i4", "ids": "<u4"}
# The dtype of dense.bin, by the transform that is applied when a batch is read.
DENSE_DTYPES = {"log(x+1)": "<i4", "none": "<f4"}
# The values in meta.json that this version can read.
UNDERSTOOD: dict[str, tuple[Any, ...]] = {
    "format": ("recsys-store",),
    "version": (1,),
    "dense_transform": tuple(DENSE_DTYPES),
}
_KEYS = (
    *UNDERSTOOD,
    "dtypes",
    "convention",
    "sources",
    "num_samples",
    "splits",
    "dense_names",
    "num_embeddings",
)
_ROWS_END = 2**31  # rows are int32


def dtypes_of(dense_transform: str, *, has_ids: bool) -> dict[str, str]:
    """The dtype of each array of a store, in the order of its files."""
    dtypes = _DTYPES | {"dense": DENSE_DTYPES[dense_transform]}
    return {name: dtype for name, dtype in dtypes.items() if has_ids or name != "ids"}


def read_meta(path: Path) -> dict[str, Any]:
    """Read `meta.json` of the store at `path`.

    Raises:
        StoreError: it does not exist, is damaged, or is of a version that this library cannot read.
    """
    file = path / "meta.json"
    if not file.is_file():
        raise StoreError(
            f"{path} is not a store: it has no meta.json; prepare one with "
            f"`recsys prepare criteo-kaggle RAW --out {path}`"
        )
    try:
        meta = parse_json(file.read_bytes())
    except ValueError as error:
        raise StoreError(f"{file} is not JSON ({error}); prepare the store again") from error
    missing = [key for key in _KEYS if not isinstance(meta, dict) or key not in meta]
    if missing:
        raise StoreError(f"{file} lacks {missing}; prepare the store again")
    _require_understood(file, meta)
    _require_kinds(file, meta)
    return dict(meta)


def _require_understood(file: Path, meta: dict[str, Any]) -> None:
    allowed = dict(UNDERSTOOD)
    for transform in DENSE_DTYPES:
        if meta["dense_transform"] == transform:
            allowed["dtypes"] = tuple(
                dtypes_of(transform, has_ids=has_ids) for has_ids in (True, False)
            )
    for key, values in allowed.items():
        if meta[key] not in values or isinstance(meta[key], bool):
            raise StoreError(
                f"{file}: {key} must be {' or '.join(map(repr, values))} for this version of "
                f"recsys, got {meta[key]!r}; prepare the store again"
            )


def _require_kinds(file: Path, meta: dict[str, Any]) -> None:
    """Check the types and the ranges of all other values."""
    num_samples, splits, sizes = (meta[key] for key in ("num_samples", "splits", "num_embeddings"))
    sources, names, bound = meta["sources"], meta["dense_names"], meta.get("max_ind_range")

    def is_split(part: Any) -> bool:
        return (
            isinstance(part, list)
            and len(part) == 2
            and all(map(is_count, [*part, num_samples]))
            and part[0] <= part[1] <= num_samples
        )

    has_splits = isinstance(splits, dict) and all(is_split(splits.get(name)) for name in SPLITS)
    has_tables = isinstance(sizes, dict) and 0 < len(sizes) == len(list(filter(is_text, sizes)))
    has_sources = isinstance(sources, list) and all(
        isinstance(each, dict) and is_text(each.get("sha256")) for each in sources
    )
    rules = (
        ("convention", "text", is_text(meta["convention"])),
        ("max_ind_range", "an integer", bound is None or is_count(bound)),
        ("num_samples", "a number of samples", is_count(num_samples)),
        ("splits", f"two sample numbers each for {', '.join(SPLITS)}", has_splits),
        ("dense_names", "a list of names", isinstance(names, list) and all(map(is_text, names))),
        (
            "num_embeddings",
            f"tables of 1 to {_ROWS_END} rows",
            has_tables and all(is_int(size, 1, _ROWS_END) for size in sizes.values()),
        ),
        ("sources", "a list of files, each with a sha256", has_sources),
    )
    for key, rule, holds in rules:
        if not holds:
            shown = repr(meta.get(key))
            raise StoreError(
                f"{file}: {key} must be {rule}, got {shown[:200]}; prepare the store again"
            )
