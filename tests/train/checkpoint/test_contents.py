"""What a checkpoint holds besides tables: unusual models, optimizers and states."""

import warnings

import pytest
import torch
from torch import nn

import recsys
from recsys import load_checkpoint, save_checkpoint
from recsys.embeddings import Adam, HotColdEmbeddingBag
from recsys.errors import CheckpointError, ConfigError


class WithExtraState(nn.Module):
    """Returns a new tensor as its state each time."""

    def __init__(self, count=0.0):
        super().__init__()
        self.register_buffer("none", None)
        self.register_buffer("not_saved", torch.full((1,), count), persistent=False)
        self.counts = torch.full((2,), count)

    def get_extra_state(self):
        return {"counts": self.counts.clone()}

    def set_extra_state(self, state):
        self.counts = state["counts"]


def test_extra_state_is_restored(tmp_path):
    again = WithExtraState()
    save_checkpoint(tmp_path, model=WithExtraState(7.0))

    load_checkpoint(tmp_path, model=again)

    assert again.counts.tolist() == [7, 7]
    assert not again.not_saved
    with pytest.raises(CheckpointError, match="_extra_state"):
        load_checkpoint(tmp_path, model=nn.Module())


def test_a_loader_without_a_position_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="loader"):
        save_checkpoint(tmp_path, model=nn.Linear(1, 1), loader=torch.utils.data.DataLoader([1]))


def test_an_expanded_buffer_of_one_row_is_restored(tmp_path):
    model, again = nn.Linear(3, 3), nn.Linear(3, 3)
    model.register_buffer("order", torch.arange(3).expand(1, -1))
    again.register_buffer("order", torch.zeros(3, dtype=torch.int64).expand(1, -1))
    save_checkpoint(tmp_path, model=model)
    load_checkpoint(tmp_path, model=again)

    assert torch.equal(again.order, model.order)


def test_tied_weights_are_restored_as_one(tmp_path):
    def make():
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        return nn.Sequential(first, second)

    model = make()
    save_checkpoint(tmp_path, model=model)
    again = make()
    load_checkpoint(tmp_path, model=again)

    assert torch.equal(again[0].weight, model[0].weight)
    assert again[1].weight is again[0].weight


def test_tensors_whose_names_would_be_equal_are_kept_apart(tmp_path):
    state = {
        "a/b": torch.tensor([1.0]),
        "a": {"b": torch.tensor([2.0])},
        "\ud800": torch.tensor([3.0]),
        "n": {0: torch.tensor([4.0]), "0": torch.tensor([5.0])},
    }
    save_checkpoint(tmp_path, model=nn.Linear(1, 1), state=state)

    assert repr(load_checkpoint(tmp_path, model=nn.Linear(1, 1))) == repr(state)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1j, "got complex"),
        ([object()], "/0: .*got object"),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused_by_its_name(tmp_path, value, name):
    with pytest.raises(CheckpointError, match=f"state/state.*{name}"):
        save_checkpoint(tmp_path, model=nn.Linear(1, 1), state=value)

    assert not list(tmp_path.iterdir())


def test_a_part_of_a_large_tensor_is_saved_alone(tmp_path):
    save_checkpoint(tmp_path, model=nn.Linear(1, 1), state=torch.zeros(10**6)[:2])

    assert (tmp_path / "delta-00000001" / "state.pt").stat().st_size < 10**5


def make_optimizers(model):
    return [
        torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), amsgrad=True),
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
        torch.optim.Adadelta(model.parameters()),
        torch.optim.ASGD(model.parameters()),
        torch.optim.Adafactor(model.parameters()),
        torch.optim.Rprop(model.parameters()),
    ]


def train(model, optimizers):
    def closure():
        model.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for optimizer in optimizers:
        optimizer.step(closure)


def test_optimizers_of_torch_go_on_bit_for_bit(tmp_path):
    model = nn.Linear(4, 3)
    optimizers = make_optimizers(model)
    train(model, optimizers)
    save_checkpoint(tmp_path, model=model, optimizers=optimizers)
    train(model, optimizers)

    again = nn.Linear(4, 3)
    of_again = make_optimizers(again)
    load_checkpoint(tmp_path, model=again, optimizers=of_again)
    train(again, of_again)

    assert torch.equal(again.weight, model.weight)
    assert isinstance(of_again[0].param_groups[0]["lr"], torch.Tensor)


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: SCHEDULERS.MultiStepLR(optimizer, [1, 3]),
        lambda optimizer: SCHEDULERS.OneCycleLR(optimizer, 0.1, total_steps=10),
        lambda optimizer: SCHEDULERS.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: SCHEDULERS.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: SCHEDULERS.CyclicLR(optimizer, 0.1, 0.2, step_size_up=3),
        lambda optimizer: SCHEDULERS.SequentialLR(
            optimizer,
            [SCHEDULERS.ConstantLR(optimizer), SCHEDULERS.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
        lambda optimizer: SCHEDULERS.ChainedScheduler(
            [SCHEDULERS.ConstantLR(optimizer), SCHEDULERS.ExponentialLR(optimizer, 0.9)]
        ),
    ],
)
def test_schedulers_of_torch_go_on(tmp_path, make):
    rates = []
    for is_again in (False, True):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = make(optimizer)
        if is_again:
            load_checkpoint(tmp_path, model=model, optimizers=optimizer, schedulers=scheduler)
        else:
            optimizer.step()
            scheduler.step()
            save_checkpoint(tmp_path, model=model, optimizers=optimizer, schedulers=scheduler)
        rates.append([])
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])

    assert rates[0] == rates[1]
    if isinstance(scheduler, SCHEDULERS.MultiStepLR):
        assert list(scheduler.milestones.elements()) == [1, 3]


def test_optimizers_of_parameters_in_another_order_are_refused(tmp_path):
    """torch takes any state, and its kernels would write past the end of a smaller one."""
    model = nn.Linear(4, 3)
    save_checkpoint(tmp_path, model=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.1))
    other = torch.optim.Adam(reversed(list(model.parameters())), lr=0.1)

    with pytest.raises(CheckpointError, match=r"optimizer 0 is .*3x4 3.* and .*3 3x4"):
        load_checkpoint(tmp_path, model=model, optimizers=other)


def test_the_row_optimizer_of_a_module_need_not_be_given(tmp_path):
    def make():
        return HotColdEmbeddingBag(20, 4, mode="sum", optimizer=Adam(lr=0.1))

    def step(bag):
        bag(torch.tensor([[1, 2], [2, 3]])).square().sum().backward()

    bag, again = make(), make()
    step(bag)
    save_checkpoint(tmp_path, model=bag)
    step(bag)
    load_checkpoint(tmp_path, model=again)
    step(again)

    assert torch.equal(again.weight, bag.weight)
    load_checkpoint(tmp_path, model=again, optimizers=again.row_optimizer)


def test_a_torch_optimizer_that_updates_rows_must_be_given(tmp_path):
    model = nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum", sparse=True), nn.Linear(4, 1))
    rows = torch.optim.Adagrad(model[0].parameters())
    recsys.accelerate(model, optimizer=rows, always=True)

    with pytest.raises(CheckpointError, match=r"0\.weight' is updated in the step of a Adagrad"):
        save_checkpoint(tmp_path, model=model)
    save_checkpoint(tmp_path, model=model, optimizers=[rows])


def test_what_was_saved_and_not_asked_for_is_named_by_one_warning(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS.ConstantLR(optimizer)
    more = {"optimizers": optimizer, "loader": scheduler}  # any object with a state
    save_checkpoint(tmp_path, model=model, schedulers=scheduler, **more)

    with pytest.warns(UserWarning, match=r"give loader=, schedulers= to load_checkpoint") as warned:
        load_checkpoint(tmp_path, model=model, optimizers=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path, model=model, schedulers=scheduler, **more)

    assert len(warned) == 1
