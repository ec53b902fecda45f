"""One HTML page about a training run or an ablation, without scripts and without other files.

`page.html` is the Jinja template of both pages. It escapes every text that a record holds;
pictures are in the page as data.
"""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys._support.files import appearing_whole
from recsys._support.sizes import format_bytes
from recsys.config import TrainConfig, describe_config
from recsys.errors import ConfigError, RecsysError
from recsys.pipeline.stalls import format_predicted, stage_seconds, stage_title
from recsys.report.ablation_columns import (
    auc_errors,
    column_notes,
    shown_metrics,
    spread_notes,
)
from recsys.report.ablation_metrics import column_title, format_number
from recsys.report.ablation_table import format_commits, format_evaluations
from recsys.report.paired import paired_cells, paired_note
from recsys.report.records import find_record
from recsys.report.summary import (
    NO_METRICS,
    format_auc_error,
    format_best_auc,
    format_skipping,
    format_stopped_early,
    tabulate_hits,
    tabulate_metrics,
    tabulate_tiers,
)
from recsys.train.run_files.curves import draw_run, draw_variations
from recsys.train.run_files.run_folder import RunFolder, read_json
from recsys.train.run_files.skipping_picture import draw_skipping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jinja2 import Template

__all__ = ["write_report"]

_COLORS = (
    "#4878d0",
    "#82c6e2",
    "#ee854a",
    "#6acc64",
    "#956cb4",
    "#d65f5f",
    "#dcdcdc",
    "#d5bb67",
    "#8c8c8c",
)
_SPREAD_NOTE = "Mean over seeds, least to most, sample standard deviation (sd)."
_ONE_SEED_NOTE = "One seed, so no spread."
_ERROR_NOTE = "After a cell's test AUC is its standard error."
_TARGET_NOTE = (
    "Seconds to {target_split} AUC {target_auc}: training time until the first evaluation that "
    "reached it, without interpolation; {evaluations}. The clock leaves evaluations out."
)


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run or an ablation; returns its path.

    Raises:
        ConfigError: the folder is neither, has no record yet, or has a damaged record.
    """
    record_file = find_record(folder)
    with _reporting_damage(record_file):
        if record_file.name == "ablate.json":
            page = _ablation_page(folder, read_json(record_file))
        else:
            page = _run_page(RunFolder.open(folder), RunFolder(folder).read_record())
    out = folder / "report.html"
    with appearing_whole(out) as partial:
        # A record may hold half of a surrogate pair, which UTF-8 cannot.
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")
    return out


@contextmanager
def _reporting_damage(file: Path) -> Iterator[None]:
    """Raise `ConfigError` for whatever a record of other keys or types makes of this module."""
    try:
        yield
    except (RecsysError, OSError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{file} is damaged: no page can be made of it ({type(error).__name__}: {error}); run "
            "the command that made it again"
        ) from error


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["flat"] = lambda tree: list(_flat(tree))
    environment.filters["chosen"] = _chosen
    return environment.from_string(Path(__file__).with_suffix(".html").read_text("utf-8"))


def _run_page(folder: RunFolder, record: Mapping[str, Any]) -> str:
    throughput, data, metrics = record["throughput"], record["data"], record["metrics"]
    rate, peak = throughput["samples_per_second"], record["peak_memory_bytes"]
    measured = {split: values for split, values in metrics.items() if values is not None}
    timeline, skipped = folder.timeline_picture_file, record.get("skipped")
    return _template().render(
        kind="run",
        title=f"Run {folder.path.resolve().name}",
        facts=[
            f"{record['status']}: {throughput['num_samples']:,} samples in "
            f"{throughput['num_steps']:,} steps, {throughput['train_seconds']:.1f} s of training",
            f"{'-' if rate is None else format(rate, ',.0f')} samples/s",
            f"peak memory {'-' if peak is None else format_bytes(peak)}",
            f"data {data['name']}, {data['num_samples']:,} samples",
            *format_stopped_early(record.get("stopped_early")),
        ],
        record=record,
        splits=list(measured),
        metrics=tabulate_metrics(measured),
        no_metrics=NO_METRICS,
        notes=format_auc_error(metrics) + format_best_auc(data),
        curves=_as_base64(draw_run(folder.read_history(), record["config"]["eval"]["split"])),
        tiers=tabulate_tiers(record.get("tiers"), record["config"].get("budget", "")),
        hits=tabulate_hits(record.get("tiers")),
        stages=_stages(record["stalls"]),
        predicted=format_predicted(record["stalls"]),
        skipped=format_skipping(skipped),
        skipping=_as_base64(skipped and draw_skipping(skipped, throughput["num_steps"])),
        timeline=_as_base64(timeline.read_bytes() if timeline.is_file() else None),
    )


def _stages(stalls: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    """Share of the time, color and legend of every stage; empty if no step was made."""
    stages = stage_seconds(stalls)
    total = sum(stages.values())
    if not total:
        return []
    return [
        (seconds / total, color, f"{stage_title(stage)} {seconds:.2f} s, {seconds / total:.0%}")
        for color, (stage, seconds) in zip(_COLORS, stages.items(), strict=False)
    ]


def _ablation_page(folder: Path, record: Mapping[str, Any]) -> str:
    config, cells = record["config"], record["cells"]
    split = cells[0]["run"]["config"]["eval"]["split"] if cells else "validation"
    for cell in cells:
        # It becomes a path below; a name such as ".." would lead out of the folder.
        if cell["name"] == ".." or Path(cell["name"]).name != cell["name"]:
            raise ConfigError(
                f"{folder / 'ablate.json'} is damaged: a cell must be named as its folder in "
                f"cells/, got {cell['name']!r}; run `recsys ablate` again"
            )
    histories = [
        (cell["variation"], RunFolder(folder / "cells" / cell["name"]).read_history())
        for cell in cells
    ]
    note = _SPREAD_NOTE if len(config["seeds"]) > 1 else _ONE_SEED_NOTE
    metrics, errors = shown_metrics(record), auc_errors(record)
    own_errors = {
        cell["variation"]: errors[cell["name"]] for cell in cells if cell["name"] in errors
    }
    if errors:
        note += f" {_ERROR_NOTE}"
    if config["target_auc"] is not None:
        note += f" {_TARGET_NOTE.format(**config, evaluations=format_evaluations(record))}"
    tested = {cell["name"]: cell["run"]["metrics"]["test"] for cell in cells}
    best = dict.fromkeys(line for cell in cells for line in format_best_auc(cell["run"]["data"]))
    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    values = {key: iter(row["values"]) for key, row in rows.items()}  # in the order of the cells
    return _template().render(
        kind="ablation",
        title=f"Ablation {folder.resolve().name}",
        facts=[
            f"{record['status']}: {len(cells)} of {record['num_cells']} cells, "
            f"{len(config['variations'])} variations, seeds {_as_text(config['seeds'])}"
        ],
        record=record,
        titles=[column_title(metric, config) for metric in metrics],
        variations=[
            [
                variation,
                *(
                    _summary(rows[variation, metric], own_errors.get(variation))
                    for metric in metrics
                ),
            ]
            for variation in dict.fromkeys(variation for variation, _ in rows)
        ],
        notes=[
            note,
            *column_notes(record),
            *spread_notes(record),
            *format_auc_error(tested),
            *best,
            *format_commits(record),
        ],
        differences=paired_cells(record) if record.get("differences") else None,
        differences_note=paired_note(record) if record.get("differences") else "",
        curves=_as_base64(
            draw_variations(histories, split, seeds=[cell["seed"] for cell in cells])
        ),
        cells=[
            [
                cell["name"],
                *(
                    format_number(name, next(values[cell["variation"], name]))
                    + (_plus_minus(errors.get(cell["name"])) if name == "auc" else "")
                    for name in metrics
                ),
                cell["run"]["status"],
            ]
            for cell in cells
        ],
        keys=[(name, _as_text(keys)) for name, keys in config["variations"].items()],
    )


def _summary(row: Mapping[str, Any], auc_error: float | None) -> str:
    """Mean, range and standard deviation of a metric of one variation, a line each.

    Args:
        row: A row of the record.
        auc_error: The standard error of the AUC of one cell of the variation; it is told where the
            variation has no spread.
    """
    mean, low, high, std = (
        format_number(row["metric"], row[key]) for key in ("mean", "min", "max", "std")
    )
    lines = [mean]
    if row["num_runs"] > 1:
        lines += [f"{low} to {high}", f"sd {std}"]
    elif row["metric"] == "auc" and row["num_runs"]:
        lines = [mean + _plus_minus(auc_error)]
    if row["num_runs"] < row["num_cells"]:
        lines.append(f"{row['num_cells'] - row['num_runs']} of {row['num_cells']} have none")
    return "\n".join(lines)


def _plus_minus(error: float | None) -> str:
    """The standard error of an AUC, to be written after it."""
    return "" if error is None else f" \N{PLUS-MINUS SIGN} {format_number('auc', error)}"


def _as_base64(png: bytes | None) -> str:
    return b64encode(png or b"").decode()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested keys as pairs of a dotted key and a text."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif key.endswith("_bytes") and isinstance(value, int):
            yield f"{prefix}{key.removesuffix('_bytes')}", format_bytes(value)
        else:
            yield f"{prefix}{key}", _as_text(value)


def _chosen(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys of a configuration that do not have their defaults.

    The default of `dense_optimizer` is `optimizer`.
    """
    defaults = describe_config(TrainConfig())
    defaults["dense_optimizer"] |= config.get("optimizer", {})
    known = set(_flat(defaults))
    return [pair for pair in _flat(config) if pair not in known]


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_as_text(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_as_text, value))
    return "-" if value is None else json.dumps(value)
