import numpy as np
import pytest

from recsys.pipeline import Paper
from recsys.pipeline.skip.paper import search_threshold


def test_first_threshold_is_tried_first_and_then_halves_the_interval():

    found = search_threshold(np.array([0.001, 0.002, 0.003, 0.9]), Paper(target=0.5, tolerance=0.1))

    # 0.05, 0.025, 0.0125, 0.00625, 0.003125 (three of four), 0.0015625 (one), 0.00234375 (two)
    assert found == (pytest.approx(0.00234375), 7, 0.5, True)


def test_level_at_the_threshold_is_not_under_it():
    levels = np.array([0.01, 0.05], np.float32).astype(np.float64)

    assert search_threshold(levels, Paper(target=0.5)) == (0.05, 1, 0.5, True)


def test_search_that_does_not_converge_drops_nothing():
    found = search_threshold(np.full(10, 0.01), Paper())

    assert found == (0.0, 25, found.share, False)
    assert found.share in (0.0, 1.0)
