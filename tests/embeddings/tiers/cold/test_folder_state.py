"""When the folder of a file tier is whole, and which modules may open it or fill it."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from weakref import WeakSet

import pytest
import torch

from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbedding,
    HotColdEmbeddingBag,
    PartialRowWiseAdam,
    RowWiseAdagrad,
)
from recsys.embeddings.tiers.cold import last_sync
from recsys.errors import ColdTierDirty, ColdTierError, TiersFailed

NUM_ROWS, DIM = 300, 4
PLAIN = SGD(lr=1.0)
IDS = torch.tensor([[1, 2, 3]])


def build(folder, optimizer=PLAIN, kind=HotColdEmbeddingBag, **options):
    return kind(
        NUM_ROWS,
        DIM,
        optimizer=optimizer,
        budget=4000,
        cold_tier="file",
        cold_path=folder,
        **options,
    )


def trained(folder, optimizer=PLAIN):
    bag = build(folder, optimizer)
    bag(IDS).sum().backward()
    bag.sync()
    return bag


def is_dirty(folder):
    return json.loads((folder / "arrays.json").read_text())["is_dirty"]


READS = {
    "state_dict": lambda bag, _: bag.state_dict()["weight"].sum(),
    "torch.save": lambda bag, path: torch.save(bag.state_dict(), path / "saved"),
    "sum": lambda bag, _: bag.weight.sum(),
    "torch.mean": lambda bag, _: torch.mean(bag.weight),
    "repr": lambda bag, _: repr(bag.weight),
    "optimizer": lambda bag, _: bag.row_optimizer.state_dict(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_leaves_a_folder_whole(read, tmp_path):
    bag = trained(tmp_path / "rows", Adagrad(lr=1.0))

    read(bag, tmp_path)

    assert not is_dirty(tmp_path / "rows")


WRITES = {
    "in place": lambda bag: bag.weight.detach().add_(1.0),
    "out=": lambda bag: torch.sum(torch.ones(2, NUM_ROWS, DIM), 0, out=bag.weight),
    "data": lambda bag: bag.weight.data.add_(1.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_folder_is_dirty_after_a_write(write, tmp_path):
    bag = trained(tmp_path / "rows")

    with torch.no_grad():
        write(bag)

    assert is_dirty(tmp_path / "rows")


@pytest.mark.parametrize(
    "keep", [lambda bag: bag.weight.data, lambda bag: bag.state_dict()["weight"]]
)
def test_a_write_by_a_tensor_kept_from_before_is_noticed_at_the_next_lookup(keep, tmp_path):
    bag = trained(tmp_path / "rows")
    kept = keep(bag)
    bag.sync()
    kept.fill_(7.0)

    with torch.no_grad():
        bag(IDS)

    assert is_dirty(tmp_path / "rows")


def test_sync_completes_what_a_tensor_kept_from_before_has_written(tmp_path, monkeypatch):
    bag = trained(tmp_path / "rows")
    kept, synced = bag.weight.data, []
    bag.sync()
    monkeypatch.setattr("os.fsync", synced.append)

    kept.fill_(7.0)
    bag.sync()

    assert synced
    assert not is_dirty(tmp_path / "rows")
    assert torch.equal(bag(IDS[:, :1]), torch.full((1, DIM), 7.0))
    assert not is_dirty(tmp_path / "rows")


@pytest.mark.parametrize("is_in_circle", [False, True])
def test_the_rows_of_a_deleted_module_are_there_for_the_next_one(tmp_path, is_in_circle):
    bag = build(tmp_path / "rows", mode="sum")
    expected = bag.weight.detach().clone()
    expected[IDS] -= 1
    bag(IDS).sum().backward()
    if is_in_circle:  # only the garbage collector deletes it
        bag.own_attribute = [bag]
    del bag
    gc.collect()

    assert torch.equal(build(tmp_path / "rows").weight, expected)


def test_the_end_of_the_process_completes_the_folder_of_a_module_that_a_function_had(tmp_path):
    script = (
        "import torch\n"
        "from recsys.embeddings import SGD, HotColdEmbeddingBag\n"
        "def main():\n"
        "    bag = HotColdEmbeddingBag(300, 4, mode='sum', optimizer=SGD(lr=1.0), budget=4000,\n"
        f"        cold_tier='file', cold_path={str(tmp_path / 'rows')!r})\n"
        "    with torch.no_grad():\n"
        "        bag.weight.zero_()\n"
        "    bag(torch.tensor([[5]])).sum().backward()\n"
        "main()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

    assert not is_dirty(tmp_path / "rows")
    rows = torch.from_file(str(tmp_path / "rows" / "weight.weight.bin"), size=300 * 4)
    assert rows.view(300, 4)[5].tolist() == [-1.0] * 4


def test_ctrl_c_while_rows_of_a_deleted_module_are_written_loses_none(tmp_path, monkeypatch):
    bag = build(tmp_path / "rows", mode="sum")
    bag(IDS).sum().backward()
    expected = bag.weight.detach().clone()

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupt)
        del bag
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "others")

    assert torch.equal(build(tmp_path / "rows").weight, expected)


def test_another_thread_waits_for_the_rows_of_a_deleted_module(tmp_path, monkeypatch):
    bag = build(tmp_path / "rows", mode="sum")
    bag(IDS).sum().backward()
    expected = bag.weight.detach().clone()
    is_writing, sync = threading.Event(), type(bag.row_updater).sync

    def sync_slowly(updater):
        is_writing.set()
        time.sleep(0.2)  # another thread finds nothing to write meanwhile
        sync(updater)

    monkeypatch.setattr(type(bag.row_updater), "sync", sync_slowly)
    del bag
    thread = threading.Thread(target=last_sync.sync_deleted)
    thread.start()
    assert is_writing.wait(10)

    assert torch.equal(build(tmp_path / "rows").weight, expected)
    thread.join()


def test_a_forked_process_neither_writes_nor_frees_what_a_deleted_module_has(tmp_path):
    """On a GPU, freeing its memory would end that process."""
    bag = build(tmp_path / "rows", mode="sum")
    bag(IDS).sum().backward()
    expected, kept = bag.weight.detach().clone(), weakref.ref(bag.row_updater)
    del bag

    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            last_sync.sync_deleted()
            last_sync._sync_all()
            code = 0 if kept() is not None and is_dirty(tmp_path / "rows") else 2
        os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(build(tmp_path / "rows").weight, expected)


def test_the_end_tells_once_of_a_deleted_module_whose_rows_cannot_be_written(tmp_path, monkeypatch):
    bag = build(tmp_path / "rows")

    def fail(_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(type(bag.row_updater), "sync", fail)
        patched.setattr(last_sync, "_UPDATERS", WeakSet([bag.row_updater]))
        del bag
        with pytest.raises(ExceptionGroup, match="not synced") as caught:
            last_sync._sync_all()

    assert len(caught.value.exceptions) == 1


def test_a_deleted_module_that_was_synced_keeps_no_memory(tmp_path):
    bag = trained(tmp_path / "rows")
    bag.sync()
    gone = weakref.ref(bag.row_updater)
    del bag

    assert gone() is None


def test_a_module_that_is_deleted_after_its_folder_keeps_no_memory(tmp_path):
    bag = build(tmp_path / "rows")
    bag(IDS).sum().backward()
    gone = weakref.ref(bag.row_updater)
    shutil.rmtree(tmp_path / "rows")
    del bag

    assert gone() is None


def test_a_warning_tells_of_a_deleted_module_whose_rows_cannot_be_written(tmp_path, monkeypatch):
    bag = build(tmp_path / "rows")

    def fail(_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(type(bag.row_updater), "sync", fail)
        del bag
        with pytest.warns(UserWarning, match="cannot be written to its files: the disk is full"):
            build(tmp_path / "others")
    with pytest.raises(ColdTierDirty, match="ended before all rows were written"):
        build(tmp_path / "rows")


def test_sync_names_a_folder_that_was_deleted_and_the_end_of_the_process_does_not(tmp_path):
    bag = build(tmp_path / "rows")
    bag(IDS).sum().backward()
    shutil.rmtree(tmp_path / "rows")

    with pytest.raises(ColdTierError, match="rows: the files of this module were deleted"):
        bag.sync()
    last_sync._sync_all()


def test_the_end_of_a_process_tells_of_rows_that_could_not_be_written(tmp_path, monkeypatch):
    bag = build(tmp_path / "rows")
    bag(IDS).sum().backward()

    def fail(_):
        raise TiersFailed("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(type(bag.row_updater), "sync", fail)
        with pytest.raises(ExceptionGroup, match=r"not synced \(the disk is full\)"):
            last_sync._sync_all()


@pytest.mark.parametrize(
    ("first", "second", "shapes"),
    [
        (Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), r"momentum1 \(300, 4\).* momentum1 \(300,\)"),
        (RowWiseAdagrad(lr=0.1), Adagrad(lr=0.1), r"momentum1 \(300,\).* momentum1 \(300, 4\)"),
        (
            Adam(lr=0.1),
            PartialRowWiseAdam(lr=0.1),
            r"exp_avg_sq \(300, 4\), .* exp_avg_sq \(300,\)",
        ),
        (Adam(lr=0.1), SGD(lr=0.1), r"exp_avg_sq \(300, 4\), .* is none"),
    ],
)
def test_a_folder_of_another_optimizer_is_refused_by_name(first, second, shapes, tmp_path):
    trained(tmp_path / "rows", first)
    gc.collect()

    with pytest.raises(ColdTierError, match=rf"rows: table 'weight' has the state .*{shapes}"):
        build(tmp_path / "rows", second)

    assert build(tmp_path / "rows", first).row_optimizer.state  # as it was


@pytest.mark.parametrize("kind", [HotColdEmbeddingBag, HotColdEmbedding])
@pytest.mark.parametrize("shape", [(1, DIM), (DIM,), (NUM_ROWS, 1), (NUM_ROWS - 1, DIM)])
def test_given_rows_of_another_shape_are_refused(kind, shape, tmp_path):
    with pytest.raises(ValueError, match=r"_weight must have the shape .* = \(300, 4\), got"):
        build(tmp_path / "rows", kind=kind, _weight=torch.ones(shape))

    assert not (tmp_path / "rows").exists()


def test_files_have_the_dtype_of_given_rows(tmp_path):
    rows = torch.rand(NUM_ROWS, DIM, dtype=torch.float64)

    bag = build(tmp_path / "rows", _weight=rows.clone())

    assert torch.equal(bag.weight.detach(), rows)
