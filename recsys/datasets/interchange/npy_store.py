"""Write the arrays of another program to a store: the part that all file layouts share.

The other program numbered the rows, so these stores have no raw ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.datasets.interchange.npy_blocks import describe_source, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.datasets.interchange.npy_blocks import NpyReader
    from recsys.datasets.store import StoreWriter

__all__ = ["append_samples", "finish_numbered"]


# Converts a block of an array to the store's numbers, or raises `DatasetFormatError`; given the
# array's name, the block, and the number of its first sample.
_Check = Callable[[str, "NDArray[Any]", int], "NDArray[Any]"]


def append_samples(
    writer: StoreWriter,
    labels: NpyReader,
    dense: NpyReader,
    sparse: NpyReader,
    *,
    check_dense: _Check,
    check_rows: _Check,
    label_rule: str,
) -> None:
    """Copy three arrays to a store, block by block.

    Args:
        writer: Receives the samples.
        labels: (N,) or (N, 1), 0 or 1.
        dense: (N, I).
        sparse: (N, F).
        check_dense: Converts dense features to the input of the writer's dense transform.
        check_rows: Converts rows.
        label_rule: Ends the message about a label that is neither 0 nor 1.

    Raises:
        DatasetFormatError: an array is damaged, or has an invalid value.
    """
    first_sample, arrays = 0, (labels, dense, sparse)
    size = min(each.samples_per_block for each in arrays)
    for label_block, dense_block, sparse_block in zip(
        *(each.blocks(size) for each in arrays), strict=True
    ):
        writer.append(
            whole_numbers(labels.name, label_block.reshape(-1), first_sample, 2, label_rule).astype(
                np.int8
            ),
            check_dense(dense.name, dense_block, first_sample),
            check_rows(sparse.name, sparse_block, first_sample).astype(np.int32),
        )
        first_sample += len(label_block)


def finish_numbered(
    writer: StoreWriter,
    *,
    num_dense: int,
    table_sizes: Iterable[int],
    splits: Mapping[str, range],
    convention: str,
    sources: Sequence[Path],
) -> Path:
    """Finish a store without raw ids; columns are named as in Criteo's stores."""
    return writer.finish(
        dense_names=[f"int_{column}" for column in range(num_dense)],
        table_sizes={f"cat_{column}": int(size) for column, size in enumerate(table_sizes)},
        splits=splits,
        about={"convention": convention, "sources": [describe_source(file) for file in sources]},
    )
