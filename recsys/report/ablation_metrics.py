"""The metrics of an ablation's cells: how each is read, named and printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from recsys.config import EvalConfig, OptimizerConfig
from recsys.embeddings.tiers.slot_costs import row_bytes
from recsys.train.parts.providers import row_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "ALWAYS",
    "METRICS",
    "Metric",
    "column_title",
    "format_number",
    "table_bytes",
    "tabulated_metrics",
    "value_of",
]


@dataclass(frozen=True)
class Metric:
    """A quantity that every cell of an ablation has, or may have.

    Attributes:
        name: Its name in `ablate.json`.
        unit: Its unit there.
        title: Its name for readers.
        read: Reads its value from a cell of `ablate.json`; None if the cell has none.
        form: Format of its values for readers.
        scale: What its values are multiplied with for readers.
        has_ratio: Whether it is also compared with the baseline by ratios.
    """

    name: str
    unit: str
    title: str
    read: Callable[[Mapping[str, Any]], float | None]
    form: str = "{:.4f}"
    scale: float = 1.0
    has_ratio: bool = False


def _quality(part: str, name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda cell: (cell["run"]["metrics"].get(part) or {}).get(name)


def _throughput(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda cell: cell["run"]["throughput"].get(name)


def _skipped(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda cell: (cell["run"].get("skipped") or {}).get(name)


def _tiers(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda cell: (cell["run"].get("tiers") or {}).get(name)


def _updates_left_out(cell: Mapping[str, Any]) -> float | None:
    """Of lookups of frozen rows; None for policies that freeze none."""
    policy = _skipped("policy")(cell) or {}
    return _skipped("share_lookups_left_out")(cell) if policy.get("name") == "freeze_rows" else None


def _stale_share(cell: Mapping[str, Any]) -> float | None:
    num_checked = _skipped("num_checked")(cell)
    return (_skipped("num_stale")(cell) or 0) / num_checked if num_checked else None


def _late(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda cell: (cell.get("late") or {}).get(name)


def _num_trained(cell: Mapping[str, Any]) -> float | None:
    # Without skipping, a run trains on every sample that it sees, and does not count them twice.
    trained = _throughput("num_trained_samples")(cell)
    return _throughput("num_samples")(cell) if trained is None else trained


def _moved_bytes(cell: Mapping[str, Any]) -> float | None:
    tiers = cell["run"].get("tiers")
    return None if tiers is None else tiers["fetched_bytes"] + tiers["written_back_bytes"]


def _fast_memory(cell: Mapping[str, Any]) -> float | None:
    tiers = cell["run"].get("tiers")
    return table_bytes(cell["run"]) if tiers is None else tiers["hot_bytes"]


def table_bytes(run: Mapping[str, Any]) -> int | None:
    """Bytes of all rows of a run and of their optimizer state.

    Args:
        run: The record of a run; None is returned for one that does not say enough.
    """
    config, sizes = run["config"], run.get("data", {}).get("table_sizes")
    if sizes is None or not {"model", "optimizer"} <= config.keys():
        return None
    dim, dims = config["model"]["embedding_dim"], config["model"].get("table_dims", {})
    optimizer = row_optimizer(OptimizerConfig(name=config["optimizer"]["name"]))
    total = 0
    for table, num_rows in sizes.items():
        own = dims.get(table, dim)
        total += num_rows * row_bytes(own, torch.float32, optimizer.state_sizes(own))
    return total


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


_ALL = (
    Metric("auc", "1", "test AUC", _quality("test", "auc")),
    Metric("logloss", "nats", "test logloss", _quality("test", "logloss")),
    Metric("validation_auc", "1", "validation AUC", _quality("validation", "auc")),
    Metric(
        "normalized_entropy", "1", "test normalized entropy", _quality("test", "normalized_entropy")
    ),
    Metric("calibration", "1", "test calibration", _quality("test", "calibration")),
    Metric("gauc", "1", "test GAUC", _quality("test", "gauc")),
    Metric("recall_at_k", "1", "test recall at {ranking_k}", _quality("test", "recall_at_k")),
    Metric("ndcg_at_k", "1", "test NDCG at {ranking_k}", _quality("test", "ndcg_at_k")),
    Metric("popular_auc", "1", "AUC of popular test samples", _quality("test_popular", "auc")),
    Metric(
        "popular_logloss",
        "nats",
        "logloss of popular test samples",
        _quality("test_popular", "logloss"),
    ),
    Metric(
        "popular_calibration",
        "1",
        "calibration of popular test samples",
        _quality("test_popular", "calibration"),
    ),
    Metric("late_auc", "1", "{late_split} AUC, last {late_percent} % of training", _late("auc")),
    Metric(
        "late_logloss",
        "nats",
        "{late_split} logloss, last {late_percent} % of training",
        _late("logloss"),
    ),
    Metric(
        "train_time",
        "ms",
        "seconds of training",
        lambda cell: _milliseconds(_throughput("train_seconds")(cell)),
        form="{:.1f}",
        scale=1e-3,
        has_ratio=True,
    ),
    Metric(
        "throughput",
        "samples/s",
        "samples/s",
        _throughput("samples_per_second"),
        form="{:,.0f}",
        has_ratio=True,
    ),
    Metric(
        "num_trained", "samples", "samples trained on", _num_trained, form="{:,.0f}", has_ratio=True
    ),
    Metric(
        "num_seen",
        "samples",
        "samples seen, skipped ones included",
        _throughput("num_samples"),
        form="{:,.0f}",
    ),
    Metric("skipped_share", "1", "share skipped", _skipped("share_skipped")),
    Metric("updates_left_out_share", "1", "share of updates left out", _updates_left_out),
    Metric(
        "stale_share", "1", "share of classified samples whose rows were all stale", _stale_share
    ),
    Metric(
        "fast_memory", "bytes", "MiB of fast memory", _fast_memory, form="{:,.1f}", scale=2**-20
    ),
    Metric("lookup_hit_rate", "1", "lookup hit rate", _tiers("lookup_hit_rate")),
    Metric("unique_hit_rate", "1", "unique hit rate", _tiers("unique_hit_rate")),
    Metric("moved_bytes", "bytes", "MiB moved", _moved_bytes, form="{:,.0f}", scale=2**-20),
    Metric(
        "time_to_target_auc",
        "ms",
        "seconds to {target_split} AUC {target_auc}",
        lambda cell: _milliseconds(cell["seconds_to_target_auc"]),
        form="{:.2f}",
        scale=1e-3,
        has_ratio=True,
    ),
)
METRICS = {metric.name: metric for metric in _ALL}
ALWAYS = ("auc", "logloss", "throughput")


def tabulated_metrics(
    cells: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Metric]:
    """The metrics of an ablation's table, in their order.

    Test AUC, test logloss and samples/s are always among them, and so is the time to the target AUC
    if there is a target. Each other metric is one of them if a cell has a value of it.

    Args:
        cells: As in `ablate.json`.
        config: As in `ablate.json`.
    """
    found = []
    for metric in _ALL:
        if metric.name == "time_to_target_auc":
            is_tabulated = config["target_auc"] is not None
        elif metric.name in ALWAYS:
            is_tabulated = True
        else:
            is_tabulated = any(value_of(metric, cell) is not None for cell in cells)
        if is_tabulated:
            found.append(metric)
    return found


def value_of(metric: Metric, cell: Mapping[str, Any]) -> float | None:
    """The value of a metric in a cell of `ablate.json`.

    None if the cell has none. A cell that diverged has none, even if it was evaluated before.
    """
    return metric.read(cell) if cell["run"]["status"] == "finished" else None


def column_title(metric: str, config: Mapping[str, Any]) -> str:
    """Title of a metric for readers; `config` is that of `ablate.json`."""
    return METRICS[metric].title.format(
        target_split=config["target_split"],
        target_auc=config["target_auc"],
        late_split=_late_split(config),
        late_percent=f"{100 * config.get('late_share', 0):g}",
        ranking_k=config.get("base", {}).get("eval", {}).get("ranking_k", EvalConfig().ranking_k),
    )


def _late_split(config: Mapping[str, Any]) -> str:
    """The part of the data that is evaluated during training, in words if cells differ in it."""
    base = config.get("base", {}).get("eval", {}).get("split", EvalConfig().split)
    splits = [keys.get("eval.split", base) for keys in config["variations"].values()]
    return config["target_split"] or " or ".join(dict.fromkeys(splits))


def format_number(
    metric: str, value: float | None, *, sign: bool = False, mean: float | None = None
) -> str:
    """Value of a metric for readers; times in seconds.

    Args:
        metric: The metric.
        value: The value, or a difference of two values.
        sign: For differences: also write the sign of a value above 0, and one digit more.
        mean: For a deviation: the mean, which has as many digits after the point.
    """
    if value is None:
        return "-"
    about = METRICS[metric]
    shown, form = value * about.scale, about.form
    if about.unit == "bytes" and 0 < abs(shown) < 1:  # of small tables
        form = "{:.3g}"
    if mean is not None:
        form = f"{{:,.{len(format_number(metric, mean).partition('.')[2])}f}}"
    if sign:
        form = form.replace("{:", "{:+").replace(".4f", ".5f")
    return form.format(shown)
