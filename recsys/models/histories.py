"""Histories: features whose rows are earlier events of a sample, the oldest first.

A history has a candidate, a feature of the same table: the item that may follow the events.
All functions work on jagged rows, as `HotColdEmbeddingCollection` returns them.

Shape letters: B samples, N rows, D embedding_dim, T steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from recsys.embeddings.table import output_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from recsys.batch import Features
    from recsys.embeddings.collection import JaggedEmbeddings

__all__ = [
    "FeatureRoles",
    "bags_of_rows",
    "feature_roles",
    "look_up",
    "pad_left",
    "steps_back",
    "sum_of_bags",
]


class FeatureRoles(NamedTuple):
    """How a model with histories uses the features of its collection.

    Attributes:
        embedding_dim: D.
        names: All features, in the order of the collection.
        candidates: The candidate of each history, in the order of `names`.
        others: The features that are neither a history nor a candidate.
    """

    embedding_dim: int
    names: list[str]
    candidates: dict[str, str]
    others: list[str]


def feature_roles(
    model: str, embedding_collection: nn.Module, histories: Mapping[str, str]
) -> FeatureRoles:
    """Check the histories of a model against the features of its collection.

    Args:
        model: Name of the model, for errors.
        embedding_collection: A module with `embedding_configs()`.
        histories: The candidate's feature of each history's feature.

    Raises:
        TypeError: the collection pools its rows.
        ValueError: there are no histories; a feature is unknown; a candidate looks up another table
            than its history, or is a history.
    """
    if not hasattr(embedding_collection, "embedding_configs"):
        raise TypeError(
            f"{model}: embedding_collection must look rows up without pooling, got "
            f"{type(embedding_collection).__name__}; make a HotColdEmbeddingCollection"
        )
    configs: list[Any] = embedding_collection.embedding_configs()  # type: ignore[operator]  # any module
    tables = [config.name for config in configs for _ in config.feature_names]
    table_of = dict(zip(output_names(configs), tables, strict=True))
    if not histories:
        raise ValueError(
            f"{model}: histories must map at least one history to its candidate, got none; a model "
            "of pooled bags, such as DLRM, needs none"
        )
    for history, candidate in histories.items():
        for feature in (history, candidate):
            if feature not in table_of:
                raise ValueError(
                    f"{model}: histories must name features of embedding_collection, which are "
                    f"{list(table_of)}; got {feature!r}"
                )
        if table_of[history] != table_of[candidate]:
            raise ValueError(
                f"{model}: a history and its candidate must look up one table; {history!r} looks "
                f"up {table_of[history]!r}, and {candidate!r} looks up {table_of[candidate]!r}"
            )
        if candidate in histories:
            raise ValueError(
                f"{model}: a candidate must not be a history; {candidate!r}, the candidate of "
                f"{history!r}, is one"
            )
    used = {*histories.keys(), *histories.values()}
    others = [name for name in table_of if name not in used]
    candidates = {name: histories[name] for name in table_of if name in histories}
    return FeatureRoles(configs[0].embedding_dim, list(table_of), candidates, others)


def look_up(
    model: str, embedding_collection: nn.Module, features: Features
) -> dict[str, JaggedEmbeddings]:
    """The rows of all features.

    Raises:
        ValueError: the features have weights, which lookups without pooling do not apply.
    """
    if features.weights_or_none() is not None:
        raise ValueError(
            f"{model}: sparse_features must have no weights, because rows are looked up without "
            "pooling; leave the weights out, or use a model of pooled bags, such as DLRM"
        )
    rows: dict[str, JaggedEmbeddings] = embedding_collection(features)
    return rows


def bags_of_rows(lengths: Tensor, num_rows: int) -> Tensor:
    """The bag of each row.

    Shape:
        lengths (B,), with sum N, which is not checked; result (N,) int64.
    """
    return torch.repeat_interleave(lengths, output_size=num_rows).long()


def steps_back(lengths: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The bag of each row, and its place from the bag's end: 1 for the last row.

    Shape:
        lengths (B,), with sum N, which is not checked; results (N,) int64.
    """
    bags = bags_of_rows(lengths, num_rows)
    rows = torch.arange(num_rows, device=lengths.device)
    return bags, lengths.cumsum(0).index_select(0, bags) - rows


def sum_of_bags(values: Tensor, lengths: Tensor, bags: Tensor | None = None) -> Tensor:
    """The sum of each bag's rows; an empty bag gives zeros.

    On the CPU rows are added in their order. On CUDA the order is that of
    `torch.Tensor.index_add`, which may differ from run to run.

    Args:
        values: The rows, bag after bag.
        lengths: Number of rows of each bag.
        bags: The bag of each row, if it is known; see `bags_of_rows`.

    Shape:
        values (N, D); lengths (B,), with sum N, which is not checked; bags (N,) int64; result (B,
        D), on the CPU `values` itself if all bags have one row.
    """
    if _has_bags_of(1, values, lengths):
        return values
    if bags is None:
        bags = bags_of_rows(lengths, values.shape[0])
    return values.new_zeros(lengths.shape[0], values.shape[1]).index_add(0, bags, values)


def pad_left(values: Tensor, lengths: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """The last T rows of each bag; shorter bags get zeros before their first row.

    Args:
        values: The rows of all bags, one bag after the other.
        lengths: Rows of each bag.
        num_steps: T.

    Shape:
        values (N, D); lengths (B,), with sum N, which is not checked; results: rows (B, T, D), a
        view of values on the CPU if all bags have T rows, and whether a row is one of the bag's
        (B, T).
    """
    num_bags, dim = lengths.shape[0], values.shape[1]
    is_step = torch.arange(num_steps, device=lengths.device) >= num_steps - lengths.unsqueeze(1)
    if _has_bags_of(num_steps, values, lengths):
        return values.view(num_bags, num_steps, dim), is_step
    bags, back = steps_back(lengths, values.shape[0])
    unused = num_bags * num_steps  # a position after the result, for the rows of longer bags
    positions = torch.where(back <= num_steps, (bags + 1) * num_steps - back, unused)
    padded = values.new_zeros(unused + 1, dim).index_copy(0, positions, values)
    return padded[:unused].view(num_bags, num_steps, dim), is_step


def _has_bags_of(size: int, values: Tensor, lengths: Tensor) -> bool:
    """Whether all bags have so many rows; False where the answer would wait for a device."""
    return (
        not torch.compiler.is_compiling()
        and lengths.device.type == "cpu"
        and values.shape[0] == size * lengths.shape[0]
        and bool((lengths == size).all())
    )
