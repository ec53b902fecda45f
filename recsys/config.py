"""The configuration of a training run: frozen models of keys, valid once built.

    TrainConfig
    |-- model: ModelConfig                architecture and its sizes
    |   |-- interaction: InteractionConfig  dot, masked_transformer
    |   `-- dcn_v2, din, tbsm           constants of the model of this name
    |-- optimizer: OptimizerConfig          of the embedding rows
    |-- dense_optimizer: OptimizerConfig    of the dense part; a key not set is as in `optimizer`
    |-- lr_schedule: LearningRateConfig     of both optimizers
    |-- schedule: ScheduleConfig            order of fetching, computing and updating, by kind:
    |                                         sequential, lookahead, hotline, fae, auto
    |-- skip: SkipConfig                    samples, or updates of rows, that are left out, by kind:
    |                                         observe, drop_input, freeze_rows, subsample,
    |                                         importance, random_drop, paper
    |-- eval: EvalConfig
    |-- early_stopping: EarlyStoppingConfig
    |-- checkpoint: CheckpointConfig        how often the run saves its state
    `-- synthetic: SyntheticConfig          used when `data` is synthetic

Later sources win: defaults, then a TOML file, then `key=value` settings. `to_toml` writes what
`load_config` reads. Only `recsys.train` and what is above it import this module, which needs
pydantic.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import textwrap
from itertools import groupby
from math import cos, inf, pi
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from recsys._support.sizes import parse_bytes
from recsys._support.untrusted import parse_toml
from recsys._support.user_code import names_class
from recsys.embeddings.staleness.settings import Staleness
from recsys.errors import ConfigError
from recsys.pipeline.skip.policies import (
    DropInput,
    FreezeRows,
    Guard,
    Importance,
    Observe,
    Policy,
    RandomDrop,
    Subsample,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from recsys.pipeline.skip.paper import Paper

__all__ = [
    "AblationKeys",
    "CheckpointConfig",
    "CrossNetConfig",
    "DINConfig",
    "DropInputConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "FAEConfig",
    "GuardConfig",
    "HotlineConfig",
    "ImportanceConfig",
    "InteractionConfig",
    "Keys",
    "LearningRateConfig",
    "LookAheadConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PaperConfig",
    "RandomDropConfig",
    "ScheduleConfig",
    "SkipConfig",
    "StalenessConfig",
    "SubsampleConfig",
    "SyntheticConfig",
    "TBSMConfig",
    "TrainConfig",
    "TransformerConfig",
    "build_from_file",
    "describe_config",
    "flat",
    "format_keys",
    "load_config",
    "put_key",
    "read_tree",
    "replace",
    "to_toml",
    "walk_keys",
]

_T = TypeVar("_T")
_KeysT = TypeVar("_KeysT", bound="Keys")
Resume = Literal["", "free", "fixed", "free without fae"]
_MEANING_COLUMN = 34  # of the help
_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
}
SYNTHETIC_PREFIX = "synthetic:"
_SYNTHETIC = f"{SYNTHETIC_PREFIX}criteo-kaggle"
_MODELS = ("dlrm", "dcn_v2", "deepfm", "din", "tbsm")
_CALLBACKS = ("tensorboard", "mlflow", "wandb")
_HIDDEN = (512, 256, 64)  # of the default dense_arch
_MOST_ROWS = 2**31  # a rank times a multiplier below the table's size must fit in 63 bits
_MOST_TABLES = 16
# The metrics of an evaluation during training that say how good predictions are.
IS_HIGHER_BETTER = {
    "auc": True,
    "gauc": True,
    "accuracy": True,
    "logloss": False,
    "normalized_entropy": False,
    "recall_at_k": True,
    "ndcg_at_k": True,
}
RANKING_METRICS = ("recall_at_k", "ndcg_at_k")


def _as_text(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value  # `budget=135050380`, in bytes


def _check_callback(name: str) -> str:
    if name not in _CALLBACKS and not names_class(name):
        raise ValueError(
            f"must be one of {', '.join(map(repr, _CALLBACKS))}, or module:Class, with the module "
            "named as in an import, not by its file"
        )
    return name


_Text = Annotated[str, BeforeValidator(_as_text)]
_Size = Annotated[int, Field(ge=1, lt=2**63)]
_Sizes = Annotated[tuple[_Size, ...], Field(strict=False, min_length=1)]
_TwoSizes = Annotated[tuple[_Size, ...], Field(strict=False, min_length=2)]
_Rows = Annotated[int, Field(ge=1, le=_MOST_ROWS)]
_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Rate = Annotated[float, Field(ge=0, lt=1)]
_Callback = Annotated[str, AfterValidator(_check_callback)]


def _key(
    default: Any,
    meaning: str,
    *,
    derived: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float = inf,
    resume: Resume = "",
    common: bool = False,
) -> Any:
    """The field of one key, or of a table of keys.

    Args:
        default: Its default; a class of keys for a table of them; None if it is derived.
        meaning: The line that `recsys train --help` prints.
        derived: The default in words, where it is derived from other keys.
        least: The lowest number it accepts.
        above: A number it must exceed; instead of `least`.
        most: The highest number it accepts.
        resume: Whether a run that continues may have another value: "free", "fixed", or
            "free without fae"; empty: as the table that it is in. The whole is fixed.
        common: Whether most runs set it; help shows it first.
    """
    begin = "at least" if above is None else "above"
    low = least if above is None else above
    words = "" if low is None else f" {begin} {low:g}"
    if low is not None and most < inf:
        words = f" in {'[' if above is None else '('}{low:g}, {most:g}]"
    about: Any = {"derived": derived, "range": words, "resume": resume, "common": common}
    ends: dict[str, Any] = {"ge": least, "gt": above, "le": most if most < inf else None}
    if type(default) is int and most == inf:
        ends["lt"] = 2**63
    limits = {name: end for name, end in ends.items() if end is not None}
    if isinstance(default, type):
        return Field(default_factory=default, description=meaning, json_schema_extra=about)
    return Field(default, description=meaning, json_schema_extra=about, **limits)


class Keys(BaseModel):
    """A table of keys; valid once built, and never changed.

    Raises:
        ConfigError: a key is unknown, or a value is not what the key accepts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def keys_set(self) -> list[str]:
        """The keys that differ from their defaults."""
        fields = type(self).model_fields.items()
        return [
            name
            for name, field in fields
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]


class Kinds(Keys):
    """Tables of keys of which one is set at most: its name, the kind, says what is done.

    A kind whose keys have their defaults may be given by its name: "lookahead" is
    `{"lookahead": {}}`.
    """

    default_kind: ClassVar[str] = ""

    @classmethod
    def from_text(cls, value: Any) -> Any:
        """The table of a kind that is given by its name; any other `value` as it is.

        Raises:
            ValueError: there is no such kind.
        """
        if not isinstance(value, str) or not value:
            return value or {}
        if value not in cls.model_fields:
            raise ValueError(f"must be one of {', '.join(map(repr, cls.model_fields))}")
        return {value: {}}

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        if len(self._chosen()) > 1:
            raise ConfigError(f"{' and '.join(self._chosen())} are set; drop one of the tables")
        default = _table_of(type(self), self.default_kind)
        if not self._chosen() and default is not None:
            object.__setattr__(self, self.default_kind, default())
        return self

    @model_serializer
    def _as_tree(self) -> Any:
        keys = getattr(self, self.kind, None)
        tree = {} if keys is None else keys.model_dump(exclude_none=True)
        return {self.kind: tree} if tree else self.kind

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return next(iter(self._chosen()), self.default_kind)

    def _chosen(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]


def replace(keys: _KeysT, **changes: Any) -> _KeysT:
    """Keys with some of them changed; what is derived from others is derived anew.

    Args:
        keys: The keys.
        changes: The new values, by name.

    Raises:
        ConfigError: a value is not what its key accepts.
    """
    kept = {name: getattr(keys, name) for name in keys.model_fields_set}
    return type(keys)(**kept | changes)


class OptimizerConfig(Keys):
    """How parameters are updated."""

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"] = _key(
        "sgd",
        "update rule; rowwise_adagrad and partial_rowwise_adam are for rows only",
        common=True,
    )
    lr: float = _key(0.1, "learning rate", least=0, common=True)
    eps: float = _key(
        None,
        "added to the denominator; torch's default: adam 1e-8, else 1e-10",
        derived="depends on name",
        least=0,
    )
    betas: Annotated[tuple[_Rate, _Rate], Field(strict=False)] = _key(
        (0.9, 0.999), "decay rates of Adam's two averages, per step"
    )

    @model_validator(mode="after")
    def _derive(self) -> OptimizerConfig:
        if vars(self)["eps"] is None:
            object.__setattr__(self, "eps", 1e-8 if self.name.endswith("adam") else 1e-10)
        return self

    def for_dense(self, dense: OptimizerConfig | None = None) -> OptimizerConfig:
        """The optimizer of the dense part, which takes from this one what it does not set.

        Args:
            dense: What it sets; None for nothing.
        """
        counterparts = {"rowwise_adagrad": "adagrad", "partial_rowwise_adam": "adam"}
        matching = replace(self, name=counterparts.get(self.name, self.name))
        own = () if dense is None else dense.model_fields_set
        return replace(matching, **{name: getattr(dense, name) for name in own})


class LearningRateConfig(Keys):
    """How learning rates change over a run; the same factor for the dense part and the rows."""

    warmup_steps: int = _key(0, "steps over which rates rise to their full value", least=0)
    decay: Literal["none", "linear", "cosine"] = _key("none", "how rates fall")
    decay_start: int = _key(0, "step at which rates begin to fall; 0: after warm-up", least=0)
    decay_steps: int = _key(0, "steps over which they fall; 0: to the end of the run", least=0)
    final: float = _key(0.0, "factor that remains at the end", least=0, most=1)

    @model_validator(mode="after")
    def _check(self) -> LearningRateConfig:
        for name in ("decay_start", "decay_steps", "final"):
            if self.decay == "none" and getattr(self, name):
                raise ConfigError(
                    f"{name} needs a decay, got {getattr(self, name)} with decay 'none'; set decay "
                    "to 'linear' or 'cosine', or drop the key"
                )
        if 0 < self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"decay_start must be at least warmup_steps {self.warmup_steps}, or 0 for the end "
                f"of warm-up; got {self.decay_start}"
            )
        return self

    @property
    def is_constant(self) -> bool:
        """Whether rates stay as they are."""
        return self.warmup_steps == 0 and self.decay == "none"

    def factor(self, step: int, num_steps: int) -> float:
        """Factor of every learning rate in one step.

        Args:
            step: Number of the step, from 0.
            num_steps: Steps of the whole run.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "none":
            return 1.0
        start = max(self.warmup_steps, self.decay_start)
        length = self.decay_steps or max(1, num_steps - start)
        progress = min(max((step - start) / length, 0.0), 1.0)
        fallen = progress if self.decay == "linear" else (1 - cos(pi * progress)) / 2
        return 1 - (1 - self.final) * fallen


class EvalConfig(Keys):
    """Evaluation during training; the last evaluation always covers all samples of every split."""

    every_steps: int = _key(
        0,
        "steps between evaluations; 0: ten evaluations an epoch, or one each step",
        least=0,
        common=True,
    )
    split: Literal["validation", "test"] = _key("validation", "split to evaluate on")
    max_samples: int = _key(
        50_000,
        "samples per evaluation, from the start of the split",
        least=1,
        resume="free without fae",
    )
    batch_size: int = _key(2048, "samples per forward pass", least=1, resume="free without fae")
    ranking_k: int = _key(
        20, "recall and NDCG count the first k items, for data to be ranked", least=1
    )
    ranking_groups: int = _key(
        1000,
        "bound of the questions that are ranked at the end: so many groups are drawn by the data "
        "alone, with one question each; of fewer groups, more of each; 0: all questions of all",
        least=0,
    )


class EarlyStoppingConfig(Keys):
    """When training ends before its last step: once evaluations stop improving."""

    patience: int = _key(
        0, "evaluations without an improvement after which training ends; 0: never", least=0
    )
    metric: Literal[
        "auc",
        "gauc",
        "accuracy",
        "logloss",
        "normalized_entropy",
        "recall_at_k",
        "ndcg_at_k",
    ] = _key("auc", "metric of the evaluations on eval.split")
    min_delta: float = _key(
        0.0, "an evaluation that is better by more than this is an improvement", least=0
    )
    keep: Literal["best", "last"] = _key(
        "best", "weights that the run saves and evaluates at its end"
    )

    @model_validator(mode="after")
    def _check(self) -> EarlyStoppingConfig:
        unused = self.keys_set()
        if not self.patience and unused:
            raise ConfigError(
                f"{unused[0]} needs patience, got {getattr(self, unused[0])!r} with patience 0; "
                "set patience, or drop the key"
            )
        return self


class CheckpointConfig(Keys):
    """When a run writes checkpoints: after a time or a number of steps, whichever comes first.

    With `every_seconds` and `every_steps` both 0 it writes none, not even after Ctrl-C.
    """

    every_seconds: float = _key(600.0, "seconds between checkpoints; 0: not by time", least=0)
    every_steps: int = _key(0, "steps between checkpoints; 0: not by steps", least=0)
    buffer: _Text = _key("128MiB", "memory for rows that wait to be written")

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        parse_bytes(self.buffer, "buffer")
        return self

    @property
    def is_on(self) -> bool:
        """Whether the run writes checkpoints."""
        return bool(self.every_seconds or self.every_steps)

    @property
    def buffer_bytes(self) -> int:
        """The size of `buffer`."""
        return parse_bytes(self.buffer, "buffer")


class SyntheticConfig(Keys):
    """What synthetic data looks like; see `recsys.datasets.SyntheticCriteo`."""

    num_samples: int = _key(1_000_000, "samples in all splits together", least=7)
    seed: int = _key(0, "seed of the data; the run has its own", least=0)
    table_sizes: Annotated[tuple[_Rows, ...], Field(strict=False)] = _key(
        (), "rows per table; empty: Kaggle's 26 sizes"
    )
    test_samples: int = _key(
        0,
        "samples to test on, and as many to validate on; 0: a fourteenth of all samples each",
        least=0,
    )


class CrossNetConfig(Keys):
    """The cross network of `dcn_v2`."""

    num_layers: int = _key(3, "cross layers", least=1)
    low_rank_dim: int = _key(64, "rank of each layer's matrix", least=1)


class DINConfig(Keys):
    """The attention of `din`."""

    attention: _Sizes = _key((80, 40), "hidden layers of the activation unit")


class TBSMConfig(Keys):
    """The tower and the time-series layer of `tbsm`."""

    num_steps: int = _key(20, "steps of the history; older ones are left out", least=1)
    num_heads: int = _key(1, "contexts that are computed from the history", least=1)
    tower: _TwoSizes = _key((15, 15), "MLP after the dot products of one step")


class TransformerConfig(Keys):
    """The interaction `masked_transformer`."""

    num_layers: int = _key(1, "blocks of attention and MLP", least=1)
    num_heads: int = _key(2, "attention heads; they divide embedding_dim", least=1)
    feedforward: int = _key(2, "hidden width of a block's MLP, in units of embedding_dim", least=1)
    mask: Literal["none", "causal", "learned"] = _key("learned", "what a token attends to")
    kept: int = _key(8, "tokens that a token attends to with mask learned", least=1)


class InteractionConfig(Kinds):
    """How `dlrm` combines the rows of a sample."""

    default_kind = "dot"

    dot: Keys | None = _key(None, "dot products of all pairs")
    masked_transformer: TransformerConfig | None = _key(None, "masked attention before them")


class ModelConfig(Keys):
    """Shape of the model."""

    name: _Text = _key(
        "dlrm",
        f"architecture: {', '.join(_MODELS)}, or module:Class for a module of your own",
        common=True,
    )
    embedding_dim: int = _key(16, "columns of every table", least=1, common=True)
    table_dims: dict[str, _Size] = _key({}, "embedding_dim of single tables: table_dims.NAME=N")
    pooling: dict[str, Literal["sum", "mean"]] = _key(
        {}, "sum or mean of a bag's rows, by table: pooling.NAME=mean; default: sum"
    )
    dense_arch: _Sizes = _key(
        None,
        "bottom MLP; ends in embedding_dim",
        derived=f"[{', '.join(map(str, _HIDDEN))}, embedding_dim]",
    )
    over_arch: _TwoSizes = _key((512, 256, 1), "top MLP; ends in 1")
    interaction: Annotated[InteractionConfig, BeforeValidator(InteractionConfig.from_text)] = _key(
        InteractionConfig, "of dlrm: dot products of all pairs, or masked attention before them"
    )
    init: Literal["classic", "torch"] = _key(
        "classic", "initial values: facebookresearch/dlrm's, or nn.Linear's own"
    )
    dcn_v2: CrossNetConfig | None = _key(None, "constants of dcn_v2")
    din: DINConfig | None = _key(None, "constants of din")
    tbsm: TBSMConfig | None = _key(None, "constants of tbsm")

    @model_validator(mode="after")
    def _derive(self) -> ModelConfig:
        """A table of constants chooses its model; the model without one has its defaults."""
        tables = {"dcn_v2": CrossNetConfig, "din": DINConfig, "tbsm": TBSMConfig}
        named = [name for name in tables if getattr(self, name) is not None]
        if named and "name" not in self.model_fields_set:
            object.__setattr__(self, "name", named[0])
        if named and named != [self.name]:
            raise ConfigError(
                f"{named[-1]} is a table of name {named[-1]!r}, got name {self.name!r}; drop one"
            )
        if self.name in tables and not named:
            object.__setattr__(self, self.name, tables[self.name]())
        if vars(self)["dense_arch"] is None:
            object.__setattr__(self, "dense_arch", (*_HIDDEN, self.embedding_dim))
        return self

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.name not in _MODELS and not names_class(self.name):
            raise ConfigError(
                f"name must be one of {', '.join(map(repr, _MODELS))}, or module:Class; got "
                f"{self.name!r}; a module is named as in an import, not by its file"
            )
        has_bottom = self.name in ("dlrm", "dcn_v2", "deepfm", "tbsm")
        if has_bottom and self.dense_arch[-1] != self.embedding_dim:
            raise ConfigError(
                f"dense_arch must end in embedding_dim {self.embedding_dim}, "
                f"got {list(self.dense_arch)}"
            )
        if self.over_arch[-1] != 1:
            raise ConfigError(f"over_arch must end in 1, got {list(self.over_arch)}")
        if self.name != "dlrm" and self.interaction.kind != "dot":
            raise ConfigError(
                f"interaction {self.interaction.kind!r} is for name 'dlrm', got {self.name!r}; "
                "drop one"
            )
        if self.name in ("din", "tbsm") and (self.table_dims or self.pooling):
            raise ConfigError(
                f"table_dims and pooling are for models that pool their bags in the lookup, got "
                f"name {self.name!r}; drop them"
            )
        return self

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


class LookAheadConfig(Keys):
    """The schedule "lookahead"; see `recsys.pipeline.LookAhead`."""

    depth: int = _key(2, "mini-batches whose rows are fetched ahead", least=1)


class HotlineConfig(Keys):
    """The schedule "hotline"; see `recsys.pipeline.Hotline`."""

    learning_share: float = _key(
        0.05,
        "share of the steps after which it repeats the choice of popular rows",
        least=0,
        most=1,
    )
    pinned_share: float = _key(
        0.5, "share of the fast memory that popular rows may keep", least=0, most=1
    )


class FAEConfig(Keys):
    """The schedule "fae"; see `recsys.pipeline.FAE`."""

    rate: float = _key(
        50.0,
        "percent of the cold, then of the hot mini-batches issued before it switches",
        above=0,
        most=100,
    )
    adaptive: bool = _key(True, "change the rate by the validation loss")
    min_rate: float = _key(1.0, "lowest rate", above=0, most=100)
    max_rate: float = _key(100.0, "highest rate", above=0, most=100)
    patience: int = _key(4, "falls of the loss in a row that raise the rate", least=1)
    factor: float = _key(2.0, "factor by which the rate rises, or falls", above=1)


class ScheduleConfig(Kinds):
    """When rows are fetched, mini-batches computed and rows updated.

    "hotline" changes the order in which floats are summed. "fae" changes the order of samples, and
    with it the results. The other schedules give bit-equal results on the CPU.
    """

    sequential: Keys | None = _key(None, "rows are fetched in the step that needs them")
    lookahead: LookAheadConfig | None = _key(None, "rows are fetched while others are computed")
    hotline: HotlineConfig | None = _key(None, "popular samples are computed during the fetch")
    fae: FAEConfig | None = _key(None, "hot and cold mini-batches in turns")
    auto: Keys | None = _key(None, "the faster of sequential and lookahead, measured")


class StalenessConfig(Keys):
    """When a row counts as stale; see `recsys.embeddings.Staleness`."""

    window: int = _key(1000, "steps over which rows' drift is measured", least=33)
    min_updates: int = _key(16, "updates in a window; a row with fewer is unknown", least=1)
    patience: int = _key(2, "windows in a row that a row's drift must be small", least=1)
    max_rows: int = _key(2**17, "rows that are followed at once", least=1)
    count_every: int = _key(4, "updates are counted in every n-th step", least=1)

    def settings(self) -> Staleness:
        """The settings of a tracker with these keys.

        Raises:
            ConfigError: keys conflict.
        """
        return Staleness(**self.model_dump())


class GuardConfig(Keys):
    """When quality is checked, and what it may lose; see `recsys.pipeline.Guard`."""

    every: int = _key(1000, "steps from one check to the next; 0: no guard", least=0)
    steps: int = _key(50, "steps of a check, in which nothing is skipped", least=10)
    logloss: float = _key(0.01, "rise of the logloss allowed, relative", above=0)
    calibration: float = _key(0.02, "change of calibration allowed, relative", above=0)

    @model_validator(mode="after")
    def _check(self) -> GuardConfig:
        others = [name for name in self.keys_set() if name != "every"]
        if self.every == 0 and others:
            raise ConfigError(
                f"{others[0]} needs a guard, got {getattr(self, others[0])} with every 0; set "
                "every above 0, or drop the key"
            )
        return self

    def settings(self) -> Guard | None:
        """The guard of these keys; None for no guard.

        Raises:
            ConfigError: keys conflict.
        """
        return Guard(**self.model_dump()) if self.every else None


class _ShareConfig(Keys):
    share: float = _key(0.2, "share of the samples to skip", above=0, most=0.95)


class ObserveConfig(_ShareConfig):
    """The policy "observe"."""

    staleness: StalenessConfig = _key(StalenessConfig, "when a row is stale")


class DropInputConfig(ObserveConfig):
    """The policies "drop_input" and "freeze_rows"."""

    guard: GuardConfig = _key(GuardConfig, "checks of quality, which lower or stop skipping")


class SubsampleConfig(DropInputConfig):
    """The policy "subsample"."""

    keep: float = _key(0.25, "share of stale samples that it keeps", above=0, most=0.95)
    seed: int = _key(0, "seed of random choices; 0: the seed of the run", least=0)


class ImportanceConfig(Keys):
    """The policy "importance"; see `recsys.pipeline.Importance`."""

    share: float = _key(0.25, "share of the samples to skip", above=0, most=0.95)
    least: float = _key(0.1, "least probability of a sample to be kept", above=0, most=0.95)
    bits: int = _key(16, "the model that predicts samples has 2**bits weights", least=8, most=24)
    lr: float = _key(0.05, "its learning rate", above=0, most=1)
    warm_up: int = _key(100, "mini-batches that are kept whole first", least=0)
    seed: int = _key(0, "seed of random choices; 0: the seed of the run", least=0)
    guard: GuardConfig = _key(GuardConfig, "checks of quality, which lower or stop skipping")


class RandomDropConfig(_ShareConfig):
    """The policy "random_drop"."""

    weighted: bool = _key(False, "whether the others get weight 1 / (1 - share)")
    refill: bool = _key(True, "whether later samples replace those left out")
    seed: int = _key(0, "seed of random choices; 0: the seed of the run", least=0)


class PaperConfig(Keys):
    """The constants of Slipstream's published code; see `recsys.pipeline.Paper`."""

    first_snapshot: int = _key(
        1000, "hot mini-batch of an epoch before the first snapshot", least=0
    )
    window_share: float = _key(
        0.03, "hot mini-batches between the snapshots, as a share", least=0, most=1
    )
    target: float = _key(0.3, "share of hot samples to drop", least=0, most=1)
    tolerance: float = _key(0.08, "how far from target the share may be", least=0, most=1)
    highest_threshold: float = _key(0.1, "the highest threshold tried", above=0)
    first_threshold: float = _key(0.05, "the threshold tried first", above=0)
    max_tries: int = _key(25, "thresholds tried at most", least=1)
    sample_share: float = _key(
        0.001, "hot samples that the threshold is found on, as a share", least=0, most=1
    )
    seed: int = _key(0, "seed of random choices; 0: the seed of the run", least=0)


class SkipConfig(Kinds):
    """Which samples, or updates of rows, a run leaves out."""

    default_kind = "none"

    none: Keys | None = _key(None, "nothing is left out")
    observe: ObserveConfig | None = _key(None, "nothing; staleness is measured")
    drop_input: DropInputConfig | None = _key(None, "samples whose rows are all stale")
    freeze_rows: DropInputConfig | None = _key(None, "updates of stale rows")
    subsample: SubsampleConfig | None = _key(
        None, "a part of the samples whose rows are all stale; the others get a larger weight"
    )
    importance: ImportanceConfig | None = _key(
        None,
        "samples that a small model predicts well: a sample is kept with a probability that grows "
        "with its error, and has weight 1 / probability",
    )
    random_drop: RandomDropConfig | None = _key(None, "random samples, for comparison")
    paper: PaperConfig | None = _key(None, "what Slipstream's published code leaves out")

    @model_validator(mode="after")
    def _check(self) -> SkipConfig:
        try:
            self.settings(0)
        except ConfigError as error:
            owner, _, fault = str(error).partition(": ")
            table = {"staleness": "staleness.", "Guard": "guard."}.get(owner, "")
            raise ConfigError(f"{self.kind}.{table}{fault}") from None
        return self

    def settings(self, run_seed: int) -> Policy | Paper | None:
        """The policy of these keys; None to train on everything.

        Args:
            run_seed: The seed of the run, for `seed` 0.

        Raises:
            ConfigError: keys conflict.
        """
        if self.kind == "none":
            return None
        values: dict[str, Any] = dict(getattr(self, self.kind))
        for name in {"staleness", "guard"} & set(values):
            values[name] = values[name].settings()
        if "seed" in values:
            values["seed"] = values["seed"] or run_seed
        if self.kind == "paper":
            from recsys.pipeline.skip.paper import Paper  # imports PyTorch

            return Paper(**values)
        return _POLICIES[self.kind](**values)

    @property
    def staleness(self) -> StalenessConfig | None:
        """When a row is stale; None for a policy that does not follow the drift of rows."""
        return getattr(getattr(self, self.kind), "staleness", None)

    @property
    def needs_rows(self) -> bool:
        """Whether the policy follows rows, or learns from row numbers."""
        return self.staleness is not None or self.kind == "importance"


_POLICIES: dict[str, Callable[..., Policy]] = {
    "observe": Observe,
    "drop_input": DropInput,
    "freeze_rows": FreezeRows,
    "subsample": Subsample,
    "importance": Importance,
    "random_drop": RandomDrop,
}


class TrainConfig(Keys):
    """One training run."""

    data: _Text = _key(
        _SYNTHETIC,
        "a store, or synthetic:criteo-kaggle; a command is given it as STORE",
        resume="free",
    )
    seed: int = _key(0, "seed of initial values and of the order of samples", least=0)
    epochs: int = _key(1, "passes over the training split", least=1, resume="free", common=True)
    batch_size: int = _key(128, "samples per step", least=1, common=True)
    device: Literal["cpu", "cuda"] = _key("cpu", "device of the model", resume="free", common=True)
    num_threads: int = _key(
        0,
        "threads that compute; 0: OMP_NUM_THREADS if it is set, else one per free core",
        least=0,
        resume="free",
    )
    prefetch: int = _key(4, "mini-batches read ahead, at least", least=1, resume="free")
    shuffle: bool = _key(
        True, "train on the samples in an order drawn for every epoch; false: in that of the data"
    )
    permutation_seed: int = _key(
        0, "seed of an order of samples within mini-batches, to see rounding; 0: none", least=0
    )
    precision: Literal["fp32", "bf16"] = _key(
        "fp32", "of the dense part; bf16 keeps parameters in fp32"
    )
    row_dtype: Literal["float32"] = _key("float32", "type of the numbers in embedding rows")
    init_from: _Text = _key(
        "",
        "folder of a run whose saved model is the start of this one; empty: initial values by seed",
    )
    save_model: bool = _key(True, "keep the model in the run's folder", resume="free")
    callbacks: Annotated[tuple[_Callback, ...], Field(strict=False)] = _key(
        (),
        "called while the run trains: tensorboard, mlflow, wandb, or module:Class",
        resume="free",
    )
    embeddings: Literal["recsys", "torch"] = _key(
        "recsys", "implementation; torch: nn.EmbeddingBag"
    )
    budget: _Text = _key(
        "",
        "fast memory for rows: 256MiB, or a number of bytes; empty: every row is resident",
        resume="free without fae",
        common=True,
    )
    plan: _Text = _key(
        "",
        "file written by `recsys plan`: rows that never leave fast memory",
        resume="free without fae",
    )
    cold_tier: Literal["host", "file"] = _key(
        "host", "tier of the other rows: RAM, or disk", resume="free", common=True
    )
    cold_path: _Text = _key(
        "", "folder on the disk for cold_tier file; empty: the disk of the run", resume="free"
    )
    model: ModelConfig = _key(ModelConfig, "shape of the model")
    optimizer: OptimizerConfig = _key(OptimizerConfig, "update of the embedding rows")
    dense_optimizer: OptimizerConfig | None = _key(None, "update of the dense part")
    lr_schedule: LearningRateConfig = _key(LearningRateConfig, "learning rates over the run")
    schedule: Annotated[ScheduleConfig, BeforeValidator(ScheduleConfig.from_text)] = _key(
        ScheduleConfig,
        "order of fetching rows, computing and updating",
        derived="lookahead with files or cuda, else sequential",
        resume="free without fae",
        common=True,
    )
    skip: Annotated[SkipConfig, BeforeValidator(SkipConfig.from_text)] = _key(
        SkipConfig, "samples, or updates of rows, that are left out", common=True
    )
    eval: EvalConfig = _key(EvalConfig, "evaluation during training", resume="free")
    early_stopping: EarlyStoppingConfig = _key(
        EarlyStoppingConfig, "end of training once evaluations stop improving", resume="free"
    )
    checkpoint: CheckpointConfig = _key(
        CheckpointConfig, "checkpoints, to resume the run", resume="free"
    )
    synthetic: SyntheticConfig = _key(SyntheticConfig, "synthetic data")

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        """Check keys that need each other, and complete the optimizer of the dense part."""
        if self.is_synthetic and self.data != _SYNTHETIC:
            raise ConfigError(f"data must be {_SYNTHETIC!r} if synthetic, got {self.data!r}")
        if len(set(self.callbacks)) < len(self.callbacks):
            raise ConfigError(f"callbacks must have each name once, got {list(self.callbacks)}")
        if self.budget:
            parse_bytes(self.budget, "budget")
        if self.cold_path and self.cold_tier == "host":
            raise ConfigError(
                f"cold_path is for cold_tier 'file', got {self.cold_path!r} with 'host'; "
                "leave it out, or set cold_tier to 'file'"
            )
        if self.dense_optimizer is not None:
            dense = self.optimizer.for_dense(self.dense_optimizer)
            if "rowwise" in dense.name:
                raise ConfigError(
                    f"dense_optimizer.name must be 'sgd', 'adagrad' or 'adam', got {dense.name!r}, "
                    "which is for rows"
                )
            object.__setattr__(self, "dense_optimizer", dense)
        _check_embeddings(self)
        _check_order(self)
        return self

    @property
    def is_synthetic(self) -> bool:
        """Whether the data is made, not read."""
        return self.data.startswith(SYNTHETIC_PREFIX)

    @property
    def resolved_dense_optimizer(self) -> OptimizerConfig:
        """The optimizer of the dense part; derived from `optimizer` when not set."""
        return self.dense_optimizer or self.optimizer.for_dense()


class AblationKeys(Keys):
    """The keys of the table `[ablate]` of an ablation, without variations and grid."""

    seeds: Annotated[tuple[_Seed, ...], Field(strict=False, min_length=1)] = _key(
        ..., "seeds of every variation, in the order in which they run"
    )
    target_auc: float = _key(0.0, "measure the training time to it; 0: none", least=0, most=1)
    target_split: Literal["validation", "test"] = _key("test", "split of that AUC")
    eval_every_samples: int = _key(4096, "training samples between two evaluations", least=1)
    baseline: _Text = _key("", "variation with which the others are compared; empty: none")
    late_share: float = _key(
        0.0, "last share of the training over which quality is averaged; 0: none", least=0, most=1
    )

    @model_validator(mode="after")
    def _check(self) -> AblationKeys:
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds must be distinct, got {list(self.seeds)}")
        return self


def _check_embeddings(config: TrainConfig) -> None:
    """Refuse keys that need the embeddings of recsys with other ones."""
    averaged = [table for table, pooling in config.model.pooling.items() if pooling == "mean"]
    needed = (
        (bool(config.budget), "budget"),
        (bool(config.plan), "plan"),
        (bool(averaged), f"model.pooling.{''.join(averaged[:1])}"),
        (config.skip.needs_rows, f"skip {config.skip.kind!r}"),
    )
    for is_set, name in needed:
        if is_set and config.embeddings != "recsys":
            raise ConfigError(
                f"{name} needs embeddings 'recsys', got {config.embeddings!r}; leave it out, or "
                "choose embeddings 'recsys'"
            )


def _check_order(config: TrainConfig) -> None:
    """Refuse what does not go together because both decide the order of samples."""
    skip, fae = config.skip.kind, config.schedule.fae
    if fae is not None and (config.permutation_seed or not config.shuffle):
        raise ConfigError(
            "shuffle false and permutation_seed are not for schedule 'fae', which orders samples "
            "by their rows; drop the key, or choose another schedule"
        )
    if skip == "paper" and (fae is None or fae.rate != 100 or fae.adaptive):
        raise ConfigError(
            "skip 'paper' trains on all cold and then on all hot mini-batches of an epoch; set "
            "schedule.fae.rate to 100 and schedule.fae.adaptive to false"
        )
    if skip == "paper" and config.model.table_dims:
        raise ConfigError(
            "skip 'paper' is for tables of one embedding_dim, got model.table_dims "
            f"{config.model.table_dims}; drop one"
        )
    if skip not in ("none", "paper") and fae is not None:
        raise ConfigError(
            f"skip {skip!r} does not go with schedule 'fae', whose order of samples is planned "
            "beforehand; choose another schedule"
        )


class Key(NamedTuple):
    """One key of a configuration, as help shows it.

    Attributes:
        group: Title of the table that it is in.
        name: Its dotted name.
        default: Its default, or words for one that depends on other keys.
        meaning: What it means.
        accepts: The values it accepts, in words.
        resume: As in `_key`, and never empty.
        common: As in `_key`.
        same_as: The table with the same keys that comes first; empty for the first.
    """

    group: str
    name: str
    default: Any
    meaning: str
    accepts: str
    resume: Resume
    common: bool = False
    same_as: str = ""


def walk_keys(keys: type[Keys] = TrainConfig) -> Iterator[Key]:
    """Every key of a table and of the tables in it.

    Args:
        keys: The table.
    """
    return _walk(keys, {}, Key("run", "", "", "", "", "fixed"))


def _walk(keys: type[Keys], seen: dict[type, str], table: Key) -> Iterator[Key]:
    """Every key of a table.

    Args:
        keys: The table.
        seen: The name of the first table of each class so far; extended.
        table: What its keys inherit.
    """
    tables = {name: _table_of(keys, name) for name in keys.model_fields}
    for own_name, inner in sorted(tables.items(), key=lambda item: item[1] is not None):
        field, name = keys.model_fields[own_name], f"{table.name}.{own_name}".removeprefix(".")
        about = cast("dict[str, Any]", field.json_schema_extra)
        key = table._replace(
            name=name,
            default=f"as in {table.same_as}"
            if table.same_as
            else about["derived"] or field.get_default(call_default_factory=True),
            meaning=field.description or "",
            resume=about["resume"] or table.resume,
            common=about["common"] and not table.same_as,
        )
        if inner is None:
            yield key._replace(accepts=_words(field.annotation) + about["range"])
            continue
        first = table.same_as or seen.setdefault(inner, name)
        if not table.same_as:
            key = key._replace(
                group=f"{name}: {key.meaning}", same_as="" if first == name else first
            )
        if issubclass(inner, Kinds):
            kinds = f"one of {', '.join(inner.model_fields)}"
            yield key._replace(default=about["derived"] or inner.default_kind, accepts=kinds)
        yield from _walk(inner, seen, key)


def _table_of(keys: type[Keys] | None, name: str) -> type[Keys] | None:
    """The class of a key that is a table of keys, optional or not; None for any other key.

    Args:
        keys: The table that it is in; None for none.
        name: The key.
    """
    annotation = (
        None
        if keys is None or name not in keys.model_fields
        else keys.model_fields[name].annotation
    )
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, Keys):
            return choice
    return None


def _words(kind: Any) -> str:
    """What values of a type are."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(filter(None, inner))}"
    if origin is Annotated:
        return _words(inner[0])
    if origin is tuple:
        return f"list of {_words(inner[0])}s"
    if origin is dict:
        return f"by name: {_words(inner[1])}"
    return _WORDS[kind]


def _explain(keys: type[Keys], error: ValidationError) -> str:
    """The first fault that pydantic found: key, rule, value and hint."""
    fault = error.errors()[0]
    path, kind, cause = fault["loc"], fault["type"], fault.get("ctx", {}).get("error")
    name, value = ".".join(map(str, path)), repr(fault["input"])[:60]
    if isinstance(cause, ConfigError):  # of keys beside each other, or in a table
        return f"{name}.{cause}" if name else str(cause)
    if kind == "missing":
        return f"{name} is required; set it"
    if kind == "extra_forbidden":
        return f"{name} is not a key; {_nearest(keys, str(path[-1]))}"
    if kind == "model_type":
        table = _table_of(keys, str(path[0]))
        has_name = isinstance(fault["input"], str) and table and "name" in table.model_fields
        hint = f"; did you mean {name}.name={fault['input']}?" if has_name else ""
        return f"{name} must be a table of keys, got {value}{hint}"
    rule = re.sub(r"^(Value error,|\w+) (should|must)", "must", fault["msg"])
    rule = rule.replace("tuple", "list").replace("dictionary", "table")
    return f"{name} {rule}, got {value}"


def _nearest(keys: type[Keys], name: str) -> str:
    """The keys of a table, or of the tables in it, whose own name is most like a mistyped one."""
    places = {own: [own] for own in keys.model_fields}
    for found in walk_keys(keys):
        if "." in found.name and not found.same_as:
            places.setdefault(found.name.rpartition(".")[2], []).append(found.name)
    close = difflib.get_close_matches(name, places, n=1)
    if not close:
        return f"keys are {', '.join(keys.model_fields)}"
    return f"did you mean {' or '.join(places[close[0]][:3])}?"


def format_keys(keys: type[Keys], *, common: bool = False) -> str:
    """Every key with its meaning, type, range and default, in groups, as `--help` prints them.

    Args:
        keys: The keys.
        common: Show those alone that most runs set.
    """
    width = max(80, shutil.get_terminal_size().columns)
    lines: list[str] = []
    shown = [found for found in walk_keys(keys) if found.common or not common]
    for (group, same_as), members in groupby(shown, lambda found: (found.group, found.same_as)):
        lines += [] if common else ["", group + (f" (keys as in {same_as})" if same_as else "")]
        for found in () if same_as else members:
            is_bare = isinstance(found.default, str) and found.default
            default = found.default if is_bare else json.dumps(found.default)
            meaning = textwrap.wrap(
                f"{found.meaning} ({found.accepts}; default {default})",
                width - _MEANING_COLUMN,
                break_long_words=False,
                break_on_hyphens=False,
            )
            name = f"  {found.name}"
            if len(name) > _MEANING_COLUMN - 2:  # the meaning begins on the next line
                lines.append(name)
                name = ""
            lines.append(f"{name:<{_MEANING_COLUMN}}{meaning[0]}")
            lines += [" " * _MEANING_COLUMN + line for line in meaning[1:]]
    return "\n".join(lines)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested keys, by dotted key: `{"eval": {"split": x}}` has `eval.split`.

    Args:
        tree: The nested keys.
        prefix: What stands before each name, with a dot at its end.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def load_config(
    file: Path | None = None, settings: Sequence[str] = (), **values: Any
) -> TrainConfig:
    """Build a configuration from a TOML file, settings and keyword values; later ones win.

    Args:
        file: TOML; keys with dots are tables.
        settings: Strings such as `optimizer.lr=0.01`. A value is read as TOML; one that is not
            TOML is taken as a string.
        values: Top-level keys, by name.

    Returns:
        The configuration.

    Raises:
        ConfigError: a key is unknown, or a value is not what the key accepts.
    """
    for setting in settings:
        name = setting.partition("=")[0].strip()
        if name in values:
            raise ConfigError(f"{name} is set elsewhere on the command line; drop {setting!r}")
    return build_from_file(lambda tree: TrainConfig(**tree | values), file, settings)


def build_from_file(
    make: Callable[[dict[str, Any]], _T],
    file: Path | None,
    settings: Sequence[str],
) -> _T:
    """Build a configuration from a TOML file and settings; errors name the file if it is at fault.

    Args:
        make: Builds a configuration from nested keys.
        file: As for `read_tree`.
        settings: As for `read_tree`.

    Returns:
        What `make` returns.

    Raises:
        ConfigError: as `read_tree` and `make` raise it.
    """
    tree = read_tree(file, settings)
    try:
        return make(tree)
    except ConfigError as error:
        fault = error
    try:
        make(read_tree(None, settings))
    except ConfigError as error:
        if str(error) == str(fault):  # the settings have the fault without the file
            raise
    raise ConfigError(f"{file}: {fault}")


def read_tree(file: Path | None = None, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read the nested keys of a TOML file and apply settings; no value is checked yet.

    Args:
        file: TOML; keys with dots are tables. None for no file.
        settings: Strings such as `optimizer.lr=0.01`, which win over the file.

    Returns:
        The nested keys.

    Raises:
        ConfigError: the file is not TOML, or a setting is not key=value.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            tree = parse_toml(file.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise ConfigError(f"{file} is not TOML: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"configuration {file} cannot be read: {error.strerror}; name a TOML file"
            ) from error
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"a setting must be key=value, got {setting!r}")
        put_key(tree, name.strip(), _parse_value(text.strip()))
    return tree


def to_toml(config: TrainConfig) -> str:
    """The whole `config` as TOML."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def describe_config(config: TrainConfig) -> dict[str, Any]:
    """The whole `config` in JSON types, with the dense optimizer resolved."""
    dense = config.resolved_dense_optimizer.model_dump()
    return {**config.model_dump(exclude_none=True), "dense_optimizer": dense}


def put_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested keys; a key of another kind, as of schedule, replaces the first.

    Args:
        tree: The nested keys; changed.
        key: Names joined by dots.
        value: The value of the key.

    Raises:
        ConfigError: a part before the last dot is a value, not a table, or there are many dots.
    """
    parts = key.split(".")
    *tables, last = parts
    if len(tables) > _MOST_TABLES:
        raise ConfigError(
            f"key {key[:40]}... must be in at most {_MOST_TABLES} tables, got {len(tables)}"
        )
    keys: type[Keys] | None = TrainConfig
    for name, inner_name in zip(tables, parts[1:], strict=True):
        keys = _table_of(keys, name)
        is_choice = keys is not None and issubclass(keys, Kinds)
        inner = tree.setdefault(name, {})
        if is_choice and isinstance(inner, str):
            inner = tree[name] = {inner: {}}
        if not isinstance(inner, dict):
            raise ConfigError(f"key {key}: {name} is a value, not a table")
        if is_choice and inner_name not in inner:
            inner.clear()
        tree = inner
    if isinstance(value, str) and isinstance(tree.get(last), dict) and value in tree[last]:
        return  # the kind that it is, whose keys stay
    tree[last] = value


def _parse_value(text: str) -> Any:
    try:
        tree = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return tree["value"] if list(tree) == ["value"] else text  # text may have several lines
