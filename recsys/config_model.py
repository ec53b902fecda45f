"""The keys of `model`: architecture, sizes of tables and layers, and constants of single models."""

from __future__ import annotations

from dataclasses import dataclass

from recsys._support.config_fields import check_fields
from recsys._support.config_fields import key as _key
from recsys._support.user_classes import names_class
from recsys.errors import ConfigError

__all__ = [
    "MODELS",
    "CrossNetConfig",
    "DINConfig",
    "ModelConfig",
    "TBSMConfig",
    "TransformerConfig",
]

MODELS = ("dlrm", "dcn_v2", "deepfm", "din", "tbsm")
_OWNERS = {"dcn": "dcn_v2", "din": "din", "tbsm": "tbsm"}  # the model that reads these keys
_HIDDEN = (512, 256, 64)  # of the default dense_arch
_WITH_BOTTOM_MLP = ("dlrm", "dcn_v2", "deepfm", "tbsm")


@dataclass(frozen=True, kw_only=True)
class CrossNetConfig:
    """The cross network of `dcn_v2`."""

    num_layers: int = _key(3, "cross layers", least=1)
    low_rank_dim: int = _key(64, "rank of each layer's matrix", least=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The interaction `masked_transformer`."""

    num_layers: int = _key(1, "blocks of attention and MLP", least=1)
    num_heads: int = _key(2, "attention heads; they divide embedding_dim", least=1)
    feedforward: int = _key(2, "hidden width of a block's MLP, in units of embedding_dim", least=1)
    mask: str = _key("learned", "what a token attends to", choices=("none", "causal", "learned"))
    kept: int = _key(8, "tokens that a token attends to with mask learned", least=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class DINConfig:
    """The attention of `din`."""

    attention: tuple[int, ...] = _key((80, 40), "hidden layers of the activation unit")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.attention or min(self.attention) < 1:
            raise ConfigError(f"attention must be positive sizes, got {list(self.attention)}")


@dataclass(frozen=True, kw_only=True)
class TBSMConfig:
    """The tower and the time-series layer of `tbsm`."""

    num_steps: int = _key(20, "steps of the history; older ones are left out", least=1)
    num_heads: int = _key(1, "contexts that are computed from the history", least=1)
    tower: tuple[int, ...] = _key((15, 15), "MLP after the dot products of one step")

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.tower) < 2 or min(self.tower) < 1:
            raise ConfigError(f"tower must be two positive sizes or more, got {list(self.tower)}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model."""

    name: str = _key(
        "dlrm",
        f"architecture: {', '.join(MODELS)}, or module:Class for a module of your own",
    )
    embedding_dim: int = _key(16, "columns of every table", least=1)
    table_dims: dict[str, int] = _key(dict, "embedding_dim of single tables: table_dims.NAME=N")
    pooling: dict[str, str] = _key(
        dict, "sum or mean of a bag's rows, by table: pooling.NAME=mean; default: sum"
    )
    dense_arch: tuple[int, ...] = _key(
        None,
        "bottom MLP; ends in embedding_dim",
        derived=f"[{', '.join(map(str, _HIDDEN))}, embedding_dim]",
    )
    over_arch: tuple[int, ...] = _key((512, 256, 1), "top MLP; ends in 1")
    interaction: str = _key(
        "dot",
        "of dlrm: dot products of all pairs, or masked attention before them",
        choices=("dot", "masked_transformer"),
    )
    init: str = _key(
        "classic",
        "initial values: facebookresearch/dlrm's, or nn.Linear's own",
        choices=("classic", "torch"),
    )
    dcn: CrossNetConfig = _key(CrossNetConfig, "constants of dcn_v2")
    transformer: TransformerConfig = _key(TransformerConfig, "constants of masked_transformer")
    din: DINConfig = _key(DINConfig, "constants of din")
    tbsm: TBSMConfig = _key(TBSMConfig, "constants of tbsm")

    def __post_init__(self) -> None:
        if vars(self)["dense_arch"] is None:
            object.__setattr__(self, "dense_arch", (*_HIDDEN, self.embedding_dim))
        check_fields(self)
        if self.name not in MODELS and not names_class(self.name):
            raise ConfigError(
                f"name must be one of {', '.join(map(repr, MODELS))}, or module:Class; got "
                f"{self.name!r}; a module is named as in an import, not by its file"
            )
        for key, sizes in (("dense_arch", self.dense_arch), ("over_arch", self.over_arch)):
            if not sizes or min(sizes) < 1:
                raise ConfigError(f"{key} must be positive sizes, got {list(sizes)}")
        if self.name in _WITH_BOTTOM_MLP and self.dense_arch[-1] != self.embedding_dim:
            raise ConfigError(
                f"dense_arch must end in embedding_dim {self.embedding_dim}, "
                f"got {list(self.dense_arch)}"
            )
        if len(self.over_arch) < 2 or self.over_arch[-1] != 1:
            raise ConfigError(
                f"over_arch must have two sizes or more and end in 1, got {list(self.over_arch)}"
            )
        self._check_tables()
        self._check_owners()

    @property
    def is_custom(self) -> bool:
        """Whether the model is a class of the user's."""
        return ":" in self.name

    def dim_of(self, table: str) -> int:
        """Columns of a table.

        Args:
            table: Its name.
        """
        return self.table_dims.get(table, self.embedding_dim)

    def _check_tables(self) -> None:
        for table, dim in self.table_dims.items():
            if dim < 1:
                raise ConfigError(f"table_dims.{table} must be at least 1, got {dim}")
        for table, pooling in self.pooling.items():
            if pooling not in ("sum", "mean"):
                raise ConfigError(f"pooling.{table} must be 'sum' or 'mean', got {pooling!r}")
        if self.name != "dlrm" and self.interaction != "dot":
            raise ConfigError(
                f"interaction {self.interaction!r} is for name 'dlrm', got {self.name!r}; drop one"
            )
        if self.name in ("din", "tbsm") and (self.table_dims or self.pooling):
            raise ConfigError(
                f"table_dims and pooling are for models that pool their bags in the lookup, got "
                f"name {self.name!r}; drop them"
            )

    def _check_owners(self) -> None:
        """Refuse keys that the model does not read."""
        for key, owner in _OWNERS.items():
            constants = getattr(self, key)
            if self.name != owner and constants != type(constants)():
                raise ConfigError(
                    f"{key}.* are for name {owner!r}, got name {self.name!r}; drop them, or choose "
                    f"{owner!r}"
                )
        if self.interaction != "masked_transformer" and self.transformer != TransformerConfig():
            raise ConfigError(
                "transformer.* are for interaction 'masked_transformer', got "
                f"{self.interaction!r}; drop them, or choose 'masked_transformer'"
            )
