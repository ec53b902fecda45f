import pytest

from recsys._support.untrusted import (
    is_int,
    is_number,
    is_text,
    parse_json,
    parse_toml,
)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 5000 + "0" + "}" * 5000, "[" * 65 + "]" * 65]
)
def test_json_nested_deeply_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"more than 64 levels deep|Expecting"):
        parse_json(text)


def test_json_of_64_levels_is_read():
    assert parse_json("[" * 64 + "]" * 64)


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 9000, ".".join("a" * 100) + " = 1", "x = " + "9" * 5000]
)
def test_toml_nested_deeply_or_of_huge_numbers_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"more than 64 levels deep|4300 digits"):
        parse_toml(text)


def test_types_and_ranges_of_parsed_values():
    assert [is_int(value, 0) for value in (0, 2**63 - 1, -1, 2**63, True, 1.0, None)] == [
        *[True] * 2,
        *[False] * 5,
    ]
    assert [is_int(value, 1, 3) for value in (1, 3, 0, 4, True)] == [True, True, *[False] * 3]
    assert [is_number(value) for value in (1, 0.5, float("nan"), float("inf"), "1")] == [
        *[True] * 2,
        *[False] * 3,
    ]
    assert [is_text(value) for value in ("é x", "\ud800", "\x00", "\n", 5)] == [True, *[False] * 4]
