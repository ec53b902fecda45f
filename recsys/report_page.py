"""One HTML page of a training run or of an ablation, whole in itself: no script, no other file.

Everything that comes from a record is escaped; pictures are in the page as data.
"""

from __future__ import annotations

import json
from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING, Any

from recsys.ablate_table import column_title, format_evaluations, format_number
from recsys.curves import draw_run, draw_variations
from recsys.errors import ConfigError
from recsys.files import appearing_whole
from recsys.pipeline.stalls import stage_seconds, stage_title
from recsys.pipeline.suggestions import Suggestion
from recsys.report import (
    METRIC_NAMES,
    NO_METRICS,
    format_auc_error,
    format_best_auc,
    format_metric,
)
from recsys.run_folder import RunFolder, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["write_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1080px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .quiet { color: #57606a; } img { max-width: 100%; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; vertical-align: top;
  text-align: left; border-bottom: 1px solid #d8dee4; }
.numbers td + td, .numbers th + th { text-align: right; font-variant-numeric: tabular-nums; }
.numbers td { white-space: pre-line; }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden; }
.legend span { display: inline-block; margin-right: 1.2rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; }
.scroll { overflow-x: auto; }
"""
_COLORS = (
    "#4878d0",
    "#82c6e2",
    "#ee854a",
    "#6acc64",
    "#956cb4",
    "#d65f5f",
    "#dcdcdc",
    "#8c8c8c",
)


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run or an ablation; returns its path.

    Raises:
        ConfigError: the folder is neither, has no record yet, or a damaged one.
    """
    if (folder / "ablate.json").is_file():
        page = _ablation_page(folder, read_json(folder / "ablate.json"))
    elif (folder / "run.json").is_file():
        page = _run_page(RunFolder.open(folder), read_json(folder / "run.json"))
    else:
        raise ConfigError(
            f"{folder} has neither a run.json nor an ablate.json; name the folder of a run or of "
            "an ablation, after it has ended"
        )
    out = folder / "report.html"
    with appearing_whole(out) as partial:
        partial.write_text(page, encoding="utf-8")
    return out


def _run_page(folder: RunFolder, record: Mapping[str, Any]) -> str:
    throughput, data = record["throughput"], record["data"]
    rate, peak = throughput["samples_per_second"], record["peak_memory_bytes"]
    facts = [
        f"{record['status']}: {throughput['num_samples']:,} samples in "
        f"{throughput['num_steps']:,} steps, {throughput['train_seconds']:.1f} s of training",
        f"{'-' if rate is None else format(rate, ',.0f')} samples/s",
        f"peak memory {'-' if peak is None else format(peak / 2**30, '.2f')} GiB",
        f"data {data['name']}, {data['num_samples']:,} samples",
    ]
    split = record["config"]["eval"]["split"]
    return _page(
        f"Run {folder.path.resolve().name}",
        [f"<p>{escape(fact)}</p>" for fact in facts],
        _section(
            "Metrics",
            _metrics_table(record["metrics"]),
            *_notes(format_auc_error(record["metrics"]) + format_best_auc(data)),
        ),
        _section("Curves", _picture(draw_run(folder.read_history(), split))),
        _section(
            "Where the time went",
            _stage_bar(record["stalls"]),
            # Records from before have none.
            *_notes(map(Suggestion.sentence, record["stalls"].get("predicted", ()))),
        ),
        *_timeline(folder),
        _section("Configuration", _table(["key", "value"], _flat(record["config"]))),
        _section("Environment", _table(["", ""], _flat(record["environment"]))),
        _section("Data", _table(["", ""], _flat(data))),
    )


def _ablation_page(folder: Path, record: Mapping[str, Any]) -> str:
    config, cells = record["config"], record["cells"]
    split = cells[0]["run"]["config"]["eval"]["split"] if cells else "validation"
    histories = {
        cell["name"]: (cell["variation"], RunFolder(folder / "cells" / cell["name"]).read_history())
        for cell in cells
    }
    note = _SPREAD_NOTE
    if config["target_auc"] is not None:
        note += _TARGET_NOTE.format(**config, evaluations=format_evaluations(record))
    tested = {cell["name"]: cell["run"]["metrics"]["test"] for cell in cells}
    best = dict.fromkeys(line for cell in cells for line in format_best_auc(cell["run"]["data"]))
    keys = [(name, _as_text(keys)) for name, keys in config["variations"].items()]
    return _page(
        f"Ablation {folder.resolve().name}",
        [
            f"<p>{escape(record['status'])}: {len(cells)} of {record['num_cells']} cells, "
            f"{len(config['variations'])} variations, seeds {escape(_as_text(config['seeds']))}</p>"
        ],
        _section(
            "Variations",
            _summary_table(record),
            *_notes([note, *format_auc_error(tested), *best]),
        ),
        _section("Curves", _picture(draw_variations(histories.values(), split))),
        _section("Cells", _cells_table(record)),
        _section("What each variation sets", _table(["variation", "keys"], keys)),
        _section("Base configuration", _table(["key", "value"], _flat(config["base"]))),
        _section("Environment", _table(["", ""], _flat(record["environment"]))),
    )


_SPREAD_NOTE = "Mean over seeds, least to most, standard deviation of a sample (sd)."
_TARGET_NOTE = (
    " Seconds to {target_split} AUC {target_auc}: training time up to the first evaluation that "
    "reached it, without interpolation; {evaluations}. The clock leaves evaluations out."
)


def _summary_table(record: Mapping[str, Any]) -> str:
    """A line per variation: of each metric the mean, the range and the standard deviation."""
    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    metrics = list(dict.fromkeys(metric for _, metric in rows))
    lines = []
    for variation in dict.fromkeys(variation for variation, _ in rows):
        line = [variation]
        for metric in metrics:
            row = rows[variation, metric]
            low, high, std = (format_number(metric, row[key]) for key in ("min", "max", "std"))
            text = format_number(metric, row["mean"])
            if row["num_runs"] > 1:
                text += f"\n{low} to {high}\nsd {std}"
            missing = row["num_cells"] - row["num_runs"]
            line.append(f"{text}\n{missing} of {row['num_cells']} have none" if missing else text)
        lines.append(line)
    header = ["variation", *(column_title(metric, record["config"]) for metric in metrics)]
    return _table(header, lines, numbers=True)


def _cells_table(record: Mapping[str, Any]) -> str:
    rows = record["rows"]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    positions: dict[str, int] = {}
    lines = []
    for cell in record["cells"]:
        place = positions[cell["variation"]] = positions.get(cell["variation"], -1) + 1
        own = {row["metric"]: row for row in rows if row["variation"] == cell["variation"]}
        numbers = [format_number(metric, own[metric]["values"][place]) for metric in metrics]
        lines.append([cell["name"], *numbers, cell["run"]["status"]])
    titles = [column_title(metric, record["config"]) for metric in metrics]
    return _table(["cell", *titles, "status"], lines, numbers=True)


def _metrics_table(metrics: Mapping[str, Mapping[str, Any] | None]) -> str:
    measured = {split: values for split, values in metrics.items() if values is not None}
    if not measured:
        return f"<p>{NO_METRICS}</p>"
    lines = [
        [name.replace("_", " "), *(format_metric(values.get(name)) for values in measured.values())]
        for name in METRIC_NAMES
    ]
    return _table(["", *measured], lines, numbers=True)


def _stage_bar(stalls: Mapping[str, Any]) -> str:
    """One bar, a piece per stage, and a legend with seconds and shares."""
    stages = stage_seconds(stalls)
    total = sum(stages.values())
    if not total:
        return "<p>No step was made.</p>"
    pieces, legend = [], []
    for color, (stage, seconds) in zip(_COLORS, stages.items(), strict=False):
        share = seconds / total
        pieces.append(f'<div style="width:{share:.2%};background:{color}"></div>')
        text = f"{stage_title(stage)} {seconds:.2f} s, {share:.0%}"
        legend.append(f'<span><i style="background:{color}"></i>{escape(text)}</span>')
    return f"<div class=bar>{''.join(pieces)}</div><p class=legend>{''.join(legend)}</p>"


def _page(title: str, head: Sequence[str], *sections: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{''.join(head)}\n{''.join(sections)}</body></html>\n"
    )


def _section(title: str, *content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{''.join(content)}\n"


def _notes(lines: Iterable[str]) -> Iterator[str]:
    return (f"<p class=quiet>{escape(line)}</p>" for line in lines)


def _timeline(folder: RunFolder) -> Iterator[str]:
    """What ran when, of a run that kept it."""
    if folder.timeline_picture_file.is_file():
        picture = _picture(folder.timeline_picture_file.read_bytes(), "timeline")
        yield _section("Ten steps", picture)


def _picture(png: bytes | None, what: str = "curves") -> str:
    if png is None:
        return "<p>Nothing was measured yet.</p>"
    return f'<img alt="{what}" src="data:image/png;base64,{b64encode(png).decode()}">'


def _table(header: Sequence[str], lines: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header) if any(header) else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>\n" for line in lines
    )
    kind = " class=numbers" if numbers else ""
    return f"<div class=scroll><table{kind}><tr>{head}</tr>\n{body}</table></div>"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested keys as pairs of a dotted key and a text."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _as_text(value)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_as_text(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(_as_text, value))
    return "-" if value is None else json.dumps(value)
