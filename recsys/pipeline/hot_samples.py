"""Hot samples: those all of whose lookups go to rows that a plan pins. FAE's pre-pass.

A pass over the data tells; what it has found is kept beside the data, under a name that says of
which plan and which samples it is, and is read from there the next time.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.counting import worst_levels
from recsys.embeddings.lookup_blocks import blocks_of_source, samples_of
from recsys.embeddings.row_counts import RowCounts
from recsys.files import appearing_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.datasets.source import SampleSource
    from recsys.embeddings.plan import HotPlan

__all__ = ["find_hot_samples", "hot_samples"]


def hot_samples(
    plan: HotPlan, source: SampleSource, samples: range, folder: Path | str | None = None
) -> NDArray[np.bool_]:
    """Which samples are hot; found once, then read from a file.

    Args:
        plan: Its tables are looked up by features of the source.
        source: Where samples come from.
        samples: Which ones, a run of them.
        folder: Where files are kept; None keeps none. Where it cannot be written a warning says so.

    Shape:
        result (N,), sample by sample.

    Raises:
        ConfigError: the source has no such samples.
        ProfileError: the source lacks a feature.
        IdOutOfRange: an id is no row of its table.
    """
    if folder is None:
        return find_hot_samples(plan, source, samples)
    file = Path(folder) / f"hot_samples-{_digest(plan, source, samples)}.npy"
    if file.is_file():
        packed = np.load(file, allow_pickle=False)
        if packed.dtype == np.uint8 and len(packed) == -(-len(samples) // 8):
            return np.unpackbits(packed, count=len(samples)).astype(np.bool_)
    found = find_hot_samples(plan, source, samples)
    try:
        with appearing_whole(file) as partial, partial.open("wb") as opened:
            np.save(opened, np.packbits(found))
    except OSError as error:
        warnings.warn(
            f"{file}: which samples are hot cannot be kept ({error.strerror}), and is found anew "
            "in every run; make the folder writable",
            stacklevel=2,
        )
    return found


def find_hot_samples(plan: HotPlan, source: SampleSource, samples: range) -> NDArray[np.bool_]:
    """The same by a pass over the data; arguments, result and errors as for `hot_samples`."""
    rows = RowCounts(plan.profile.table_sizes, plan.profile.features)
    levels = np.ones(int(rows.sizes.sum()), np.uint8)
    for table, base in zip(plan.tables, rows.bases.tolist(), strict=True):
        levels[base + plan.pinned_rows(table)] = 0
    found, first = [np.empty(0, np.bool_)], samples_of(source, samples).start
    for block in blocks_of_source(source, samples):
        rows.add(block, first.__add__)  # refuses what is no row
        segments = rows.segments(block)
        worst = worst_levels(levels, segments, block.values, block.offsets, block.num_samples)
        found.append(worst == 0)
        first += block.num_samples
    return np.concatenate(found)


def _digest(plan: HotPlan, source: SampleSource, samples: range) -> str:
    """Of everything that the answer rests on."""
    told = hashlib.sha256()
    features = plan.profile.features
    about = [source.fingerprint, samples.start, samples.stop, plan.profile.table_sizes, features]
    told.update(json.dumps(about).encode())
    for table in plan.tables:
        told.update(plan.pinned_rows(table).astype("<i8").tobytes())
        told.update(b"|")
    return told.hexdigest()[:16]
