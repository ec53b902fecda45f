"""A store's `meta.json`: its features, and checks of everything that a reader of the store uses.

A feature of kind "one" looks up exactly one row for each sample. A feature of kind "multi" or
"sequence" looks up a bag of any number of rows; the rows of a sequence are in the order of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.files import as_argument
from recsys._support.untrusted import is_int, is_text, parse_json
from recsys.datasets.splits import SPLITS
from recsys.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "BAG_ARRAYS",
    "DENSE_DTYPES",
    "KINDS",
    "UNDERSTOOD",
    "Feature",
    "dtypes_of",
    "features_of",
    "histories_in",
    "is_store",
    "read_meta",
    "require_features",
]

KINDS = ("one", "multi", "sequence")

_DTYPES = {"labels": "<i1", "dense": "<i4", "sparse": "<i4"}
BAG_ARRAYS = ("bag_values", "bag_ends")
_OPTIONAL_DTYPES = {
    "bag_values": "<i4",
    "bag_ends": "<i8",
    "bag_weights": "<f4",
    "weights": "<f4",
    "groups": "<i4",
    "times": "<i8",
    "catalog": "<i4",
    "ids": "<u4",
}
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
_TABLE_SUFFIXES = {".csv", ".tsv", ".parquet", ".pq"}


class Feature(NamedTuple):
    """A feature.

    Attributes:
        name: Its name; distinct in a store.
        table: The table that it looks up, without a ".": the names of a model's parameters have
            one. Several features may share a table.
        kind: One of `KINDS`.
        is_weighted: Whether the rows of its bags have weights; not for kind "one".
    """

    name: str
    table: str
    kind: str = "one"
    is_weighted: bool = False

    @property
    def is_bag(self) -> bool:
        """Whether a sample may look up any number of rows."""
        return self.kind != "one"

    def as_dict(self) -> dict[str, Any]:
        """In JSON types; `is_weighted` only where it is true, as stores without weights lack it."""
        found = self._asdict()
        if not self.is_weighted:
            del found["is_weighted"]
        return found


def features_of(meta: Mapping[str, Any]) -> tuple[Feature, ...]:
    """The features of a store, given its checked `meta.json`."""
    if "features" in meta:
        return tuple(Feature(**each) for each in meta["features"])
    return tuple(Feature(table, table) for table in meta["num_embeddings"])


def histories_in(features: Sequence[Feature]) -> dict[str, str]:
    """For each sequence that shares its table: the first feature of kind "one" that does so."""
    ones: dict[str, str] = {}
    for each in features:
        if not each.is_bag:
            ones.setdefault(each.table, each.name)
    return {
        each.name: ones[each.table]
        for each in features
        if each.kind == "sequence" and each.table in ones
    }


def require_features(features: Sequence[Feature]) -> None:
    """Check the features of a new store.

    Raises:
        ConfigError: a name occurs twice, or a table or a kind is not valid.
    """
    names: set[str] = set()
    for name, table, kind, is_weighted in features:
        if name in names:
            raise ConfigError(f"feature {name!r}: names must be distinct, got it twice; rename one")
        names.add(name)
        if "." in table:
            raise ConfigError(
                f"feature {name!r}: the name of its table must not have a '.', got {table!r}; give "
                f"the feature another table, such as {table.replace('.', '_')!r}"
            )
        if kind not in KINDS:
            raise ConfigError(f"feature {name!r}: kind must be one of {KINDS}, got {kind!r}")
        if is_weighted and kind == "one":
            raise ConfigError(
                f"feature {name!r}: only features of kind multi or sequence have weights, got kind "
                f"{kind!r}; leave is_weighted out"
            )


def dtypes_of(dense_transform: str, optional: Collection[str] = ()) -> dict[str, str]:
    """The dtype of each array of a store, in the order of its files.

    Args:
        dense_transform: A key of `DENSE_DTYPES`.
        optional: Names of the optional arrays that the store has. Other names are ignored.
    """
    kept = {name: dtype for name, dtype in _OPTIONAL_DTYPES.items() if name in optional}
    return _DTYPES | {"dense": DENSE_DTYPES[dense_transform]} | kept


def is_store(path: Path) -> bool:
    """Whether a folder looks like a store: a table's folder does not."""
    return (path / "meta.json").is_file()


def read_meta(path: Path) -> dict[str, Any]:
    """Read `meta.json` of the store at `path`.

    Raises:
        StoreError: it does not exist, is damaged, or is of a version that this library cannot read;
            or `path` is a file, such as a table that is not prepared yet.
    """
    file = path / "meta.json"
    if path.is_file():
        raise _not_prepared(path)
    if not file.is_file():
        reason = "is not a store: it has no meta.json" if path.exists() else "does not exist"
        raise StoreError(
            f"{path} {reason}; prepare a store with "
            f"`recsys prepare table FILES --schema SCHEMA --out {as_argument(path)}`, or with "
            f"`recsys prepare criteo-kaggle RAW --out {as_argument(path)}`"
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
    _require_features(file, meta)
    return dict(meta)


def _not_prepared(path: Path) -> StoreError:
    """The error for a file in place of a store; it names the command that makes a store of it."""
    suffixes = {suffix.lower() for suffix in path.suffixes}
    file = as_argument(path)
    of_table = (
        f"`recsys inspect {file} > schema.toml` and "
        f"`recsys prepare table {file} --schema schema.toml --out STORE`"
    )
    if suffixes & _TABLE_SUFFIXES:
        of_new_rows = f"`recsys prepare table {file} --like ITS_STORE --out STORE`"
        kind, way_out = "a table", f"{of_table}; for a model that is trained, by {of_new_rows}"
    else:
        of_text = f"`recsys prepare criteo-kaggle {file} --out STORE` for raw Criteo text"
        kind, way_out = "a file", f"{of_text}, or {of_table} for a CSV, TSV or Parquet table"
    return StoreError(
        f"{path} is {kind}, and data must be a store, the folder that `recsys prepare` makes; "
        f"make it by {way_out}"
    )


def _require_understood(file: Path, meta: dict[str, Any]) -> None:
    allowed = dict(UNDERSTOOD)
    for transform in DENSE_DTYPES:
        if meta["dense_transform"] == transform:
            found = meta["dtypes"]
            allowed["dtypes"] = (dtypes_of(transform, found if isinstance(found, dict) else ()),)
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
            and all(is_int(number, 0) for number in [*part, num_samples])
            and part[0] <= part[1] <= num_samples
        )

    has_splits = isinstance(splits, dict) and all(is_split(splits.get(name)) for name in SPLITS)
    has_tables = isinstance(sizes, dict) and 0 < len(sizes) == len(list(filter(is_text, sizes)))
    has_sources = isinstance(sources, list) and all(
        isinstance(each, dict) and is_text(each.get("sha256")) for each in sources
    )
    rules = (
        ("convention", "text", is_text(meta["convention"])),
        ("max_ind_range", "an integer", bound is None or is_int(bound, 0)),
        ("num_samples", "a number of samples", is_int(num_samples, 0)),
        ("splits", f"two sample numbers each for {', '.join(SPLITS)}", has_splits),
        ("dense_names", "a list of names", isinstance(names, list) and all(map(is_text, names))),
        (
            "num_embeddings",
            f"tables of 1 to {_ROWS_END} rows",
            has_tables and all(is_int(size, 1, _ROWS_END) for size in sizes.values()),
        ),
        ("sources", "a list of files, each with a sha256", has_sources),
    )
    _require(file, meta, rules)


def _require_features(file: Path, meta: dict[str, Any]) -> None:
    """Check the entries that only stores with declared features have.

    The values checked by `_require_kinds` are used.
    """
    tables, dtypes, schema = meta["num_embeddings"], meta["dtypes"], meta.get("schema", {})
    features = meta.get("features", [{"name": name, "table": name} for name in tables])
    _require(
        file,
        meta,
        (
            (
                "features",
                "a list of distinct names, each with a table of num_embeddings, a kind of "
                f"{', '.join(KINDS)}, and perhaps is_weighted, true only with a kind other than "
                "one, and each table with a feature and without a '.' in its name",
                _are_features(features, tables),
            ),
            (
                "schema",
                "a JSON object, and categorical in it a JSON object of JSON objects",
                isinstance(schema, dict) and _has_objects(schema.get("categorical", {})),
            ),
            ("encoding", "text", is_text(meta.get("encoding", ""))),
            (
                "unknown",
                f"numbers of values by column, for parts of {', '.join(SPLITS)}",
                _are_counts(meta.get("unknown", {})),
            ),
        ),
    )
    found = features_of(meta)
    ones = [each.name for each in found if not each.is_bag]
    ranking = meta.get("ranking")
    rules = (
        (
            "dtypes",
            f"with bag_values and bag_ends if a feature has bags, as {len(features) - len(ones)} "
            "have, and without them otherwise",
            all((name in dtypes) == (len(ones) < len(features)) for name in BAG_ARRAYS),
        ),
        (
            "dtypes",
            "with bag_weights if a feature is weighted, and without it otherwise",
            ("bag_weights" in dtypes) == any(each.is_weighted for each in found),
        ),
        (
            "ranking",
            "an item and its item_features, distinct features of kind one, and perhaps repeats, "
            "true or false, with catalog in dtypes if and only if there are item_features",
            "catalog" not in dtypes
            if ranking is None
            else _is_ranking(ranking, ones, has_catalog="catalog" in dtypes),
        ),
    )
    _require(file, meta, rules)


def _are_features(features: Any, tables: dict[str, int]) -> bool:
    try:
        found = [Feature(**each) for each in features]
        require_features(found)
        has_all = {each.table for each in found} == tables.keys()
    except (TypeError, ConfigError):
        return False
    return has_all and all(
        is_text(each.name) and is_text(each.table) and isinstance(each.is_weighted, bool)
        for each in found
    )


def _has_objects(value: Any) -> bool:
    """Whether a parsed value is a JSON object of JSON objects."""
    return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())


def _are_counts(unknown: Any) -> bool:
    """Whether a parsed value has a number for each column of some parts."""
    if not _has_objects(unknown) or not unknown.keys() <= set(SPLITS):
        return False
    return all(
        is_text(name) and is_int(count, 0) for of in unknown.values() for name, count in of.items()
    )


def _is_ranking(ranking: Any, ones: list[str], *, has_catalog: bool) -> bool:
    if not isinstance(ranking, dict) or ranking.keys() - {"repeats"} != {"item", "item_features"}:
        return False
    if not isinstance(ranking.get("repeats", False), bool):
        return False
    others = ranking["item_features"]
    if not isinstance(others, list) or not all(map(is_text, [ranking["item"], *others])):
        return False
    names = [ranking["item"], *others]
    return len(set(names)) == len(names) and set(names) <= set(ones) and bool(others) == has_catalog


def _require(file: Path, meta: dict[str, Any], rules: Iterable[tuple[str, str, bool]]) -> None:
    """Raise for the first rule (key, rule, whether it holds) that does not hold."""
    for key, rule, holds in rules:
        if not holds:
            shown = repr(meta.get(key))
            raise StoreError(
                f"{file}: {key} must be {rule}, got {shown[:200]}; prepare the store again"
            )
