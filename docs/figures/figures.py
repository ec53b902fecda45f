"""Draws the pictures of docs/concepts.md: `python docs/figures/figures.py`.

They are SVG with their own background, light or dark as the reader's system is, and wide enough to
be read on a phone. The curve is drawn from docs/benchmarks/synthetic_coverage.json.
"""

from __future__ import annotations

import json
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING

from drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, Drawing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["FIGURES"]

_HERE = Path(__file__).parent
_RECORD = _HERE.parent / "benchmarks" / "synthetic_coverage.json"


def coverage() -> str:
    """How many of the lookups the most popular rows get."""
    record = json.loads(_RECORD.read_text())
    picture = Drawing(340, "Share of the lookups that go to the most popular rows")
    left, right, top, bottom = 56, 496, 52, 280
    shares = [*record["tops"], 1.0]

    def across(share: float) -> float:
        return left + (right - left) * (log10(share) + 3) / 3

    def down(share: float) -> float:
        return bottom - (bottom - top) * share

    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.line(left, down(share), right, down(share), "grid")
        picture.text(left - 8, down(share) + 5, f"{share:.0%}", anchor="end")
    for share in shares:
        picture.text(across(share), bottom + 22, f"{share:.1%}".replace(".0", ""))
    picture.text(left - 44, 30, "share of the lookups", anchor="start")
    picture.text((left + right) / 2, bottom + 46, "most popular rows, of all rows that were met")
    real = record["real"]["popularity"][0]
    full = record["synthetic"]["popularity"][-1]
    for each, name, color, place in (
        (real, "real data", BLUE, 0.36),
        (full, "synthetic data", ORANGE, 0.21),
    ):
        values = [*each["top_shares"], 1.0]
        points = [(across(s), down(v)) for s, v in zip(shares, values, strict=True)]
        picture.path(points, color)
        for x, y in points:
            picture.dot(x, y, color)
        picture.dot(left + 86, down(place) - 5, color)
        words = f"{name}: {each['num_samples']:,} samples"
        picture.text(left + 98, down(place), words, anchor="start")
    return picture.svg()


def tiers() -> str:
    """The hot tier with its slots, and the cold tier with every row."""
    picture = Drawing(330, "The hot tier holds some rows in slots; the cold tier has every row")
    picture.box(16, 16, 488, 118, "panel")
    picture.text(32, 42, "HOT TIER: fast memory, as much as the budget", anchor="start")
    for number, row in enumerate(("7", "3", "free", "12", "5", "40")):
        color = GREY if row == "free" else ORANGE
        label = row if row == "free" else f"row {row}"
        picture.filled(32 + 77 * number, 56, 70, 36, color, label)
        picture.text(67 + 77 * number, 112, f"slot {number}")
    picture.box(16, 206, 488, 108, "panel")
    picture.text(32, 300, "COLD TIER: memory or files, every row", anchor="start")
    for number in range(12):
        picture.filled(32 + 38.5 * number, 222, 34, 36, BLUE, str(number))
    picture.text(490, 278, "...", anchor="end")
    picture.arrow(180, 206, 180, 134)
    picture.text(168, 166, "fetch: a row", anchor="end")
    picture.text(168, 186, "and its state", anchor="end")
    picture.arrow(330, 134, 330, 206)
    picture.text(342, 166, "write back: rows", anchor="start")
    picture.text(342, 186, "that were updated", anchor="start")
    return picture.svg()


def journey() -> str:
    """What one mini-batch does to the tiers, from top to bottom."""
    picture = Drawing(
        450, "One mini-batch: look up, claim, fetch, compute, update, write back later"
    )
    hot, cold = 288, 462
    picture.filled(hot - 62, 14, 124, 30, GREY, "hot tier")
    picture.filled(cold - 46, 14, 92, 30, GREY, "cold tier")
    picture.line(cold, 44, cold, 434, "grid")
    steps = (
        ("1  look up", "rows 7, 3, 7, 9", "735", ORANGE),
        ("2  claim slots", "7, 3 hit, 9 misses", "73?", ORANGE),
        ("3  fetch", "9, in the place of 5", "739", ORANGE),
        ("4  compute", "forward, backward", "739", GREEN),
        ("5  update", "each row once", "739", PURPLE),
        ("6  write back", "when a slot is reused", "739", PURPLE),
    )
    for number, (name, detail, rows, color) in enumerate(steps):
        y = 84 + 66 * number
        picture.text(16, y - 4, name, anchor="start", style="strong")
        picture.text(16, y + 16, detail, anchor="start")
        for slot, row in enumerate(rows):
            is_taken = row == "?"
            picture.filled(hot - 62 + 42 * slot, y - 16, 40, 32, GREY if is_taken else color, row)
        if name.endswith("fetch"):
            picture.arrow(hot + 68, y - 10, cold - 4, y - 10)
            picture.text((hot + 64 + cold) / 2, y - 17, "5, if dirty")
            picture.arrow(cold - 4, y + 8, hot + 68, y + 8)
            picture.text((hot + 64 + cold) / 2, y + 27, "9")
        elif name.endswith("update"):
            picture.text(hot + 72, y + 5, "dirty", anchor="start")
        elif name.endswith("write back"):
            picture.arrow(hot + 68, y, cold - 4, y)
            picture.text((hot + 64 + cold) / 2, y - 8, "dirty rows")
    return picture.svg()


_LEFT = 104  # where the bars of a timeline begin


def _lanes(picture: Drawing, top: float, names: Iterable[str]) -> Callable[..., None]:
    """Name the lanes of a timeline; returns what draws a bar in one, by lane, start and length."""
    for lane, name in enumerate(names):
        picture.text(16, top + 21 + 40 * lane, name, anchor="start")

    def bar(lane: int, start: float, length: float, color: str, label: str = "") -> None:
        picture.filled(_LEFT + start, top + 40 * lane, length - 2, 32, color, label)

    return bar


def lookahead() -> str:
    """The same three mini-batches, sequential and with look-ahead."""
    picture = Drawing(292, "Sequential steps wait for rows; look-ahead fetches them meanwhile")
    picture.text(16, 30, "Sequential: each step waits for its rows", anchor="start", style="strong")
    bar = _lanes(picture, 44, ("compute", "transfers"))
    for step in range(3):
        bar(1, 134 * step, 62, BLUE, f"fetch {step + 1}")
        bar(0, 134 * step + 62, 72, GREEN, f"step {step + 1}")
    picture.text(
        16, 162, "Look-ahead: rows come during earlier steps", anchor="start", style="strong"
    )
    bar = _lanes(picture, 176, ("compute", "transfers"))
    for step in range(4):
        bar(1, 62 + 72 * (step - 1) if step else 0, 62, BLUE, f"fetch {step + 1}")
    for step in range(3):
        bar(0, 62 + 72 * step, 72, GREEN, f"step {step + 1}")
    picture.line(_LEFT + 278, 168, _LEFT + 278, 252, "mark")
    picture.text(_LEFT + 278, 274, "done sooner, same numbers")
    return picture.svg()


def hotline() -> str:
    """One mini-batch in two parts."""
    picture = Drawing(
        206, "Hotline computes on popular samples while rows are fetched for the others"
    )
    picture.text(16, 30, "Hotline: one mini-batch, in two parts", anchor="start", style="strong")
    bar = _lanes(picture, 44, ("compute", "transfers"))
    bar(0, 0, 156, GREEN, "popular samples")
    bar(0, 156, 134, PURPLE, "the others")
    bar(0, 290, 106, GREY, "one update")
    bar(1, 0, 148, BLUE, "rows of the others")
    picture.text(16, 162, "Popular samples look up rows in fast memory only.", anchor="start")
    picture.text(16, 184, "The gradients of both parts are added up.", anchor="start")
    return picture.svg()


def fae() -> str:
    """Mini-batches of hot samples and of cold ones, in turns."""
    picture = Drawing(206, "FAE trains on hot mini-batches and on cold ones, in turns")
    picture.text(16, 30, "FAE: samples sorted before training", anchor="start", style="strong")
    bar = _lanes(picture, 44, ("compute", "transfers"))
    for start, name, color in ((0, "cold", PURPLE), (132, "hot", GREEN), (276, "cold", PURPLE)):
        for number in range(2):
            gap = 20 * (number + 1) if name == "cold" else 0
            bar(0, start + gap + 40 * number, 40, color, name)
            if name == "cold":
                bar(1, start + 60 * number, 20, BLUE)
    bar(0, 216, 54, GREY, "loss?")
    picture.text(16, 162, "Hot samples look up rows in fast memory only.", anchor="start")
    picture.text(16, 184, "The loss sets how often the two kinds swap.", anchor="start")
    return picture.svg()


FIGURES = {
    "coverage.svg": coverage,
    "tiers.svg": tiers,
    "journey.svg": journey,
    "lookahead.svg": lookahead,
    "hotline.svg": hotline,
    "fae.svg": fae,
}


if __name__ == "__main__":
    for file, draw in FIGURES.items():
        (_HERE / file).write_text(draw(), encoding="utf-8")
