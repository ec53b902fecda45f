"""The curve of `recsys bench tiers`: share of speed over share of memory, a line per schedule.

It lies beside the JSON that it is drawn from, and has its name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from recsys.curves import draw_shares
from recsys.errors import ConfigError
from recsys.files import require_place

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["curve_file", "write_curve"]


def curve_file(file: Path) -> Path:
    """Where the curve of some JSON goes.

    Args:
        file: The JSON, which need not be there yet.

    Raises:
        ConfigError: no picture can be written there.
    """
    curve = file.with_suffix(".png")
    if curve == file:
        raise ConfigError(
            f"{file} is where the curve goes, a picture; give the JSON a name that ends in .json"
        )
    require_place(curve)
    return curve


def write_curve(file: Path) -> None:
    """Draw what was measured beside the JSON that has it.

    Where too few rounds make no interval, a point has none.

    Args:
        file: The JSON.
    """
    rows = json.loads(file.read_text())["rows"]
    shares = {row["case"]: row["median"] for row in rows if row["metric"] == "budget_share"}
    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        if row["metric"] != "share_of_resident_speed":
            continue
        keys = dict(pair.split("=") for pair in row["case"].split(","))
        speed = row["median"]
        low, high = (speed if row[end] is None else row[end] for end in ("low", "high"))
        points = curves.setdefault(keys["schedule"], [])
        points.append((shares[row["case"]], speed, low, high))
    curve_file(file).write_bytes(draw_shares(curves))
