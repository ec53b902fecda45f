"""Errors of one rank that the others do not learn of. They end the ranks, so they come last."""

import pytest

torchrec = pytest.importorskip("torchrec")


@pytest.mark.slow
def test_an_error_in_a_lookup_ends_every_rank(failing_ranks):
    (first, first_seconds), (second, second_seconds) = failing_ranks("too_few_slots")

    assert "recsys.errors.BudgetTooSmall: " in second
    assert "RuntimeError" in first
    assert max(first_seconds, second_seconds) < 30
