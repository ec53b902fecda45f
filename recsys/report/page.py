"""One HTML page about a training run or an ablation, without scripts and without other files.

`page.html` is the Jinja template of both pages. It escapes every text that a record holds;
pictures are in the page as data.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys._support.counted import counted
from recsys._support.files import appearing_whole
from recsys._support.sizes import format_bytes
from recsys.config import TrainConfig, describe_config
from recsys.errors import ConfigError, RecsysError
from recsys.pipeline.stalls import format_predicted, stage_seconds, stage_title
from recsys.report.ablation_files import csv_table, markdown_table
from recsys.report.ablation_page import ablation_values
from recsys.report.ablation_pictures import STAGE_COLORS
from recsys.report.records import find_record
from recsys.report.summary import (
    NO_METRICS,
    format_auc_error,
    format_best_auc,
    format_earlier_metrics,
    format_processes,
    format_skipping,
    format_stopped_early,
    tabulate_hits,
    tabulate_metrics,
    tabulate_tiers,
)
from recsys.report.texts import as_base64, flat_texts
from recsys.train.run_files.curves import draw_run
from recsys.train.run_files.run_folder import RunFolder, read_json
from recsys.train.run_files.skipping_picture import draw_skipping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jinja2 import Template

__all__ = ["write_report"]


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run or an ablation; returns its path.

    The folder of an ablation also gets its table as `table.md` and `table.csv`.

    Raises:
        ConfigError: the folder is neither, has no record yet, or has a damaged record.
    """
    record_file = find_record(folder)
    files = {}
    with _reporting_damage(record_file):
        if record_file.name == "ablate.json":
            record = read_json(record_file)
            values = ablation_values(folder, record)
            files["table.md"] = markdown_table(record, values["title"])
            files["table.csv"] = csv_table(record)
            files["report.html"] = _template().render(kind="ablation", **values)
        else:
            files["report.html"] = _run_page(
                RunFolder.open(folder), RunFolder(folder).read_record()
            )
    for name, text in files.items():
        with appearing_whole(folder / name) as partial:
            # A record may hold half of a surrogate pair, which UTF-8 cannot.
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    return folder / "report.html"


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
    environment.filters["flat"] = lambda tree: list(flat_texts(tree))
    environment.filters["chosen"] = _chosen
    return environment.from_string(Path(__file__).with_suffix(".html").read_text("utf-8"))


def _run_page(folder: RunFolder, record: Mapping[str, Any]) -> str:
    throughput, data, metrics = record["throughput"], record["data"], record["metrics"]
    rate, peak = throughput["samples_per_second"], record["peak_memory_bytes"]
    measured = {split: values for split, values in metrics.items() if values is not None}
    timeline, skipped = folder.timeline_picture_file, record.get("skipped")
    history = folder.read_history()
    return _template().render(
        kind="run",
        title=f"Run {folder.path.resolve().name}",
        facts=[
            f"{record['status']}: {throughput['num_samples']:,} samples in "
            f"{counted(throughput['num_steps'], 'step')}, "
            f"{throughput['train_seconds']:.1f} s of training",
            f"{'-' if rate is None else format(rate, ',.0f')} samples/s",
            f"peak memory {'-' if peak is None else format_bytes(peak)}",
            *(f"processes {text}" for text in format_processes(record.get("processes"))),
            f"data {data['name']}, {data['num_samples']:,} samples",
            *format_stopped_early(record.get("stopped_early")),
        ],
        record=record,
        splits=list(measured),
        metrics=tabulate_metrics(measured),
        no_metrics=NO_METRICS,
        notes=[
            *format_auc_error(metrics),
            *format_earlier_metrics(record, history),
            *format_best_auc(data),
        ],
        curves=as_base64(draw_run(history, record["config"]["eval"]["split"])),
        tiers=tabulate_tiers(record.get("tiers"), record["config"].get("budget", "")),
        hits=tabulate_hits(record.get("tiers")),
        stages=_stages(record["stalls"]),
        predicted=format_predicted(record["stalls"]),
        skipped=format_skipping(skipped),
        skipping=as_base64(skipped and draw_skipping(skipped, throughput["num_steps"])),
        timeline=as_base64(timeline.read_bytes() if timeline.is_file() else None),
    )


def _stages(stalls: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    """Share of the time, color and legend of every stage; empty if no step was made."""
    stages = stage_seconds(stalls)
    total = sum(stages.values())
    if not total:
        return []
    return [
        (
            seconds / total,
            STAGE_COLORS.get(stage, "#BBBBBB"),
            f"{stage_title(stage)} {seconds:.2f} s, {seconds / total:.0%}",
        )
        for stage, seconds in stages.items()
    ]


def _chosen(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys of a configuration that do not have their defaults.

    The default of `dense_optimizer` is `optimizer`.
    """
    defaults = describe_config(TrainConfig())
    defaults["dense_optimizer"] |= config.get("optimizer", {})
    known = set(flat_texts(defaults))
    return [pair for pair in flat_texts(config) if pair not in known]
