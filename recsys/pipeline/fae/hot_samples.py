"""Finds hot samples: a sample is hot if a plan pins every row that it looks up. FAE's pre-pass.

One pass over the data finds them. The result is kept in a file whose name is a digest of the plan
and the samples, and later runs read that file.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recsys._support.files import appearing_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.batch import SampleSource
    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["hot_samples"]


def hot_samples(
    plan: HotPlan, source: SampleSource, samples: range, folder: Path | str | None = None
) -> NDArray[np.bool_]:
    """Tell which samples are hot, by reading the file of an earlier call or by a pass over them.

    Args:
        plan: Says which rows are pinned; features of the source look up its tables.
        source: Where samples come from.
        samples: A contiguous range of samples.
        folder: Where the file is kept; None keeps none. A folder that cannot be written warns, and
            so does a damaged file, which is replaced.

    Shape:
        result (N,), one value for each sample.

    Raises:
        ConfigError, IdOutOfRange, ProfileError: as for `HotPlan.find_hot_samples`.
    """
    if folder is None:
        return plan.find_hot_samples(source, samples)
    file = Path(folder) / f"hot_samples-{_digest(plan, source, samples)}.npy"
    if file.is_file():
        kept = _read(file, len(samples))
        if kept is not None:
            return kept
    found = plan.find_hot_samples(source, samples)
    try:
        with appearing_whole(file) as partial, partial.open("wb") as opened:
            np.save(opened, np.packbits(found))
    except BlockingIOError:  # another run writes the same list
        pass
    except OSError as error:
        warnings.warn(
            f"{file}: the list of hot samples cannot be kept ({error.strerror}), so every run "
            "finds them again; make the folder writable",
            stacklevel=2,
        )
    return found


def _read(file: Path, num_samples: int) -> NDArray[np.bool_] | None:
    """The hot samples in a file of `hot_samples`; None, with a warning, if it is damaged."""
    shape = (-(-num_samples // 8),)
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        fault = f"it must hold {shape} uint8, got {array.shape} {array.dtype}"
        if array.dtype == np.uint8 and array.shape == shape:
            return np.unpackbits(array, count=num_samples).astype(np.bool_)
    except Exception as error:  # numpy raises many classes for damaged files
        fault = str(error)
    warnings.warn(
        f"{file}: the list of hot samples is damaged ({fault}); it is made again", stacklevel=3
    )
    return None


def _digest(plan: HotPlan, source: SampleSource, samples: range) -> str:
    """A digest of everything that the result depends on."""
    digest = hashlib.sha256()
    features = plan.profile.features
    about = [source.fingerprint, samples.start, samples.stop, plan.profile.table_sizes, features]
    digest.update(json.dumps(about).encode())
    for table in plan.tables:
        digest.update(plan.pinned_rows(table).astype("<i8").tobytes())
        digest.update(b"|")
    return digest.hexdigest()[:16]
