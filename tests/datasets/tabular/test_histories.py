import numpy as np

from recsys.datasets.tabular.split import Histories


def histories_of(groups, is_listed, times=None, *, ends_at_equal_times=False, max_length=9):
    """The history of each row as a list of row numbers."""
    groups = np.array(groups, np.int32)
    times = None if times is None else np.array(times, np.int64)
    histories = Histories(
        np.argsort(groups, kind="stable") if times is None else np.lexsort((times, groups)),
        groups,
        np.array(is_listed, np.bool_),
        times if ends_at_equal_times else None,
        np.arange(len(groups), dtype=np.int32),
        max_length,
    )
    found = histories.of_rows(np.arange(len(groups)))
    return [each.tolist() for each in np.split(found.values, np.cumsum(found.lengths)[:-1])]


def test_a_history_lists_earlier_rows_of_its_group():
    groups, is_listed = [0, 1, 0, 0, 1, 0], [1, 1, 0, 1, 1, 1]
    assert histories_of(groups, is_listed) == [[], [], [0], [0], [1], [0, 3]]
    times = [5, 1, 4, 3, 2, 1]
    assert histories_of(groups, is_listed, times) == [[5, 3], [], [5, 3], [5], [1], []]
    assert histories_of(groups, is_listed, times, max_length=1)[0] == [3]


def test_a_history_may_end_before_the_first_row_of_an_equal_time():
    groups, times = [0, 0, 0, 0, 1, 1], [3, 3, 4, 4, 4, 4]
    order_of_file = [[], [0], [0, 1], [0, 1, 2], [], [4]]
    assert histories_of(groups, [1] * 6, times) == order_of_file
    before = [[], [], [0, 1], [0, 1], [], []]
    assert histories_of(groups, [1] * 6, times, ends_at_equal_times=True) == before


def test_groups_whose_times_meet_stay_apart():
    found = histories_of([0, 0, 1, 1], [1] * 4, [0, 1, 1, 2], ends_at_equal_times=True)
    assert found == [[], [0], [], [2]]
