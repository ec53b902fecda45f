import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys.datasets.criteo import parse_lines

NUMBERS = ["0", "1", "-1", "-", "2147483647", "2147483648", "-2147483648", "-2147483649", "00"]
OTHERS = ["12345678901", "1.5", "+1", " 1", "deadBEEF", "123456789", "g", "0x1", "", "\r", "7\r"]
FIELDS = st.sampled_from(NUMBERS + OTHERS)
GOOD = re.compile(r"[01](\t(-?[0-9]{1,10})?){13}(\t[0-9a-fA-F]{0,8}){26}\r?")
LINE_ENDS = st.sampled_from(["\n", "\r\n"])


def is_good(line):
    integers = line.split("\t")[1:14]
    return bool(GOOD.fullmatch(line)) and all(-(2**31) <= int(n or 0) < 2**31 for n in integers)


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


@given(st.lists(st.tuples(lines(), LINE_ENDS), max_size=6))
def test_the_first_line_that_breaks_a_rule_is_found(pieces):
    text = "".join(line + end for line, end in pieces)

    parsed = parse(text)

    # A lone return inside a line is no line end, so the kernel's lines are those between newlines.
    expected_lines = text.split("\n")[:-1]
    bad = [n for n, line in enumerate(expected_lines) if not is_good(line)]
    assert parsed.bad_line == (expected_lines[bad[0]].encode("latin-1") if bad else None)
    assert len(parsed.labels) == (bad[0] if bad else len(expected_lines))
