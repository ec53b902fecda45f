"""What may change, and the runs from which it can be predicted.

Imports no PyTorch, so that the command line can refuse a run at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.nested_keys import flat
from recsys._support.sizes import parse_bytes, round_up_bytes
from recsys._support.untrusted import is_count, is_finite_number
from recsys.config import describe_config
from recsys.errors import ConfigError
from recsys.train.loop.resume import resumed_config
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from recsys.config import TrainConfig

__all__ = [
    "FEWEST_STEPS",
    "Change",
    "MeasuredRun",
    "change_of",
    "change_to",
    "depth_of",
    "reason_against",
    "usual_changes",
]

_PREDICTED = ("budget", "cold_tier", "batch_size", "schedule.name", "schedule.depth")
# Keys that do not change the steps of training. The seed changes their order. What stopped early is
# refused, and data is compared by its fingerprint.
_IRRELEVANT = (
    "cold_path",
    "data",
    "save_model",
    "timeline_steps",
    "seed",
    "callbacks",
    "early_stopping.",
    "eval.",
)
# The first steps begin with empty slots and cold caches: fewer say nothing about a run.
FEWEST_STEPS = 10
_SCHEDULES = ("", "sequential", "lookahead")
_DEFAULT_DEPTH = 2
_TRAIN_AGAIN = "run it again with this version"
_MEASURED = {
    "throughput": ("samples_per_second", "num_samples", "num_steps", "train_seconds"),
    "stalls": ("prefetch_wait_seconds", "write_back_wait_seconds", "checkpoint_seconds"),
    "environment": ("num_cores", "num_threads"),
}
_OF_TIERS = {
    "tiers": ("lookup_hit_rate", "hot_bytes"),
    "transfers": ("fetched_rows", "written_back_rows", "fetch_seconds", "write_back_seconds"),
}


class MeasuredRun(NamedTuple):
    """A run that has ended.

    Attributes:
        path: Its folder.
        config: Its configuration.
        record: Its `run.json`.
    """

    path: Path
    config: TrainConfig
    record: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> MeasuredRun:
        """Read the folder of a run.

        Raises:
            ConfigError: it is not the folder of a run that has ended, or its record is damaged or
                too old, or the run has a setting that is not predicted.
        """
        folder = RunFolder.open(path)
        config, record = folder.read_config(), folder.read_record()
        if reason := reason_against(config, record):
            raise ConfigError(f"{folder.path}: what-if cannot read this run: {reason}")
        return cls(folder.path, config, record)

    @property
    def is_tiered(self) -> bool:
        """Whether some rows were in the cold tier."""
        return self.record["tiers"] is not None

    @property
    def num_steps(self) -> int:
        """Steps of training."""
        return int(self.record["throughput"]["num_steps"])

    @property
    def num_samples(self) -> int:
        """Samples of training."""
        return int(self.record["throughput"]["num_samples"])

    @property
    def samples_per_second(self) -> float:
        """The measured speed."""
        return float(self.record["throughput"]["samples_per_second"])

    @property
    def waited_seconds(self) -> float:
        """Seconds of training in which it waited for rows."""
        stalls = self.record["stalls"]
        return float(stalls["prefetch_wait_seconds"] + stalls["write_back_wait_seconds"])


class Change(NamedTuple):
    """A run to predict.

    Attributes:
        label: What changes, in words.
        config: The configuration with the change.
        measured: A run with this configuration; None if there is none.
    """

    label: str
    config: TrainConfig
    measured: MeasuredRun | None = None


def depth_of(config: TrainConfig) -> int:
    """The look-ahead depth of a run in two tiers; 0: sequential."""
    if config.schedule.name == "sequential":
        return 0
    return config.schedule.depth or _DEFAULT_DEPTH


def change_of(run: MeasuredRun, settings: Sequence[str]) -> Change:
    """A change of some keys.

    Args:
        run: The run.
        settings: As `key=value`.

    Raises:
        ConfigError: a key is unknown or means something that is not predicted, or a value is not
            what the key accepts.
    """
    config = resumed_config(run.path, None, settings, None)
    _require_changeable(run, config, "", (*_PREDICTED, "cold_path"))
    if config.cold_tier == "file" and not config.budget:
        raise ConfigError("cold_tier 'file' needs a budget; add --set budget=...")
    return Change(", ".join(settings), config)


def usual_changes(run: MeasuredRun, everything_bytes: int) -> list[Change]:
    """Half and double of what a run has: budget, depth and batch size; and the other cold tier.

    Args:
        run: The run.
        everything_bytes: Bytes of all rows and their state.
    """
    config, size = run.config, run.config.batch_size
    found: list[list[str]] = []
    if run.is_tiered:
        budget, depth = parse_bytes(config.budget), depth_of(config)
        found += [[f"budget={round_up_bytes(each)}"] for each in (budget // 2, 2 * budget)]
        if depth:
            depths = {max(1, depth // 2), 2 * depth} - {depth}
            found += [[f"schedule.depth={each}"] for each in sorted(depths)]
            found.append(["schedule.name=sequential"])
        else:
            found += [["schedule.name=lookahead", f"schedule.depth={each}"] for each in (2, 4)]
        found.append([f"cold_tier={'file' if config.cold_tier == 'host' else 'host'}"])
    else:
        found += [[f"budget={round_up_bytes(everything_bytes // each)}"] for each in (2, 4, 8)]
    found += [[f"batch_size={each}"] for each in (size // 2, 2 * size) if each]
    return [change_of(run, settings) for settings in dict.fromkeys(map(tuple, found))]


def change_to(run: MeasuredRun, other: MeasuredRun) -> Change:
    """The change that leads to another run, which was measured, too.

    Raises:
        ConfigError: the runs differ in something that is not predicted.
    """
    _require_changeable(run, other.config, f"{other.path}: ", (*_PREDICTED, *_IRRELEVANT))
    for part, key in (("data", "fingerprint"), ("environment", "num_threads")):
        ours, theirs = run.record[part].get(key), other.record[part].get(key)
        if ours != theirs:
            raise ConfigError(
                f"{other.path}: {part}.{key} of its record is {theirs!r}, and that of {run.path} "
                f"{ours!r}; compare runs on the same data with as many threads"
            )
    before, after = run.config, other.config
    changed = []
    if before.budget != after.budget:
        changed.append(f"budget={after.budget or 'none'}")
    if before.cold_tier != after.cold_tier:
        changed.append(f"cold_tier={after.cold_tier}")
    if depth_of(before) != depth_of(after):
        depth = depth_of(after)
        changed.append(f"schedule.depth={depth}" if depth else "schedule.name=sequential")
    if before.batch_size != after.batch_size:
        changed.append(f"batch_size={after.batch_size}")
    return Change(", ".join(changed) or "the same", other.config, other)


def _require_changeable(
    run: MeasuredRun, config: TrainConfig, place: str, keys: Sequence[str]
) -> None:
    """Refuse a configuration that differs from a run's in other keys.

    Args:
        run: The run.
        config: The configuration with the change.
        place: Start of the message.
        keys: The keys that may differ; one that ends with a dot stands for a table.
    """
    before, after = flat(describe_config(run.config)), flat(describe_config(config))
    for key in sorted(before.keys() | after.keys()):
        is_equal = before.get(key) == after.get(key)
        if not is_equal and not any(key == each or key.startswith(each) for each in keys):
            raise ConfigError(
                f"{place}{key} {before.get(key)!r} becomes {after.get(key)!r}, which what-if "
                f"cannot predict; it predicts {', '.join(_PREDICTED)}: train with {key} changed, "
                "and start from that run"
            )
    if config.schedule.name not in _SCHEDULES:
        raise ConfigError(
            f"{place}schedule.name must be one of 'sequential' and 'lookahead' for what-if, got "
            f"{config.schedule.name!r}, which orders or divides mini-batches by other rules; "
            "train with it"
        )


def reason_against(config: TrainConfig, record: Mapping[str, Any]) -> str:
    """Why nothing can be predicted from a run; empty if it can."""
    name = config.schedule.name
    if name not in _SCHEDULES:
        return f"its schedule.name is {name!r}; train with 'lookahead' or 'sequential'"
    if config.device != "cpu":
        return f"its device is {config.device!r}, whose work runs beside the host's; use 'cpu'"
    if config.embeddings != "recsys":
        return f"its embeddings {config.embeddings!r} have one tier; use 'recsys'"
    if config.skip.is_on:
        return f"it skips by policy {config.skip.policy!r}; train with skip.policy=none"
    if config.plan:
        return f"its rows are pinned by plan {config.plan!r}; train without a plan"
    if len({config.model.embedding_dim, *config.model.table_dims.values()}) > 1:
        return "its tables have several embedding_dims, which divide the budget; use one"
    if record.get("processes") is not None:
        return "it trained on several processes; train on one"
    if record.get("resumed"):
        return "it was resumed, and its times are those of its parts; train in one go"
    if record.get("stopped_early"):
        return "it was stopped early; train without early stopping"
    if record.get("status") != "finished":
        return f"its status is {record.get('status')!r}; let a run finish"
    wanted = _MEASURED | (_OF_TIERS if record.get("tiers") is not None else {})
    for part, keys in wanted.items():
        found = record.get(part)
        for key in keys:
            value = found.get(key) if isinstance(found, dict) else None
            if not (is_finite_number(value) and value is not None and value >= 0):
                return f"its record has no {part}.{key}, which older versions lack; {_TRAIN_AGAIN}"
    num_steps = record["throughput"]["num_steps"]
    if not is_count(num_steps, 1) or not record["throughput"]["train_seconds"]:
        return "it made no step"
    if num_steps < FEWEST_STEPS:
        return (
            f"it made {num_steps} steps, and the first ones are slower and miss more than later "
            f"ones; train for at least {FEWEST_STEPS}"
        )
    if not all(is_count(record["environment"][key], 1) for key in _MEASURED["environment"]):
        return "its record has no whole numbers of cores and threads"
    if "tiers" not in record:
        return f"its record does not say whether rows were in two tiers; {_TRAIN_AGAIN}"
    return ""
