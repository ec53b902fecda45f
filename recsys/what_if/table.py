"""The predictions of one run as text and as JSON types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys._support.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.what_if.changes import MeasuredRun
    from recsys.what_if.predict import Prediction

__all__ = ["describe_predictions", "format_predictions"]


def describe_predictions(
    run: MeasuredRun, predictions: Sequence[Prediction], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Predictions in JSON types.

    Args:
        run: The run that they start from.
        predictions: The predictions.
        refused: The reasons of changes that cannot be trained, by their label.
    """
    return {
        "run": str(run.path),
        "measured": _measured(run),
        "predictions": [
            {
                "change": each.change.label,
                "predicted": {
                    "samples_per_second": each.samples_per_second,
                    "exposed_seconds_per_1000_steps": each.exposed_seconds,
                    "lookup_hit_rate": each.hit_rate,
                    "hot_bytes": each.hot_bytes,
                },
                "speedup": each.speedup,
                "notes": list(each.notes),
                **_beside(each),
            }
            for each in predictions
        ],
        "refused": dict(refused),
    }


def format_predictions(found: Mapping[str, Any]) -> str:
    """The table that `recsys what-if` prints.

    Args:
        found: As `describe_predictions` returned it.
    """
    has_measured = any("measured" in each for each in found["predictions"])
    now = found["measured"]
    labels = ["as measured", *(each["change"] for each in found["predictions"]), *found["refused"]]
    width = max(map(len, labels)) + 2
    header = (
        f"{'change':<{width}}{'samples/s':>11}{'speed':>8}{'waits':>9}{'hits':>8}{'memory':>11}"
    )
    header += f"{'measured':>11}{'error':>8}" if has_measured else ""
    lines = [header, f"{'as measured':<{width}}{_cells(now, 1.0)}"]
    notes: list[str] = []
    for each in found["predictions"]:
        line = f"{each['change']:<{width}}{_cells(each['predicted'], each['speedup'])}"
        if has_measured:
            line += f"{each['measured']['samples_per_second']:>11,.0f}{each['error']:>+8.1%}"
        numbers = []
        for note in each["notes"]:
            if note not in notes:
                notes.append(note)
            numbers.append(notes.index(note) + 1)
        lines.append(line + "".join(f" [{number}]" for number in sorted(numbers)))
    lines += [f"{label:<{width}}{reason}" for label, reason in found["refused"].items()]
    lines += [
        "",
        "speed: relative to the run; waits: seconds of waiting for rows in 1,000 steps; "
        "hits: of lookups; memory: fast memory for rows",
        *(f"[{number}] {note}" for number, note in enumerate(notes, 1)),
    ]
    return "\n".join(lines)


def _cells(figures: Mapping[str, Any], speedup: float) -> str:
    memory = figures["hot_bytes"]
    return (
        f"{figures['samples_per_second']:>11,.0f}{speedup:>7.2f}x"
        f"{figures['exposed_seconds_per_1000_steps']:>9.2f}{figures['lookup_hit_rate']:>8.1%}"
        f"{'-' if memory is None else format_bytes(memory):>11}"
    )


def _measured(run: MeasuredRun) -> dict[str, Any]:
    """What a run measured, as predictions name it."""
    tiers = run.record["tiers"]
    return {
        "samples_per_second": run.samples_per_second,
        "exposed_seconds_per_1000_steps": 1000 * run.waited_seconds / run.num_steps,
        "lookup_hit_rate": 1.0 if tiers is None else tiers["lookup_hit_rate"],
        "hot_bytes": None if tiers is None else tiers["hot_bytes"],
    }


def _beside(prediction: Prediction) -> dict[str, Any]:
    """The measurement of the same configuration, if there is one."""
    measured = prediction.change.measured
    if measured is None:
        return {}
    return {
        "beside": str(measured.path),
        "measured": _measured(measured),
        "error": prediction.error,
    }
