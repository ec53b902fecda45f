"""The features of a store: which table each one looks up, and how many rows of it.

A feature of kind "one" looks up exactly one row for each sample. A feature of kind "multi" or
"sequence" looks up a bag of any number of rows; the rows of a sequence are in the order of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["KINDS", "Feature", "features_of", "histories_in", "require_features"]

KINDS = ("one", "multi", "sequence")


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
