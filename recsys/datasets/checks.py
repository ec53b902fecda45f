"""What a user should know of a prepared store before a model is trained on it.

All labels and groups are read, and of the other arrays 65,536 samples of a part, in 16 blocks that
lie evenly in it. So time and memory are small for stores of any size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.auc import auc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from recsys.datasets.store import Store

__all__ = ["findings_of", "num_groups_of_both_kinds"]

_BLOCK, _MOST = 4096, 1 << 16
_FEW_POSITIVES, _FEW_TO_JUDGE = 100, 50
_NEARLY_ALL, _TELLS_LABEL = 0.9, 0.99
_NUM_BINS = 256
_CHANCE = 1e-9  # that labels are equal by luck; among a million values, that is one in a thousand


def findings_of(store: Store) -> list[str]:
    """A sentence for each thing that makes a model of this store, or its metrics, doubtful.

    - a part with fewer than 100 positive samples;
    - columns, the label among them, that have one value, or none, in the training part;
    - columns that tell a label, by their value or by being empty;
    - columns nearly all of whose values are unknown outside the training part;
    - a part in which most groups are new, where they are a feature, or none has both labels.
    """
    parts = {part: samples for part, samples in store.splits.items() if samples}
    names = store.label_names or (store.meta.get("schema", {}).get("label") or "label",)
    labels_NK = store.labels.reshape(store.num_samples, len(names))
    findings = []
    for name, labels in zip(names, labels_NK.T, strict=True):
        counts = {
            part: np.count_nonzero(labels[samples.start : samples.stop])
            for part, samples in parts.items()
        }
        few = [f"{part} {count}" for part, count in counts.items() if count < _FEW_POSITIVES]
        if few:
            findings.append(
                f"label {name!r} has fewer than {_FEW_POSITIVES} positive samples in a part "
                f"({', '.join(few)}); metrics of so few say little"
            )
    judged = [part for part in parts if part != "train"]
    if "train" in parts:
        findings += _of_training(store, labels_NK, names)
    findings += _of_unknown_values(store, judged)
    if "train" in parts and store.groups is not None and not store.label_names:
        findings += _of_groups(store, judged)
    return findings


def num_groups_of_both_kinds(store: Store, part: str) -> int:
    """How many groups of a part have positive and negative samples; others have no AUC.

    Args:
        store: A store with groups and one label.
        part: "train", "test" or "validation".
    """
    return int(np.count_nonzero(_groups_in(store, part, 0) & _groups_in(store, part, 1)))


def _of_training(store: Store, labels_NK: NDArray[np.int8], names: Sequence[str]) -> Iterator[str]:
    """Columns that have one value, and columns that tell a label."""
    samples = _some(store.splits["train"])
    labels_NK = labels_NK[samples]
    drawn = store.meta.get("schema", {}).get("negatives", {})
    constant = [
        name
        for name, labels in zip(names, labels_NK.T, strict=True)
        if (labels == labels[0]).all() and drawn.get("per_positive") != 0
    ]
    telling: dict[str, list[str]] = {name: [] for name in names}
    for column, values in _columns(store, samples):
        if (values == values[0]).all():
            constant.append(column)
            continue
        if column in (drawn.get("item"), *drawn.get("item_columns", ())):
            continue  # popular items are rarely drawn as negatives, which is no leak
        for name, labels in zip(names, labels_NK.T, strict=True):
            if (_auc_alone(values, labels) or 0) >= _TELLS_LABEL or _tells_one(values, labels):
                telling[name].append(column)
    if constant and len(samples) > 1:
        yield (
            f"columns with one value, or none, in the training part: {', '.join(constant)} "
            f"({len(samples):,} samples were looked at); a model learns nothing from them"
        )
    for name, columns in telling.items():
        if columns:
            yield (
                f"label {name!r} follows from {', '.join(map(repr, columns))} alone, by the value "
                f"or by its being empty (AUC of at least {_TELLS_LABEL} in the training part, or a "
                "value that only positives have); if that is known only after the label, leave it "
                "out of the schema"
            )


def _of_unknown_values(store: Store, parts: Sequence[str]) -> Iterator[str]:
    bags = {feature.name for feature in store.features if feature.is_bag}
    found = []
    for part in parts:
        counts = store.meta.get("unknown", {}).get(part, {})
        samples, columns = _some(store.splits[part]), []
        for column, values in _columns(store, samples):
            num_unknown = counts.get(column, 0) * len(samples) / len(store.splits[part])
            if column in bags:  # counts are of values, and a number here is of a bag
                num_unknown = np.count_nonzero(values == 0)
            if num_unknown > (num_unknown + np.count_nonzero(values > 0)) * _NEARLY_ALL:
                columns.append(column)
        found += [f"in the {part} part of {', '.join(map(repr, columns))}"] if columns else []
    if found:
        yield (
            f"nearly all values are unknown {', '.join(found)}: the training part does not have "
            "them, so a model knows nothing of them; leave the column out, or change [split]"
        )


def _of_groups(store: Store, parts: Sequence[str]) -> Iterator[str]:
    schema, in_train = store.meta.get("schema", {}), _groups_in(store, "train")
    wanted = {schema.get("split_by"), *map(str, schema.get("split", {}).values())}
    is_feature = schema.get("group") in store.feature_tables
    new, one_kind = [], []
    for part in parts:
        in_part = _groups_in(store, part)
        num_groups, num_new = np.count_nonzero(in_part), np.count_nonzero(in_part & ~in_train)
        if is_feature and 2 * num_new > num_groups and "group" not in wanted:
            new.append(f"{num_new:,} of {num_groups:,} in the {part} part")
        labels = store.labels[store.splits[part].start : store.splits[part].stop]
        has_both = 0 < np.count_nonzero(labels) < len(labels)
        if has_both and not num_groups_of_both_kinds(store, part):
            one_kind.append(part)
    if new:
        yield (
            f"most groups {schema['group']!r} have no sample in the training part "
            f"({', '.join(new)}), so a model cannot know them; change [split]"
        )
    if one_kind:
        yield f"no group has both labels in the part {', '.join(one_kind)}, which has no GAUC"


def _groups_in(store: Store, part: str, label: int | None = None) -> NDArray[np.bool_]:
    """Whether each group has samples in a part, with that label if one is given."""
    assert store.groups is not None
    found, samples = np.zeros(store.groups.max(initial=0) + 1, np.bool_), store.splits[part]
    for begin in range(samples.start, samples.stop, _MOST):
        block = slice(begin, min(begin + _MOST, samples.stop))
        groups = store.groups[block]
        found[groups if label is None else groups[store.labels[block] == label]] = True
    return found


def _some(part: range) -> NDArray[np.int64]:
    """Numbers of at most 65,536 samples of a part, in blocks."""
    if len(part) <= _MOST:
        return np.arange(part.start, part.stop)
    starts = np.linspace(part.start, part.stop - _BLOCK, _MOST // _BLOCK).astype(np.int64)
    return (starts[:, None] + np.arange(_BLOCK)).reshape(-1)


def _columns(store: Store, samples: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[Any]]]:
    """A number for each sample, (B,), by column.

    The sum of the first and the last row of a feature, -1 for an empty bag; the bin of a dense
    value.
    """
    batch = store.read(samples)
    rows, offsets = batch.sparse_features.values().numpy(), batch.sparse_features.offsets().numpy()
    for number, feature in enumerate(store.features):
        bounds = offsets[number * len(samples) : (number + 1) * len(samples) + 1]
        is_full = np.diff(bounds) > 0
        values = np.full(len(samples), -1, np.int64)
        values[is_full] = rows[bounds[:-1][is_full]] + rows[bounds[1:][is_full] - 1]
        yield feature.name, values
    for name, values in zip(store.meta["dense_names"], batch.dense_features.numpy().T, strict=True):
        edges = np.quantile(values, np.linspace(0, 1, _NUM_BINS + 1), method="lower")
        edges = np.unique([edges, np.nextafter(edges, np.inf, dtype=np.float64)])
        yield name, np.searchsorted(edges, values, side="right")


def _auc_alone(values: NDArray[Any], labels: NDArray[np.int8]) -> float | None:
    """How well a column alone tells the label: AUC of its rates in one half, on the other half."""
    if not _FEW_TO_JUDGE <= np.count_nonzero(labels) <= len(labels) - _FEW_TO_JUDGE:
        return None
    _, values = np.unique(values, return_inverse=True)
    is_known = np.random.default_rng(0).random(len(values)) < 0.5
    known, ones = values[is_known], values[is_known & (labels == 1)]
    size, mean = int(values.max()) + 1, labels.mean()
    rates = np.bincount(ones, minlength=size) + mean
    rates /= np.bincount(known, minlength=size) + 1
    return auc(rates[values[~is_known]], labels[~is_known])


def _tells_one(values: NDArray[Any], labels: NDArray[np.int8]) -> bool:
    """Whether a value has positives alone, and so many that this is no luck."""
    _, values = np.unique(values, return_inverse=True)
    sizes, ones = np.bincount(values), np.bincount(values, labels)
    return bool(labels.mean() ** sizes[sizes == ones].max(initial=0) < _CHANCE)
