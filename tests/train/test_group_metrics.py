from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.train.metrics import auc, evaluate_groups

SAMPLES = st.lists(
    st.tuples(st.integers(-3, 3), st.booleans(), st.integers(-2, 3)), min_size=1, max_size=60
)


def arrays(samples):
    scores, labels, keys = map(np.array, zip(*samples, strict=True))
    return scores.astype(np.float32), labels.astype(np.int8), keys


def aucs_in_plain_python(samples):
    """By key, AUC pair by pair and the number of samples; AUC None without a pair."""
    found = {}
    for key in sorted({key for _, _, key in samples}):
        own = [(score, label) for score, label, other in samples if other == key]
        pairs = [
            (positive > negative) + (positive == negative) / 2
            for positive, is_positive in own
            for negative, is_other_positive in own
            if is_positive and not is_other_positive
        ]
        found[key] = (sum(pairs) / len(pairs) if pairs else None, len(own))
    return found


@given(SAMPLES)
def test_gauc_is_the_mean_of_the_aucs_by_samples(samples):
    expected = aucs_in_plain_python(samples).values()
    kept = [(area, count) for area, count in expected if area is not None]

    found = evaluate_groups(*arrays(samples))

    total = sum(count for _, count in kept)
    gauc = sum(area * count for area, count in kept) / total if kept else None
    assert found.gauc == (None if gauc is None else pytest.approx(gauc, abs=1e-12))
    assert found.num_groups == len(kept)
    assert found.num_groups_left_out == len(expected) - len(kept)


def test_one_group_has_the_auc_of_all_samples():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=5000).astype(np.float32).round(2)
    labels = rng.random(5000) < 1 / (1 + np.exp(-scores))

    found = evaluate_groups(scores, labels, np.full(5000, 7))

    assert found.gauc == auc(scores, labels)


def test_groups_are_judged_apart():
    # Every score of the second group is higher than every score of the first.
    scores = np.array([0.1, 0.2, 0.8, 0.9], np.float32)
    labels = np.array([0, 1, 0, 1])

    assert auc(scores, labels) == 0.75
    assert evaluate_groups(scores, labels, np.array([5, 5, 3, 3])).gauc == 1.0


def test_no_samples_have_no_groups():
    none = np.empty(0, np.float32)

    assert asdict(evaluate_groups(none, none, np.empty(0, np.int32))) == {
        "gauc": None,
        "num_groups": 0,
        "num_groups_left_out": 0,
    }
