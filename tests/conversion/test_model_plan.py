"""Plans of models and of single bags: whose rows are pinned, by which names."""

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotColdEmbeddingBag,
    PopularityProfile,
    TableConfig,
    plan_hot_rows,
)
from recsys.errors import ProfileError

MAP_BYTES, SLOT_BYTES = 4, 11


def profile_of(popular, sizes):
    """Every named row was looked up nine times."""
    profile = PopularityProfile(sizes)
    rows = [torch.tensor(popular.get(name, ()), dtype=torch.int64).repeat(9) for name in sizes]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    profile.add(JaggedIds(list(sizes), torch.cat(rows), offsets))
    return profile


def bags(*sizes, dim=4, **options):
    options = {"mode": "sum", "sparse": True} | options
    return nn.ModuleDict(
        {"tables": nn.ModuleList(nn.EmbeddingBag(s, dim, **options) for s in sizes)}
    )


def pinned_rows(module):
    """Numbered over all tables of the group, those that are looked up most first."""
    [group] = module.groups()
    return group.fetcher.planned.tolist()


def room_for(num_rows, num_slots, row_bytes):
    return MAP_BYTES * num_rows + num_slots * (row_bytes + SLOT_BYTES)


def planned(profile, budget, optimizer=None, **sizes):
    tables = [
        TableConfig(name=name, num_embeddings=size, embedding_dim=4) for name, size in sizes.items()
    ]
    return plan_hot_rows(profile, tables, budget, optimizer, window_lookups=8, small_share=0)


def test_a_bags_plan_keeps_its_rows_in_their_slots_by_whatever_name():
    popular = [7, 3, 390]
    plan = planned(
        profile_of({"users": popular}, {"users": 400}),
        room_for(400, 11, 16),
        SGD(lr=0.1),
        users=400,
    )
    runs = []
    for options in ({}, {"plan": plan}):
        torch.manual_seed(0)
        runs.append(HotColdEmbeddingBag(400, 4, mode="sum", optimizer=SGD(lr=0.1), **options))
    tiered = runs[1]

    for start in range(0, 320, 8):
        for bag in runs:
            bag(torch.arange(start, start + 8).reshape(4, 2)).square().sum().backward()
    before = tiered.groups()[0].fetcher.counts
    tiered(torch.tensor([popular]))
    after = tiered.groups()[0].fetcher.counts

    assert sorted(pinned_rows(tiered)) == sorted(popular)
    assert tiered.groups()[0].num_slots == 11
    assert after.hits - before.hits == 3
    assert torch.equal(tiered.weight, runs[0].weight)


def test_a_bags_budget_comes_before_that_of_its_plan():
    profile = profile_of({"users": range(100)}, {"users": 400})
    plan = planned(profile, room_for(400, 11, 16), users=400)

    bag = HotColdEmbeddingBag(
        400, 4, optimizer=SGD(lr=0.1), plan=plan, budget=room_for(400, 20, 16)
    )

    assert bag.groups()[0].num_slots == 20
    assert len(pinned_rows(bag)) == 12


@pytest.mark.parametrize(
    ("sizes", "options", "error", "name"),
    [
        ({"a": 400, "b": 3}, {"optimizer": SGD(lr=0.1)}, ProfileError, "'a'"),
        ({"a": 300}, {"optimizer": SGD(lr=0.1)}, ProfileError, r"\(300, 4\)"),
        ({"a": 400}, {}, ValueError, "optimizer"),
    ],
)
def test_a_plan_of_other_tables_is_no_bags(sizes, options, error, name):
    with pytest.raises(error, match=name):
        HotColdEmbeddingBag(400, 4, plan=planned(profile_of({}, sizes), "1MiB", **sizes), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_models_bags_are_planned_for_by_their_names_in_the_model(dtype):
    popular = {"tables.0": [7, 3], "tables.2": [250]}
    sizes = {"tables.0": 9000, "tables.1": 200, "tables.2": 8000}
    profile = profile_of(popular | {"others": [1]}, sizes | {"others": 5})
    runs, generator = [], torch.Generator().manual_seed(0)
    row_bytes = 8 * dtype.itemsize  # with Adagrad's state
    plan = planned(profile, "1MiB", Adagrad(lr=0.1), **dict(reversed(sizes.items())))
    chosen = {"plan": plan, "budget": room_for(17_200, 27, row_bytes)}
    for options in ({}, chosen):
        torch.manual_seed(0)
        model = bags(*sizes.values(), dtype=dtype)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        recsys.accelerate(model, optimizer=optimizer, **options, always=True)
        runs.append((model, optimizer))

    for _ in range(10):
        ids = torch.randint(0, 200, (3, 4, 2), generator=generator)
        for model, optimizer in runs:
            optimizer.zero_grad()
            pairs = zip(model["tables"], ids, strict=True)
            sum(bag(each).square().sum() for bag, each in pairs).backward()
            optimizer.step()

    assert sorted(pinned_rows(runs[1][0]["tables"][0])) == [3, 7, 9200 + 250]
    for expected, found in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_table_that_bags_share_is_planned_for_once_by_its_first_name():
    model = bags(20_000, 20_000)
    model["tables"][1].weight = model["tables"][0].weight
    profile = profile_of({"tables.0": [9]}, {"tables.0": 20_000})
    plan = planned(profile, room_for(20_000, 9, 16), SGD(lr=0.1), **{"tables.0": 20_000})

    recsys.accelerate(model, optimizer=SGD(lr=0.1), plan=plan)

    assert pinned_rows(model["tables"][1]) == [9]


def collections(torchrec, *names):
    """Modules of a collection of two tables, alike but for the values."""
    return nn.ModuleDict(
        {
            name: torchrec.EmbeddingBagCollection(
                [
                    torchrec.EmbeddingBagConfig(
                        name=f"t_{feature}",
                        num_embeddings=size,
                        embedding_dim=4,
                        feature_names=[feature],
                    )
                    for feature, size in (("a", 9000), ("b", 200))
                ]
            )
            for name in names
        }
    )


def test_a_collections_tables_are_planned_for_by_their_own_names():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    model, sizes = collections(torchrec, "sparse"), {"t_a": 9000, "t_b": 200}
    plan = planned(profile_of({"t_b": [5]}, sizes), room_for(9200, 17, 16), SGD(lr=0.1), **sizes)

    recsys.accelerate(model, optimizer=SGD(lr=0.1), plan=plan)

    assert pinned_rows(model["sparse"]) == [9005]


SIZES = {"tables.0": 3000, "tables.1": 200}


def profile():
    return profile_of({}, SIZES)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            lambda: {"plan": planned(profile(), "1MiB", **SIZES), "optimizer": None},
            ValueError,
            "optimizer",
        ),
        (
            lambda: {"plan": "p.npz"},
            TypeError,
            r"must be a HotPlan, got str; HotPlan.load reads a file",
        ),
        (
            lambda: {
                "plan": planned(profile_of({}, {"tables.0": 3000}), "1MiB", **{"tables.0": 3000})
            },
            ProfileError,
            r"'tables.1' are None in the plan and .* has \['tables.0'\], and",
        ),
        (
            lambda: {"plan": planned(profile_of({}, SIZES | {"c": 1}), "1MiB", **SIZES, c=1)},
            ProfileError,
            r"'c' are .* and None here; .* here are \['tables.0', 'tables.1'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_left_as_it_was(options, kind, message):
    model = bags(*SIZES.values())

    with pytest.raises(kind, match=message):
        recsys.accelerate(model, **({"optimizer": SGD(lr=0.1)} | options()))

    assert {type(bag) for bag in model["tables"]} == {nn.EmbeddingBag}
