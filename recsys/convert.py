"""A store's samples as other programs read them.

format        what OUT names
classic-npz   facebookresearch/dlrm's processed file, as `kaggleAdDisplayChallenge_processed.npz`
torchrec-npy  a prefix: TorchRec's OUT_dense.npy, OUT_sparse.npy and OUT_labels.npy
"""

from __future__ import annotations

from pathlib import Path

from recsys.datasets.classic_npz import write_classic_npz
from recsys.datasets.source import day_splits
from recsys.datasets.store import Store
from recsys.datasets.torchrec_npy import write_torchrec_npy
from recsys.errors import ConfigError

__all__ = ["FORMATS", "convert_store"]

FORMATS = ("classic-npz", "torchrec-npy")


def convert_store(
    store: str | Path, to: str, out: str | Path, *, split: str | None = None
) -> list[Path]:
    """Write the samples of a store in another program's format; streaming.

    Args:
        store: Of convention `classic`, where it is to be a classic npz.
        to: One of `FORMATS`.
        out: What to write; the module says what it names. No file of it may exist.
        split: Write "train", "test" or "validation" alone, which only `torchrec-npy` can; all
            samples by default, if the splits are those that reading the files back gives.

    Returns:
        The files written.

    Raises:
        ConfigError: the format or the split is none, or they do not go together, or the split must
            be named, or `out` is a folder.
        StoreError: `store` is none, or the format cannot hold it.
        AlreadyExists: a file is there.
    """
    if to not in FORMATS:
        raise ConfigError(f"the format must be one of {FORMATS}, got {to!r}")
    out = Path(out)
    if out.is_dir():
        name = "processed.npz" if to == "classic-npz" else "train"
        raise ConfigError(f"{out} is a folder; name what is to be in it: {out / name}, say")
    if to == "torchrec-npy":
        source = Store(store)
        if split is None:
            _check_splits_come_back(source)
        return write_torchrec_npy(source, out.parent, out.name, split=split)
    if split is not None:
        raise ConfigError(
            f"a classic npz has all samples of a store, and cannot have split {split!r} "
            "alone; leave the split out"
        )
    return [write_classic_npz(Store(store), out)]


def _check_splits_come_back(store: Store) -> None:
    """Training on samples that were for testing must not come about by itself."""
    read_back = day_splits([store.num_samples])
    for name, part in store.splits.items():
        if part != read_back[name]:
            raise ConfigError(
                f"store {store.path}: its {name} samples are {part.start} to {part.stop}, but "
                f"npy files keep no splits, and those read back would be {read_back[name].start} "
                f"to {read_back[name].stop}; write each part alone, with split 'train', 'test' or "
                "'validation'"
            )
