"""Readers of tables of any columns: files, schemas, and stores to be like."""

import csv
import io
import shutil
import warnings
from functools import partial

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from fuzz_cases import Reader
from fuzz_data import nothing
from fuzz_mutations import cut_bytes, mutate_bytes, mutate_file, mutate_tree

from recsys.datasets.tabular.inspect import inspect_table
from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.schema import Schema

NUM_ROWS = 40
LABELLED = {
    "label": "click",
    "group": "user",
    "timestamp": "time",
    "weight": "w",
    "missing_values": ["NA"],
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


def table_text():
    """A good table, with quotes, missing values, and text of other alphabets."""
    stream = io.StringIO()
    writer = csv.writer(stream)
    names = ["click", "user", "time", "w", "price", "age", "site", "ad", "tags", "scores", "seen"]
    writer.writerow(names)
    for row in range(NUM_ROWS):
        tags = "|".join("abcd"[: row % 4])
        scores = "|".join(str(each / 4) for each in range(row % 4))
        seen = " ".join(str(each) for each in range(row % 5))
        price = "NA" if row % 9 == 0 else row / 4
        site = ["a, b", "ü\nz", "", 'q"q', "e"][row % 5]
        time = 1_700_000_000 + 100 * row
        writer.writerow([row % 2, row % 7, time, 1, price, row % 3, site, row, tags, scores, seen])
    return stream.getvalue().encode()


def pack(name):
    """The bytes of the good table, as a file of this name holds them."""
    text, stream = table_text(), pa.BufferOutputStream()
    if name.endswith(".parquet"):
        options = pyarrow.csv.ParseOptions(newlines_in_values=True)
        values = pyarrow.csv.ConvertOptions(null_values=["NA"])
        table = pyarrow.csv.read_csv(
            io.BytesIO(text), parse_options=options, convert_options=values
        )
        pq.write_table(table, stream, row_group_size=15)
    elif name.endswith(".csv"):
        return text
    else:
        kind = "gzip" if name.endswith(".gz") else "zstd"
        with pa.CompressedOutputStream(stream, kind) as packed:
            packed.write(text)
    return stream.getvalue().to_pybytes()


def make_file(folder, name):
    (folder / name).write_bytes(pack(name))


def attack_file(folder, random, name):
    file = folder / name
    mutate_file(file, random, mutate_bytes)
    if random.random() < 0.3:
        return partial(print_guess, file)
    schema = Schema.from_dict(random.choice([LABELLED, POSITIVES]))
    return partial(prepare_table, [file], folder / "store", schema, num_threads=1)


def print_guess(file):
    text = inspect_table([file]).to_toml()
    schema = file.with_name("schema.toml")
    schema.write_text(text)
    Schema.from_toml(schema)


def attack_schema(folder, random):
    file = folder / "a.csv"
    file.write_bytes(table_text())
    good = random.choice([LABELLED, POSITIVES])
    if random.random() < 0.5:
        tree = mutate_tree(good, random)
        return lambda: prepare_table(
            [file], folder / "store", Schema.from_dict(tree), num_threads=1
        )
    toml = folder / "schema.toml"
    toml.write_bytes(mutate_bytes(Schema.from_dict(good).to_toml().encode(), random))
    return lambda: prepare_table([file], folder / "store", Schema.from_toml(toml), num_threads=1)


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
            ("CSV, zst", "a.csv.zst"),
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
        "store to be like",
        "a cut description; bytes of vocabularies",
        make_like,
        attack_like,
        ("store",),
    ),
)
