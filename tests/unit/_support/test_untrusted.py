from recsys._support.untrusted import (
    is_int,
    is_number,
    is_text,
    parse_json,
)


def test_json_of_64_levels_is_read():
    assert parse_json("[" * 64 + "]" * 64)


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
