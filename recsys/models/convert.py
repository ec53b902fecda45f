"""Convert weights between recsys' DLRM, which has TorchRec's keys, and the classic `DLRM_Net`.

    recsys and TorchRec                                                    facebookresearch/dlrm
    sparse_arch.embedding_bag_collection.embedding_bags.t_<feature>.weight emb_l.<i>.weight
    dense_arch.model._mlp.<k>._linear.weight, .bias                        bot_l.<2k>.weight, .bias
    over_arch.model.0._mlp.<k>._linear.weight, .bias                       top_l.<2k>.weight, .bias
    over_arch.model.1.weight, .bias                                        the last top_l.<2k>

Classic layers have even numbers because the activations between them are numbered too. Both models
put the dense vector first and the products of pairs after it. recsys orders the pairs by rows of
the strict upper triangle, the classic model by rows of the strict lower triangle, so the columns of
the first top layer are permuted. The classic model ends in a sigmoid; recsys' DLRM returns the
logits before it. All other tensors are passed on without a copy.

References:
    facebookresearch/dlrm, dlrm_s_pytorch.py: `create_mlp`, `create_emb`, `interact_features`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from math import comb
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["from_classic", "to_classic"]

_TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"
_RECSYS_KEY = re.compile(
    r"(?a)sparse_arch\.embedding_bag_collection\.embedding_bags\.t_(?P<table>.+)\.weight"
    r"|dense_arch\.model\._mlp\.(?P<bottom>\d+)\._linear\.(?:weight|bias)"
    r"|over_arch\.model\.0\._mlp\.(?P<top>\d+)\._linear\.(?:weight|bias)"
    r"|over_arch\.model\.1\.(?:weight|bias)"
)
_CLASSIC_KEY = re.compile(
    r"(?a)emb_l\.(?P<table>\d+)\.weight"
    r"|bot_l\.(?P<bottom>\d+)\.(?:weight|bias)|top_l\.(?P<top>\d+)\.(?:weight|bias)"
)


class _Keys(NamedTuple):
    """Keys of a model: of its tables, and of its layers without ".weight" or ".bias"."""

    tables: list[str]
    bottom: list[str]
    top: list[str]


def to_classic(state_dict: Mapping[str, Tensor], feature_names: Sequence[str]) -> dict[str, Tensor]:
    """Convert the weights of a recsys or TorchRec `DLRM` for a classic `DLRM_Net`.

    Args:
        state_dict: Of a `DLRM` whose tables are called `t_<feature>`, as in `recsys train` and in
            TorchRec's example.
        feature_names: The features in the order of the data's columns. A state dict does not have
            this order: a safetensors file is sorted by name.

    Shape:
        For F features and embedding_dim D, the first top layer's weight has D + F * (F + 1) / 2
        columns in both models.

    Returns:
        The same weights under the names of the other model, and a copy of that of the first top
        layer.

    Raises:
        WeightsError: keys are missing or unexpected, or shapes do not fit each other.
    """
    own = _recsys_keys(feature_names, _count(state_dict, _RECSYS_KEY, "a DLRM's"))
    classic = _classic_keys(len(own.tables), len(own.bottom), len(own.top))
    columns = _check(state_dict, own)
    return _renamed(state_dict, own, classic, columns)


def from_classic(
    state_dict: Mapping[str, Tensor], feature_names: Sequence[str]
) -> dict[str, Tensor]:
    """Convert the weights of a classic `DLRM_Net` for a recsys or TorchRec `DLRM`.

    Args:
        state_dict: Of a `DLRM_Net` with dot interaction and without self terms. A checkpoint of the
            classic script has it under "state_dict".
        feature_names: The features in the order of the classic tables; table i becomes
            `t_<feature_names[i]>`.

    Returns:
        The same weights under the names of the other model, and a copy of that of the first top
        layer.

    Raises:
        WeightsError: keys are missing or unexpected, or shapes do not fit each other.
    """
    found = _count(state_dict, _CLASSIC_KEY, "a DLRM_Net's")
    for name, layers in (("bot_l", found["bottom"]), ("top_l", found["top"])):
        odd = [layer for layer in layers if layer[-1] in "13579"]
        if odd:
            raise WeightsError(
                f"state dict: layers of {name} must have even numbers (activations have the odd), "
                f"got {name}.{odd[0]}; is this a DLRM_Net?"
            )
    if len(found["top"]) < 2:
        raise WeightsError("state dict: top_l must have at least two layers for a DLRM, got one")
    classic = _classic_keys(len(found["table"]), len(found["bottom"]), len(found["top"]))
    if len(feature_names) != len(classic.tables):
        raise WeightsError(
            f"state dict: feature_names must name its {len(classic.tables)} tables, got "
            f"{len(feature_names)} names"
        )
    counts = {"bottom": found["bottom"], "top": found["top"][:-1], "table": found["table"]}
    own = _recsys_keys(feature_names, counts)
    columns = torch.argsort(_check(state_dict, classic))
    return _renamed(state_dict, classic, own, columns)


def _classic_columns(num_features: int, embedding_dim: int) -> Tensor:
    """For each column of the classic first top layer, the equivalent column of the recsys layer."""
    size = num_features + 1
    upper = torch.zeros(size, size, dtype=torch.int64)
    first, second = torch.triu_indices(size, size, offset=1)
    upper[first, second] = torch.arange(comb(size, 2))
    later, earlier = torch.tril_indices(size, size, offset=-1)
    return torch.cat([torch.arange(embedding_dim), embedding_dim + upper[earlier, later]])


def _recsys_keys(feature_names: Sequence[str], found: Mapping[str, Sequence[str]]) -> _Keys:
    if len(set(feature_names)) != len(feature_names):
        raise WeightsError(f"feature_names must be distinct, got {list(feature_names)}")
    hidden = [f"over_arch.model.0._mlp.{layer}._linear" for layer in range(len(found["top"]))]
    return _Keys(
        [_TABLE.format(name) for name in feature_names],
        [f"dense_arch.model._mlp.{layer}._linear" for layer in range(len(found["bottom"]))],
        [*hidden, "over_arch.model.1"],
    )


def _classic_keys(num_tables: int, num_bottom: int, num_top: int) -> _Keys:
    return _Keys(
        [f"emb_l.{table}.weight" for table in range(num_tables)],
        [f"bot_l.{2 * layer}" for layer in range(num_bottom)],
        [f"top_l.{2 * layer}" for layer in range(num_top)],
    )


def _count(
    state_dict: Mapping[str, Tensor], pattern: re.Pattern[str], whose: str
) -> dict[str, list[str]]:
    """The distinct tables, bottom layers and top layers named by the keys of a state dict."""
    found: dict[str, dict[str, None]] = {"table": {}, "bottom": {}, "top": {}}
    if not isinstance(state_dict, Mapping):
        raise WeightsError(
            f"state dict: must be a dict of tensors, got {type(state_dict).__name__}; call the "
            "model's state_dict()"
        )
    for key, tensor in state_dict.items():
        match = pattern.fullmatch(str(key))
        if match is None:
            raise WeightsError(
                f"state dict: key {key!r} is not one of {whose}; pass the state_dict of the bare "
                "model, with one plain table per feature and dot interaction"
            )
        if not isinstance(tensor, torch.Tensor):
            raise WeightsError(
                f"state dict: {key} must be a torch.Tensor, got {type(tensor).__name__}; turn "
                "arrays into tensors with torch.from_numpy"
            )
        if match.lastgroup is not None:
            found[match.lastgroup][match[match.lastgroup]] = None
    for part, names in found.items():
        if not names:
            raise WeightsError(
                f"state dict: it has no key of {whose} {part} part; pass the whole state_dict"
            )
    return {part: list(names) for part, names in found.items()}


def _check(state_dict: Mapping[str, Tensor], keys: _Keys) -> Tensor:
    """Check keys and shapes. Returns the permutation of the first top layer's columns."""
    layers = [f"{layer}.{kind}" for layer in keys.bottom + keys.top for kind in ("weight", "bias")]
    expected = [*keys.tables, *layers]
    for key in expected:
        if key not in state_dict:
            way_out = (
                "pass all tables, and name their features in the data's order"
                if key in keys.tables
                else "its other keys require it, so pass the whole state_dict of the model"
            )
            raise WeightsError(f"state dict: key {key!r} is missing; {way_out}")
    for key in state_dict:
        if key not in expected:
            raise WeightsError(
                f"state dict: key {key!r} is unexpected: it fits neither the feature names nor the "
                "layers before it; name all features, and pass one model's whole state_dict"
            )
    first = state_dict[keys.tables[0]]
    _require(len(first.shape) == 2, keys.tables[0], "(E, D)", first)
    embedding_dim = first.shape[1]
    for key in keys.tables:
        table = state_dict[key]
        fits = len(table.shape) == 2 and table.shape[1] == embedding_dim
        _require(fits, key, f"(E, {embedding_dim}) as other tables are", table)
    for names in (keys.bottom, keys.top):
        for name in names:
            weight, bias = state_dict[f"{name}.weight"], state_dict[f"{name}.bias"]
            _require(len(weight.shape) == 2, f"{name}.weight", "(outputs, inputs)", weight)
            _require(bias.shape == weight.shape[:1], f"{name}.bias", f"({len(weight)},)", bias)
        for before, name in pairwise(names):
            width = state_dict[f"{before}.weight"].shape[0]
            weight = state_dict[f"{name}.weight"]
            _require(weight.shape[1] == width, f"{name}.weight", f"(outputs, {width})", weight)
    last = state_dict[f"{keys.bottom[-1]}.weight"]
    _require(
        last.shape[0] == embedding_dim,
        f"{keys.bottom[-1]}.weight",
        f"({embedding_dim}, inputs), as wide as the tables",
        last,
    )
    num_features = len(keys.tables)
    width = embedding_dim + comb(num_features + 1, 2)
    over = state_dict[f"{keys.top[0]}.weight"]
    _require(
        over.shape[1] == width,
        f"{keys.top[0]}.weight",
        f"(outputs, {width}), which is D + F * (F + 1) / 2 for dot interaction without self terms",
        over,
    )
    return _classic_columns(num_features, embedding_dim)


def _require(fits: bool, key: str, shape: str, found: Tensor) -> None:
    if not fits:
        raise WeightsError(f"state dict: {key} must be {shape}, got {tuple(found.shape)}")


def _renamed(
    state_dict: Mapping[str, Tensor], before: _Keys, after: _Keys, columns: Tensor
) -> dict[str, Tensor]:
    renamed = {new: state_dict[old] for old, new in zip(before.tables, after.tables, strict=True)}
    for old, new in zip(before.bottom + before.top, after.bottom + after.top, strict=True):
        for kind in ("weight", "bias"):
            renamed[f"{new}.{kind}"] = state_dict[f"{old}.{kind}"]
    over = f"{after.top[0]}.weight"
    renamed[over] = renamed[over].index_select(1, columns.to(renamed[over].device))
    return renamed
