"""One autograd node for the calls of many bags; `test_accelerate_models` has what they compute."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import recsys
from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.errors import IdOutOfRange, MalformedBags
from tests.embeddings.lookup.test_device_calls import nodes_of

NUM_BAGS, NUM_ROWS, DIM = 5, 30, 16
BUDGET = 8000  # bytes: slots for two thirds of the rows
in_both = pytest.mark.parametrize("budget", [None, BUDGET], ids=["resident", "in slots"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) for _ in range(NUM_BAGS)
        )

    def forward(self, ids, offsets):
        return [bag(each, offsets) for bag, each in zip(self.bags, ids, strict=True)]


def batch(seed, size=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_ROWS, (NUM_BAGS, size), generator=generator), torch.arange(size)


def accelerated(budget=None, num_steps=0):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    for seed in range(num_steps):
        train(model, optimizer, seed)
    return model, optimizer


def num_claimed(model):
    [tiers] = model.bags[0].tiers()
    return tiers.residency.num_claimed


def train(model, optimizer, seed, size=6):
    outputs = model(*batch(seed, size))
    torch.cat(outputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return outputs


def test_from_the_second_step_on_calls_share_a_node():
    model, optimizer = accelerated(num_steps=2)
    outputs = train(model, optimizer, 2)
    shorter = train(model, optimizer, 3, size=2)

    assert len(nodes_of(outputs)) == 1
    assert len(nodes_of(shorter)) == 1


def test_more_calls_than_expected_open_another_node():
    model, _ = accelerated(num_steps=2)

    outputs = model(*batch(2)) + model(*batch(3)) + model(*batch(4, size=2))

    assert len(nodes_of(outputs)) == 3


@in_both
def test_errors_come_with_the_call_and_leave_the_node_usable(budget):
    model, optimizer = accelerated(budget)
    other = copy.deepcopy(Model())
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for seed in range(2):
        train(model, optimizer, seed)
        train(other, other_optimizer, seed)
    ids, offsets = batch(2)
    bad = ids[1].clone()
    bad[3] = NUM_ROWS
    first = model.bags[0](ids[0], offsets)

    with pytest.raises(IdOutOfRange, match=f"sample 3: id {NUM_ROWS} is not in"):
        model.bags[1](bad, offsets)

    rest = [bag(each, offsets) for bag, each in zip(model.bags[1:], ids[1:], strict=True)]
    for outputs, its_optimizer in (
        ([first, *rest], optimizer),
        (other(ids, offsets), other_optimizer),
    ):
        torch.cat(outputs).square().sum().backward()
        its_optimizer.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@in_both
def test_a_second_backward_is_refused_by_output(budget):
    model, _ = accelerated(budget, num_steps=2)
    first, second, *_ = model(*batch(2))

    first.sum().backward()
    second.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        first.sum().backward()


@in_both
def test_ids_changed_in_place_are_refused_and_ids_refilled_by_numpy_are_not_read(budget):
    model, optimizer = accelerated(budget, num_steps=2)
    ids, offsets = batch(2)
    before = model.bags[0].weight.detach().clone()
    [output, other, *_] = model(ids.unbind(), offsets)
    expected = ids[0].unique()
    ids[0].numpy()[:] = 10**9

    output.sum().backward()
    optimizer.step()

    is_updated = (model.bags[0].weight != before).any(1)
    assert is_updated.nonzero().flatten().tolist() == expected.tolist()
    ids[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


@in_both
def test_outputs_that_wait_for_a_call_keep_no_model_alive(budget):
    model, optimizer = accelerated(budget, num_steps=2)
    ids, offsets = batch(2)
    output = model.bags[0](ids[0], offsets)  # four outputs of the node wait
    gone = weakref.ref(model.bags[1].weight), weakref.ref(model)

    del model, optimizer, output
    gc.collect()

    assert [each() for each in gone] == [None, None]


def test_rows_are_updated_although_the_module_is_gone():
    bag = HotColdEmbeddingBag(NUM_ROWS, DIM, mode="sum", optimizer=SGD(lr=1.0))
    weight, ids = bag.weight, torch.tensor([[3], [4]])
    bag(ids)
    output, before = bag(ids), weight.detach().clone()
    del bag
    gc.collect()

    output.sum().backward()

    torch.testing.assert_close((before - weight.detach())[3:5], torch.ones(2, DIM))


@in_both
def test_the_default_device_does_not_matter(budget):
    model, _ = accelerated(budget, num_steps=1)
    ids, offsets = batch(1)

    with torch.device("meta"):
        outputs = model(ids, offsets)
        with torch.no_grad():
            outputs += model(ids, offsets)

    assert {output.device.type for output in outputs} == {"cpu"}


def test_forwards_without_backward_do_not_make_the_next_node_larger():
    model, optimizer = accelerated(num_steps=1)
    for _ in range(20):
        model(*batch(1))
    train(model, optimizer, 2)

    output = model.bags[0](batch(3)[0][0], batch(3)[1])

    [node] = nodes_of([output])
    assert len(node.node.calls) == NUM_BAGS


@in_both
def test_other_rows_by_functional_call_are_refused_and_the_models_own_go_on(budget):
    model, optimizer = accelerated(budget, num_steps=1)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    for _ in range(2):
        with pytest.raises(ValueError, match=r"'bags\.0': .*; leave tables out of what"):
            torch.func.functional_call(model, weights, batch(1))
        train(model, optimizer, 1)


@in_both
def test_without_gradients_no_node_is_made(budget):
    model, _ = accelerated(budget, num_steps=1)

    with torch.no_grad():
        outputs = model(*batch(1))
    model.requires_grad_(False)
    outputs += model(*batch(1))

    assert not any(output.requires_grad for output in outputs)
    for output, again in zip(outputs[:NUM_BAGS], outputs[NUM_BAGS:], strict=True):
        assert torch.equal(output, again)


@in_both
def test_a_copy_has_nodes_of_its_own(budget):
    model, _ = accelerated(budget, num_steps=2)
    model.bags[0](batch(2)[0][0], batch(2)[1])

    twin = copy.deepcopy(model)

    assert len(nodes_of(twin(*batch(2))) & nodes_of(model(*batch(2)))) == 0


def test_outputs_that_wait_are_not_filled_with_rows_of_another_dtype():
    model, _ = accelerated(num_steps=2)
    ids, offsets = batch(2)
    model.bags[0](ids[0], offsets)

    model.double()
    model(ids, offsets)
    outputs = model(ids, offsets)

    assert {output.dtype for output in outputs} == {torch.float64}
    for bag, each, output in zip(model.bags, ids, outputs, strict=True):
        assert torch.equal(output, bag.weight[each])


def test_no_bags_are_refused_as_ever():
    bag = HotColdEmbeddingBag(
        NUM_ROWS, DIM, mode="sum", include_last_offset=True, optimizer=SGD(lr=0.1)
    )
    none = torch.empty(0, dtype=torch.int64)
    bag(torch.tensor([1]), torch.tensor([0, 1]))

    with pytest.raises(MalformedBags):
        bag(none, none)


def test_evaluation_with_gradients_of_ever_other_sizes_keeps_no_outputs_for_each():
    model, optimizer = accelerated(num_steps=2)

    for size in range(1, 300):
        model.bags[0](torch.zeros(size, dtype=torch.int64), torch.arange(size))

    calls = model.bags[0]._group.calls(model.bags[0]._updater)
    assert len(calls._nodes._open) <= 64
    train(model, optimizer, 3)


def test_slots_are_held_until_backward_or_until_the_output_is_gone():
    model, optimizer = accelerated(BUDGET, num_steps=1)
    ids, offsets = batch(1)
    needed = [len(each.unique()) for each in ids]

    first, second, *others = model(ids, offsets)
    assert num_claimed(model) == sum(needed)
    del others
    assert num_claimed(model) == sum(needed[:2])
    first.sum().backward()
    optimizer.step()
    assert num_claimed(model) == needed[1]
    del second
    assert num_claimed(model) == 0


def test_a_loss_that_is_kept_holds_no_slots_of_outputs_that_are_not_used():
    model, optimizer = accelerated(BUDGET)
    for seed in range(4):
        output, *_ = model(*batch(seed))
        loss = output.sum()
        loss.backward()
        optimizer.step()
        del output, _

        assert num_claimed(model) == 0
        assert loss.grad_fn is not None


def test_a_lookup_that_fails_holds_no_slots():
    model, _ = accelerated(BUDGET, num_steps=1)

    with pytest.raises(IdOutOfRange):
        model.bags[0](torch.tensor([[1], [NUM_ROWS]]))

    assert num_claimed(model) == 0


def test_slots_of_an_output_that_is_not_used_are_released_after_the_step():
    model, optimizer = accelerated(BUDGET)
    twin, its_optimizer = accelerated()
    for seed in range(3):
        for each, optimizer_of_rows in ((model, optimizer), (twin, its_optimizer)):
            outputs = each(*batch(seed))
            torch.cat(outputs[1:]).square().sum().backward()
            del outputs
            optimizer_of_rows.step()
            optimizer_of_rows.zero_grad()

    assert num_claimed(model) == 0
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def test_in_slots_bags_may_have_any_form():
    model, optimizer = accelerated(BUDGET)
    twin, its_optimizer = accelerated()
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    inputs = [
        (ids.view(6, 1),),
        (ids.view(2, 3),),
        (ids, torch.tensor([0, 0, 4])),
        (ids.int(), torch.tensor([0, 2, 5], dtype=torch.int32)),
        (ids, torch.arange(6)),
    ]
    for _ in range(3):
        for each, optimizer_of_rows in ((model, optimizer), (twin, its_optimizer)):
            outputs = [bag(*given) for bag, given in zip(each.bags, inputs, strict=True)]
            torch.cat(outputs).square().sum().backward()
            optimizer_of_rows.step()
            optimizer_of_rows.zero_grad()

    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


@in_both
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize(("mode", "has_weights"), [("sum", False), ("sum", True), ("mean", False)])
def test_bags_with_weights_and_padding_train_as_torchs(budget, padding_idx, mode, has_weights):
    torch.manual_seed(0)
    plain = nn.ModuleList(
        nn.EmbeddingBag(NUM_ROWS, DIM, mode=mode, sparse=True, padding_idx=padding_idx)
        for _ in range(NUM_BAGS)
    )
    own = copy.deepcopy(plain)
    theirs, ours = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, own))
    recsys.accelerate(own, optimizer=ours, budget=budget, always=True)
    generator = torch.Generator().manual_seed(0)

    for step in range(4):
        ids = torch.randint(0, 8, (NUM_BAGS, 6), generator=generator)
        ids[0] = 0  # with padding, nothing is left
        offsets = torch.tensor([0, 2, 2, 5]) if step else torch.arange(6)
        weights = torch.randn(6, generator=generator) if has_weights else None
        for bags, optimizer in ((plain, theirs), (own, ours)):
            optimizer.zero_grad()
            outputs = [bag(each, offsets, weights) for bag, each in zip(bags, ids, strict=True)]
            torch.cat(outputs).square().sum().backward()
            optimizer.step()

    assert len(nodes_of(outputs)) == (1 if budget is None else NUM_BAGS)
    with torch.no_grad():
        found, expected = (
            [bag(each, offsets, weights) for bag, each in zip(bags, ids, strict=True)]
            for bags in (own, plain)
        )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own.state_dict(), plain.state_dict())


@in_both
def test_weights_are_as_they_were_at_the_call(budget):
    model, _ = accelerated(budget)
    ids, weights = torch.tensor([1, 1, 2]), torch.ones(3)
    refilled = weights.clone()
    before = model.bags[0].weight.detach().clone()
    model.bags[0](ids, torch.tensor([0]))  # the first call finds out where the rows are

    changed = model.bags[0](ids, torch.tensor([0]), weights)
    kept = model.bags[0](ids, torch.tensor([0]), refilled)
    weights.zero_()
    refilled.numpy()[:] = 0  # torch does not see it

    with pytest.raises(RuntimeError, match="inplace operation: the ids, offsets or weights"):
        changed.sum().backward()
    kept.sum().backward()
    assert torch.equal(model.bags[0].weight.grad.to_dense()[1], torch.full((DIM,), 2.0))
    assert torch.equal(model.bags[0].weight, before)


@in_both
@pytest.mark.parametrize(
    ("weights", "error"),
    [
        (torch.tensor([1.0, torch.nan, 1.0]), "sample 0: .*nan at position 1"),
        (torch.ones(2), "must have the input's shape"),
        (torch.ones(3, dtype=torch.float64), "must be torch.float32 like the rows"),
    ],
)
def test_wrong_weights_are_refused(budget, weights, error):
    model, _ = accelerated(budget)

    for has_grad in (True, False):
        with torch.set_grad_enabled(has_grad), pytest.raises(MalformedBags, match=error):
            model.bags[0](torch.tensor([1, 1, 2]), torch.tensor([0]), weights)


@in_both
@pytest.mark.parametrize("weights", [None, torch.ones(3)], ids=["plain", "weighted"])
def test_without_gradients_an_id_that_is_no_row_is_named(budget, weights):
    model, _ = accelerated(budget)

    with torch.no_grad(), pytest.raises(IdOutOfRange, match=f"sample 1: id {NUM_ROWS} is not in"):
        model.bags[0](torch.tensor([1, NUM_ROWS, 2]), torch.tensor([0, 1]), weights)


@in_both
def test_weights_that_need_a_gradient_get_it(budget):
    model, _ = accelerated(budget)
    weights = torch.ones(3, requires_grad=True)
    rows = model.bags[0].weight.detach()[[1, 1, 2]]

    model.bags[0](torch.tensor([1, 1, 2]), torch.tensor([0]), weights).sum().backward()

    torch.testing.assert_close(weights.grad, rows.sum(1))


@in_both
def test_forward_mode_refuses_weights_with_a_tangent(budget):
    model, _ = accelerated(budget)
    model.bags[0](torch.tensor([1]), torch.tensor([0]))  # as above

    with forward_ad.dual_level():
        weights = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(NotImplementedError, match="jvp"):
            model.bags[0](torch.tensor([1, 1, 2]), torch.tensor([0]), weights)
