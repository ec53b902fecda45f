import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.datasets.criteo import explain, parse_lines

NUMBERS = ["0", "1", "-1", "-", "2147483647", "2147483648", "-2147483648", "-2147483649", "00"]
OTHERS = ["12345678901", "1.5", "+1", " 1", "deadBEEF", "123456789", "g", "0x1", "", "\r", "7\r"]
FIELDS = st.sampled_from(NUMBERS + OTHERS)
LINE_ENDS = st.sampled_from(["\n", "\r\n"])


def parse(text):
    array = np.frombuffer(text.encode("latin-1"), np.uint8)
    return parse_lines(array, 0, len(array))


@st.composite
def lines(draw):
    """Lines that are good but for a few fields, or that have a few fields too many or too few."""
    fields = ["1"] + ["3"] * 13 + ["0a"] * 26
    for place in draw(st.lists(st.integers(0, 39), max_size=3)):
        fields[place] = draw(FIELDS)
    del fields[draw(st.integers(35, 40)) :]
    fields += draw(st.lists(FIELDS, max_size=2))
    return "\t".join(fields)


def test_values_are_read_missing_ones_as_zero_and_negative_ones_clipped(raw_line):
    integers = ["", "-3", "0", "2147483647"] + ["7"] * 9
    categories = ["", "0", "ffffffff", "FfFfFfFf", "1"] + ["05db9164"] * 21

    parsed = parse(raw_line("1", integers, categories) + "\n")

    assert parsed.labels.tolist() == [1]
    assert parsed.integers.tolist() == [[0, 0, 0, 2147483647] + [7] * 9]
    expected = [0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 1] + [0x05DB9164] * 21
    assert parsed.categories[:, 0].tolist() == expected


def test_windows_line_ends_are_line_ends(raw_line):
    unix = parse(f"{raw_line()}\n{raw_line('1')}\n")

    windows = parse(f"{raw_line()}\r\n{raw_line('1')}\r\n")

    assert windows.bad_line is unix.bad_line is None
    assert windows.labels.tolist() == unix.labels.tolist()
    np.testing.assert_array_equal(windows.categories, unix.categories)


@given(st.lists(st.tuples(lines(), LINE_ENDS), max_size=6))
def test_the_kernel_and_the_explanation_agree_on_every_line(pieces):
    text = "".join(line + end for line, end in pieces)

    parsed = parse(text)

    # A lone return inside a line is no line end, so the kernel's lines are those between newlines.
    expected_lines = text.split("\n")[:-1]
    lines = [line.encode("latin-1") for line in expected_lines]
    bad = [n for n, line in enumerate(lines) if explain(line)]
    assert parsed.bad_line == (lines[bad[0]] if bad else None)
    assert len(parsed.labels) == (bad[0] if bad else len(lines))


def test_parsing_stops_at_the_first_bad_line(raw_line):
    parsed = parse(f"{raw_line()}\noops\n{raw_line()}\n\n")

    assert parsed.bad_line == b"oops"
    assert len(parsed.labels) == 1


@pytest.mark.parametrize(
    ("line", "rule", "value"),
    [
        ("0\t1", "expected 40 tab-separated fields", "2"),
        ("", "expected 40 tab-separated fields", "1"),
        ("2" + "\t" * 39, "field 1 (label) must be 0 or 1", "'2'"),
        ("\t" * 39, "field 1 (label) must be 0 or 1", "''"),
        ("0\tx" + "\t" * 38, "field 2 (int_0) must be empty or an integer", "'x'"),
        (
            "0" + "\t" * 13 + "2147483648" + "\t" * 26,
            "field 14 (int_12) must be empty or an integer of 32 bits",
            None,
        ),
        ("0" + "\t" * 39 + "xyz", "field 40 (cat_25) must be empty or 1 to 8 hex", "'xyz'"),
        ("0" + "\t" * 14 + "123456789" + "\t" * 25, "field 15 (cat_0) must be empty or 1", None),
    ],
)
def test_a_bad_line_is_explained(line, rule, value):
    found = explain(line.encode())

    assert found is not None
    assert rule in found[0]
    assert value is None or found[1] == value
