"""The configuration of a training run: frozen dataclasses, valid once built.

    TrainConfig
    |-- model: ModelConfig
    |-- optimizer: OptimizerConfig          of embedding rows
    |-- dense_optimizer: OptimizerConfig    of everything else; what is not set is as for the rows
    |-- lr_schedule: LearningRateConfig     of both
    |-- schedule: ScheduleConfig            what runs when
    |-- eval: EvalConfig
    `-- synthetic: SyntheticConfig          used where `data` is synthetic

Sources, later ones winning: defaults, a TOML file, `key=value` settings. `to_toml` writes what
`load_config` reads.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import cos, isfinite, pi
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import tomli_w

from recsys.config_fields import at_least as _at_least
from recsys.config_fields import key as _key
from recsys.config_fields import one_of as _one_of
from recsys.config_schedule import ScheduleConfig
from recsys.errors import ConfigError
from recsys.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "EvalConfig",
    "LearningRateConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "SyntheticConfig",
    "TrainConfig",
    "build_config",
    "describe_config",
    "describe_keys",
    "load_config",
    "put_key",
    "read_tree",
    "to_toml",
]

EMBEDDINGS = ("recsys", "torch", "fbgemm")
COLD_TIERS = ("host", "file")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
_DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam")
_ADAMS = ("adam", "partial_rowwise_adam")
_SYNTHETIC_SPLITS = ("chronological", "random")
_MAX_DRIFT = 1e6
SYNTHETIC_PREFIX = "synthetic:"

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model."""

    name: str = _key("dlrm", "dlrm")
    embedding_dim: int = _key(16, "columns of every table")
    dense_arch: tuple[int, ...] = _key((512, 256, 64, 16), "bottom MLP; ends in embedding_dim")
    over_arch: tuple[int, ...] = _key((512, 256, 1), "top MLP; ends in 1")
    interaction: str = _key("dot", "dot")
    init: str = _key("classic", "classic (facebookresearch/dlrm) or torch (nn.Linear's own)")

    def __post_init__(self) -> None:
        _one_of("name", self.name, ("dlrm",))
        _one_of("interaction", self.interaction, ("dot",))
        _one_of("init", self.init, ("classic", "torch"))
        _at_least("embedding_dim", self.embedding_dim, 1)
        for key, sizes in (("dense_arch", self.dense_arch), ("over_arch", self.over_arch)):
            if not sizes or min(sizes) < 1:
                raise ConfigError(f"{key} must be positive sizes, got {list(sizes)}")
        if self.dense_arch[-1] != self.embedding_dim:
            raise ConfigError(
                f"dense_arch must end in embedding_dim {self.embedding_dim}, "
                f"got {list(self.dense_arch)}"
            )
        if len(self.over_arch) < 2 or self.over_arch[-1] != 1:
            raise ConfigError(
                f"over_arch must have two sizes or more and end in 1, got {list(self.over_arch)}"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters are updated."""

    name: str = _key("sgd", "sgd, adagrad, adam; rows only: rowwise_adagrad, partial_rowwise_adam")
    lr: float = _key(0.1, "learning rate")
    eps: float = _key(None, "added to the denominator; by name as in torch: adam 1e-8, else 1e-10")
    betas: tuple[float, ...] = _key((0.9, 0.999), "what stays of Adam's two averages at a step")

    def __post_init__(self) -> None:
        _one_of("name", self.name, OPTIMIZERS)
        if vars(self)["eps"] is None:
            object.__setattr__(self, "eps", 1e-8 if self.name in _ADAMS else 1e-10)
        for key, value in (("lr", self.lr), ("eps", self.eps)):
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{key} must be finite and at least 0, got {value}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be two numbers in [0, 1), got {list(self.betas)}")

    def for_dense(self) -> OptimizerConfig:
        """The dense part's counterpart of an optimizer of rows."""
        counterparts = {"rowwise_adagrad": "adagrad", "partial_rowwise_adam": "adam"}
        return dataclasses.replace(self, name=counterparts.get(self.name, self.name))


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """How learning rates change over a run: of the dense part and of rows alike."""

    warmup_steps: int = _key(0, "steps over which rates rise to their full value")
    decay: str = _key("none", "none, linear or cosine")
    decay_start: int = _key(0, "step at which rates begin to fall; 0: when warm-up ends")
    decay_steps: int = _key(0, "steps over which they fall; 0: to the end of the run")
    final: float = _key(0.0, "share of a rate that is left at the end")

    def __post_init__(self) -> None:
        _one_of("decay", self.decay, ("none", "linear", "cosine"))
        _at_least("warmup_steps", self.warmup_steps, 0)
        _at_least("decay_start", self.decay_start, 0)
        _at_least("decay_steps", self.decay_steps, 0)
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final must lie in [0, 1], got {self.final}")
        for key in ("decay_start", "decay_steps", "final"):
            if self.decay == "none" and getattr(self, key):
                raise ConfigError(
                    f"{key} means nothing with decay 'none', got {getattr(self, key)}; "
                    "set decay to 'linear' or 'cosine', or drop the key"
                )
        if 0 < self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"decay_start must be at least warmup_steps {self.warmup_steps}, or 0 for the end "
                f"of warm-up; got {self.decay_start}"
            )

    @property
    def first_decay_step(self) -> int:
        """The step behind which rates fall, where they do."""
        return max(self.warmup_steps, self.decay_start)

    @property
    def is_constant(self) -> bool:
        """Whether rates stay as they are."""
        return self.warmup_steps == 0 and self.decay == "none"

    def factor(self, step: int, num_steps: int) -> float:
        """What a rate is multiplied by in a step.

        Args:
            step: The step's number, from 0.
            num_steps: Steps of the whole run.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "none":
            return 1.0
        start = self.first_decay_step
        length = self.decay_steps or max(1, num_steps - start)
        progress = min(max((step - start) / length, 0.0), 1.0)
        fallen = progress if self.decay == "linear" else (1 - cos(pi * progress)) / 2
        return 1 - (1 - self.final) * fallen


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When quality is measured during training; the last evaluation is always over everything."""

    every_steps: int = _key(0, "steps between evaluations; 0: ten times an epoch, or each step")
    split: str = _key("validation", "validation or test: the part, in evaluations before the last")
    max_samples: int = _key(50_000, "of that part, in evaluations before the last")
    batch_size: int = _key(2048, "mini-batch of evaluations")

    def __post_init__(self) -> None:
        _at_least("every_steps", self.every_steps, 0)
        _one_of("split", self.split, ("validation", "test"))
        _at_least("max_samples", self.max_samples, 1)
        _at_least("batch_size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What synthetic data looks like."""

    num_samples: int = _key(1_000_000, "samples in all parts together")
    seed: int = _key(0, "of the data, apart from the training's")
    table_sizes: tuple[int, ...] = _key((), "rows per table; empty: Kaggle's 26 sizes")
    drift: float = _key(0.0, "share of popularity that goes to other rows per million samples")
    preference_changes: tuple[int, ...] = _key((), "times at which rows' effects are drawn anew")
    preference_share: float = _key(0.5, "of the rows, that a preference change meets")
    split: str = _key("chronological", "what is held out: chronological (the end) or random")

    def __post_init__(self) -> None:
        _at_least("num_samples", self.num_samples, 1)
        _at_least("seed", self.seed, 0)
        if self.table_sizes and min(self.table_sizes) < 1:
            raise ConfigError(f"table_sizes must be positive, got {list(self.table_sizes)}")
        if not 0 <= self.drift <= _MAX_DRIFT:
            raise ConfigError(f"drift must be in [0, {_MAX_DRIFT:g}], got {self.drift}")
        changes = list(self.preference_changes)
        if changes != sorted({time for time in changes if time > 0}):
            raise ConfigError(f"preference_changes must be rising, each at least 1, got {changes}")
        if not 0 <= self.preference_share <= 1:
            raise ConfigError(f"preference_share must be in [0, 1], got {self.preference_share}")
        _one_of("split", self.split, _SYNTHETIC_SPLITS)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    data: str = _key("synthetic:criteo-kaggle", "a store, or synthetic:criteo-kaggle")
    seed: int = _key(0, "of initial values and of the order of samples")
    epochs: int = _key(1, "passes over the training part")
    batch_size: int = _key(128, "samples per step")
    device: str = _key("cpu", "cpu or cuda")
    num_threads: int = _key(0, "threads of the computation; 0: one per core")
    prefetch: int = _key(2, "mini-batches read ahead, at least")
    precision: str = _key("fp32", "of the dense part: fp32, or bf16 with parameters in fp32")
    save_model: bool = _key(True, "keep the model in the run's folder")
    timeline_steps: int = _key(0, "first steps that are kept as a timeline, timeline.json; 0: none")
    embeddings: str = _key("recsys", "recsys, torch (nn.EmbeddingBag) or fbgemm (TBE)")
    budget: str = _key("", 'of fast memory for rows, as "256MiB"; empty: all are resident')
    plan: str = _key("", "a file of `recsys plan`: rows that never leave fast memory")
    cold_tier: str = _key("host", "where other rows wait: host, or file for a folder on disk")
    cold_path: str = _key(
        "", "that folder, not there yet; empty: one that is deleted behind the run"
    )
    model: ModelConfig = _key(ModelConfig, "")
    optimizer: OptimizerConfig = _key(OptimizerConfig, "")
    dense_optimizer: OptimizerConfig | None = _key(None, "")
    lr_schedule: LearningRateConfig = _key(LearningRateConfig, "")
    schedule: ScheduleConfig = _key(ScheduleConfig, "")
    eval: EvalConfig = _key(EvalConfig, "")
    synthetic: SyntheticConfig = _key(SyntheticConfig, "")

    def __post_init__(self) -> None:
        _one_of("embeddings", self.embeddings, EMBEDDINGS)
        _one_of("device", self.device, ("cpu", "cuda"))
        _one_of("precision", self.precision, ("fp32", "bf16"))
        _at_least("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed must be less than 2**63, got {self.seed}")
        _at_least("epochs", self.epochs, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("num_threads", self.num_threads, 0)
        _at_least("prefetch", self.prefetch, 1)
        _at_least("timeline_steps", self.timeline_steps, 0)
        _one_of("cold_tier", self.cold_tier, COLD_TIERS)
        if self.budget:
            parse_bytes(self.budget, "budget")
        if self.cold_path and self.cold_tier == "host":
            raise ConfigError(
                f"cold_path is of cold_tier 'file', got {self.cold_path!r} and 'host'; leave it out"
            )
        if (self.budget or self.plan) and self.embeddings != "recsys":
            raise ConfigError(
                f"budget and plan are for embeddings 'recsys', got {self.embeddings!r}; leave them "
                "out, or choose embeddings 'recsys'"
            )
        if self.dense_optimizer is not None and self.dense_optimizer.name not in _DENSE_OPTIMIZERS:
            raise ConfigError(
                f"dense_optimizer.name must be one of {_DENSE_OPTIMIZERS} (others are for rows), "
                f"got {self.dense_optimizer.name!r}"
            )

    @property
    def resolved_dense_optimizer(self) -> OptimizerConfig:
        """How the dense part is updated."""
        if self.dense_optimizer is not None:
            return self.dense_optimizer
        return self.optimizer.for_dense()


def load_config(
    file: Path | None = None, settings: Sequence[str] = (), **values: Any
) -> TrainConfig:
    """Build a configuration from a TOML file, settings and keyword values, later ones winning.

    Args:
        file: TOML; keys with dots are tables.
        settings: `optimizer.lr=0.01` and the like; a value is TOML, or a bare string where it is
            not.
        values: Top-level keys, by name.

    Raises:
        ConfigError: a key is unknown, or a value is not what the key takes.
    """
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in values:
            raise ConfigError(f"{key} is named elsewhere on the command; drop {setting!r}")
    return build_config(read_tree(file, settings) | values)


def read_tree(file: Path | None = None, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The nested keys of a TOML file with settings put over them; nothing is built yet.

    Raises:
        ConfigError: the file is no TOML, or a setting is not key=value.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            tree = tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not TOML: {error}") from error
        except OSError as error:
            raise ConfigError(f"configuration {file} cannot be read: {error.strerror}") from error
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"a setting must be key=value, got {setting!r}")
        put_key(tree, key.strip(), _parse_value(text.strip()))
    return tree


def build_config(tree: Mapping[str, Any]) -> TrainConfig:
    """A configuration from nested keys.

    Raises:
        ConfigError: a key is unknown, or a value is not what the key takes.
    """
    # A dense optimizer that is half set takes the rest from the rows' optimizer.
    rows = _build(OptimizerConfig, tree.get("optimizer", {}), "optimizer.")
    dense = tree.get("dense_optimizer")
    if isinstance(dense, Mapping):
        inherited = dataclasses.asdict(rows.for_dense())
        if "eps" not in tree.get("optimizer", {}):
            del inherited["eps"]  # nobody has set it: it is by name, and the name may be another
        tree = {**tree, "dense_optimizer": {**inherited, **dense}}
    return _build(TrainConfig, tree, "")


def to_toml(config: TrainConfig) -> str:
    """The whole configuration as TOML."""
    tree = dataclasses.asdict(config)
    return tomli_w.dumps({key: value for key, value in tree.items() if value is not None})


def describe_config(config: TrainConfig) -> dict[str, Any]:
    """The whole configuration in JSON types, with nothing left to be derived."""
    dense = dataclasses.asdict(config.resolved_dense_optimizer)
    return {**dataclasses.asdict(config), "dense_optimizer": dense}


def describe_keys(kind: type = TrainConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key of a configuration: its name, its default and its meaning."""
    types = get_type_hints(kind)
    for entry in fields(kind):
        table = _table_of(types[entry.name])
        if table is not None:
            yield from describe_keys(table, f"{prefix}{entry.name}.")
        else:
            default = "by name" if entry.default is None else entry.default
            default = "as for rows" if prefix == "dense_optimizer." else default
            yield prefix + entry.name, default, entry.metadata["meaning"]


def _build(kind: type[_T], tree: Any, prefix: str) -> _T:
    """An instance of a configuration class from nested mappings."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')} must be a table of keys, got {tree!r}")
    types = get_type_hints(kind)
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]  # always a dataclass
    built: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else f"; keys are {names}"
            raise ConfigError(f"unknown key {prefix}{name}{hint}")
        table = _table_of(types[name])
        if table is not None:
            built[name] = _build(table, value, f"{prefix}{name}.")
        else:
            built[name] = _checked(prefix + name, value, types[name])
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _table_of(kind: Any) -> type | None:
    """The configuration class that a key's type names, optional or not; None for a plain value."""
    for choice in (kind, *get_args(kind)):
        if dataclasses.is_dataclass(choice) and isinstance(choice, type):
            return choice
    return None


def _checked(key: str, value: Any, kind: Any) -> Any:
    """The value as the type a key takes."""
    if kind is float and type(value) is int:
        return float(value)
    if kind == tuple[int, ...]:
        if isinstance(value, list | tuple) and all(type(size) is int for size in value):
            return tuple(value)
        raise ConfigError(f"{key} must be a list of integers, got {value!r}")
    if kind == tuple[float, ...]:
        if isinstance(value, list | tuple) and all(type(v) in (int, float) for v in value):
            return tuple(float(v) for v in value)
        raise ConfigError(f"{key} must be a list of numbers, got {value!r}")
    if type(value) is not kind:
        raise ConfigError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def put_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, whose dots name tables, in nested keys.

    Raises:
        ConfigError: one of its tables is a value.
    """
    *tables, last = key.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"key {key}: {table} is a value, not a table")
    tree[last] = value


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
