"""Rows in files, copies and optimizers that are refused: what is done, the error, and its name."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import recsys
from recsys.embeddings import SGD, HotColdEmbeddingBag


def bags():
    return nn.ModuleList(nn.EmbeddingBag(100, 8, mode="sum", sparse=True) for _ in range(2))


def share_memory_in_files():
    model = bags()
    model[1].weight.data = model[0].weight.data
    recsys.accelerate(
        model, optimizer=SGD(lr=0.1), budget="4KiB", cold_tier="file", cold_path="rows"
    )


def copy_an_optimizer():
    bag = HotColdEmbeddingBag(100, 8, mode="sum", optimizer=SGD(lr=0.1))
    copy.deepcopy((bag, bag.row_optimizer))


def give_two_optimizers():
    model = bags()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    recsys.accelerate(model, optimizer=SGD(lr=0.1))


REFUSALS = [
    ("tables on one memory, in files", share_memory_in_files, ValueError, "tables '0' and '1'"),
    ("a copy of a recsys optimizer", copy_an_optimizer, TypeError, "state_dict()"),
    ("a second optimizer", give_two_optimizers, ValueError, "apply_optimizer_in_backward"),
]


@pytest.mark.parametrize(
    ("do", "error", "name"), [each[1:] for each in REFUSALS], ids=[each[0] for each in REFUSALS]
)
def test_it_is_refused_by_name(do, error, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error) as refused:
        do()

    assert name in str(refused.value)
