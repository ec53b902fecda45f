import torch
from torch import nn

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD


def test_it_is_an_embedding_bag_that_says_so():
    settings = {"max_norm": 2.0, "norm_type": 1.0, "mode": "sum", "padding_idx": -1}

    module = HotColdEmbeddingBag(5, 3, **settings, optimizer=SGD(lr=0.1))

    assert isinstance(module, nn.EmbeddingBag)
    assert repr(module) == "HotCold" + repr(nn.EmbeddingBag(5, 3, **settings))
    assert list(module.state_dict()) == ["weight"]


def test_an_attached_bag_hands_its_gradient_over_and_a_detached_one_keeps_it():
    owner = HotColdEmbeddingBag(5, 3, mode="sum", optimizer=SGD(lr=1.0), auto_apply=False)
    follower = HotColdEmbeddingBag(5, 3, mode="sum", sparse=True)
    follower.weight = owner.weight
    before = owner.weight.detach().clone()
    ids = torch.tensor([[1, 1], [4, 0]])

    follower.attach(owner.row_optimizer.updater, owner._group, 0)
    follower(ids).sum().backward()
    owner.row_optimizer.step()
    moved = owner.weight.detach().clone()
    follower.detach()
    follower(ids).sum().backward()

    counts = torch.tensor([1.0, 2, 0, 0, 1]).unsqueeze(1)
    torch.testing.assert_close(moved, before - counts)
    assert torch.equal(owner.weight, moved)
    torch.testing.assert_close(follower.weight.grad.to_dense(), counts.expand(5, 3))
