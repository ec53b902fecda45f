"""A forked process leaves the files of its parent alone, and can train on rows in memory."""

import os
import threading
import traceback
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.tiers.transfers import TransferQueue
from recsys.errors import ColdTierError, TiersFailed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def make(folder=None):
    torch.manual_seed(0)
    files = {} if folder is None else {"cold_tier": "file", "cold_path": folder}
    return HotColdEmbeddingBag(
        300, 4, mode="sum", optimizer=SGD(lr=0.1), budget=4 * 300 + 24 * 80, **files
    )


def ids_of(step):
    return torch.randint(0, 300, (8, 8), generator=torch.Generator().manual_seed(step))


def train(bag, steps):
    for step in steps:
        bag.prefetch(ids_of(step))
        bag(ids_of(step)).square().sum().backward()
    return bag.weight.detach().clone()


def in_a_fork(function):
    """What a function returns, or the error it raises, in a forked process."""

    def call(connection):
        try:
            connection.send(function())
        except Exception as error:
            traceback.print_exc()
            connection.send(error)

    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=call, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60), "the forked process hangs"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def test_training_on_files_of_the_parent_is_refused_and_changes_no_row(tmp_path):
    plain = make()
    expected = train(plain, range(30))
    bag = make(tmp_path / "rows")
    train(bag, range(20))

    for claim in (lambda: train(bag, range(50, 70)), lambda: bag(ids_of(50))):
        error = in_a_fork(claim)
        assert isinstance(error, ColdTierError)
        assert f"{tmp_path / 'rows'}: this process was forked" in str(error)

    assert torch.equal(train(bag, range(20, 30)), expected)


def test_evaluation_reads_the_rows_as_they_are(tmp_path):
    bag = make(tmp_path / "rows")
    train(bag, range(20))
    ids = torch.arange(300).view(-1, 1)

    def evaluate():
        with torch.no_grad():
            return bag(ids).tolist()

    assert in_a_fork(evaluate) == evaluate()


def test_rows_in_memory_are_a_copy_that_may_be_trained():
    bag = make()
    train(bag, range(20))  # so that the parent has the thread that the fork lacks

    found = in_a_fork(lambda: train(bag, range(20, 40)).tolist())

    assert found == train(bag, range(20, 40)).tolist()


def test_scattered_rows_of_files_are_not_read_in_a_fork_without_threads(tmp_path):
    bag = make(tmp_path / "rows")
    saved, rows = SavedTables(bag), np.arange(300)
    [table] = saved.tables
    for _ in range(50):  # starts the threads
        table.gather("weight", rows)

    error = in_a_fork(lambda: table.gather("weight", rows))

    assert isinstance(error, ColdTierError)
    assert "was forked from the one that opened the files" in str(error)


def test_a_fork_while_rows_are_moved_says_so_and_does_not_wait_for_them():
    queue, go = TransferQueue(), threading.Event()
    queue.put(lambda: go.wait(60), in_background=True)

    def use():
        queue.settle()
        queue.require_intact()

    error = in_a_fork(use)
    go.set()
    use()

    assert isinstance(error, TiersFailed)
    assert "forked while rows were moved; call settle() of the module" in str(error)


def test_a_lookup_in_a_fork_needs_no_lock_that_a_thread_of_its_parent_holds():
    bag = make()
    train(bag, range(2))
    [tiers] = bag.tiers()
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with tiers.lock:
            is_held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()

    def look_up():
        with torch.no_grad():
            return bag(ids_of(0)).tolist()

    try:
        found = in_a_fork(look_up)
    finally:
        is_over.set()
        thread.join()

    assert found == look_up()
