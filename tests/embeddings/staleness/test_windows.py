"""What is reported about windows stays bounded, and loses no thawed row."""

from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.staleness.windows import MOST_WINDOWS, thin_windows


@given(st.integers(1, 1200), st.integers(0, 500), st.integers(33, 2000))
def test_windows_are_thinned_evenly(num_windows, num_before, steps):
    """`num_before` windows were never reported, because the tracker was reset."""
    windows = []
    for number in range(num_before + 1, num_before + num_windows + 1):
        entry = {"step": number * steps, "num_thawed": number}
        windows = thin_windows([*windows, entry], steps)
        assert len(windows) <= MOST_WINDOWS
    found = [each["step"] // steps for each in windows]
    newest = num_before + num_windows
    assert found[0] == num_before + 1
    assert found[-1] == newest
    every = next(2**n for n in range(20) if newest <= (MOST_WINDOWS - 2) * 2**n)
    inner = [number for number in range(num_before + 2, newest) if number % every == 0]
    assert found[1:-1] == inner
    ends = [num_before, *found]
    assert [each["num_thawed"] for each in windows] == [
        sum(range(first + 1, last + 1)) for first, last in zip(ends, found, strict=False)
    ]
