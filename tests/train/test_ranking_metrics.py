from dataclasses import asdict
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.train.metrics import Rankings


def judged(k, scores, relevant, is_candidate=True, num_unknown=0):
    """Recall and NDCG of one ranking."""
    rankings, scores = Rankings(k), np.array(scores, np.float32)
    is_candidate = np.broadcast_to(is_candidate, scores.shape)
    rankings.add(0, scores, np.array(relevant, np.int64), is_candidate, num_unknown)
    found = rankings.result()
    return found.recall_at_k, found.ndcg_at_k


@st.composite
def rankings(draw):
    """Scores of items, which of them are candidates, and some candidates as relevant items."""
    scores = draw(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
    is_candidate = draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    candidates = [item for item, is_one in enumerate(is_candidate) if is_one]
    relevant = draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []
    return scores, is_candidate, relevant


def places_shown(scores, is_candidate, relevant, k):
    """Places of the relevant items among the first k: after all others of at least their score."""
    places = []
    for item in relevant:
        better = [
            other
            for other, score in enumerate(scores)
            if is_candidate[other] and other != item and score >= scores[item]
        ]
        if len(better) < k:
            places.append(len(better) + 1)
    return places


@given(rankings(), st.integers(1, 12), st.integers(0, 3))
def test_recall_and_ndcg_are_their_definitions(ranking, k, num_unknown):
    scores, is_candidate, relevant = ranking
    num_relevant = len(relevant) + num_unknown
    if not num_relevant:
        return

    recall, found = judged(k, scores, relevant, is_candidate, num_unknown)

    places = places_shown(scores, is_candidate, relevant, k)
    best = sum(1 / log2(1 + place) for place in range(1, min(k, num_relevant) + 1))
    assert recall == len(places) / num_relevant
    ndcg = sum(1 / log2(1 + place) for place in places) / best
    assert found == pytest.approx(ndcg, abs=1e-12)
    assert ndcg <= 1


def test_the_best_ranking_has_recall_and_ndcg_1():
    scores, relevant = [0, 5, 4, 3, 1], [2, 1, 3]

    assert judged(3, scores, relevant) == (1, 1)
    # Two is all that two places can hold.
    assert judged(2, scores, relevant) == (pytest.approx(2 / 3), 1)


def test_one_relevant_item_gains_by_its_rank():
    scores = [9, 8, 7, 6]

    assert judged(2, scores, [2]) == (0, 0)
    assert judged(3, scores, [2]) == (1, pytest.approx(1 / log2(4)))


def test_items_that_are_not_candidates_take_no_place():
    found = judged(4, [9, 8, 7, 6], [3], [False, True, False, True])

    assert found == (1, pytest.approx(1 / log2(3)))


def test_equal_scores_find_nothing():
    assert judged(20, np.zeros(21), [4]) == (0, 0)


def test_a_result_has_means_and_their_errors():
    rankings = Rankings(2)
    everything = np.ones(3, np.bool_)
    for group, (relevant, num_unknown) in enumerate((([0], 0), ([2], 0), ([1], 1))):
        rankings.add(group, np.array([3, 2, 1]), np.array(relevant), everything, num_unknown)

    found = rankings.result()

    last = (1 / log2(3)) / (1 + 1 / log2(3))
    ndcgs = np.array([1, 0, last])
    assert asdict(found) == {
        "recall_at_k": 0.5,
        "recall_standard_error": pytest.approx(0.5 / 3**0.5),
        "ndcg_at_k": pytest.approx(ndcgs.mean()),
        "ndcg_standard_error": pytest.approx(ndcgs.std(ddof=1) / 3**0.5),
        "ranking_k": 2,
        "num_rankings": 3,
        "num_unknown_items": 1,
    }


def test_without_rankings_there_is_nothing_to_tell():
    found = Rankings(5).result()

    assert (found.recall_at_k, found.ndcg_at_k, found.num_rankings) == (None, None, 0)
    one = Rankings(5)
    one.add(7, np.zeros(1), np.array([0]), np.ones(1, np.bool_))
    assert one.result().recall_standard_error is None


def test_a_group_counts_once_however_many_rankings_it_has():
    rankings, everything = Rankings(1), np.ones(2, np.bool_)
    for group, relevant in ((5, 0), (3, 0), (5, 1), (5, 1), (5, 1), (8, 1)):
        rankings.add(group, np.array([2, 1]), np.array([relevant]), everything)

    found = rankings.result()

    means = np.array([1, 1 / 4, 0])
    assert found.recall_at_k == pytest.approx(means.mean())
    assert found.recall_standard_error == pytest.approx(means.std(ddof=1) / 3**0.5)
    assert found.ndcg_standard_error == pytest.approx(means.std(ddof=1) / 3**0.5)
    assert found.num_rankings == 6
