"""Files of rows are scratch space: they have no names, and are freed with what uses them."""

import gc
import os
import signal

import pytest
import torch

from recsys.embeddings import SGD, Adagrad, Adam, HotColdEmbedding, HotColdEmbeddingBag
from recsys.embeddings.tiers.cold.cold_files import ColdFiles
from tests.forks import Fork
from tests.scratch_files import scratch_files

NUM_ROWS, DIM = 300, 4
PLAIN = SGD(lr=1.0)
IDS = torch.tensor([[1, 2, 3]])


def build(folder, optimizer=PLAIN, kind=HotColdEmbeddingBag, **options):
    torch.manual_seed(0)
    files = {"budget": 4000, "cold_tier": "file", "cold_path": folder}
    return kind(NUM_ROWS, DIM, optimizer=optimizer, **files, **options)


def train(bag, ids=IDS):
    bag(ids).square().sum().backward()


def trained(folder, optimizer=PLAIN):
    bag = build(folder, optimizer)
    train(bag)
    return bag


def trained_resident(optimizer):
    torch.manual_seed(0)
    bag = HotColdEmbeddingBag(NUM_ROWS, DIM, optimizer=optimizer)
    train(bag)
    return bag


def test_files_have_no_names_and_are_freed_with_their_module(tmp_path):
    bag = trained(tmp_path / "rows", Adam(lr=0.1))
    assert not list((tmp_path / "rows").iterdir())
    assert len(scratch_files(tmp_path / "rows")) == 3  # the rows and two state arrays

    del bag
    gc.collect()

    assert not scratch_files(tmp_path / "rows")


def train_and_wait(folder):
    bag = trained(folder)
    print("trained", flush=True)  # noqa: T201  # the test waits for it
    signal.pause()
    del bag


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_process_leaves_no_file(tmp_path):
    fork = Fork(train_and_wait, tmp_path / "rows")
    assert next(fork.lines()) == "trained\n"
    fork.process.kill()
    fork.end()

    assert not list((tmp_path / "rows").iterdir())


def test_several_modules_have_their_rows_in_one_folder(tmp_path):
    bags = [trained(tmp_path) for _ in range(2)]
    train(bags[0])

    resident = trained_resident(PLAIN)
    assert torch.equal(bags[1].weight, resident.weight)
    train(resident)
    assert torch.equal(bags[0].weight, resident.weight)


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    bag = build("rows", Adagrad(lr=1.0))
    monkeypatch.chdir(tmp_path / "elsewhere")

    train(bag)  # makes the file of the state

    assert len(scratch_files(tmp_path / "rows")) == 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_state_that_is_made_again_leaves_tensors_of_the_earlier_state(tmp_path):
    bag = trained(tmp_path, Adagrad(lr=1.0))
    kept = bag.row_optimizer.state_dict()["state"]["weight"]["momentum1"]
    expected = kept.clone()

    bag.row_optimizer.state.clear()
    train(bag, IDS + 5)

    assert torch.equal(kept, expected)
    assert not torch.equal(bag.row_optimizer.state[bag.weight]["momentum1"], expected)


def test_state_that_another_tensor_replaces_counts_for_rows_in_slots_at_once(tmp_path):
    bag, resident = trained(tmp_path, Adagrad(lr=1.0)), trained_resident(Adagrad(lr=1.0))
    for each in (bag, resident):
        each.row_optimizer.state_dict()
        state = each.row_optimizer.state[each.weight]
        state["momentum1"] = torch.full_like(state["momentum1"], 9.0)
        train(each)

    assert torch.equal(bag.weight, resident.weight)


@pytest.mark.parametrize("optimizer", [Adagrad(lr=0.1), Adam(lr=0.1)], ids=["Adagrad", "Adam"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_state_that_was_removed_begins_at_zero(is_loaded, optimizer, tmp_path):
    bag, resident = trained(tmp_path, optimizer), trained_resident(optimizer)
    other = build(tmp_path, optimizer)
    empty = other.row_optimizer.state_dict()
    for each in (bag, resident):
        if is_loaded:
            each.row_optimizer.load_state_dict(empty)
        else:
            each.row_optimizer.state.clear()
        train(each)

    assert torch.equal(bag.weight, resident.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_table_without_rows_has_its_dtype(dtype, tmp_path):
    with torch.device("meta"):  # not the default device either
        files = ColdFiles(tmp_path, {"t": ((0, 3), dtype)})

    rows = files.begin_with("t", None)

    assert (rows.shape, rows.dtype, rows.device.type) == ((0, 3), dtype, "cpu")


@pytest.mark.parametrize("kind", [HotColdEmbeddingBag, HotColdEmbedding])
@pytest.mark.parametrize("shape", [(1, DIM), (DIM,), (NUM_ROWS, 1), (NUM_ROWS - 1, DIM)])
def test_given_rows_of_another_shape_are_refused(kind, shape, tmp_path):
    with pytest.raises(ValueError, match=r"_weight must have the shape .* = \(300, 4\), got"):
        build(tmp_path / "rows", kind=kind, _weight=torch.ones(shape))

    assert not (tmp_path / "rows").exists()


def test_files_have_the_dtype_of_given_rows(tmp_path):
    rows = torch.rand(NUM_ROWS, DIM, dtype=torch.float64)

    bag = build(tmp_path, _weight=rows.clone())

    assert torch.equal(bag.weight.detach(), rows)
