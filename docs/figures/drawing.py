"""An SVG picture, put together from texts, boxes, lines and arrows."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "PURPLE", "Drawing"]

# White letters are legible on each of them.
BLUE, GREEN, ORANGE, PURPLE, GREY = "#2f6fae", "#2a7d4f", "#b4541a", "#7a4fa3", "#64707d"

_WIDTH = 520  # a phone shows it at about two thirds, and letters at 11 pixels
_STYLE = """\
text{font:16px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#1f2933}
.strong{font-weight:600}.on{fill:#fff;font-size:14px}
.back{fill:#fff}.panel{fill:#f1f4f7;stroke:#c3ccd5}
.grid{stroke:#c3ccd5}.mark{stroke:#1f2933;stroke-dasharray:4 3}
.arrow{stroke:#1f2933;stroke-width:2}.head{fill:#1f2933}
@media (prefers-color-scheme:dark){text{fill:#e6eaee}.on{fill:#fff}.back{fill:#1c232b}
.panel{fill:#28323c;stroke:#465462}.grid{stroke:#465462}.mark,.arrow{stroke:#e6eaee}
.head{fill:#e6eaee}}
"""


class Drawing:
    """A picture of a fixed width. Places are in pixels from its upper left corner.

    Args:
        height: In pixels.
        title: What it shows, for those who cannot see it.
    """

    def __init__(self, height: float, title: str) -> None:
        self._height = height
        self._parts = [f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>"]
        self._parts.append(f'<rect class="back" width="{_WIDTH}" height="{height:g}" rx="8"/>')

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", style: str = ""
    ) -> None:
        """Words on a line at height y, that begin ("start"), end or have their middle at x."""
        kind = f' class="{style}"' if style else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """An empty box."""
        self._parts.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="6"/>'
        )

    def filled(
        self, x: float, y: float, width: float, height: float, color: str, label: str
    ) -> None:
        """A coloured box with a label in its middle."""
        self._parts.append(
            f'<rect fill="{color}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="4"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + 5, label, style="on")

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """A straight line."""
        self._parts.append(
            f'<line class="{style}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line along one of the axes, with a head at its end."""
        length = max(abs(x2 - x1), abs(y2 - y1))
        right, down = (x2 - x1) / length, (y2 - y1) / length
        x0, y0 = x2 - 10 * right, y2 - 10 * down
        self.line(x1, y1, x0, y0, "arrow")
        corners = (
            (x2, y2),
            (x0 - 5 * down, y0 + 5 * right),
            (x0 + 5 * down, y0 - 5 * right),
        )
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self._parts.append(f'<polygon class="head" points="{points}"/>')

    def path(self, points: Sequence[tuple[float, float]], color: str) -> None:
        """Lines from point to point."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="3" points="{places}"/>'
        )

    def dot(self, x: float, y: float, color: str) -> None:
        """A small disc."""
        self._parts.append(f'<circle fill="{color}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')

    def svg(self) -> str:
        """The picture as a file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{self._height:g}" '
            f'viewBox="0 0 {_WIDTH} {self._height:g}" role="img">\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )
