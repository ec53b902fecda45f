import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys._support.sizes import (
    cdiv,
    format_bytes,
    next_power_of_2,
    parse_bytes,
    round_up_as_written,
)
from recsys.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (17, 17),
        (np.int64(17), 17),
        ("17", 17),
        ("17B", 17),
        ("256MiB", 256 * 2**20),
        ("2 GiB", 2**31),
        ("1.5KiB", 1536),
        ("1 TiB", 2**40),
        ("3MB", 3_000_000),
        ("1g", 10**9),
        (" 4kib ", 4096),
        ("1.001KB", 1001),
        (str(2**53 + 1), 2**53 + 1),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "MiB", "-1MiB", "1 XB", "1e9", "2 GiB 3", "0.5", "1.5B", -1, True, 1.5, None),
        np.ones(2),
    ],
)
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="budget must be a number of bytes such as 256MiB"):
        parse_bytes(text, "budget")


@pytest.mark.parametrize("size", [2**63, "9" * 30, "9" * 500 + "GiB", "9000000TiB"])
def test_a_size_that_does_not_fit_64_bits_is_refused(size):
    with pytest.raises(ConfigError, match="budget must be at most 9223372036854775807 bytes"):
        parse_bytes(size, "budget")


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (256 * 2**20, "256 MiB"),
        (1023.4 * 2**30, "1023 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit_of_which_there_is_one(num_bytes, expected):
    assert format_bytes(num_bytes) == expected


@given(st.integers(0, 2**60))
def test_a_written_size_can_be_read(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.01)


@given(st.integers(0, 2**50))
def test_a_size_rounded_up_as_written_is_no_less_and_read_as_it_is(num_bytes):
    found = round_up_as_written(num_bytes)

    assert num_bytes <= found <= num_bytes + num_bytes // 99
    assert parse_bytes(format_bytes(found)) == found


@given(st.integers(1, 2**40), st.integers(1, 2**20))
def test_blocks_and_powers_of_two_cover_a_number(number, size):
    assert (cdiv(number, size) - 1) * size < number <= cdiv(number, size) * size
    power = next_power_of_2(number)
    assert power & (power - 1) == 0
    assert power // 2 < number <= power
