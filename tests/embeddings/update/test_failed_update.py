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


@pytest.mark.parametrize(
    ("wrong", "is_first"),
    [("the rate", True), ("the rate", False), *((table, False) for table in range(3))],
)
def test_what_is_corrected_gives_the_step_that_was_refused(optimizer_with_state, wrong, is_first):
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        how = {"optimizer": optimizer_with_state, "auto_apply": False}
        modules.append(HotColdEmbeddingBagCollection(TABLES, **how))
    module, expected = modules

    def backward():
        for each in modules:
            each(IDS).values().square().sum().backward()

    def step():
        for each in modules:
            each.row_optimizer.step()

    if not is_first:
        backward()
        step()
    backward()
    holder, name, value = module.row_optimizer.param_groups[0], "lr", float("nan")
    if wrong != "the rate":
        holder = module.row_optimizer.state[module.table_weights()[wrong]]
        name, value = "momentum1", torch.zeros(2, 2)
    right, holder[name] = holder[name], value

    for _ in range(2):
        with pytest.raises(ValueError, match=name):
            module.row_optimizer.step()
    holder[name] = right
    step()
    step()
    backward()
    step()

    for mine, theirs in zip(module.table_weights(), expected.table_weights(), strict=True):
        assert torch.equal(mine, theirs)
    states = [each.row_optimizer.state_dict()["state"] for each in modules]
    torch.testing.assert_close(*states, rtol=0, atol=0)
