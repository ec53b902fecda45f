"""Readers of tables of any columns: files, schemas, and stores to be like."""

import gzip
import shutil
import warnings
from functools import partial

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from fuzz_cases import Reader, command
from fuzz_data import attack_store, nothing
from fuzz_mutations import cut_bytes, mutate_bytes, mutate_file, mutate_tree

from recsys.datasets import Schema, prepare_table

NUM_ROWS = 40
LABELLED = {
    "label": "click",
    "group": "user",
    "timestamp": "time",
    "weight": "w",
    "missing_values": ["NA", ""],
    "dense": {"price": {"transform": "log", "missing": "mean"}, "age": {"missing": 3.5}},
    "categorical": {
        "user": {"values": "integer", "min_count": 2},
        "site": {"max_rows": 9, "missing": "own"},
        "ad": {"values": "integer", "numbering": "hash", "num_rows": 7},
    },
    "multi": {"tags": {"split": "|", "max_length": 2}},
    "sequence": {"seen": {"split": " ", "values": "integer", "max_length": 3}},
    "filter": {"ad": ">= 5"},
    "history": {"recent": {"of": "site", "max_length": 4, "where": {"ad": "< 30"}}},
    "split": {"by": "timestamp", "test_from": 1_700_003_200, "validation": 0.2},
}
POSITIVES = {
    "group": "user",
    "categorical": {"user": {"values": "integer"}, "site": {}, "age": {}},
    "history": {"recent": {"of": "site"}},
    "split": {"by": "last_one_out"},
    "negatives": {"item": "site", "item_columns": ["age"], "per_positive": 2, "by": "popularity"},
}


def good_table():
    """With quotes, missing values, and text of other alphabets."""
    rows = range(NUM_ROWS)
    return pa.table(
        {
            "click": [row % 2 for row in rows],
            "user": [row % 7 for row in rows],
            "time": [1_700_000_000 + 100 * row for row in rows],
            "w": [1] * NUM_ROWS,
            "price": [row / 4 if row % 9 else None for row in rows],
            "age": [row % 3 for row in rows],
            "site": [["a, b", "ü\nz", "", 'q"q', "e"][row % 5] for row in rows],
            "ad": list(rows),
            "tags": ["|".join("abcd"[: row % 4]) for row in rows],
            "seen": [" ".join("01234"[: row % 5]) for row in rows],
        }
    )


def pack(name):
    """The bytes of the good table, as a file of this name holds them."""
    stream = pa.BufferOutputStream()
    if name.endswith(".parquet"):
        pq.write_table(good_table(), stream, row_group_size=15)
    else:
        pyarrow.csv.write_csv(good_table(), stream)
    data = stream.getvalue().to_pybytes()
    return gzip.compress(data) if name.endswith(".gz") else data


def make_file(folder, name):
    (folder / name).write_bytes(pack(name))


def attack_file(folder, random, name):
    file = folder / name
    mutate_file(file, random, mutate_bytes)
    if random.random() < 0.3:
        return partial(command, "inspect", file)
    schema = Schema.from_dict(random.choice([LABELLED, POSITIVES]))
    return partial(prepare_table, [file], folder / "store", schema, num_threads=1)


def attack_schema(folder, random):
    make_file(folder, "a.csv")
    good = random.choice([LABELLED, POSITIVES])
    schema = partial(Schema.from_dict, mutate_tree(good, random))
    if random.random() < 0.5:
        toml = folder / "schema.toml"
        toml.write_bytes(mutate_bytes(Schema.from_dict(good).to_toml().encode(), random))
        schema = partial(Schema.from_toml, toml)
    return lambda: prepare_table([folder / "a.csv"], folder / "store", schema(), num_threads=1)


def make_like(folder):
    make_file(folder, "a.csv")
    for name, tree in (("labelled", LABELLED), ("positives", POSITIVES)):
        prepare_table([folder / "a.csv"], folder / name, Schema.from_dict(tree), num_threads=1)
    # Compiles its kernels now: while memory is traced, that takes several times as long.
    with warnings.catch_warnings(action="ignore"):
        prepare_table([folder / "a.csv"], folder / "like", like=folder / "labelled", num_threads=1)
    shutil.rmtree(folder / "like")


def attack_like(folder, random):
    known = folder / random.choice(["labelled", "positives"])
    files = [*known.glob("vocabulary/*"), *[known / "meta.json"] * 3]
    file = random.choice(sorted(files))
    mutate = cut_bytes if file.suffix == ".json" else mutate_bytes
    file.write_bytes(mutate(file.read_bytes(), random))
    return partial(prepare_table, [folder / "a.csv"], folder / "store", like=known, num_threads=1)


_BYTES = "bytes, numbers; links, folders, pipes"
_OF_ALL_ROWS = (
    "a table must have at least one row",
    "the training part has none of",
    "missing values take the mean of the training part",
)
TABLES = (
    *(
        Reader(
            f"table in {kind}",
            _BYTES,
            partial(make_file, name=name),
            partial(attack_file, name=name),
            ("store",),
            of_all_rows=_OF_ALL_ROWS,
        )
        for kind, name in (
            ("CSV", "a.csv"),
            ("CSV, gzip", "a.csv.gz"),
            ("Parquet", "a.parquet"),
        )
    ),
    Reader(
        "schema of a table",
        "types, numbers, missing keys, bytes",
        nothing,
        attack_schema,
        ("store",),
        names_file=False,
    ),
    Reader(
        "table store",
        "a cut description; bytes of arrays; links, folders, pipes",
        make_like,
        partial(attack_store, names=("labelled", "positives")),
        of_all_rows=("is not in [0, ",),
    ),
    Reader(
        "store to be like",
        "a cut description; bytes of vocabularies",
        make_like,
        attack_like,
        ("store",),
    ),
)
