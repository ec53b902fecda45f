"""What a loader refuses: the arguments or the state, the error, and the name that it gives."""

import functools

import pytest

from recsys.datasets import BatchLoader, SyntheticCriteo
from recsys.errors import ConfigError


@functools.cache
def source(num_samples=49, seed=0):
    """A source with a validation split of 3 samples; of none, if it has 7."""
    return SyntheticCriteo(num_samples=num_samples, table_sizes=[1], seed=seed)


def make(num_samples=49, data=0, **changes):
    arguments = {"split": "train", "batch_size": 5, "shuffle": False} | changes
    return BatchLoader(source(num_samples, data), **arguments)


def load(state):
    """Load a state, and require the position to stay what it was if it is refused."""
    loader = make()
    try:
        loader.load_state_dict(state)
    finally:
        assert (loader.epoch, loader.state_dict()["next_sample"]) == (0, 0)


def load_changed(**changes):
    state = make().state_dict() | changes
    load({key: value for key, value in state.items() if value is not None})


def iterate_twice():
    loader = make()
    running = iter(loader)
    next(running)
    next(iter(loader))


def load_while_it_runs():
    loader = make()
    running = iter(loader)
    next(running)
    loader.load_state_dict(loader.state_dict())


REFUSALS = [
    *[
        (f"{next(iter(changes))}={value}", functools.partial(make, **changes), ConfigError, name)
        for changes, name in (
            ({"split": "all"}, "split"),
            ({"batch_size": 0}, "batch_size"),
            ({"batch_size": 2.5}, "batch_size"),
            ({"batch_size": True}, "batch_size"),
            ({"prefetch": 0}, "prefetch"),
            ({"seed": -1, "shuffle": True}, "seed"),
            ({"permutation_seed": -3, "shuffle": True}, "permutation_seed"),
            ({"batch_size": 43, "drop_last": True}, "batch_size"),
            ({"split": "validation", "num_samples": 7}, "validation"),
            ({"rank": 2, "num_ranks": 2, "batch_size": 4}, "rank"),
        )
        for value in [next(iter(changes.values()))]
    ],
    *[
        (f"a state of a loader with {next(iter(changes))}", case, ConfigError, next(iter(changes)))
        for changes in (
            {"seed": 1},
            {"shuffle": True},
            {"split": "test"},
            {"drop_last": True},
            {"permutation_seed": 5},
        )
        for case in [lambda changes=changes: load(make(**changes).state_dict())]
    ],
    ("a state of other data", lambda: load(make(data=1).state_dict()), ConfigError, "data is"),
    *[
        (
            f"a malformed state, {changes}",
            functools.partial(load_changed, **changes),
            ConfigError,
            next(iter(changes)),
        )
        for changes in (
            {"next_sample": 43},
            {"next_sample": -1},
            {"next_sample": 3.0},
            {"next_sample": True},
            {"next_sample": "3"},
            {"epoch": None, "epochs": 1},
            {"epoch": -1},
            {"epoch": 2**63},
            {"epoch": [0]},
            {"seed": False},
            {"data": ["numbered"]},
        )
    ],
    *[
        (f"no state, {state}", lambda state=state: load(state), ConfigError, "loader state")
        for state in (None, [], 7, "state", {3: 4})
    ],
    ("a second iteration", iterate_twice, RuntimeError, "iterated"),
    ("a state while it runs", load_while_it_runs, RuntimeError, "state"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name):
    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)
