"""The configuration of a training run: frozen dataclasses, valid once built.

    TrainConfig
    |-- model: ModelConfig                architecture and its sizes
    |   |-- dcn: CrossNetConfig           constants of dcn_v2
    |   |-- transformer: TransformerConfig
    |   |-- din: DINConfig
    |   `-- tbsm: TBSMConfig
    |-- optimizer: OptimizerConfig          of the embedding rows
    |-- dense_optimizer: OptimizerConfig    of the dense part; a key not set is as in `optimizer`
    |-- lr_schedule: LearningRateConfig     of both optimizers
    |-- schedule: ScheduleConfig            order of fetching, computing and updating
    |-- skip: SkipConfig                    samples, or updates of rows, that are left out
    |   |-- staleness: StalenessConfig      when a row is stale
    |   |-- guard: GuardConfig              checks of quality
    |   |-- importance: ImportanceConfig    constants of policy importance
    |   `-- paper: PaperConfig              constants of policy paper
    |-- eval: EvalConfig
    |-- early_stopping: EarlyStoppingConfig
    |-- checkpoint: CheckpointConfig        how often the run saves its state
    `-- synthetic: SyntheticConfig          used when `data` is synthetic

Later sources win: defaults, then a TOML file, then `key=value` settings. `to_toml` writes what
`load_config` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi
from typing import TYPE_CHECKING, Any

import tomli_w

from recsys._support.config_fields import build, build_with_file, check_fields, walk_keys
from recsys._support.config_fields import key as _key
from recsys._support.sizes import parse_bytes
from recsys._support.untrusted import parse_toml
from recsys.config_callbacks import EarlyStoppingConfig, check_callbacks
from recsys.config_checkpoint import CheckpointConfig
from recsys.config_model import (
    CrossNetConfig,
    DINConfig,
    ModelConfig,
    TBSMConfig,
    TransformerConfig,
)
from recsys.config_schedule import ScheduleConfig
from recsys.config_skip import (
    GuardConfig,
    ImportanceConfig,
    PaperConfig,
    SkipConfig,
    StalenessConfig,
)
from recsys.datasets.synthetic.config import SyntheticConfig
from recsys.embeddings.tiers import COLD_TIERS
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "CheckpointConfig",
    "CrossNetConfig",
    "DINConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "GuardConfig",
    "ImportanceConfig",
    "LearningRateConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PaperConfig",
    "ScheduleConfig",
    "SkipConfig",
    "StalenessConfig",
    "SyntheticConfig",
    "TBSMConfig",
    "TrainConfig",
    "TransformerConfig",
    "build_config",
    "describe_config",
    "describe_keys",
    "load_config",
    "put_key",
    "read_tree",
    "to_toml",
]

EMBEDDINGS = ("recsys", "torch")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
_DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam")
_ADAMS = ("adam", "partial_rowwise_adam")
SYNTHETIC_PREFIX = "synthetic:"
_SYNTHETIC = f"{SYNTHETIC_PREFIX}criteo-kaggle"
_MOST_TABLES = 16


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters are updated."""

    name: str = _key(
        "sgd",
        "update rule; rowwise_adagrad and partial_rowwise_adam are for rows only",
        choices=OPTIMIZERS,
    )
    lr: float = _key(0.1, "learning rate", least=0)
    eps: float = _key(
        None,
        "added to the denominator; torch's default: adam 1e-8, else 1e-10",
        derived="depends on name",
        least=0,
    )
    betas: tuple[float, ...] = _key((0.9, 0.999), "decay rates of Adam's two averages, per step")

    def __post_init__(self) -> None:
        if vars(self)["eps"] is None:
            object.__setattr__(self, "eps", 1e-8 if self.name in _ADAMS else 1e-10)
        check_fields(self)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be two numbers in [0, 1), got {list(self.betas)}")

    def for_dense(self) -> OptimizerConfig:
        """The matching optimizer of the dense part."""
        counterparts = {"rowwise_adagrad": "adagrad", "partial_rowwise_adam": "adam"}
        return dataclasses.replace(self, name=counterparts.get(self.name, self.name))


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """How learning rates change over a run; the same factor for the dense part and the rows."""

    warmup_steps: int = _key(0, "steps over which rates rise to their full value", least=0)
    decay: str = _key("none", "how rates fall", choices=("none", "linear", "cosine"))
    decay_start: int = _key(0, "step at which rates begin to fall; 0: after warm-up", least=0)
    decay_steps: int = _key(0, "steps over which they fall; 0: to the end of the run", least=0)
    final: float = _key(0.0, "factor that remains at the end", least=0, most=1)

    def __post_init__(self) -> None:
        check_fields(self)
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
        """The step after which rates fall, if they fall at all."""
        return max(self.warmup_steps, self.decay_start)

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
        start = self.first_decay_step
        length = self.decay_steps or max(1, num_steps - start)
        progress = min(max((step - start) / length, 0.0), 1.0)
        fallen = progress if self.decay == "linear" else (1 - cos(pi * progress)) / 2
        return 1 - (1 - self.final) * fallen


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training; the last evaluation always covers all samples of every split."""

    every_steps: int = _key(
        0, "steps between evaluations; 0: ten evaluations an epoch, or one each step", least=0
    )
    split: str = _key("validation", "split to evaluate on", choices=("validation", "test"))
    max_samples: int = _key(50_000, "samples per evaluation, from the start of the split", least=1)
    batch_size: int = _key(2048, "samples per forward pass", least=1)
    ranking_k: int = _key(
        20, "recall and NDCG count the first k items, for data to be ranked", least=1
    )
    ranking_groups: int = _key(
        1000,
        "bound of the questions that are ranked at the end: so many groups are drawn by the data "
        "alone, with one question each; of fewer groups, more of each; 0: all questions of all",
        least=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    data: str = _key(
        _SYNTHETIC, "a store, or synthetic:criteo-kaggle; a command is given it as STORE"
    )
    seed: int = _key(0, "seed of initial values and of the order of samples", least=0)
    epochs: int = _key(1, "passes over the training split", least=1)
    batch_size: int = _key(128, "samples per step", least=1)
    device: str = _key("cpu", "device of the model", choices=("cpu", "cuda"))
    num_threads: int = _key(
        0, "threads that compute; 0: OMP_NUM_THREADS if it is set, else one per free core", least=0
    )
    prefetch: int = _key(4, "mini-batches read ahead, at least", least=1)
    shuffle: bool = _key(
        True, "train on the samples in an order drawn for every epoch; false: in that of the data"
    )
    precision: str = _key(
        "fp32", "of the dense part; bf16 keeps parameters in fp32", choices=("fp32", "bf16")
    )
    init_from: str = _key(
        "",
        "folder of a run whose saved model is the start of this one; empty: initial values by seed",
    )
    save_model: bool = _key(True, "keep the model in the run's folder")
    callbacks: tuple[str, ...] = _key(
        (), "called while the run trains: tensorboard, mlflow, wandb, or module:Class"
    )
    embeddings: str = _key("recsys", "implementation; torch: nn.EmbeddingBag", choices=EMBEDDINGS)
    budget: str = _key(
        "",
        "fast memory for rows: 256MiB, or a number of bytes; empty: every row is resident",
    )
    plan: str = _key("", "file written by `recsys plan`: rows that never leave fast memory")
    cold_tier: str = _key("host", "tier of the other rows: RAM, or disk", choices=COLD_TIERS)
    cold_path: str = _key("", "folder on the disk for cold_tier file; empty: the disk of the run")
    model: ModelConfig = _key(ModelConfig, "shape of the model")
    optimizer: OptimizerConfig = _key(OptimizerConfig, "update of the embedding rows")
    dense_optimizer: OptimizerConfig | None = _key(None, "update of the dense part")
    lr_schedule: LearningRateConfig = _key(LearningRateConfig, "learning rates over the run")
    schedule: ScheduleConfig = _key(
        ScheduleConfig, "order of fetching rows, computing and updating"
    )
    skip: SkipConfig = _key(SkipConfig, "samples, or updates of rows, that are left out")
    eval: EvalConfig = _key(EvalConfig, "evaluation during training")
    early_stopping: EarlyStoppingConfig = _key(
        EarlyStoppingConfig, "end of training once evaluations stop improving"
    )
    checkpoint: CheckpointConfig = _key(CheckpointConfig, "checkpoints, to resume the run")
    synthetic: SyntheticConfig = _key(SyntheticConfig, "synthetic data")

    def __post_init__(self) -> None:
        check_fields(self)
        check_callbacks(self.callbacks)
        if self.seed >= 2**63:
            raise ConfigError(f"seed must be less than 2**63, got {self.seed}")
        if self.data.startswith(SYNTHETIC_PREFIX) and self.data != _SYNTHETIC:
            raise ConfigError(f"synthetic data must be {_SYNTHETIC!r}, got {self.data!r}")
        if type(vars(self)["budget"]) is int:  # bytes
            object.__setattr__(self, "budget", str(self.budget))
        if self.budget:
            parse_bytes(self.budget, "budget")
        if not self.shuffle and self.schedule.name == "fae":
            raise ConfigError(
                "shuffle false is not for schedule 'fae', which orders samples by their rows; "
                "drop the key, or choose another schedule"
            )
        if self.cold_path and self.cold_tier == "host":
            raise ConfigError(
                f"cold_path is for cold_tier 'file', got {self.cold_path!r} with 'host'; "
                "leave it out, or set cold_tier to 'file'"
            )
        if (self.budget or self.plan) and self.embeddings != "recsys":
            raise ConfigError(
                f"budget and plan are for embeddings 'recsys', got {self.embeddings!r}; leave them "
                "out, or choose embeddings 'recsys'"
            )
        averaged = [table for table, pooling in self.model.pooling.items() if pooling == "mean"]
        if averaged and self.embeddings != "recsys":
            raise ConfigError(
                f"model.pooling.{averaged[0]} 'mean' is for embeddings 'recsys', got "
                f"{self.embeddings!r}; leave it out, or choose embeddings 'recsys'"
            )
        if self.skip.needs_rows and self.embeddings != "recsys":
            raise ConfigError(
                f"skip.policy {self.skip.policy!r} is for embeddings 'recsys', got "
                f"{self.embeddings!r}; choose embeddings 'recsys', or policy 'random_drop'"
            )
        _check_order_of_skipping(self.skip, self.schedule)
        if self.skip.policy == "paper" and self.model.table_dims:
            raise ConfigError(
                "skip.policy 'paper' is for tables of one embedding_dim, got model.table_dims "
                f"{self.model.table_dims}; drop one"
            )
        if self.dense_optimizer is not None and self.dense_optimizer.name not in _DENSE_OPTIMIZERS:
            raise ConfigError(
                f"dense_optimizer.name must be one of {_DENSE_OPTIMIZERS} (others are for rows), "
                f"got {self.dense_optimizer.name!r}"
            )

    @property
    def resolved_dense_optimizer(self) -> OptimizerConfig:
        """The optimizer of the dense part; derived from `optimizer` when not set."""
        if self.dense_optimizer is not None:
            return self.dense_optimizer
        return self.optimizer.for_dense()


def _check_order_of_skipping(skip: SkipConfig, schedule: ScheduleConfig) -> None:
    """Refuse a policy with a schedule whose order of samples it cannot take."""
    is_fae = schedule.name == "fae"
    if skip.policy == "paper" and not (is_fae and schedule.rate == 100 and not schedule.adaptive):
        raise ConfigError(
            "skip.policy 'paper' trains on all cold and then on all hot mini-batches of an epoch; "
            "set schedule.name to 'fae', schedule.rate to 100 and schedule.adaptive to false"
        )
    if skip.policy not in ("none", "paper") and is_fae:
        raise ConfigError(
            f"skip.policy {skip.policy!r} does not go with schedule.name 'fae', whose order of "
            "samples is planned beforehand; choose another schedule"
        )


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
        key = setting.partition("=")[0].strip()
        if key in values:
            raise ConfigError(f"{key} is set elsewhere on the command line; drop {setting!r}")
    tree, others = (read_tree(each, settings) | values for each in (file, None))
    return build_with_file(build_config, tree, others, file)


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
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"a setting must be key=value, got {setting!r}")
        put_key(tree, key.strip(), _parse_value(text.strip()))
    return tree


def build_config(tree: Mapping[str, Any]) -> TrainConfig:
    """Build a configuration from nested keys.

    Args:
        tree: Keys and values; those of a table of keys are a mapping.

    Returns:
        The configuration.

    Raises:
        ConfigError: a key is unknown, or a value is not what the key accepts.
    """
    # A key that dense_optimizer does not set is taken from the optimizer of the rows.
    rows = build(OptimizerConfig, tree.get("optimizer", {}), "optimizer.")
    dense = tree.get("dense_optimizer")
    if isinstance(dense, Mapping):
        inherited = dataclasses.asdict(rows.for_dense())
        if "eps" not in tree.get("optimizer", {}):
            del inherited["eps"]  # its default depends on the name, which may differ
        tree = {**tree, "dense_optimizer": {**inherited, **dense}}
    return build(TrainConfig, tree, "")


def to_toml(config: TrainConfig) -> str:
    """The whole `config` as TOML."""
    tree = dataclasses.asdict(config)
    return tomli_w.dumps({key: value for key, value in tree.items() if value is not None})


def describe_config(config: TrainConfig) -> dict[str, Any]:
    """The whole `config` in JSON types, with the dense optimizer resolved."""
    dense = dataclasses.asdict(config.resolved_dense_optimizer)
    return {**dataclasses.asdict(config), "dense_optimizer": dense}


def describe_keys(kind: type = TrainConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key of a configuration: its name, its default and its meaning.

    Args:
        kind: The class of the configuration.
        prefix: What stands before each name, with a dot at its end.
    """
    for each in walk_keys(kind, prefix):
        yield each.name, each.default, each.meaning


def put_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested keys.

    Args:
        tree: The nested keys; changed.
        key: Names joined by dots.
        value: The value of the key.

    Raises:
        ConfigError: a part before the last dot is a value, not a table, or there are many dots.
    """
    *tables, last = key.split(".")
    if len(tables) > _MOST_TABLES:
        raise ConfigError(
            f"key {key[:40]}... must be in at most {_MOST_TABLES} tables, got {len(tables)}"
        )
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"key {key}: {table} is a value, not a table")
    tree[last] = value


def _parse_value(text: str) -> Any:
    try:
        tree = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return tree["value"] if list(tree) == ["value"] else text  # text may have several lines
