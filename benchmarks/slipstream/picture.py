"""Draws docs/figures/skipping.svg from the records of the ablations; `python picture.py` writes it.

For each policy: the AUC that it loses beside no skipping, in pairs of equal seeds, by the share of
samples that it left out. `FreezeRows` leaves out no samples, so it is not shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from recsys.report import make_differences

__all__ = ["picture"]

_ROOT = Path(__file__).resolve().parents[2]
_RECORDS = {
    "synthetic": ("random_drop", "drop_input", "subsample", "paper"),
    "goal": ("importance",),
    "goal_35": ("importance",),
}
_COLORS = {
    "importance": "#0a7d4f",
    "random_drop": "#777777",
    "drop_input": "#1f77b4",
    "subsample": "#c4452f",
    "paper": "#8a5fbf",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 520, 260, 60, 20
_MOST_SHARE, _MOST_LOSS = 0.45, 0.005


def _place(share: float, loss: float) -> tuple[float, float]:
    """Where a point is drawn."""
    return _LEFT + share / _MOST_SHARE * _WIDTH, _TOP + loss / _MOST_LOSS * _HEIGHT


def picture() -> str:
    """The picture, as SVG."""
    points: dict[str, list[tuple[float, float]]] = {policy: [] for policy in _COLORS}
    for name, policies in _RECORDS.items():
        file = _ROOT / "benchmarks" / "results" / f"slipstream_{name}.json"
        record = json.loads(file.read_text())
        for entry in make_differences(record["cells"], record["config"]):
            policy = entry["variation"].partition("-")[0]
            if entry["metric"] == "auc" and policy in policies:
                cells = [c for c in record["cells"] if c["variation"] == entry["variation"]]
                share = mean(cell["run"]["skipped"]["share_skipped"] for cell in cells)
                points[policy].append(_place(share, -entry["mean"]))
    drawn = []
    for tenth in range(5):
        x, y = _place(tenth / 10, _MOST_LOSS)
        drawn.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{10 * tenth} %</text>')
        x, y = _place(0, tenth / 1000)
        drawn.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{-tenth / 1000:.3f}</text>')
        drawn.append(f'<path d="M{x} {y}h{_WIDTH}" stroke="#dddddd"/>')
    for policy, color in _COLORS.items():
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(points[policy]))
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        x, y = max(points[policy])
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{color}">{policy}</text>')
    x, y = _place(_MOST_SHARE / 2, _MOST_LOSS)
    drawn.append(f'<text x="{x}" y="{y + 38}" text-anchor="middle">samples left out</text>')
    drawn.append(f'<text x="{_LEFT}" y="12">test AUC beside no skipping</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 90} '
        f'{_TOP + _HEIGHT + 50}" role="img" font-family="sans-serif" font-size="12">\n'
        "<title>AUC that each policy of skipping loses, by the share of samples left out</title>"
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>\n"])


if __name__ == "__main__":
    (_ROOT / "docs" / "figures" / "skipping.svg").write_text(picture())
