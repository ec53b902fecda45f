"""Builds the model that a configuration names, on embeddings that exist already.

    model.name       class                       embeddings
    dlrm             recsys.models.DLRM          pooled
    dcn_v2           recsys.models.DCNv2         pooled
    deepfm           recsys.models.DeepFM        pooled
    din              recsys.models.DIN           rows, not pooled
    tbsm             recsys.models.TBSM          rows, not pooled
    module:Class     a class of the user's       rows, not pooled, if it has `unpooled = True`

A class of the user's is built as `Class(embeddings, num_dense)`. Its `forward(batch)` takes a
`recsys.batch.Batch` and returns logits, (B,) or (B, 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recsys._support.user_classes import current_folder_last, import_class
from recsys.batch import histories_of
from recsys.errors import ConfigError
from recsys.models import (
    DIN,
    DLRM,
    TBSM,
    DCNv2,
    DeepFM,
    DLRMTrain,
    MaskedTransformerArch,
)
from recsys.models.batch_train import BatchTrain
from recsys.models.dlrm import initialize_classic
from recsys.train.saved_state import require_savable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from recsys.batch import SampleSource
    from recsys.config import ModelConfig

__all__ = ["build_network", "is_unpooled", "needs_rows"]


def is_unpooled(config: ModelConfig) -> bool:
    """Whether the model of a configuration looks rows up without pooling.

    Raises:
        ConfigError: the class of the user's cannot be imported.
    """
    if config.is_custom:
        return bool(getattr(_import_class(config.name), "unpooled", False))
    return config.name in ("din", "tbsm")


def needs_rows(config: ModelConfig) -> bool:
    """The same as `is_unpooled`, for a configuration that is checked.

    Raises:
        ConfigError: the class of the user's cannot be imported; or rows are not pooled, and
            `table_dims` or `pooling` are set.
    """
    takes_rows = is_unpooled(config)
    if takes_rows and (config.table_dims or config.pooling):
        raise ConfigError(
            "model.table_dims and model.pooling are for models that pool their bags in the lookup, "
            f"and {config.name!r} does not; drop them"
        )
    return takes_rows


def build_network(
    config: ModelConfig, source: SampleSource, embeddings: nn.Module, device: torch.device
) -> DLRMTrain | BatchTrain:
    """Build a model with its loss, and draw the initial values of its dense part.

    Args:
        config: Names the model.
        source: The data: its number of dense features, and its histories.
        embeddings: A collection: pooled, or of rows if `needs_rows(config)`.
        device: Device of the dense part.

    Returns:
        A module that maps a mini-batch to (loss, (loss, logits, labels)); its `model` is the model.

    Raises:
        ConfigError: sizes do not fit each other or into memory, the model does not fit the data, or
            the class of the user's does not take the two arguments or makes a model that cannot be
            saved.
    """
    if config.is_custom:
        with device:
            return BatchTrain(_build_custom(config.name, embeddings, source.num_dense))
    dims = {config.dim_of(table) for table in source.table_sizes}
    if len(dims) == 1 and config.embedding_dim not in dims:
        raise ConfigError(
            f"model.table_dims gives all tables {dims.pop()} columns; set model.embedding_dim to "
            "that and drop model.table_dims"
        )
    try:
        model = _build(config, source, embeddings, device)
    except ConfigError:
        raise
    except ValueError as error:  # sizes do not fit each other, or the tables
        raise ConfigError(f"model.name {config.name!r}: {error}") from error
    except RuntimeError as error:  # torch's, on memory
        raise ConfigError(
            f"model.name {config.name!r}: its dense part cannot be made ({error}); make layers "
            "smaller, such as model.dense_arch and model.over_arch"
        ) from error
    if config.init == "classic":
        initialize_classic(model)
    return DLRMTrain(model)


def _build(
    config: ModelConfig, source: SampleSource, embeddings: nn.Module, device: torch.device
) -> nn.Module:
    sizes = (source.num_dense, config.dense_arch, config.over_arch)
    if config.name == "dlrm":
        return DLRM(
            embeddings, *sizes, device, interaction=_interaction(config, embeddings, device)
        )
    if config.dcn_v2 is not None:
        cross = config.dcn_v2
        return DCNv2(embeddings, *sizes, cross.num_layers, cross.low_rank_dim, device)
    if config.name == "deepfm":
        return DeepFM(embeddings, *sizes, device)
    histories = _histories(config.name, source)
    if config.din is not None:
        return DIN(
            embeddings,
            source.num_dense,
            histories,
            config.over_arch,
            attention_layer_sizes=config.din.attention,
            dense_device=device,
        )
    tbsm = config.tbsm
    assert tbsm is not None
    return TBSM(
        embeddings,
        source.num_dense,
        histories,
        tbsm.num_steps,
        config.dense_arch,
        config.over_arch,
        tower_layer_sizes=tbsm.tower,
        num_heads=tbsm.num_heads,
        dense_device=device,
    )


def _interaction(
    config: ModelConfig, embeddings: Any, device: torch.device
) -> MaskedTransformerArch | None:
    """The interaction of a DLRM, if it is not the dot product."""
    transformer = config.interaction.masked_transformer
    if transformer is None:
        return None
    return MaskedTransformerArch(
        len(embeddings.output_keys()),
        config.embedding_dim,
        num_layers=transformer.num_layers,
        num_heads=transformer.num_heads,
        feedforward=transformer.feedforward,
        mask=transformer.mask,
        kept=transformer.kept,
        device=device,
    )


def _histories(name: str, source: SampleSource) -> Mapping[str, str]:
    """The histories of the data, each with the feature of its candidate.

    Raises:
        ConfigError: there are none.
    """
    found = histories_of(source)
    if not found:
        raise ConfigError(
            f"model.name {name!r} needs a history: a feature of kind sequence that shares its "
            f"table with a feature of kind one, the candidate; {source.describe()['name']} has "
            "none; declare [history.NAME] of a categorical column in the schema, or give "
            "[sequence.COLUMN] the column's table, or choose another model"
        )
    return found


def _import_class(name: str) -> type[nn.Module]:
    return import_class("model.name", name, nn.Module, "torch.nn.Module")


def _build_custom(name: str, embeddings: nn.Module, num_dense: int) -> nn.Module:
    """Build a class of the user's.

    Raises:
        ConfigError: it does not take the two arguments, or a run could not save it.
    """
    custom = _import_class(name)
    try:
        with current_folder_last():
            model: nn.Module = custom(embeddings, num_dense)
    except TypeError as error:
        raise ConfigError(
            f"model.name {name!r}: the class is built as {custom.__name__}(embeddings, num_dense), "
            f"which raised a TypeError: {error}"
        ) from error
    require_savable(model, f"model.name {name!r}")
    return model
