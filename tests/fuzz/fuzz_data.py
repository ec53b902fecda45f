"""Readers of data: raw text, stores, profiles, plans."""

import gzip
import io
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
from fuzz_cases import Reader
from fuzz_mutations import (
    cut_bytes,
    mutate_bytes,
    mutate_file,
    mutate_json,
    mutate_npy,
    mutate_npz,
)

from recsys.config import ModelConfig
from recsys.datasets import Store
from recsys.datasets.criteo import prepare_criteo_1tb, prepare_criteo_kaggle
from recsys.datasets.store_writer import Feature, StoreWriter, classic_splits
from recsys.embeddings import PopularityProfile, RowWiseAdagrad, plan_hot_rows
from recsys.embeddings.popularity.plan import HotPlan
from recsys.errors import ProfileError
from recsys.train.build import tables_of

NUM_SAMPLES = 42


def raw_text(num_samples=NUM_SAMPLES, seed=0):
    """Good lines in Criteo's format."""
    rng = np.random.default_rng(seed)
    lines = []
    for sample in range(num_samples):
        integers = [str(each) for each in rng.integers(0, 50, 13)]
        integers[2] = ""
        categories = [f"{each:08x}" for each in rng.integers(0, 9, 26)]
        lines.append("\t".join([str(sample % 2), *integers, *categories]))
    return ("\n".join(lines) + "\n").encode()


def make_store(folder, name="store", **arguments):
    (folder / "raw.txt").write_bytes(raw_text())
    prepare_criteo_kaggle(
        [folder / "raw.txt"], folder / name, num_threads=1, show_progress=False, **arguments
    )
    (folder / "raw.txt").unlink()
    return Store(folder / name)


def read_store(path):
    """Everything that other parts do with a store."""
    store = Store(path)
    store.read(np.arange(store.num_samples))
    store.describe(), store.fingerprint, repr(store)
    if sum(store.table_sizes.values()) < 1 << 20:  # without raw ids, a table may have any size
        PopularityProfile.count(store)
    for part in store.splits.values():
        store.read(np.array(part, np.int64))


def raw_attack(folder, random, pack):
    file = folder / "raw.txt"
    file.write_bytes(raw_text())
    mutate_file(file, random, mutate_bytes)
    if file.is_file() and not file.is_symlink():
        packed = pack(file.read_bytes())
        if random.random() < 0.3:
            packed = mutate_bytes(packed, random)
        elif random.random() < 0.02:
            packed = pack(bytes([random.choice(b"0\n\t")]) * (16 * 2**20))  # a bomb
        file.write_bytes(packed)
    return partial(
        prepare_criteo_kaggle,
        [file],
        folder / "store",
        num_threads=random.choice([1, 2]),
        show_progress=False,
    )


def make_days(folder):
    for day in range(2):
        (folder / f"day_{day}").write_bytes(raw_text(10, seed=day))


def attack_days(folder, random):
    mutate_file(folder / f"day_{random.randint(0, 1)}", random, mutate_bytes)
    return partial(
        prepare_criteo_1tb,
        [folder / "day_0", folder / "day_1"],
        folder / "store",
        max_ind_range=random.choice([None, None, 3]),
        num_threads=1,
        show_progress=False,
    )


def make_table_store(folder):
    """A store with everything that a store may have: bags, shared tables, weights, a catalog."""
    rng, n = np.random.default_rng(0), NUM_SAMPLES
    features = [
        Feature("item", "item"),
        Feature("tags", "tag", "multi"),
        Feature("genre", "genre"),
        Feature("history", "item", "sequence"),
    ]
    lengths = rng.integers(0, 4, (n, 2))
    with StoreWriter(
        folder / "store",
        dense_transform="none",
        features=features,
        has_weights=True,
        has_groups=True,
        has_times=True,
    ) as writer:
        writer.append(
            rng.integers(0, 2, n),
            rng.random((n, 2)),
            rng.integers(0, 3, (n, 2)),
            bag_values=rng.integers(0, 5, lengths.sum()),
            bag_lengths=lengths,
            weights=rng.random(n),
            groups=rng.integers(0, 9, n),
            times=rng.integers(0, 2**31, n),
        )
        writer.finish(
            dense_names=["price", "age"],
            table_sizes={"item": 9, "tag": 5, "genre": 3},
            splits=classic_splits(n),
            about={
                "convention": "table",
                "sources": [{"sha256": "0" * 64}],
                "schema": {"label": "click"},
                "ranking": {"item": "item", "item_features": ["genre"]},
            },
            catalog=rng.integers(0, 3, (9, 1)),
        )


def attack_store(folder, random):
    arrays = sorted(path.name for path in (folder / "store").glob("*.bin"))
    file = random.choice(["meta.json"] * len(arrays) + arrays)
    mutate = cut_bytes if file == "meta.json" else mutate_bytes
    mutate_file(folder / "store" / file, random, mutate)
    return partial(read_store, folder / "store")


def make_profile(folder):
    store = make_store(folder)
    PopularityProfile.count(store).save(folder / "profile.npz")


def mutate_profile(data, random):
    """A profile's archive, or its text alone."""

    def mutate_member(member, random):
        if b"recsys-profile" not in member or random.random() < 0.3:
            return mutate_npy(member, random)
        text = mutate_json(np.load(io.BytesIO(member)).tobytes(), random)
        stream = io.BytesIO()
        np.save(stream, np.frombuffer(text, np.uint8))
        return stream.getvalue()

    return mutate_npz(data, random, mutate_member)


def attack_profile(folder, random):
    mutate_file(folder / "profile.npz", random, mutate_profile)

    def use():
        profile = PopularityProfile.load(folder / "profile.npz")
        repr(profile)
        profile.ranked_rows(5)
        if profile.num_lookups:
            profile.coverage(3)
        with suppress(ProfileError):  # the profile may have features of other names
            profile.for_tables(_tables_of(profile))
        profile.save(folder / "again.npz")

    return use


def _tables_of(profile):
    return tables_of(profile.table_sizes, profile.features, ModelConfig(embedding_dim=4))


def make_plan(folder):
    store = make_store(folder)
    profile = PopularityProfile.count(store)
    tables = _tables_of(profile)
    plan_hot_rows(profile, tables, "6KB", RowWiseAdagrad(lr=0.1), window_lookups=2).save(
        folder / "plan.npz"
    )


def attack_plan(folder, random):
    mutate_file(folder / "plan.npz", random, mutate_profile)

    def use():
        plan = HotPlan.load(folder / "plan.npz")
        str(plan), plan.pinned_by_table(), plan.everything_bytes
        if plan.profile.num_lookups:
            plan.coverage()
        plan.retarget(plan.floor_bytes)

    return use


def _plan_of(store):
    profile = PopularityProfile.count(store)
    tables = [
        SimpleNamespace(
            name=name, num_embeddings=size, embedding_dim=4, feature_names=(name,), data_type="fp32"
        )
        for name, size in profile.table_sizes.items()
    ]
    return plan_hot_rows(profile, tables, "9KB", window_lookups=2)


def nothing(folder):
    """A reader whose attack makes its own files."""


_BYTES = "bytes, numbers; links, folders, pipes"
_NPY = "bytes, headers, shapes, dtypes, pickles, wrong sizes; links, folders, pipes"
_PACKS = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
}
DATA = (
    *(
        Reader(
            f"raw Criteo text, {name}",
            _BYTES + ("; bombs" if name != "plain" else ""),
            nothing,
            partial(raw_attack, pack=pack),
            ("store",),
        )
        for name, pack in _PACKS.items()
    ),
    Reader("days of Criteo 1TB", _BYTES, make_days, attack_days, ("store",)),
    Reader(
        "store",
        "a cut description; bytes of arrays; links, folders, pipes",
        make_store,
        attack_store,
        of_all_rows=("is not in [0, ",),
    ),
    Reader(
        "table store",
        "a cut description; bytes of arrays; links, folders, pipes",
        make_table_store,
        attack_store,
        of_all_rows=("is not in [0, ",),
    ),
    Reader("profile", f"{_NPY}; JSON; bombs", make_profile, attack_profile, is_bounded=False),
    Reader("plan", f"{_NPY}; JSON; bombs", make_plan, attack_plan, is_bounded=False),
)
