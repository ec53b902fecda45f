"""The curve of `recsys bench tiers`: share of speed over share of memory, a line per schedule.

The picture is in the folder of the JSON from which it is drawn, under the same name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from recsys._support.files import require_place
from recsys.errors import ConfigError
from recsys.train.run_files.curves import draw_shares

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["curve_file", "write_curve"]


def curve_file(file: Path) -> Path:
    """The path of the curve that belongs to a JSON file.

    Args:
        file: The JSON, which need not exist yet.

    Raises:
        ConfigError: no picture can be written there.
    """
    curve = file.with_suffix(".png")
    if curve == file:
        raise ConfigError(
            f"{file} is where the curve goes; give the JSON a name that ends in .json"
        )
    require_place(curve)
    return curve


def write_curve(file: Path) -> None:
    """Draw the curve of a JSON file.

    A point has no interval if there were too few rounds for one.

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
