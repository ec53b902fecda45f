"""Readers of data: raw text, stores, profiles, plans."""

import gzip
import io
from contextlib import suppress
from functools import partial

import numpy as np
from fuzz_cases import Reader
from fuzz_mutations import (
    cut_bytes,
    mutate_bytes,
    mutate_file,
    mutate_json,
    mutate_npy,
    mutate_npz,
    npy,
)

from recsys.datasets import Store, prepare_criteo_1tb, prepare_criteo_kaggle
from recsys.embeddings import (
    HotPlan,
    PopularityProfile,
    RowWiseAdagrad,
    TableConfig,
    plan_hot_rows,
)
from recsys.errors import ProfileError

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
    files = [file]
    prepare = partial(prepare_criteo_kaggle, num_threads=random.choice([1, 2]))
    if random.random() < 0.3:
        (folder / "day_0").write_bytes(raw_text(10, seed=1))
        files = [folder / "day_0", file]
        prepare = partial(prepare_criteo_1tb, max_ind_range=random.choice([None, 3]))
    return partial(prepare, files, folder / "store", show_progress=False)


def attack_store(folder, random, names=("store",)):
    store = folder / random.choice(names)
    arrays = sorted(store.glob("*.bin"))
    file = random.choice([store / "meta.json"] * len(arrays) + arrays)
    mutate_file(file, random, cut_bytes if file.name == "meta.json" else mutate_bytes)
    return partial(read_store, store)


def make_profile(folder):
    store = make_store(folder)
    PopularityProfile.count(store).save(folder / "profile.npz")


def mutate_profile(data, random):
    """A profile's archive, or its text alone."""

    def mutate_member(member, random):
        if b"recsys-profile" not in member or random.random() < 0.3:
            return mutate_npy(member, random)
        text = mutate_json(np.load(io.BytesIO(member)).tobytes(), random)
        return npy(np.frombuffer(text, np.uint8))

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
    return [
        TableConfig(name=table, num_embeddings=size, embedding_dim=4, feature_names=names)
        for (table, size), names in zip(
            profile.table_sizes.items(), profile.features.values(), strict=True
        )
    ]


def make_plan(folder):
    profile = PopularityProfile.count(make_store(folder))
    settings = (profile, _tables_of(profile), "6KB", RowWiseAdagrad(lr=0.1))
    plan_hot_rows(*settings, window_lookups=2).save(folder / "plan.npz")


def attack_plan(folder, random):
    mutate_file(folder / "plan.npz", random, mutate_profile)

    def use():
        plan = HotPlan.load(folder / "plan.npz")
        str(plan), plan.pinned_by_table(), plan.everything_bytes
        if plan.profile.num_lookups:
            plan.coverage()
        plan.retarget(plan.floor_bytes)

    return use


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
    Reader(
        "store",
        "a cut description; bytes of arrays; links, folders, pipes",
        make_store,
        attack_store,
        of_all_rows=("is not in [0, ",),
    ),
    Reader("profile", f"{_NPY}; JSON; bombs", make_profile, attack_profile, is_bounded=False),
    Reader("plan", f"{_NPY}; JSON; bombs", make_plan, attack_plan, is_bounded=False),
)
