"""Results of a run as text: the table that `recsys train` prints at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys._support.files import as_argument
from recsys._support.sizes import format_bytes
from recsys.pipeline.skip.guard_decisions import describe_decision
from recsys.pipeline.stalls import format_stalls, stage_seconds
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "NO_METRICS",
    "format_auc_error",
    "format_best_auc",
    "format_earlier_metrics",
    "format_little_learned",
    "format_metric",
    "format_metrics",
    "format_processes",
    "format_run",
    "format_skipping",
    "format_stopped_early",
    "format_unknown",
    "tabulate_hits",
    "tabulate_metrics",
    "tabulate_tiers",
]

_METRIC_NAMES = (
    "auc",
    "auc_standard_error",
    "logloss",
    "normalized_entropy",
    "calibration",
    "accuracy",
    "num_samples",
)
# Of data that has them; shown where the first of each has a value.
_PARTS_OF_SOME = (
    ("gauc", "num_groups", "num_groups_left_out"),
    (
        "recall_at_k",
        "recall_standard_error",
        "popularity_recall_at_k",
        "ndcg_at_k",
        "ndcg_standard_error",
        "popularity_ndcg_at_k",
        "num_rankings",
        "num_unknown_items",
    ),
)
_DAYS_SHOWN = 31
_COLUMNS_SHOWN = 8
_TABLES_SHOWN = 4
_DECISIONS_SHOWN = 5
# What these policies do to samples.
_KEEP_EVERYTHING = {
    "observe": "nothing by observe, which only measures",
    "freeze_rows": "updates of stale rows by freeze_rows",
}
_LEARNED_LITTLE = 0.99  # the normalized entropy of the mean label is 1
_WORSE_THAN_THE_MEAN = 1.01
_OVERFITTED = 0.9  # loss in training over that of test samples
NO_METRICS = "no evaluation was made, or the run diverged"


def format_metric(value: Any) -> str:
    """Value of a metric for readers."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def format_metrics(metrics: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Table with a line per metric and a column per split."""
    measured = {split: values for split, values in metrics.items() if values is not None}
    if not measured:
        return NO_METRICS
    rows = tabulate_metrics(measured)
    width = max(20, *(len(title) + 2 for title, *_ in rows))
    lines = [" " * width + "".join(f"{split:>14}" for split in measured)]
    for title, *cells in rows:
        lines.append(f"{title:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join([*lines, *format_auc_error(measured), *_format_one_label(measured)])


def tabulate_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Lines of a table of metrics: a title, then a cell for each split.

    Metrics that only some data has are there if a split has a value of them.
    """
    splits = list(metrics.values())
    names = list(_METRIC_NAMES)
    for part in _PARTS_OF_SOME:
        if any(values.get(part[0]) is not None for values in splits):
            names += part
    rows = [
        [_title(name, splits), *(format_metric(values.get(name)) for values in splits)]
        for name in names
    ]
    by_day = [values.get("auc_by_day", {}) for values in splits]
    days = sorted({day for values in by_day for day, auc in values.items() if auc is not None})
    rows += [
        [f"auc {day}", *(format_metric(values.get(day)) for values in by_day)]
        for day in days[:_DAYS_SHOWN]
    ]
    if len(days) > _DAYS_SHOWN:
        rows.append([f"{len(days) - _DAYS_SHOWN} later days: run.json", *("" for _ in splits)])
    return rows


def _title(name: str, splits: Sequence[Mapping[str, Any]]) -> str:
    """Name of a metric for readers, with the k that it counts."""
    counted = {values["ranking_k"] for values in splits if "ranking_k" in values}
    if name.endswith("_at_k") and len(counted) == 1:
        name = f"{name.removesuffix('k')}{counted.pop()}"
    return name.replace("_", " ")


def format_auc_error(metrics: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """One line with the largest possible error of the AUCs; empty if they are exact."""
    found = [(values or {}).get("max_auc_error") for values in metrics.values()]
    errors = [error for error in found if error]
    if not errors:
        return []
    return [f"auc was counted in bins; it is wrong by at most {max(errors):.1e}"]


def _format_one_label(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each split whose labels are all equal, unless it is judged by rankings."""
    lines = []
    for split, values in metrics.items():
        is_ranked = values.get("recall_at_k") is not None
        if values.get("auc", 0) is None and values["num_samples"] > 1 and not is_ranked:
            label = 0 if values.get("calibration") is None else 1  # which needs a positive label
            lines.append(
                f"{split}: all {values['num_samples']:,} labels are {label}; there is no auc, and "
                "the other metrics say nothing about a model"
            )
    return lines


def format_best_auc(data: Mapping[str, Any]) -> list[str]:
    """One line with the AUC of the true click probabilities; empty for data without them."""
    best_auc = data.get("best_auc")
    return [] if best_auc is None else [f"{'best AUC possible':<20}{format_metric(best_auc):>14}"]


def format_earlier_metrics(
    record: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A sentence if metrics of an interrupted run are of a step before its last one.

    Args:
        record: The run record.
        history: The lines of its history.
    """
    split, num_steps = record["config"]["eval"]["split"], record["throughput"]["num_steps"]
    found = record["metrics"].get(split)
    steps = [entry["step"] for entry in history if found and entry.get(split) == found]
    if record["status"] != "interrupted" or not steps or steps[-1] == num_steps:
        return []
    return [
        f"metrics of the {split} split are those after step {steps[-1]:,}, of the last evaluation; "
        f"training ended after step {num_steps:,} (its saved model: recsys evaluate)"
    ]


def format_unknown(unknown: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A line for each part with values that have no row of their own; empty if there are none.

    Args:
        unknown: How many, by part of the data and column.
    """
    lines = []
    for part, columns in unknown.items():
        most_first = sorted(columns.items(), key=lambda each: -each[1])
        shown = ", ".join(f"{column} {count:,}" for column, count in most_first[:_COLUMNS_SHOWN])
        num_others = len(columns) - _COLUMNS_SHOWN
        rest = f", and {num_others} more columns" if num_others > 0 else ""
        lines.append(f"{part}: values without a row of their own, which share row 0: {shown}{rest}")
    return lines


def _describe_model(model: Mapping[str, Any]) -> str:
    """Name of a model, with its interaction if that is not the default."""
    interaction = model.get("interaction", "dot")
    return str(model["name"]) + (f", {interaction}" if interaction != "dot" else "")


def format_little_learned(
    metrics: Mapping[str, Mapping[str, Any] | None],
    optimizer: str,
    history: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """A hint, if predictions are hardly better, or worse, than the mean label for every sample.

    Args:
        metrics: By part of the data.
        optimizer: Name of the optimizer that was used.
        history: The lines of the history of the run, for its last loss in training.
    """
    test = metrics.get("test") or {}
    entropy = test.get("normalized_entropy")
    if entropy is None or entropy < _LEARNED_LITTLE:
        return []
    is_worse = entropy > _WORSE_THAN_THE_MEAN
    losses = [line["train_loss"] for line in history if line.get("train_loss") is not None]
    if is_worse and losses and losses[-1] < _OVERFITTED * test["logloss"]:
        advice = "a lower optimizer.lr, fewer epochs, or early_stopping.patience: the model fits "
        advice += f"training samples alone, whose loss fell to {losses[-1]:.4f}"
    else:
        other = "--set optimizer.name=adagrad --set optimizer.lr=0.03"
        advice = f"{other if optimizer == 'sgd' else 'another optimizer.lr'}, or more epochs"
    found, side = ("worse", "above") if is_worse else ("hardly better", "near")
    return [
        "",
        f"Predictions are {found} than the mean label for all (normalized entropy {side} 1).",
        f"Try {advice}.",
    ]


def format_run(record: Mapping[str, Any], run_dir: Path) -> str:
    """The text that `recsys train` prints at its end."""
    throughput = record["throughput"]
    rate = throughput["samples_per_second"]
    seconds = stage_seconds(record["stalls"])
    evaluate = seconds.pop("evaluate")
    total = sum(seconds.values())
    config = record["config"]
    dim, optimizer = config["model"]["embedding_dim"], config["optimizer"]
    dims = config["model"].get("table_dims", {})
    sizes = record["data"]["table_sizes"]
    num_bytes = sum(4 * size * dims.get(table, dim) for table, size in sizes.items())
    peak = record["peak_memory_bytes"]
    files = sorted(file.name for file in run_dir.iterdir())
    skipped, history = record.get("skipped"), RunFolder(run_dir).read_history()
    tiers = tabulate_tiers(record["tiers"], config.get("budget", ""))
    lines = []
    if record["status"] != "finished":
        lines.append(f"{record['status']} at step {throughput['num_steps']:,}")
        if record["status"] == "interrupted" and record["checkpoints"] is not None:
            lines.append(f"continue it by: recsys train --run {as_argument(run_dir)} --resume")
    if record.get("stopped_early") is not None:
        lines += [*format_stopped_early(record["stopped_early"]), ""]
    lines += [
        *_measured(record, run_dir),
        *format_earlier_metrics(record, history),
        *format_little_learned(record["metrics"], optimizer["name"], history),
        *format_best_auc(record["data"]),
        "",
        f"data                {record['data']['name']}, {record['data']['num_samples']:,} samples",
        f"model               {_describe_model(config['model'])}",
        f"tables              {len(sizes)}, {sum(sizes.values()):,} rows of "
        f"{', '.join(map(str, sorted({dim, *dims.values()})))}: "
        f"{format_bytes(num_bytes)}, embeddings {config['embeddings']}",
        f"recipe              {optimizer['name']} {optimizer['lr']:g}, B={config['batch_size']}, "
        f"{config['epochs']} epoch{'s' if config['epochs'] > 1 else ''}, seed {config['seed']}",
        *(f"processes           {text}" for text in format_processes(record.get("processes"))),
        f"samples/s           {'-' if rate is None else format(rate, ',.0f')}",
        f"training            {throughput['num_samples']:,} samples in {total:.1f} s; "
        f"evaluation took {evaluate:.1f} s more",
        *(f"{title:<20}{text}" for title, text in tiers),
        *format_skipping(skipped),
        f"peak memory         {'-' if peak is None else format_bytes(peak)}",
        f"saved               {run_dir}/: {', '.join(files)}",
        "",
        format_stalls(
            record["stalls"],
            is_alone=record.get("processes") is None,
            follows_rows=skipped is not None and skipped["staleness"] is not None,
        ),
    ]
    return "\n".join(lines)


def _measured(record: Mapping[str, Any], run_dir: Path) -> list[str]:
    """The metrics of a run, or that an unfinished one has none yet."""
    metrics = record["metrics"]
    if record["status"] == "finished":
        return [format_metrics(metrics)]
    if any(metrics.values()):
        return ["measured so far:", "", format_metrics(metrics)]
    command = f"recsys evaluate {as_argument(run_dir)}"
    way_on = f"; `{command}` measures its saved model" if record["config"]["save_model"] else ""
    return [f"no evaluation was made so far{way_on}"]


def format_stopped_early(stopped: Mapping[str, Any] | None) -> list[str]:
    """A sentence on why training ended before its last step; empty if it did not."""
    if stopped is None:
        return []
    start = f"stopped early at step {stopped['step']:,}: "
    if stopped.get("metric") is None:
        return [f"{start}{stopped['callback'] or 'a callback'} asked for it"]
    metric, best, num_without = stopped["metric"], stopped["best"], stopped["num_without"]
    last = "the last evaluation" if num_without == 1 else f"the last {num_without:,} evaluations"
    than = f" of more than {stopped['min_delta']:g}" if stopped.get("min_delta") else ""
    return [
        f"{start}{last} brought no improvement{than}; the "
        f"best {metric} on the {stopped['split']} split was {best:.4f} at step "
        f"{stopped['best_step']:,}; the model is that of the last step"
    ]


def format_processes(processes: Mapping[str, Any] | None) -> list[str]:
    """How many processes trained, and which numbers are those of one of them; empty for one."""
    if processes is None:
        return []
    placement = processes["placement"]
    num_divided = sum(place is None for place in placement.values())
    return [
        f"{processes['num_ranks']}; {num_divided} of {len(placement)} tables are divided by rows; "
        "tiers, checkpoints and memory are those of the first process"
    ]


def tabulate_tiers(tiers: Mapping[str, Any] | None, budget: str) -> list[tuple[str, str]]:
    """Fast memory, hit rates and bytes moved, a line each; empty if all rows were resident.

    Args:
        tiers: The entry of a run record.
        budget: As the configuration has it; empty if a plan gave it.
    """
    if tiers is None:
        return []
    of_budget = f" of budget {budget}" if budget else ""
    return [
        (
            "tiers",
            f"{format_bytes(tiers['hot_bytes'])} hot{of_budget}, {tiers['num_slots']:,} of "
            f"{tiers['num_rows']:,} rows; the rest: {tiers['cold_tier']}",
        ),
        (
            "hits",
            f"{tiers['lookup_hit_rate']:.1%} of lookups, {tiers['unique_hit_rate']:.1%} of "
            "distinct rows",
        ),
        (
            "moved",
            f"{format_bytes(tiers['fetched_bytes'])} fetched, "
            f"{format_bytes(tiers['written_back_bytes'])} written back; "
            f"{tiers['exposed_fetch_seconds']:.1f} s of waiting",
        ),
        *_most_misses(tiers),
    ]


def _most_misses(tiers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line with the tables that miss most; empty if no lookup missed, or none was counted."""
    rows = tabulate_hits(tiers)
    shown = [f"{name} {share}" for name, *_, share in rows[:_TABLES_SHOWN] if share != "-"]
    return [("missed most", f"{', '.join(shown)} of all misses")] if shown else []


def tabulate_hits(tiers: Mapping[str, Any] | None) -> list[list[str]]:
    """Name, rows, lookups, hit rate and share of all misses of each table, most misses first.

    Empty where lookups were not counted by table.

    Args:
        tiers: The entry of a run record.
    """
    tables = (tiers or {}).get("tables", [])
    total = sum(map(_misses, tables))
    return [
        [
            each["name"],
            f"{each['num_rows']:,}",
            f"{each['num_lookups']:,}",
            _percent(each["num_hits"], each["num_lookups"]),
            _percent(_misses(each), total),
        ]
        for each in sorted(tables, key=_misses, reverse=True)
    ]


def _misses(table: Mapping[str, Any]) -> int:
    return int(table["num_lookups"] - table["num_hits"])


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def format_skipping(skipped: Mapping[str, Any] | None) -> list[str]:
    """What a run left out, a line each; empty for a run without skipping.

    Args:
        skipped: The entry of a run record, `Skipping.report`.
    """
    if skipped is None:
        return []
    lines = [f"skipped             {_left_out(skipped)}"]
    if skipped["num_checked"]:
        share = skipped["num_stale"] / skipped["num_checked"]
        lines.append(
            f"stale samples       {share:.1%} of {skipped['num_checked']:,} checked had stale rows "
            "only"
        )
    if skipped["staleness"] is not None:
        lines += _staleness_lines(skipped["staleness"], skipped["policy"])
    if skipped["guard"] is not None:
        has_skipped = bool(skipped["num_skipped"] or skipped.get("num_lookups_left_out"))
        lines += _guard_lines(skipped["guard"], has_skipped=has_skipped)
    predictor = skipped.get("importance") or {"predictor_logloss": None}
    if predictor["predictor_logloss"] is not None:
        lines.append(
            f"predictor           logloss {predictor['predictor_logloss']:.4f} on the samples seen "
            "last"
        )
    paper = skipped.get("paper")
    if paper is not None and not paper["decisions"]:
        lines.append("threshold           none: no epoch had a sample to find one on")
    for decision in paper["decisions"] if paper is not None else ():
        lines.append(
            f"epoch {decision['epoch'] + 1:<14}threshold {decision['threshold']:.3g}, "
            f"{_largest(decision['num_stale_rows'])}"
        )
    return lines


def _left_out(skipped: Mapping[str, Any]) -> str:
    """What a policy left out, in one line."""
    policy, num_seen = skipped["policy"], skipped["num_seen"]
    if policy["name"] in _KEEP_EVERYTHING:
        what = _frozen(skipped) or _KEEP_EVERYTHING[policy["name"]]
        return f"{what}; all {num_seen:,} samples were trained on"
    # With a given threshold, the share means nothing.
    is_share_given = "share" in policy and policy.get("staleness", {}).get("threshold") is None
    asked = f", asked for {policy['share']:.1%}" if is_share_given else ""
    return (
        f"{skipped['share_skipped']:.1%} of {num_seen:,} samples by {policy['name']}{asked}; "
        f"{num_seen - skipped['num_skipped']:,} trained on"
    )


def _frozen(skipped: Mapping[str, Any]) -> str:
    """The updates that frozen rows left out; empty for a policy that freezes no rows."""
    if not skipped.get("share_lookups_left_out"):
        return ""
    num_lookups = skipped["staleness"]["num_lookups"]
    return f"{skipped['share_lookups_left_out']:.1%} of the updates of {num_lookups:,} lookups"


def _staleness_lines(staleness: Mapping[str, Any], policy: Mapping[str, Any]) -> list[str]:
    windows = staleness["windows"]
    if not windows:
        return ["stale rows          none: no window of skip.staleness has ended"]
    last, thawed = windows[-1], sum(window["num_thawed"] for window in windows)
    # Of a long run some windows have no entry, but the first and the last have one.
    num_windows = 1 + (last["step"] - windows[0]["step"]) // policy["staleness"]["window"]
    threshold = "none" if last["threshold"] is None else f"{last['threshold']:.3g}"
    return [
        f"stale rows          {_largest(last['stale_rows'])}; threshold {threshold}",
        f"thawed              {_times('row', thawed)}, in {_times('window', num_windows)}",
        f"tracker             {format_bytes(staleness['memory_bytes'])} of memory",
    ]


def _largest(stale_rows: Mapping[str, int]) -> str:
    """The tables with the most stale rows."""
    found = sorted(((count, name) for name, count in stale_rows.items() if count), reverse=True)
    if not found:
        return "no stale rows"
    shown = ", ".join(f"{name} {count:,}" for count, name in found[:_TABLES_SHOWN])
    total = sum(stale_rows.values())
    return f"{total:,} in {len(found)} of {len(stale_rows)} tables: {shown}" + (
        ", ..." if len(found) > _TABLES_SHOWN else ""
    )


def _guard_lines(guard: Mapping[str, Any], *, has_skipped: bool) -> list[str]:
    num_windows, num_decisions = guard["num_windows"], guard["num_decisions"]
    found = f"guard               {_times('window', num_windows)}, "
    if not num_decisions:
        if num_windows < 2:
            return [f"{found}so nothing was compared; lower skip.guard.every"]
        if not any(guard["estimates"].values()):
            return [f"{found}but too few labels of 0 or of 1 to compare; raise skip.guard.steps"]
        if not has_skipped:
            return [f"{found}and nothing was skipped between them"]
        return [f"{found}all inside the bands"]
    shown = [describe_decision(each) for each in guard["decisions"][-_DECISIONS_SHOWN:]]
    last = f"; the last {len(shown)}:" if num_decisions > len(shown) else ""
    lines = [f"{found}decisions: {num_decisions}{last}"]
    return [*lines, *(" " * 20 + each for each in shown)]


def _times(word: str, number: int) -> str:
    """A number of things, such as "no window" or "2 windows"."""
    return f"{f'{number:,}' if number else 'no'} {word}{'s' if number > 1 else ''}"
