"""Conversion of a store's samples to the formats of other programs.

format        meaning of OUT
classic-npz   facebookresearch/dlrm's processed file, as `kaggleAdDisplayChallenge_processed.npz`
torchrec-npy  a prefix: TorchRec's OUT_dense.npy, OUT_sparse.npy and OUT_labels.npy
"""

from __future__ import annotations

from pathlib import Path

from recsys.datasets.classic_npz import write_classic_npz
from recsys.datasets.interchange import FORMATS
from recsys.datasets.splits import day_splits
from recsys.datasets.store import Store
from recsys.datasets.torchrec_npy import write_torchrec_npy
from recsys.errors import ConfigError

__all__ = ["FORMATS", "convert_store"]


def convert_store(
    store: str | Path, to: str, out: str | Path, *, split: str | None = None
) -> list[Path]:
    """Write the samples of a store in another program's format, in a stream.

    Args:
        store: A store; for `classic-npz`, one of convention `classic`.
        to: One of `FORMATS`.
        out: A file or a prefix; see the module. None of the files may exist.
        split: Write only "train", "test" or "validation"; for `torchrec-npy` alone. Without it, all
            samples are written, and the splits must be the default ones.

    Returns:
        The files written.

    Raises:
        ConfigError: the format or the split is unknown, they exclude each other, the split must be
            named, or `out` is a folder.
        StoreError: `store` is not a store, or the format cannot hold it.
        AlreadyExists: a file exists.
    """
    if to not in FORMATS:
        raise ConfigError(f"the format must be one of {FORMATS}, got {to!r}")
    out = Path(out)
    if out.is_dir():
        name = "processed.npz" if to == "classic-npz" else "train"
        raise ConfigError(f"{out} is a folder; name what is to be in it, such as {out / name}")
    if to == "torchrec-npy":
        source = Store(store)
        if split is None:
            _check_splits_come_back(source)
        return write_torchrec_npy(source, out.parent, out.name, split=split)
    if split is not None:
        raise ConfigError(
            f"a classic npz holds all samples of a store, and cannot have split {split!r} "
            "alone; leave the split out"
        )
    return [write_classic_npz(Store(store), out)]


def _check_splits_come_back(store: Store) -> None:
    """Check that the splits survive: otherwise a reader would train on test samples.

    Raises:
        ConfigError: npy files would be read back with other splits.
    """
    read_back = day_splits([store.num_samples])
    for name, part in store.splits.items():
        if part != read_back[name]:
            raise ConfigError(
                f"store {store.path}: its {name} samples are {part.start} to {part.stop}, but "
                f"npy files keep no splits, and read back they would be {read_back[name].start} to "
                f"{read_back[name].stop}; write each part alone, with split 'train', 'test' or "
                "'validation'"
            )
