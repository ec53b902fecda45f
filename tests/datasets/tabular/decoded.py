"""The values that a store holds, read back from its arrays and vocabularies."""

import itertools

import numpy as np
import pyarrow as pa

from recsys.datasets import Schema, Store, prepare_table

ALL_TRAIN = {"by": "fraction", "test": 0, "validation": 0}
_NUMBERS = itertools.count()


def bags_of(store):
    """For each feature, the rows that each sample looks up."""
    ids = store.read(np.arange(store.num_samples)).sparse_features
    found = {}
    for name in ids.keys():  # noqa: SIM118  # no mapping
        rows, offsets = ids[name].values().numpy(), ids[name].offsets().numpy()
        found[name] = [each.tolist() for each in np.split(rows, offsets[1:-1])]
    return found


def vocabularies_of(store):
    """The value of each row, by table; that of rows for no single value is None."""
    found = {}
    for number, table in enumerate(store.table_sizes):
        file = store.path / "vocabulary" / f"{number}.arrow"
        found[table] = pa.ipc.open_file(file).read_all()["value"].to_pylist()
    return found


def rows_of(files, tree, folder):
    """The rows of files, by column, as a store in the folder has them; all are for training."""
    files = files if isinstance(files, list) else [files]
    out = folder / f"store {next(_NUMBERS)}"
    store = Store(prepare_table(files, out, Schema.from_dict({"split": ALL_TRAIN} | tree)).path)
    values = vocabularies_of(store)
    columns = {"label": store.labels.tolist()}
    for feature in store.features:
        bags = [[values[feature.table][row] for row in bag] for bag in bags_of(store)[feature.name]]
        columns[feature.name] = bags if feature.is_bag else [value for (value,) in bags]
    columns |= dict(zip(store.meta["dense_names"], store.dense.T.tolist(), strict=True))
    for name in ("times", "weights", "groups"):
        if getattr(store, name) is not None:
            columns[name] = getattr(store, name).tolist()
    return columns
