"""One module of one process uses a folder of rows."""

import fcntl
import os

import pytest
import torch

from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.embeddings.tiers.cold.folder_lock import lock_folder
from recsys.errors import ColdTierError


def test_a_folder_that_may_only_be_read_is_refused_before_training(tmp_path, monkeypatch):
    os.close(lock_folder(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)

    with pytest.raises(ColdTierError, match=r"must be a writable folder \(Permission"):
        lock_folder(tmp_path)


def test_a_lock_whose_file_was_just_deleted_is_none(tmp_path, monkeypatch):
    lock, flock = tmp_path / "lock", fcntl.flock

    def delete_first(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    descriptor = lock_folder(tmp_path)
    try:
        with pytest.raises(ColdTierError, match="another module or process"):
            lock_folder(tmp_path)
    finally:
        os.close(descriptor)


def test_a_folder_that_is_in_use_is_refused_with_what_to_delete_in_a_notebook(tmp_path):
    def make():
        return HotColdEmbeddingBag(
            100,
            4,
            optimizer=SGD(lr=0.1),
            budget="2KiB",
            cold_tier="file",
            cold_path=tmp_path / "rows",
        )

    bag = make()
    with pytest.raises(
        ColdTierError, match=r"delete every reference to that module.*\(del model\)"
    ):
        bag = make()
    rows = bag.weight.detach().clone()
    del bag
    assert torch.equal(make().weight, rows)
