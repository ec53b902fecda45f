"""Resident tables: lookups and updates give the oracle's bits, whatever is looked up and how."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recsys.embeddings.kernels.cpu import lookup as lookup_kernels
from recsys.embeddings.kernels.cpu import update as update_kernels
from recsys.embeddings.lookup.inputs import read_bags, without_row
from recsys.embeddings.lookup.lookup import Nodes, look_up
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.rows.bags import Lookups
from recsys.embeddings.rows.tables import TableGroup
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.errors import IdOutOfRange, MalformedBags, NonFiniteGradient
from tests.exact.oracle import Oracle

FORMULAS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@dataclass
class Case:
    """Tables and what is looked up in them.

    `features` has the table of each feature.
    """

    sizes: list
    features: list
    dim: int
    dtype: torch.dtype
    formula: object
    is_mean: bool
    kind: str
    id_dtype: torch.dtype
    has_weights: bool
    is_frozen: bool
    batch_sizes: list
    lookups_per_step: int
    seed: int


@st.composite
def cases(draw):
    """Small tables, so that rows repeat within a mini-batch."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    tables = st.integers(0, len(sizes) - 1)
    return Case(
        sizes,
        draw(st.lists(tables, min_size=1, max_size=5)),
        draw(st.sampled_from([3, 16])),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(FORMULAS)),
        draw(st.booleans()),
        draw(st.sampled_from(["one-hot", "equal", "jagged", "with end"])),
        draw(st.sampled_from([torch.int64, torch.int32])),
        draw(st.booleans()),
        draw(st.booleans()) and len(sizes) > 1,
        draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 2**16)),
    )


class Model:
    """Tables of one group with an optimizer, looked up directly."""

    def __init__(self, case, generator):
        self.case = case
        self.tables = [
            nn.Parameter(torch.randn(size, case.dim, generator=generator).to(case.dtype))
            for size in case.sizes
        ]
        self.tables[-1].requires_grad_(not case.is_frozen)
        names = [f"t{number}" for number in range(len(case.sizes))]
        self.group = TableGroup(names, self.tables)
        keyed = {name: (table, "") for name, table in zip(names, self.tables, strict=True)}
        self.optimizer = FusedOptimizer(keyed, [self.group], case.formula, rounding_seed=7)
        self.nodes = Nodes()
        self.width = case.dim * len(case.features)
        locations = [
            (table, position, position * case.dim) for position, table in enumerate(case.features)
        ]
        self.lookups = Lookups(locations, is_mean=case.is_mean)

    def bags(self, num_samples, generator):
        """Bags as the case wants them."""
        case = self.case
        num_bags = num_samples * len(case.features)
        length = {"one-hot": 1, "equal": 2}.get(case.kind)
        lengths = torch.randint(0, 4, (num_bags,), generator=generator)
        if length is not None:
            lengths = torch.full((num_bags,), length)
        ids = []
        for position, table in enumerate(case.features):
            count = int(lengths[position * num_samples : (position + 1) * num_samples].sum())
            ids.append(torch.randint(0, case.sizes[table], (count,), generator=generator))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        if case.kind != "with end":
            offsets = offsets[:-1]
        weights = None
        if case.has_weights:
            weights = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
        return read_bags(
            torch.cat(ids).to(case.id_dtype),
            None if length is not None else offsets,
            weights,
            num_samples,
            num_bags,
            self.group.compute_dtype,
        )


@settings(max_examples=60)
@given(cases())
def test_lookups_and_updates_are_the_oracles(case):
    check_case(case)


@settings(max_examples=20)
@given(cases())
@pytest.mark.threads
def test_two_threads_give_the_same(case):
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_kernels, "MIN_SHARED_BYTES", 0)
        patch.setattr(update_kernels, "MIN_SHARED_BYTES", 0)
        try:
            torch.set_num_threads(2)
            check_case(case)
        finally:
            torch.set_num_threads(before)


def check_case(case):
    generator = torch.Generator().manual_seed(case.seed)
    model = Model(case, generator)
    is_narrow = case.dtype == torch.bfloat16
    oracle = Oracle(model.tables, case.formula, seed=7 if is_narrow else None)
    for num_samples in case.batch_sizes:
        losses = []
        for _ in range(case.lookups_per_step):
            bags = model.bags(num_samples, generator)
            pooled = look_up(model.nodes, [(model.group, model.lookups)], bags, model.width)
            assert torch.equal(pooled, oracle.look_up(model.lookups, bags, model.width))
            gradient = torch.randn(pooled.shape, generator=generator).to(pooled.dtype)
            if pooled.requires_grad:
                losses.append((pooled * gradient).sum())
                oracle.add(model.group.trained(model.lookups), bags, gradient)
        if losses:
            sum(reversed(losses)).backward()
        model.optimizer.step()
        oracle.step()
        for table, expected in zip(model.tables, oracle.tables, strict=True):
            assert torch.equal(table, expected)
        for table, expected in zip(model.tables, oracle.states, strict=True):
            state = model.optimizer.state.get(table, {})
            for name, values in zip(case.formula.state_sizes(case.dim), expected, strict=True):
                found = state.get(name, values)
                assert torch.equal(found.view(values.shape), values)
                assert name in state or not values.any()


def one_table(formula=SGD(lr=1.0), num_rows=5, dim=4, dtype=torch.float32):  # noqa: B008
    """A group of one table of ones, its optimizer, and the lookup in it."""
    table = nn.Parameter(torch.ones(num_rows, dim, dtype=dtype))
    group = TableGroup(["items"], [table])
    optimizer = FusedOptimizer({"items": (table, "")}, [group], formula)
    return group, optimizer, Lookups([(0, 0, 0)], is_mean=False)


def bags_of(ids, offsets=None, weights=None, dtype=torch.float32):
    """One feature of one table."""
    ids = torch.tensor(ids)
    num_samples = len(ids) if offsets is None else len(offsets)
    offsets = None if offsets is None else torch.tensor(offsets)
    return read_bags(ids, offsets, weights, num_samples, num_samples, dtype)


def test_calls_of_a_pass_share_a_node_from_the_second_pass_on():
    group, optimizer, lookups = one_table()
    nodes = Nodes()
    for number in range(3):
        found = [look_up(nodes, [(group, lookups)], bags_of([1, 2]), 4) for _ in range(3)]
        nodes_of = [pooled.grad_fn for pooled in found]
        if number > 0:  # results of a shared node are views
            nodes_of = [view.next_functions[0][0] for view in nodes_of]
        assert len({*map(id, nodes_of)}) == (3 if number == 0 else 1)
        sum(pooled.sum() for pooled in found[:2]).backward()  # the third is not used
        assert len(group.ledger.entries) == 2
        optimizer.step()
    assert group.tables[0][1].tolist() == [-5.0] * 4


def test_rows_can_be_updated_at_the_end_of_each_backward():
    group, optimizer, lookups = one_table()
    nodes = Nodes(optimizer)
    for expected in (-1.0, -3.0):
        first = look_up(nodes, [(group, lookups)], bags_of([1]), 4)
        second = look_up(nodes, [(group, lookups)], bags_of([1]), 4)
        (first.sum() + second.sum()).backward()
        assert group.tables[0][1].tolist() == [expected] * 4
        assert group.tables[0][0].tolist() == [1.0] * 4


def test_a_graph_can_be_kept_for_a_second_backward_and_else_refuses_it():
    group, optimizer, lookups = one_table()
    nodes = Nodes()
    pooled = look_up(nodes, [(group, lookups)], bags_of([1]), 4)
    pooled.sum().backward(retain_graph=True)
    pooled.sum().backward()
    optimizer.step()
    assert group.tables[0][1].tolist() == [-1.0] * 4
    with pytest.raises(RuntimeError, match="second time"):
        pooled.sum().backward()


def test_ids_may_be_overwritten_after_the_lookup():
    group, optimizer, lookups = one_table()
    bags = bags_of([1])
    pooled = look_up(Nodes(), [(group, lookups)], bags, 4)
    bags.ids.fill_(3)
    pooled.sum().backward()
    optimizer.step()
    assert group.tables[0][:, 0].tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("is_mean", [False, True])
def test_weights_get_the_gradient_of_torch(is_mean):
    group, _, _ = one_table(dtype=torch.float64)
    with torch.no_grad():
        group.tables[0].copy_(torch.randn(5, 4, dtype=torch.float64))
    weights = torch.rand(4, dtype=torch.float64, requires_grad=True)
    bags = bags_of([1, 2, 1, 4], [0, 3], weights, torch.float64)
    factors = torch.rand(2, 4, dtype=torch.float64)
    lookups = Lookups([(0, 0, 0)], is_mean=is_mean)
    (look_up(Nodes(), [(group, lookups)], bags, 4) * factors).sum().backward()
    ours, weights.grad = weights.grad, None
    lengths = torch.tensor([3.0, 1.0]) if is_mean else torch.ones(2)
    rows = group.tables[0].detach()[bags.ids] * weights.unsqueeze(1)
    pooled = torch.stack([rows[:3].sum(0), rows[3:].sum(0)]) / lengths.unsqueeze(1)
    (pooled * factors).sum().backward()
    torch.testing.assert_close(ours, weights.grad)


def test_a_row_can_be_left_out():
    bags = without_row(bags_of([1, 2, 1, 4], [0, 3]), 1)
    assert (bags.ids.tolist(), bags.offsets.tolist()) == ([2, 4], [0, 1])
    group, _, lookups = one_table()
    assert look_up(Nodes(), [(group, lookups)], bags, 4)[:, 0].tolist() == [1, 1]


def test_a_row_without_a_finite_gradient_stays_and_is_named():
    group, optimizer, lookups = one_table()
    pooled = look_up(Nodes(), [(group, lookups)], bags_of([1, 3]), 4)
    pooled.backward(torch.tensor([[1.0] * 4, [float("nan")] * 4]))
    with pytest.raises(NonFiniteGradient, match=r"'items'.*row 3"):
        optimizer.step()
    assert group.tables[0][:, 0].tolist() == [1, 0, 1, 1, 1]


def test_a_gradient_changed_before_its_update_is_refused():
    group, optimizer, lookups = one_table()
    pooled = look_up(Nodes(), [(group, lookups)], bags_of([1, 3]), 4)
    gradient = torch.ones(2, 4)
    pooled.backward(gradient)
    gradient.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        optimizer.step()


def test_tables_may_move_until_they_have_slots():
    group, optimizer, lookups = one_table()
    nodes = Nodes()
    group.tables[0].data = torch.full((5, 4), 2.0)
    pooled = look_up(nodes, [(group, lookups)], bags_of([1]), 4)
    assert pooled.tolist() == [[2.0] * 4]
    pooled.sum().backward()
    group.tables[0].data = torch.full((5, 4), 3.0)
    optimizer.step()
    assert group.tables[0][:2, 0].tolist() == [3.0, 2.0]


def test_the_state_of_a_torch_like_optimizer_can_be_saved_and_loaded():
    first, second = one_table(Adam(lr=0.1)), one_table(Adam(lr=0.1))
    for _ in range(2):
        look_up(Nodes(), [(first[0], first[2])], bags_of([1, 2]), 4).sum().backward()
        first[1].step()
    second[1].load_state_dict(first[1].state_dict())
    second[0].tables[0].data.copy_(first[0].tables[0])
    for group, optimizer, lookups in (first, second):
        look_up(Nodes(), [(group, lookups)], bags_of([1, 3]), 4).sum().backward()
        optimizer.step()
    assert torch.equal(first[0].tables[0], second[0].tables[0])


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: bags_of([1, 9]), IdOutOfRange, "'items', sample 1: id 9"),
        (lambda: bags_of([1, -1]), IdOutOfRange, "'items', sample 1: id -1"),
        (lambda: bags_of([1, 2, 7], [0, 1]), IdOutOfRange, "'items', sample 1: id 7"),
        (lambda: bags_of([1, 2], [0, 3]), MalformedBags, "offsets"),
        (lambda: bags_of([1, 2], [1, 2]), MalformedBags, "offsets"),
        (lambda: bags_of([1, 2, 3], [0, 2, 1]), MalformedBags, "offsets"),
        (lambda: bags_of([1.0]), MalformedBags, "float32"),
        (lambda: bags_of([1], weights=torch.tensor([float("nan")])), MalformedBags, "nan"),
        (lambda: bags_of([1, 2], weights=torch.ones(1)), MalformedBags, "weights"),
    ],
)
@pytest.mark.parametrize("is_training", [False, True])
def test_bad_input_is_named(make, error, name, is_training):
    group, _, lookups = one_table()
    with pytest.raises(error, match=name), torch.set_grad_enabled(is_training):
        look_up(Nodes(), [(group, lookups)], make(), 4)
