import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recsys.embeddings.attach import Attachment
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam
from tests.exact.oracle import update_rows

NUM_ROWS, DIM = 11, 3
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-7},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}
by_name = {"ids": lambda value: type(value).__name__ if hasattr(value, "lr") else str(value)}


def bags(seed):
    """Ids with repeats and empty bags, as a mini-batch has them; row 10 is in none."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 0, 1, 5, 2])
    ids = torch.randint(0, NUM_ROWS - 1, (int(lengths.sum()),), generator=generator)
    return ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])


def loss(module, seed, *more):
    """A loss whose gradients differ from number to number, and from seed to seed."""
    result = module(*bags(seed), *more)
    generator = torch.Generator().manual_seed(100 + seed)
    return (result * torch.randn(result.shape, generator=generator, dtype=result.dtype)).sum()


def plain_module(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return nn.EmbeddingBag(NUM_ROWS, DIM, dtype=dtype, **settings)


def ours_like(plain, optimizer, *, auto_apply=True, **settings):
    settings = {"mode": plain.mode} | settings
    rows = plain.weight.detach().clone()
    return HotColdEmbeddingBag.from_pretrained(
        rows, freeze=False, **settings, optimizer=optimizer, auto_apply=auto_apply
    )


# Of the sparse tensors that torch's optimizers make.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("optimizer", "torchs"),
    [
        (SGD(lr=0.1), torch.optim.SGD),
        (Adagrad(lr=0.1), torch.optim.Adagrad),
        (Adam(lr=0.1), torch.optim.SparseAdam),
    ],
    **by_name,
)
def test_each_step_is_that_of_torchs_module_and_optimizer(optimizer, torchs, mode, dtype):
    plain = plain_module(dtype, mode=mode, sparse=True)
    theirs = torchs(plain.parameters(), lr=0.1)
    own = ours_like(plain, optimizer)

    for step in range(4):
        with torch.no_grad():
            plain.weight.copy_(own.weight)
        for module in (plain, own):
            loss(module, step).backward()
        theirs.step()
        theirs.zero_grad()

        torch.testing.assert_close(own.weight.detach(), plain.weight.detach(), **TOLERANCES[dtype])


def reference_step(plain, optimizer, seeds):
    """What the sum of the mini-batches' gradients makes of the rows, from scratch."""
    weight = plain.weight.detach().clone()
    for seed in seeds:
        loss(plain, seed).backward()
    rows = torch.cat([bags(seed)[0] for seed in seeds]).unique()
    states = [
        torch.zeros(NUM_ROWS, size, dtype=weight.dtype)
        for size in optimizer.state_sizes(DIM).values()
    ]
    update_rows(optimizer, weight, states, rows, plain.weight.grad[rows])
    return weight


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_several_backward_passes_and_one_step_are_one_step_of_the_summed_gradient(mode, optimizer):
    plain = plain_module(torch.float64, mode=mode)
    own = ours_like(plain, optimizer, auto_apply=False)
    expected = reference_step(plain, optimizer, range(3))

    for seed in range(3):
        loss(own, seed).backward()
    own.row_optimizer.step()

    torch.testing.assert_close(own.weight.detach(), expected, **TOLERANCES[torch.float64])


def test_rows_shared_out_by_ddp_are_refused_with_an_optimizer_alone(process_group):
    plain = plain_module(mode="sum")
    shared = nn.parallel.DistributedDataParallel(ours_like(plain, None))
    refused = nn.parallel.DistributedDataParallel(ours_like(plain, SGD(lr=1.0)))

    loss(shared, 0).backward()
    with pytest.raises(
        RuntimeError, match="does not share its row updates between processes; build"
    ):
        refused(*bags(0))

    assert shared.module.weight.grad.abs().max() > 0


class Checkpointed(nn.Module):
    """Looks up without gradients, and again in backward, as a reentrant checkpoint does."""

    def __init__(self, bag):
        super().__init__()
        self.bag, self.scale = bag, nn.Parameter(torch.ones(1))

    def forward(self, ids, offsets):
        def scaled(scale):
            return self.bag(ids, offsets) * scale

        return checkpoint(scaled, self.scale, use_reentrant=True)


def test_rows_shared_out_by_ddp_are_refused_in_a_reentrant_checkpoint(process_group):
    plain = plain_module(mode="sum")
    refused = nn.parallel.DistributedDataParallel(
        Checkpointed(ours_like(plain, SGD(lr=1.0))), static_graph=True
    )

    with pytest.raises(RuntimeError, match="does not share its row updates between processes"):
        refused(*bags(0))
    with torch.no_grad():
        found = refused.eval()(*bags(0))

    assert torch.equal(found, plain(*bags(0)))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_two_lookups_in_one_backward_are_one_step_of_the_summed_gradient(mode, optimizer):
    plain = plain_module(torch.float64, mode=mode)
    own = ours_like(plain, optimizer)
    expected = reference_step(plain, optimizer, [4, 5])

    (loss(own, 4) + loss(own, 5)).backward()

    torch.testing.assert_close(own.weight.detach(), expected, **TOLERANCES[torch.float64])


def test_an_update_per_backward_is_not_a_step_of_the_summed_gradient():
    found = {}

    for auto_apply in (True, False):
        own = HotColdEmbeddingBag.from_pretrained(
            torch.zeros(1, 1), False, optimizer=Adagrad(lr=0.1), auto_apply=auto_apply
        )
        for gradient in (1.0, 2.0):
            (gradient * own(torch.tensor([[0]]))).sum().backward()
        own.row_optimizer.step()
        found[auto_apply] = own.weight.item()

    assert found[False] == pytest.approx(-0.100, abs=5e-4)  # 0.1 * 3 / sqrt(9)
    assert found[True] == pytest.approx(-0.189, abs=5e-4)  # 0.1 * 1 / sqrt(1) + 0.1 * 2 / sqrt(5)


def test_weights_may_be_parameters_that_move_before_the_rows():
    own = ours_like(plain_module(mode="sum"), SGD(lr=1.0), auto_apply=False)
    expected = own.weight.detach().clone()
    weights = nn.Parameter(torch.tensor([[2.0, 3.0]]))
    dense = torch.optim.SGD([weights], lr=1.0)

    own(torch.tensor([[1, 4]]), None, weights).sum().backward()
    dense.step()
    own.row_optimizer.step()

    expected[1] -= 2
    expected[4] -= 3
    torch.testing.assert_close(own.weight.detach(), expected)


def test_a_padding_row_stays_as_it_is():
    own = HotColdEmbeddingBag(3, DIM, mode="sum", padding_idx=-3, optimizer=Adam(lr=0.1))

    own(torch.tensor([[0, 1], [0, 0]])).sum().backward()

    assert own.weight[0].tolist() == [0.0] * DIM
    assert own.row_optimizer.state[own.weight]["momentum1"][0].tolist() == [0.0] * DIM


def test_frozen_rows_stay_and_weights_have_a_gradient_all_the_same():
    own = ours_like(plain_module(mode="sum"), SGD(lr=1.0))
    own.weight.requires_grad = False
    before = own.weight.clone()
    weights = torch.ones(11, requires_grad=True)

    unweighted = own(*bags(0))
    loss(own, 0, weights).backward()

    assert not unweighted.requires_grad
    assert torch.equal(own.weight, before)
    assert weights.grad.abs().min() > 0


def test_pretrained_rows_are_shared_and_frozen_unless_told_otherwise():
    rows = torch.ones(4, DIM)

    with pytest.warns(UserWarning, match="freezes the rows by default: .*; pass freeze=False"):
        frozen = HotColdEmbeddingBag.from_pretrained(rows, optimizer=SGD(lr=1.0))
    own = HotColdEmbeddingBag.from_pretrained(
        rows, False, None, 1.0, False, "sum", False, True, 2, optimizer=SGD(lr=1.0)
    )
    own(torch.tensor([0, 2]), torch.tensor([0, 2])).sum().backward()

    assert not frozen.weight.requires_grad
    assert rows.tolist() == [[0.0] * DIM, *[[1.0] * DIM] * 3]
    assert repr(own).endswith("(4, 3, norm_type=1.0, mode='sum', padding_idx=2)")


def test_rows_are_exchanged_with_torchs_module_both_ways():
    plain = plain_module(mode="sum")
    own = HotColdEmbeddingBag(NUM_ROWS, DIM, mode="sum", optimizer=Adagrad(lr=0.1))
    back = plain_module(mode="sum")
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)

    own.load_state_dict(plain.state_dict())
    for _ in range(2):
        for module in (own, plain):
            loss(module, 0).backward()
        theirs.step()
        theirs.zero_grad()
    back.load_state_dict(own.state_dict(), assign=True)

    assert type(own.state_dict()["weight"]) is torch.Tensor
    torch.testing.assert_close(back.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_drawing_rows_anew_is_as_torch_does_it():
    own = HotColdEmbeddingBag(NUM_ROWS, DIM, padding_idx=1, optimizer=SGD(lr=1.0))
    plain = nn.EmbeddingBag(NUM_ROWS, DIM, padding_idx=1)

    for module in (own, plain):
        torch.manual_seed(3)
        module.reset_parameters()

    assert torch.equal(own.weight, plain.weight)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_nothing_is_collected_without_gradients(mode):
    own = ours_like(plain_module(mode=mode), SGD(lr=1.0), auto_apply=False)
    before = own.weight.detach().clone()

    with torch.no_grad():
        without = own.eval()(*bags(0))
    with torch.inference_mode():
        inferred = own(*bags(0))
    own.row_optimizer.step()

    assert not without.requires_grad
    assert torch.equal(without, inferred)
    assert torch.equal(own.weight, before)


# torch.compile looks at `grad` of every tensor, and hides the warning that this gives.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("optimizer", [None, Adagrad(lr=0.1)], **by_name)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_compiled_model_around_it_computes_the_same(mode, optimizer):
    class Model(nn.Module):
        def __init__(self, bag):
            super().__init__()
            self.bag, self.scale = bag, nn.Parameter(torch.ones(DIM))

        def forward(self, *arguments):
            return (self.bag(*arguments) * self.scale).tanh()

    model, other = (Model(ours_like(plain_module(mode=mode), optimizer)) for _ in range(2))

    # Without an optimizer there is one graph, as of torch's module; with one it ends and goes on.
    compiled = torch.compile(other, backend="eager", fullgraph=optimizer is None)
    for each in (model, compiled):
        each(*bags(0)).square().sum().backward()

    torch.testing.assert_close(other.bag.weight, model.bag.weight)
    torch.testing.assert_close(other.bag.weight.grad, model.bag.weight.grad)
    torch.testing.assert_close(other.scale.grad, model.scale.grad)


def sharing(optimizer, modes):
    """Bags whose rows one optimizer updates, as in a model that was accelerated."""
    members = [ours_like(plain_module(torch.float64, mode=mode), None) for mode in modes]
    tables = [each.tables()[0]._replace(key=f"{n}") for n, each in enumerate(members)]
    attachment = Attachment(members, tables, optimizer)
    return members, attachment.row_optimizer


def test_bags_of_several_modes_share_one_update(optimizer):
    modes = ["sum", "mean", "sum", "mean"]
    members, row_optimizer = sharing(optimizer, modes)
    expected = [
        reference_step(plain_module(torch.float64, mode=mode), optimizer, [0, 1]) for mode in modes
    ]

    with row_optimizer.update_once():
        for seed in (0, 1):
            sum(loss(each, seed) for each in members).backward()

    for each, rows in zip(members, expected, strict=True):
        torch.testing.assert_close(each.weight.detach(), rows, **TOLERANCES[torch.float64])


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), PartialRowWiseAdam(lr=0.1)], **by_name)
def test_a_step_without_lookups_in_a_table_is_none_of_its_steps(optimizer):
    members, _ = sharing(optimizer, ["sum", "sum"])
    alone = ours_like(plain_module(torch.float64, mode="sum"), optimizer)

    for looked_up in (members[:1], members[:1], members):
        sum(loss(each, 0) for each in looked_up).backward()
    loss(alone, 0).backward()

    assert torch.equal(members[1].weight, alone.weight)
    assert not torch.equal(members[0].weight, alone.weight)


def test_frozen_bags_of_a_group_ask_for_no_gradient():
    members, _ = sharing(SGD(lr=1.0), ["sum", "mean"])
    for each in members:
        each.weight.requires_grad = False
    members[0].weight.requires_grad = True
    before = members[1].weight.clone()

    found = [each(*bags(0)) for each in members]
    found[0].sum().backward()

    assert [each.requires_grad for each in found] == [True, False]
    assert torch.equal(members[1].weight, before)
