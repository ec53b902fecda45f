"""Decisions of a guard: in words, and from a saved state."""

from __future__ import annotations

from typing import Any

from recsys._support.states import SavedState
from recsys.pipeline.skip.window_quality import MEASURES

__all__ = ["KINDS", "MOST_DECISIONS", "describe_decision", "load_decisions"]

KINDS = ("all", "skipped")
MOST_DECISIONS = 256
_ACTIONS = ("lowered", "stopped", "raised")


def describe_decision(decision: dict[str, Any]) -> str:
    """A decision in words, such as "from mini-batch 1081 on, the run stops skipping: ..."."""
    factor = decision["factor"]
    what = f"skips {factor:.0%} of the share that was asked for" if factor else "stops skipping"
    if decision["paused_until"] > decision["from_step"]:
        what = f"skips nothing until mini-batch {decision['paused_until']}, and then {what[6:]}"
    reasons = ", ".join(
        f"{each['measure']} of {each['samples']} samples is {each['value']:.4f} "
        f"(estimate {each['estimate']:.4f})"
        for each in decision["reasons"]
    )
    return (
        f"from mini-batch {decision['from_step']} on, the run {what}"
        f"{f': {reasons}' if reasons else ''}"
    )


def load_decisions(found: SavedState) -> list[dict[str, Any]]:
    """The decisions of a state.

    Raises:
        ConfigError: they are none.
    """
    decisions: list[dict[str, Any]] = []
    for entry in found.items("decisions", range(MOST_DECISIONS + 1), "entries"):
        read = SavedState(
            "guard decision",
            entry,
            ("step", "from_step", "paused_until", "action", "factor", "reasons"),
        )
        if read["action"] not in _ACTIONS:
            raise read.error("action", f"one of {_ACTIONS}")
        if not isinstance(read["reasons"], list | tuple):
            raise read.error("reasons", "a list")
        least = decisions[-1]["from_step"] + 1 if decisions else 0
        decisions.append(
            {
                "step": read.whole("step"),
                "from_step": read.whole("from_step", least=least),
                "paused_until": read.whole("paused_until", least=least),
                "action": read["action"],
                "factor": read.number("factor", most=1),
                "reasons": [_load_reason(reason) for reason in read["reasons"]],
            }
        )
    return decisions


def _load_reason(entry: Any) -> dict[str, Any]:
    read = SavedState("guard decision: reason", entry, ("samples", "measure", "value", "estimate"))
    for key, choices in (("samples", KINDS), ("measure", MEASURES)):
        if read[key] not in choices:
            raise read.error(key, f"one of {choices}")
    return {
        "samples": read["samples"],
        "measure": read["measure"],
        "value": read.number("value"),
        "estimate": read.number("estimate"),
    }
