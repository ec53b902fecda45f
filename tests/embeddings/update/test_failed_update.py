"""An update that is refused has moved nothing and forgotten nothing: corrected, it is made."""

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig

TABLES = [
    TableConfig(name="users", num_embeddings=9, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=5, embedding_dim=4),
    TableConfig(name="words", num_embeddings=5, embedding_dim=8, data_type="bf16"),
]
IDS = JaggedIds.from_one_hot(
    ["users", "goods", "words"], torch.tensor([[0, 8, 3, 3], [4, 4, 0, 2], [1, 1, 1, 0]])
)


def build(optimizer, auto_apply=False):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(TABLES, optimizer=optimizer, auto_apply=auto_apply)


def backward(module):
    module(IDS).values().square().sum().backward()


def assert_same(module, expected):
    for mine, theirs in zip(module.table_weights(), expected.table_weights(), strict=True):
        assert torch.equal(mine, theirs)
    states = [each.row_optimizer.state_dict()["state"] for each in (module, expected)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("is_first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("is_looked_at", [False, True], ids=["", "grad looked at"])
def test_a_rate_corrected_gives_the_step_that_was_refused(optimizer, is_first, is_looked_at):
    module, expected = build(optimizer), build(optimizer)
    for each in (module, expected):
        if not is_first:
            backward(each)
            each.row_optimizer.step()
        backward(each)
        if is_looked_at:
            assert each.table_weights()[0].grad is not None
    [settings] = module.row_optimizer.param_groups
    settings["lr"], right = float("nan"), settings["lr"]

    for _ in range(2):
        with pytest.raises(ValueError, match="lr"):
            module.row_optimizer.step()
    settings["lr"] = right
    for each in (module, expected):
        each.row_optimizer.step()
        each.row_optimizer.step()
        backward(each)
        each.row_optimizer.step()

    assert_same(module, expected)


@pytest.mark.parametrize("table", range(3))
def test_state_corrected_gives_the_step_that_was_refused(optimizer_with_state, table):
    module, expected = build(optimizer_with_state), build(optimizer_with_state)
    for each in (module, expected):
        backward(each)
        each.row_optimizer.step()
        backward(each)
    state = module.row_optimizer.state[module.table_weights()[table]]
    right = state["momentum1"]
    state["momentum1"] = torch.zeros(2, 2)

    with pytest.raises(ValueError, match="'momentum1'"):
        module.row_optimizer.step()
    state["momentum1"] = right
    for each in (module, expected):
        each.row_optimizer.step()
        backward(each)
        each.row_optimizer.step()

    assert_same(module, expected)
