"""A timeline of training, for chrome://tracing or Perfetto.

steps        the stages of every step, one after the other, and within them waiting for rows
rows, ...    the background transfers of each table group
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from recsys._support.files import appearing_whole

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Timeline"]


class Timeline:
    """Spans of time, on named tracks."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, float, float]] = []

    def add(self, track: str, name: str, begin: float, end: float) -> None:
        """Record a span; any thread may call this.

        Args:
            track: The track on which it is shown.
            name: What the time was spent on.
            begin: By `time.perf_counter`.
            end: By `time.perf_counter`.
        """
        self._spans.append((track, name, begin, end))

    def add_move(self, track: str, name: str, begin: float, end: float) -> None:
        """Record what a queue of transfers did; waiting for it belongs to the steps."""
        self.add(track if name == "move" else "steps", name, begin, end)

    def shown(self, num_steps: int) -> dict[str, list[tuple[str, float, float]]]:
        """Select a few steps for a picture, without the first step, which is slower than others.

        Args:
            num_steps: How many steps; if there is only one step, that one is selected.

        Returns:
            By track, (name, begin, end) of each span, in seconds since the first step selected.
            Waits are on a separate track, because they lie within stages.
        """
        spans = sorted(self._spans, key=lambda span: span[2])
        starts, before = [], ""
        for track, name, begin, _ in spans:
            if track == "steps" and name != "wait":
                # With skipping, a step may load and choose from several mini-batches in turn.
                if name == "load" and before not in ("load", "skip"):
                    starts.append(begin)
                before = name
        if not starts:
            return {}
        first = starts[1:2] or starts[:1]
        after = starts[num_steps + 1 : num_steps + 2] or [float("inf")]
        tracks: dict[str, list[tuple[str, float, float]]] = {}
        for track, name, begin, end in spans:
            if first[0] <= begin < after[0]:
                shown_on = "waiting" if name == "wait" else track
                tracks.setdefault(shown_on, []).append((name, begin - first[0], end - first[0]))
        return tracks

    def write(self, path: Path) -> None:
        """Write Chrome trace events, in microseconds since the first span."""
        spans = list(self._spans)
        start = min((begin for _, _, begin, _ in spans), default=0.0)
        tracks = {track: number for number, track in enumerate(dict.fromkeys(s[0] for s in spans))}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        events += [
            {
                "name": name,
                "ph": "X",
                "pid": 0,
                "tid": tracks[track],
                "ts": (begin - start) * 1e6,
                "dur": (end - begin) * 1e6,
            }
            for track, name, begin, end in spans
        ]
        with appearing_whole(path) as partial:  # its error names the file
            partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
