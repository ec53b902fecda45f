"""The configuration of a training run: frozen models of keys, valid once built.

    TrainConfig
    |-- model: ModelConfig                architecture and its sizes
    |   |-- interaction: InteractionConfig  dot, masked_transformer
    |   `-- dcn_v2, din, tbsm, two_tower, sasrec
    |                                   constants of the model of this name
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

import dataclasses
import difflib
import json
import reprlib
import shutil
import textwrap
from contextlib import suppress
from itertools import groupby, pairwise
from math import cos, pi, prod
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
    get_type_hints,
)

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from recsys._support.sizes import parse_bytes
from recsys._support.untrusted import LIMITS, AbstractSettings, parse_toml
from recsys.errors import ConfigError, refuse
from recsys.pipeline.schedule import LookAhead
from recsys.pipeline.skip.policies import (
    DropInput,
    FreezeRows,
    Importance,
    Observe,
    Paper,
    Policy,
    RandomDrop,
    Subsample,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "AblationKeys",
    "CheckpointConfig",
    "CrossNetConfig",
    "DINConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "FAEConfig",
    "HotlineConfig",
    "InteractionConfig",
    "Keys",
    "LearningRateConfig",
    "ModelConfig",
    "OptimizerConfig",
    "SASRecConfig",
    "ScheduleConfig",
    "SkipConfig",
    "SyntheticConfig",
    "TBSMConfig",
    "TrainConfig",
    "TransformerConfig",
    "TwoTowerConfig",
    "VariationKeys",
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

_KeysT = TypeVar("_KeysT", bound="Keys")
_Table = type["Keys"] | type[AbstractSettings]
Resume = Literal["", "free", "fixed", "free without fae"]
# What values of a type are, and their limits, in words.
_WORDS: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}
_FORMS: dict[Any, str] = {Annotated: "{0}", tuple: "list of {0}s", dict: "by name: {1}"}
SYNTHETIC_PREFIX = "synthetic:"
_SYNTHETIC = f"{SYNTHETIC_PREFIX}criteo-kaggle"
RETRIEVAL_MODELS = ("two_tower", "sasrec")
_MODELS = ("dlrm", "dcn_v2", "deepfm", "din", "tbsm", *RETRIEVAL_MODELS)
_HIDDEN = (512, 256, 64)  # of the default dense_arch
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

_Text = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]  # budget=135050380
_Whole = Annotated[int, Field(ge=0, lt=2**63)]
_Count = Annotated[int, Field(ge=1, lt=2**63)]
_Counts = Annotated[tuple[_Count, ...], Field(strict=False, min_length=1)]
_TwoCounts = Annotated[tuple[_Count, ...], Field(strict=False, min_length=2)]
# A rank times a multiplier below the table's size must fit in 63 bits.
_Rows = Annotated[int, Field(ge=1, le=2**31)]
_Rate = Annotated[float, Field(ge=0, lt=1)]
_Class = r"[A-Za-z_][\w.]*:\w+"  # module:Class, the module named as in an import
_Callback = Annotated[str, Field(pattern=rf"^(tensorboard|mlflow|wandb|{_Class})$")]


def _key(
    default: Any,
    meaning: str,
    *,
    derived: str = "",
    resume: Resume = "",
    common: bool = False,
    **limits: float,
) -> Any:
    """The field of one key, or of a table of keys.

    Args:
        default: Its default; for one that is derived from the keys before it, a function of them.
        meaning: The line that `recsys train --help` prints.
        derived: The default in words, where it is derived from other keys.
        resume: Whether a run that continues may have another value: "free", "fixed", or
            "free without fae"; empty: as the table that it is in. The whole is fixed.
        common: Whether most runs set it; help shows it first.
        limits: The numbers that it accepts, as for `pydantic.Field`.
    """
    about: Any = {"derived": derived, "resume": resume, "common": common}
    given: Any = {"default_factory" if callable(default) else "default": default, **limits}
    return Field(description=meaning, json_schema_extra=about, **given)


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

    def _require(self, switch: str, *, off: Any, but: str = "") -> Self:
        """Refuse keys that have no effect while `switch` is off, all others but one; returns self.

        Args:
            switch: The key that the others need.
            off: Its value with which they have no effect.
            but: A key that needs no other.
        """
        others = sorted(self.model_dump(exclude_defaults=True).keys() - {switch, but})
        refuse(
            (
                getattr(self, switch) == off and bool(others),
                f"{', '.join(others)} needs {switch}, which is {off!r}; set it, or drop the key",
            )
        )
        return self


class Kinds(Keys):
    """Tables of keys of which one is set at most: its name, the kind, says what is done.

    A kind may be given by its name: "lookahead" is `{"lookahead": {}}`.
    """

    default_kind: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        value = value or cls.default_kind or {}
        if isinstance(value, dict) and len(value) > 1:
            raise ConfigError(f"{' and '.join(value)} are set; drop one of the tables")
        return {value: {}} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _as_tree(self, handler: SerializerFunctionWrapHandler) -> Any:
        tree = {name: keys for name, keys in handler(self).items() if keys is not None}
        return tree if any(tree.values()) else self.kind

    @property
    def kind(self) -> str:
        """The name of the kind; empty if none is set and there is no default."""
        return next(iter(self.model_fields_set), "")


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
    lr: float = _key(0.1, "learning rate", ge=0, common=True)
    eps: float = _key(
        lambda keys: 1e-8 if keys["name"].endswith("adam") else 1e-10,
        "added to the denominator; torch's default: adam 1e-8, else 1e-10",
        derived="depends on name",
        ge=0,
    )
    betas: Annotated[tuple[_Rate, _Rate], Field(strict=False)] = _key(
        (0.9, 0.999), "decay rates of Adam's two averages, per step"
    )

    def for_dense(self, dense: OptimizerConfig | None = None) -> OptimizerConfig:
        """The optimizer of the dense part, which takes from this one what it does not set.

        Args:
            dense: What it sets; None for nothing.
        """
        counterpart = self.name.rpartition("rowwise_")[2]
        own = {} if dense is None else dense.model_dump(exclude_unset=True)
        return replace(self, **{"name": counterpart} | own)


class LearningRateConfig(Keys):
    """How learning rates change over a run; the same factor for the dense part and the rows."""

    warmup_steps: _Whole = _key(0, "steps over which rates rise to their full value")
    decay: Literal["none", "linear", "cosine"] = _key("none", "how rates fall")
    decay_start: _Whole = _key(0, "step at which rates begin to fall; 0: after warm-up")
    decay_steps: _Whole = _key(0, "steps over which they fall; 0: to the end of the run")
    final: float = _key(0.0, "factor that remains at the end", ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(
            (
                0 < self.decay_start < self.warmup_steps,
                f"decay_start must be at least warmup_steps {self.warmup_steps}, or 0 for the end "
                f"of warm-up; got {self.decay_start}",
            )
        )
        return self._require("decay", off="none", but="warmup_steps")

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

    every_steps: _Whole = _key(
        0,
        "steps between evaluations; 0: ten evaluations an epoch, or one each step",
        common=True,
    )
    split: Literal["validation", "test"] = _key("validation", "split to evaluate on")
    max_samples: _Count = _key(
        50_000,
        "samples per evaluation, from the start of the split",
        resume="free without fae",
    )
    batch_size: _Count = _key(2048, "samples per forward pass", resume="free without fae")
    ranking_k: _Count = _key(20, "recall and NDCG count the first k items, for data to be ranked")
    ranking_groups: _Whole = _key(
        1000,
        "bound of the questions that are ranked at the end: so many groups are drawn by the data "
        "alone, with one question each; of fewer groups, more of each; 0: all questions of all",
    )


class EarlyStoppingConfig(Keys):
    """When training ends before its last step: once evaluations stop improving."""

    patience: _Whole = _key(
        0, "evaluations without an improvement after which training ends; 0: never"
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
        0.0, "an evaluation that is better by more than this is an improvement", ge=0
    )
    keep: Literal["best", "last"] = _key(
        "best", "weights that the run saves and evaluates at its end"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self._require("patience", off=0)


class CheckpointConfig(Keys):
    """When a run writes checkpoints: after a time or a number of steps, whichever comes first.

    With `every_seconds` and `every_steps` both 0 it writes none, not even after Ctrl-C.
    """

    every_seconds: float = _key(600.0, "seconds between checkpoints; 0: not by time", ge=0)
    every_steps: _Whole = _key(0, "steps between checkpoints; 0: not by steps")


class SyntheticConfig(Keys):
    """What synthetic data looks like; see `recsys.datasets.SyntheticCriteo`."""

    num_samples: int = _key(1_000_000, "samples in all splits together", ge=7)
    seed: _Whole = _key(0, "seed of the data; the run has its own")
    table_sizes: Annotated[tuple[_Rows, ...], Field(strict=False)] = _key(
        (), "rows per table; empty: Kaggle's 26 sizes"
    )
    test_samples: _Whole = _key(
        0,
        "samples to test on, and as many to validate on; 0: a fourteenth of all samples each",
    )


class CrossNetConfig(Keys):
    """The cross network of `dcn_v2`."""

    num_layers: _Count = _key(3, "cross layers")
    low_rank_dim: _Count = _key(64, "rank of each layer's matrix")


class DINConfig(Keys):
    """The attention of `din`."""

    attention: _Counts = _key((80, 40), "hidden layers of the activation unit")


class TBSMConfig(Keys):
    """The tower and the time-series layer of `tbsm`."""

    num_steps: _Count = _key(20, "steps of the history; older ones are left out")
    num_heads: _Count = _key(1, "contexts that are computed from the history")
    tower: _TwoCounts = _key((15, 15), "MLP after the dot products of one step")


class _RetrievalConfig(Keys):
    num_sampled: _Whole = _key(
        0, "items drawn for each mini-batch, beside its own; 0: all items are compared"
    )
    id_dropout: float = _key(
        0.0, "share of the steps of histories left out in training", ge=0, le=0.95
    )
    row_decay: float = _key(0.0, "weight decay of the rows that samples look up", ge=0)


class TwoTowerConfig(_RetrievalConfig):
    """The towers of `two_tower`."""

    mlp: _Counts = _key((128,), "hidden layers of the user's tower")
    dropout: float = _key(0.0, "dropout of its input", ge=0, le=0.95)


class SASRecConfig(_RetrievalConfig):
    """The attention of `sasrec`."""

    num_steps: _Count = _key(20, "steps of the history; older ones are left out")
    num_blocks: _Count = _key(2, "blocks of attention and MLP")
    num_heads: _Count = _key(2, "attention heads; they divide embedding_dim")
    dropout: float = _key(0.2, "dropout of rows, attention and MLP", ge=0, le=0.95)


class TransformerConfig(Keys):
    """The interaction `masked_transformer`."""

    num_layers: _Count = _key(1, "blocks of attention and MLP")
    num_heads: _Count = _key(2, "attention heads; they divide embedding_dim")
    feedforward: _Count = _key(2, "hidden width of a block's MLP, in units of embedding_dim")
    mask: Literal["none", "causal", "learned"] = _key("learned", "what a token attends to")
    kept: _Count = _key(8, "tokens that a token attends to with mask learned")


class InteractionConfig(Kinds):
    """How `dlrm` combines the rows of a sample."""

    default_kind = "dot"

    dot: Keys | None = _key(None, "dot products of all pairs")
    masked_transformer: TransformerConfig | None = _key(None, "masked attention before them")


class ModelConfig(Keys):
    """Shape of the model."""

    name: Annotated[str, Field(pattern=rf"^({'|'.join(_MODELS)}|{_Class})$")] = _key(
        "dlrm",
        f"architecture: {', '.join(_MODELS)}, or module:Class for a module of your own",
        common=True,
    )
    embedding_dim: _Count = _key(16, "columns of every table", common=True)
    table_dims: dict[str, _Count] = _key({}, "embedding_dim of single tables: table_dims.NAME=N")
    pooling: dict[str, Literal["sum", "mean"]] = _key(
        {}, "sum or mean of a bag's rows, by table: pooling.NAME=mean; default: sum"
    )
    dense_arch: _Counts = _key(
        lambda keys: (*_HIDDEN, keys["embedding_dim"]),
        "bottom MLP; ends in embedding_dim",
        derived=f"[{', '.join(map(str, _HIDDEN))}, embedding_dim]",
    )
    over_arch: _TwoCounts = _key((512, 256, 1), "top MLP; ends in 1")
    interaction: InteractionConfig = _key(
        InteractionConfig, "of dlrm: dot products of all pairs, or masked attention before them"
    )
    init: Literal["classic", "torch"] = _key(
        "classic", "initial values: facebookresearch/dlrm's, or nn.Linear's own"
    )
    dcn_v2: CrossNetConfig | None = _key(None, "constants of dcn_v2")
    din: DINConfig | None = _key(None, "constants of din")
    tbsm: TBSMConfig | None = _key(None, "constants of tbsm")
    two_tower: TwoTowerConfig | None = _key(None, "constants of two_tower")
    sasrec: SASRecConfig | None = _key(None, "constants of sasrec")

    @model_validator(mode="after")
    def _check(self) -> Self:
        constants = _table_of(type(self), self.name)
        if constants is not None and getattr(self, self.name) is None:
            object.__setattr__(self, self.name, constants())
        for name in _MODELS:
            is_unread = name != self.name and getattr(self, name, None) is not None
            refuse((is_unread, f"{name} is for name {name!r}, got name {self.name!r}; drop one"))
        has_bottom = self.name in ("dlrm", "dcn_v2", "deepfm", "tbsm")
        refuse(
            (
                has_bottom and self.dense_arch[-1] != self.embedding_dim,
                f"dense_arch must end in embedding_dim {self.embedding_dim}, got "
                f"{list(self.dense_arch)}",
            ),
            (self.over_arch[-1] != 1, f"over_arch must end in 1, got {list(self.over_arch)}"),
            (
                self.name != "dlrm" and self.interaction.kind != "dot",
                f"interaction {self.interaction.kind!r} is for name 'dlrm', got {self.name!r}; "
                "drop one",
            ),
            (
                self.name in ("din", "tbsm", *RETRIEVAL_MODELS)
                and bool(self.table_dims or self.pooling),
                "table_dims and pooling are for models that pool their bags in the lookup, got "
                f"name {self.name!r}; drop them",
            ),
        )
        return self


class HotlineConfig(Keys):
    """The schedule "hotline"; see `recsys.pipeline.Hotline`."""

    learning_share: float = _key(
        0.05,
        "share of the steps after which it repeats the choice of popular rows",
        ge=0,
        le=1,
    )
    pinned_share: float = _key(
        0.5, "share of the fast memory that popular rows may keep", ge=0, le=1
    )


class FAEConfig(Keys):
    """The schedule "fae"; see `recsys.pipeline.FAE`."""

    rate: float = _key(
        50.0,
        "percent of the cold, then of the hot mini-batches issued before it switches",
        gt=0,
        le=100,
    )
    adaptive: bool = _key(True, "change the rate by the validation loss")


class ScheduleConfig(Kinds):
    """When rows are fetched, mini-batches computed and rows updated.

    "hotline" changes the order in which floats are summed. "fae" changes the order of samples, and
    with it the results. The other schedules give bit-equal results on the CPU.
    """

    sequential: Keys | None = _key(None, "rows are fetched in the step that needs them")
    lookahead: LookAhead | None = _key(None, "rows are fetched while others are computed")
    hotline: HotlineConfig | None = _key(None, "popular samples are computed during the fetch")
    fae: FAEConfig | None = _key(None, "hot and cold mini-batches in turns")
    auto: Keys | None = _key(None, "the faster of sequential and lookahead, measured")


class SkipConfig(Kinds):
    """Which samples, or updates of rows, a run leaves out."""

    default_kind = "none"

    none: Keys | None = _key(None, "nothing is left out")
    observe: Observe | None = _key(None, "nothing; staleness is measured")
    drop_input: DropInput | None = _key(None, "samples whose rows are all stale")
    freeze_rows: FreezeRows | None = _key(None, "updates of stale rows")
    subsample: Subsample | None = _key(
        None, "a part of the samples whose rows are all stale; the others get a larger weight"
    )
    importance: Importance | None = _key(
        None,
        "samples that a small model predicts well: a sample is kept with a probability that grows "
        "with its error, and has weight 1 / probability",
    )
    random_drop: RandomDrop | None = _key(None, "random samples, for comparison")
    paper: Paper | None = _key(None, "what Slipstream's published code leaves out")

    def settings(self, seed: int) -> Policy | None:
        """The policy of these keys; None to train on everything.

        Args:
            seed: Seed of its random choices, if it has none of its own.
        """
        policy: Any = None if self.kind == "none" else getattr(self, self.kind)
        if getattr(policy, "seed", None) == 0:
            policy = dataclasses.replace(policy, seed=seed)
        return cast("Policy | None", policy)


class TrainConfig(Keys):
    """One training run."""

    data: _Text = _key(
        _SYNTHETIC,
        "a store, or synthetic:criteo-kaggle; a command is given it as STORE",
        resume="free",
    )
    seed: _Whole = _key(0, "seed of initial values and of the order of samples")
    epochs: _Count = _key(1, "passes over the training split", resume="free", common=True)
    batch_size: _Count = _key(128, "samples per step", common=True)
    device: Literal["cpu", "cuda"] = _key("cpu", "device of the model", resume="free", common=True)
    num_threads: _Whole = _key(
        0,
        "threads that compute; 0: OMP_NUM_THREADS if it is set, else one per free core",
        resume="free",
    )
    prefetch: _Count = _key(4, "mini-batches read ahead, at least", resume="free")
    shuffle: bool = _key(
        True, "train on the samples in an order drawn for every epoch; false: in that of the data"
    )
    permutation_seed: _Whole = _key(
        0, "seed of an order of samples within mini-batches, to see rounding; 0: none"
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
    schedule: ScheduleConfig = _key(
        ScheduleConfig,
        "order of fetching rows, computing and updating",
        derived="lookahead with files or cuda, else sequential",
        resume="free without fae",
        common=True,
    )
    skip: SkipConfig = _key(
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
    def _check(self) -> Self:
        """Check keys that need each other, and complete the optimizer of the dense part."""
        if self.budget:
            parse_bytes(self.budget, "budget")
        if self.dense_optimizer is not None:
            dense = self.optimizer.for_dense(self.dense_optimizer)
            object.__setattr__(self, "dense_optimizer", dense)
        dense_name = self.resolved_dense_optimizer.name
        averaged = [name for name, pooling in self.model.pooling.items() if pooling == "mean"]
        skip, fae = self.skip.kind, self.schedule.fae
        needs_recsys = {
            "budget": self.budget,
            "plan": self.plan,
            f"model.pooling.{''.join(averaged[:1])}": averaged,
            f"skip {skip!r}": skip not in ("none", "random_drop"),
        }
        refuse(
            *(
                (
                    bool(is_set) and self.embeddings != "recsys",
                    f"{name} needs embeddings 'recsys', got {self.embeddings!r}; leave it out, or "
                    "choose embeddings 'recsys'",
                )
                for name, is_set in needs_recsys.items()
            ),
            (
                self.is_synthetic and self.data != _SYNTHETIC,
                f"data must be {_SYNTHETIC!r} if synthetic, got {self.data!r}",
            ),
            (
                bool(self.cold_path) and self.cold_tier == "host",
                f"cold_path is for cold_tier 'file', got {self.cold_path!r} with 'host'; "
                "leave it out, or set cold_tier to 'file'",
            ),
            (
                "rowwise" in dense_name,
                f"dense_optimizer.name must be 'sgd', 'adagrad' or 'adam', got {dense_name!r}, "
                "which is for rows",
            ),
            (
                fae is not None and bool(self.permutation_seed or not self.shuffle),
                "shuffle false and permutation_seed are not for schedule 'fae', which orders "
                "samples by their rows; drop the key, or choose another schedule",
            ),
            (
                skip == "paper" and (fae is None or fae.rate != 100 or fae.adaptive),
                "skip 'paper' trains on all cold and then on all hot mini-batches of an epoch; set "
                "schedule.fae.rate to 100 and schedule.fae.adaptive to false",
            ),
            (
                skip == "paper" and bool(self.plan),
                "skip 'paper' plans the hot rows for the part of the budget that its snapshot "
                f"leaves, got plan {self.plan!r}; drop the key plan",
            ),
            (
                skip == "paper" and bool(self.model.table_dims),
                "skip 'paper' is for tables of one embedding_dim, got model.table_dims "
                f"{self.model.table_dims}; drop one",
            ),
            (
                skip not in ("none", "paper") and fae is not None,
                f"skip {skip!r} does not go with schedule 'fae', whose order of samples is planned "
                "beforehand; choose another schedule",
            ),
            (
                self.model.name in RETRIEVAL_MODELS and self.schedule.hotline is not None,
                "schedule 'hotline' computes a mini-batch in two parts, and model.name "
                f"{self.model.name!r} compares its samples; choose another schedule",
            ),
        )
        return self

    @property
    def is_synthetic(self) -> bool:
        """Whether the data is made, not read."""
        return self.data.startswith(SYNTHETIC_PREFIX)

    @property
    def resolved_dense_optimizer(self) -> OptimizerConfig:
        """The optimizer of the dense part; derived from `optimizer` when not set."""
        return self.dense_optimizer or self.optimizer.for_dense()


class VariationKeys(Keys):
    """A variation of an ablation: its name, and keys of `TrainConfig`, not checked yet."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w.+-]*)?$")] = _key(..., "name in tables")


class AblationKeys(Keys):
    """The keys of the table `[ablate]` of an ablation."""

    seeds: Annotated[tuple[_Whole, ...], Field(strict=False, min_length=1)] = _key(
        ..., "seeds of every variation, in the order in which they run"
    )
    target_auc: float = _key(0.0, "measure the training time to it; 0: none", ge=0, le=1)
    target_split: Literal["validation", "test"] = _key("test", "split of that AUC")
    eval_every_samples: _Count = _key(4096, "training samples between two evaluations")
    baseline: _Text = _key("", "variation with which the others are compared; empty: none")
    variations: Annotated[tuple[VariationKeys, ...], Field(strict=False)] = _key(
        (), "named sets of keys"
    )
    grid: dict[str, Any] = _key({}, "by key: values, of which every combination is taken")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [variation.name for variation in self.variations]
        unread = self.model_fields_set & {"target_split", "eval_every_samples"}
        grid = flat(self.grid)
        no_list = [key for key, values in grid.items() if not (isinstance(values, list) and values)]
        num_combined = 0 if no_list else prod(map(len, grid.values()))
        refuse(
            (len({*self.seeds}) < len(self.seeds), f"seeds must differ, got {list(self.seeds)}"),
            (len({*names}) < len(names), f"names of variations must differ, got {names}"),
            (not (names or self.grid), "variations or grid must say what varies"),
            (bool(no_list), f"grid.{', '.join(no_list)} must be a list of values"),
            (num_combined > 10_000, f"grid must have at most 10,000 cells, got {num_combined:,}"),
            (
                bool(unread) and not self.target_auc,
                f"{', '.join(unread)} means nothing without ablate.target_auc; drop it",
            ),
        )
        return self


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
    """

    group: str
    name: str
    default: Any
    meaning: str
    accepts: str
    resume: Resume
    common: bool = False


_RUN = Key("run", "", "", "", "", "fixed")


def walk_keys(
    keys: _Table = TrainConfig, table: Key = _RUN, seen: dict[type, str] | None = None
) -> Iterator[Key]:
    """Every key of a table and of the tables in it; of tables with equal keys those of the first.

    Args:
        keys: The table.
        table: What its keys inherit.
        seen: The name of the first table of each class so far; extended.
    """
    seen = {} if seen is None else seen
    known = _fields_of(keys)
    tables = {name: _table_of(keys, name) for name in known}
    for own_name, inner in sorted(tables.items(), key=lambda item: item[1] is not None):
        field, name = known[own_name], f"{table.name}.{own_name}".removeprefix(".")
        extra = cast("dict[str, Any]", field.json_schema_extra or {})
        about: dict[str, Any] = {"derived": "", "resume": "", "common": False} | extra
        key = table._replace(
            name=name,
            default=about["derived"] or field.get_default(call_default_factory=True),
            meaning=field.description or "",
            accepts=_words(field.annotation, field.metadata),
            resume=about["resume"] or table.resume,
            common=about["common"],
        )
        if inner is None:
            yield key
            continue
        key = key._replace(group=f"{name}: {key.meaning}")
        first = seen.setdefault(inner, name) if _fields_of(inner) else name
        if first != name:
            yield key._replace(default="as there", accepts=f"keys as in {first}")
        else:
            if issubclass(inner, Kinds):
                yield key._replace(default=about["derived"] or inner.default_kind)
            yield from walk_keys(inner, key, seen)


def _fields_of(table: _Table) -> dict[str, FieldInfo]:
    """The fields of a table of keys, by name."""
    if issubclass(table, Keys):
        return table.model_fields
    kinds, of = get_type_hints(table), FieldInfo.from_annotated_attribute
    return {one.name: of(kinds[one.name], one) for one in dataclasses.fields(table)}  # type: ignore[arg-type]  # a dataclass derives from it


def _table_of(keys: _Table | None, name: str) -> _Table | None:
    """The class of a key that is a table of keys, optional or not; None for any other key.

    Args:
        keys: The table that it is in; None for none.
        name: The key.
    """
    field = None if keys is None else _fields_of(keys).get(name)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    tables = (kind for kind in kinds if isinstance(kind, type))
    return next((kind for kind in tables if issubclass(kind, (Keys, AbstractSettings))), None)


def _words(kind: Any, limits: Sequence[Any] = ()) -> str:
    """What values of a type are, and their limits."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin in _FORMS:
        return _FORMS[origin].format(*map(_words, inner))
    if isinstance(kind, type) and issubclass(kind, Kinds):
        return f"one of {', '.join(kind.model_fields)}"
    ends = [
        f" {words} {getattr(limit, name):g}"
        for name, words in LIMITS.items()
        for limit in limits
        if getattr(limit, name, 2**31) < 2**31
    ]
    return _WORDS.get(kind, "table") + ",".join(ends)


def _explain(keys: _Table, error: ValidationError) -> str:
    """The first fault that pydantic found: key, rule, value and hint."""
    fault = error.errors()[0]
    names = [str(part) for part in fault["loc"]]
    name, kind, cause = ".".join(names), fault["type"], fault.get("ctx", {}).get("error")
    for part in names:
        keys = _table_of(keys, part) or keys
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name} is not a key; {_nearest(keys, names[-1])}"
    if isinstance(cause, ConfigError):  # of a table in this one, or of keys that conflict
        joint = ": " if str(cause)[0].isupper() else "."  # a class of settings, or a key
        return f"{name}{joint}{cause}" if name else str(cause)
    if kind in ("model_type", "dataclass_type"):
        return (
            f"{name} is a table; set a key of it, such as "
            f"{name}.{next(iter(_fields_of(keys)), 'KEY')}={fault['input']}"
        )
    return f"{name}: {fault['msg']}, got {reprlib.repr(fault['input'])}"


def _nearest(keys: _Table, name: str) -> str:
    """The key of a table, or of the tables in it, whose own name is most like a mistyped one."""
    known = [*_fields_of(keys), *(key.name for key in walk_keys(keys))]
    by_own_name = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(name, by_own_name, n=1)
    if not close:
        return f"keys are {', '.join(_fields_of(keys))}"
    return f"did you mean {by_own_name[close[0]]}?"


def format_keys(keys: type[Keys], *, common: bool = False) -> str:
    """Every key with its meaning, type, range and default, in groups, as `--help` prints them.

    Args:
        keys: The keys.
        common: Show those alone that most runs set.
    """
    width = max(80, shutil.get_terminal_size().columns)
    lines: list[str] = []
    shown = [found for found in walk_keys(keys) if found.common or not common]
    for group, members in groupby(shown, lambda found: found.group):
        lines += [] if common else ["", group]
        for found in members:
            is_bare = isinstance(found.default, str) and found.default
            default = found.default if is_bare else json.dumps(found.default)
            text = f"  {found.name:<30}  {found.meaning} ({found.accepts}; default {default})"
            lines += textwrap.wrap(text, width, subsequent_indent=" " * 34, break_on_hyphens=False)
    return "\n".join(lines)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested keys, by dotted key: `{"eval": {"split": x}}` has `eval.split`.

    Args:
        tree: The nested keys.
        prefix: What stands before each name, with a dot at its end.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
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
    try:
        return TrainConfig(**read_tree(file, settings, **values))
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(f"{' with '.join([str(file), *settings])}: {error}") from error


def read_tree(
    file: Path | None = None, settings: Sequence[str] = (), **values: Any
) -> dict[str, Any]:
    """Read the nested keys of a TOML file and apply settings; no value is checked yet.

    Args:
        file: TOML; keys with dots are tables. None for no file.
        settings: Strings such as `optimizer.lr=0.01`, which win over the file.
        values: Top-level keys, which win over the file and are not among the settings.

    Returns:
        The nested keys.

    Raises:
        ConfigError: the file is not TOML, or a setting is not key=value, or sets a key of `values`.
        OSError: the file cannot be read.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            tree = parse_toml(file.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise ConfigError(f"{file} is not TOML: {error}") from error
    for setting in settings:
        name, equals, text = setting.partition("=")
        refuse(
            (not (equals and name.strip()), f"a setting must be key=value, got {setting!r}"),
            (name.strip() in values, f"{setting} is set elsewhere on the command line; drop one"),
        )
        value: Any = text.strip()
        with suppress(ValueError):  # not TOML: a text
            value = parse_toml(f"value = {value}")["value"]
        put_key(tree, name.strip(), value)
    return tree | values


def to_toml(config: TrainConfig) -> str:
    """The whole `config` as TOML."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def describe_config(config: TrainConfig) -> dict[str, Any]:
    """The whole `config` in JSON types, with the dense optimizer resolved."""
    return {
        **config.model_dump(exclude_none=True),
        "dense_optimizer": config.resolved_dense_optimizer.model_dump(),
    }


def put_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested keys; a key of another kind, as of schedule, replaces the first.

    Args:
        tree: The nested keys; changed.
        key: Names joined by dots.
        value: The value of the key.
    """
    names = key.split(".")
    keys: _Table | None = TrainConfig
    for name, next_name in pairwise(names):
        keys, inner = _table_of(keys, name), tree.get(name)
        is_kinds = keys is not None and issubclass(keys, Kinds)
        if not isinstance(inner, dict) or (is_kinds and next_name not in inner):
            inner = {}
        tree[name] = inner
        tree = inner
    present = tree.get(names[-1])
    is_same_kind = isinstance(present, dict) and isinstance(value, str) and value in present
    tree[names[-1]] = present if is_same_kind else value  # the keys of the kind stay
