"""The picture of what a run skipped, over its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys.train.run_files import curves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

__all__ = ["draw_skipping"]

_TABLES_SHOWN = 8


def draw_skipping(skipped: Mapping[str, Any], num_steps: int) -> bytes:
    """PNG of what a run left out.

    Its parts: the share of samples that were skipped, and of those with stale rows only. Where rows
    were followed, stale rows of the tables that had most of them, and drift by popularity in the
    first and the last window. With a guard, the part of the target share that it allowed.

    Args:
        skipped: `Skipping.report`.
        num_steps: Steps of the run.
    """
    from matplotlib.figure import Figure

    has_rows, has_guard = skipped["staleness"] is not None, skipped["guard"] is not None
    num_parts = 1 + 2 * has_rows + has_guard
    num_lines = -(-num_parts // 2)
    with curves.picture_style():
        figure = Figure(figsize=(9, 3 * num_lines), layout="constrained")
        axes = iter(figure.subplots(num_lines, 2).flatten())
        _draw_share(next(axes), skipped, num_steps)
        if has_rows:
            _draw_stale_rows(next(axes), skipped["staleness"]["windows"])
            _draw_drift(next(axes), skipped["staleness"]["windows"])
        if has_guard:
            _draw_guard(next(axes), skipped["guard"], num_steps)
        for axis in axes:
            figure.delaxes(axis)
        for axis in figure.axes:
            if axis.get_legend_handles_labels()[1]:
                axis.legend()
        return curves.as_png(figure)


def _draw_share(axis: Axes, skipped: Mapping[str, Any], num_steps: int) -> None:
    """Draw shares of samples between the points in time that a run has noted."""
    end = {key: skipped[key] for key in ("num_seen", "num_checked", "num_stale")}
    end |= {"num_batches": num_steps, "num_kept": skipped["num_seen"] - skipped["num_skipped"]}
    before = dict.fromkeys(end, 0)
    steps: list[float] = []
    shares: dict[str, list[float]] = {"skipped": [], "with stale rows only": []}
    for now in [*skipped["over_time"], end]:
        seen, kept, checked, stale = (
            now[key] - before[key] for key in ("num_seen", "num_kept", "num_checked", "num_stale")
        )
        if seen:
            steps.append((now["num_batches"] + before["num_batches"]) / 2)
            shares["skipped"].append(1 - kept / seen)
            shares["with stale rows only"].append(stale / checked if checked else float("nan"))
        before = now
    if not skipped["num_checked"]:
        del shares["with stale rows only"]
    for name, values in shares.items():
        axis.plot(steps, values, marker="o", markersize=3, label=name)
    axis.set(xlabel="steps", ylabel="share of samples")
    axis.set_ylim(0, max(0.01, 1.1 * axis.dataLim.ymax))


def _draw_stale_rows(axis: Axes, windows: Sequence[Mapping[str, Any]]) -> None:
    steps = [window["step"] for window in windows]
    for name in _tables_with_most_stale_rows(windows)[:_TABLES_SHOWN]:
        axis.plot(steps, [window["stale_rows"][name] for window in windows], label=name)
    axis.set(xlabel="steps", ylabel="stale rows")


def _tables_with_most_stale_rows(windows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of tables, those that had most stale rows in a window first."""
    most: dict[str, int] = {}
    for window in windows:
        for name, count in window["stale_rows"].items():
            most[name] = max(count, most.get(name, 0))
    return sorted(most, key=lambda name: -most[name])


def _draw_drift(axis: Axes, windows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogFormatter

    judged = [window for window in windows if any(window["drift_by_decile"])]
    for window in [*judged[:1], *judged[1:][-1:]]:
        label = f"window before step {window['step']:,}"
        # Zeros and nulls have no place on a logarithmic axis.
        values = [value or float("nan") for value in window["drift_by_decile"]]
        axis.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=label)
    axis.set(xlabel="tenth of the rows, most updated first", ylabel="median drift")
    axis.set_yscale("log")
    # The formatter of this scale writes mathematics, which pictures do not read.
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter())


def _draw_guard(axis: Axes, guard: Mapping[str, Any], num_steps: int) -> None:
    decisions = guard["decisions"]
    # A long run has noted its last decisions only.
    has_all = not decisions or guard["num_decisions"] == len(decisions)
    allowed = [(0, 1.0)] if has_all else []
    for each in decisions:
        if each["paused_until"] > each["from_step"]:
            allowed.append((each["from_step"], 0.0))
        allowed.append((each["paused_until"], each["factor"]))
    allowed = [(min(step, num_steps), factor) for step, factor in allowed]
    axis.step(*zip(*allowed, (num_steps, allowed[-1][1]), strict=True), where="post")
    for action, marker in (("lowered", "v"), ("stopped", "X"), ("raised", "^")):
        points = [(each["step"], each["factor"]) for each in decisions if each["action"] == action]
        if points:
            axis.plot(*zip(*points, strict=True), marker, label=f"{action} after a window")
    axis.set(xlabel="steps", ylabel="part of the share that the guard allows", ylim=(-0.05, 1.05))
