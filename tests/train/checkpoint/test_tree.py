import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.train.checkpoint.tree import from_tree, to_tree

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


@given(values)
def test_nested_values_come_back_equal(value):
    tree = to_tree(value, "state", lambda *_: pytest.fail("no tensor"))

    assert repr(from_tree(tree, lambda _: None)) == repr(value)


def test_tensors_become_references():
    kept = {}

    def refer(name, tensor):
        kept[name] = tensor
        return name

    value = {"a": [torch.ones(2), math.inf], 3: (torch.zeros(1),)}
    found = from_tree(to_tree(value, "state", refer), kept.__getitem__)

    assert found["a"][0] is value["a"][0]
    assert found[3][0] is value[3][0]
    assert list(kept) == ["state/a/0", "state/3/0"]
