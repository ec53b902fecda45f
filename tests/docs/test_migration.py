"""docs/migration.md: its blocks run, its commands parse, and its keys exist."""

import re
import shlex

import numpy as np
import pytest
import torch

import recsys
from recsys.cli.options import build_parsers
from recsys.config import load_config, walk_keys
from recsys.datasets import Store
from recsys.datasets.store_writer import classic_splits


@pytest.fixture
def page(pytestconfig):
    return (pytestconfig.rootpath / "docs" / "migration.md").read_text()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def test_the_blocks_run_and_plan_what_the_page_says(page, tmp_path, monkeypatch):
    pytest.importorskip("torchrec")
    monkeypatch.chdir(tmp_path)
    labels, integers, rows = write_arrays_of_other_programs(np.random.default_rng(0))
    found = {}

    for block in blocks(page, "python"):
        exec(compile(block, "docs/migration.md", "exec"), found)

    placed = found["plan"].plan[""]
    assert {each.compute_kernel for each in placed.values()} == {"fused_uvm_caching"}
    hit_rates = found["dlrm"].sparse_arch.embedding_bag_collection.hit_rates
    assert 0 < hit_rates.lookups < 1
    for name, transformed in (("from_npz", np.log1p(integers)), ("from_npy", integers)):
        store = Store(name)
        batch = store.read(np.arange(store.num_samples))
        np.testing.assert_array_equal(store.labels, labels)
        np.testing.assert_allclose(batch.dense_features, transformed, rtol=1e-6)
        assert store.splits["train"] == classic_splits(len(labels))["train"]
        assert list(store.table_sizes.values()) == [len(np.unique(c[:60])) + 1 for c in rows.T]


def write_arrays_of_other_programs(rng):
    labels = rng.integers(0, 2, 70, np.int32)
    integers, rows = rng.integers(0, 9, (70, 13)), rng.integers(0, 5, (70, 26))
    np.savez(
        "kaggleAdDisplayChallenge_processed.npz",
        X_cat=np.asfortranarray(rows, np.float64),
        X_int=integers.astype(np.int32),
        y=labels,
        counts=np.full(26, 5, np.int32),
    )
    for day, part in enumerate((slice(40), slice(40, 70))):
        np.save(f"day_{day}_labels.npy", labels[part, None])
        np.save(f"day_{day}_dense.npy", integers[part].astype(np.float32))
        np.save(f"day_{day}_sparse.npy", rows[part].astype(np.int32))
    return labels, integers, rows


def test_a_share_of_the_rows_is_held_by_the_budget_that_the_page_derives(page):
    share, sizes, dim = 0.2, (20_000, 5_000), 16
    rule = "f times the bytes of rows and state plus 4 bytes for each row of the tables"
    assert rule in " ".join(page.split())
    model = torch.nn.ModuleList(torch.nn.EmbeddingBag(n, dim, sparse=True) for n in sizes)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    num_rows = sum(sizes)

    budget = int(share * num_rows * dim * 4 * 2) + 4 * num_rows
    estimate = recsys.estimate(model, budget, optimizer=optimizer)

    assert share * 0.9 < estimate.num_slots / num_rows <= share


def test_the_commands_parse_and_their_settings_are_accepted(page):
    parser = build_parsers()[0]
    lines = [
        line for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()
    ]
    inline = re.findall(r"`recsys ((?:export|prepare)[^`]* --out [^`]*)`", page)

    assert len(lines) + len(inline) > 3
    for line in [*(line.removeprefix("recsys ") for line in lines), *inline]:
        options = parser.parse_args(shlex.split(line))
        if options.command == "train":
            assert load_config(None, options.set, data="store").batch_size in (128, 1024)


def test_the_recipe_that_is_spelled_out_is_the_default(page):
    settings = [
        part for part in shlex.split(blocks(page, "sh")[1].replace("\\\n", "")) if "=" in part
    ]

    assert load_config(None, settings, data="store") == load_config(None, [], data="store")


def test_every_key_that_is_named_exists(page):
    keys = {key.name for key in walk_keys()}
    tables = {name.split(".")[0] for name in keys if "." in name}
    here = " ".join(line.split(" | ")[-1] for line in page.splitlines() if line.startswith("| "))
    named = [each.partition("=")[0] for each in re.findall(r"`([a-z_.]+(?:=[^`]*)?)`", here)]
    dotted = [name for name in named if name.split(".")[0] in tables and "." in name]

    assert len(dotted) > 15
    assert [name for name in dotted if name not in keys] == []
    assert {"batch_size", "epochs", "seed", "shuffle", "prefetch", "device"} <= set(named) & keys
