import mmap
import re
from pathlib import Path

import pytest
import torch

from recsys._support import memory
from recsys._support.memory import advise_huge_pages
from recsys.batch import JaggedIds
from recsys.embeddings import Adagrad, HotColdEmbeddingBagCollection, TableConfig

MIB = 2**20

has_huge_pages = pytest.mark.skipif(
    memory._page_bytes() != 2 * MIB, reason="needs Linux with transparent huge pages of 2 MiB"
)


def is_advised(address):
    """Whether the system keeps "hg" among the flags of the mapping that holds an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@has_huge_pages
def test_a_fresh_table_is_advised_in_whole_huge_pages_alone():
    # Memory of its own: the allocator's may have been advised before.
    mapping = mmap.mmap(-1, 36 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    table = torch.frombuffer(mapping, dtype=torch.float32, count=33 * MIB // 4, offset=MIB)

    agreed = advise_huge_pages(table)

    first_page = -(-table.data_ptr() // (2 * MIB)) * (2 * MIB)
    end = table.data_ptr() + table.nbytes
    last_page = end // (2 * MIB) * (2 * MIB)
    assert agreed
    assert is_advised(first_page)
    assert is_advised(last_page - 1)
    assert not is_advised(last_page)


@has_huge_pages
def test_rows_and_their_state_lie_in_huge_pages():
    table = TableConfig(name="t", num_embeddings=2 * MIB // 16, embedding_dim=16)
    module = HotColdEmbeddingBagCollection([table], optimizer=Adagrad(lr=0.1))

    module(
        JaggedIds.from_one_hot(["t"], torch.zeros(1, 1, dtype=torch.int64))
    ).values().sum().backward()

    [rows] = module.table_weights()
    state = module.row_optimizer.state[rows]["momentum1"]
    assert is_advised(rows.data_ptr() + 4 * MIB)
    assert is_advised(state.data_ptr() + 4 * MIB)


@has_huge_pages
def test_large_pooled_vectors_lie_in_huge_pages():
    module = HotColdEmbeddingBagCollection(
        [TableConfig(name="t", num_embeddings=1, embedding_dim=64)], optimizer=Adagrad(lr=0.1)
    )
    ids = JaggedIds.from_one_hot(["t"], torch.zeros(1, 160_000, dtype=torch.int64))

    pooled = module(ids).values()

    assert is_advised(pooled.data_ptr() + 4 * MIB)
    assert torch.equal(pooled, module.table_weights()[0].expand(160_000, 64))


@has_huge_pages
def test_what_stands_in_a_table_stays():
    table = torch.arange(8 * MIB // 4).float().view(-1, 16)

    advise_huge_pages(table)

    assert is_advised(table.data_ptr() + 4 * MIB)
    assert torch.equal(table.view(-1), torch.arange(8 * MIB // 4).float())


def test_tables_smaller_than_a_huge_page_are_left_alone():
    assert not advise_huge_pages(torch.empty(1000, 16))


def test_tables_on_other_devices_are_left_alone():
    assert not advise_huge_pages(torch.empty(MIB, 16, device="meta"))


def test_a_refusal_is_told_and_does_no_harm(monkeypatch):
    monkeypatch.setattr(memory, "_page_bytes", lambda: 2 * MIB)
    monkeypatch.setattr(memory, "_MADV_HUGEPAGE", -1)  # no advice at all: refused
    table = torch.ones(8 * MIB // 64, 16)

    agreed = advise_huge_pages(table)

    assert not agreed
    assert bool((table == 1).all())


@pytest.mark.parametrize("setting", ["always [madvise] never", "always madvise [never]", None])
def test_the_systems_owner_decides(monkeypatch, tmp_path, setting):
    monkeypatch.setattr(memory, "_SETTINGS", tmp_path)
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")

    page_bytes = memory._page_bytes.__wrapped__()

    assert page_bytes == (2 * MIB if setting == "always [madvise] never" else 0)
