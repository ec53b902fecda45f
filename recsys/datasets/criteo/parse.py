r"""Parse text in Criteo's format; each line is a sample.

    label \t int_0 ... int_12 \t cat_0 ... cat_25 \n

The kernel checks these rules, and `explain` reports a violation:

- 40 fields separated by single tabs; the line ends at "\n", "\r\n" or the end of the file;
- the label is 0 or 1;
- an integer is empty (missing) or matches -?[0-9]{1,10} and fits 32 bits;
- a category is empty (missing) or one to eight hexadecimal digits.

A missing field becomes 0, and so does a negative integer. The kernel only finds the first bad line.
Python code then explains it, so good lines cost nothing extra.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsys._support.jit import inlined_part, kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "NUM_CATEGORIES",
    "NUM_INTEGERS",
    "ParsedLines",
    "explain",
    "parse_lines",
]

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES

# A good line has at least this many bytes: a label, 39 tabs, an end.
MIN_LINE_BYTES = NUM_FIELDS + 1

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO, _ONE, _NINE = (ord(char) for char in "\t\n\r-019")
_INTEGER = rb"(-?[0-9]{1,10})?"
_RULES = (
    ("label", "0 or 1", rb"[01]"),
    ("int_{}", "empty or an integer of 32 bits", _INTEGER),
    ("cat_{}", "empty or 1 to 8 hexadecimal digits", rb"[0-9a-fA-F]{0,8}"),
)
_NOT_HEX = 16
_HEX = np.full(256, _NOT_HEX, np.uint8)
_HEX[[ord(char) for char in "0123456789abcdef"]] = range(16)
_HEX[[ord(char) for char in "ABCDEF"]] = range(10, 16)


class ParsedLines(NamedTuple):
    """The samples of one part of the text, up to its first bad line.

    Shape:
        labels (n,) int8; integers (n, 13) int32; categories (26, n) uint32, column by column, so
        that columns can be numbered in parallel; bad_line None if all lines are good.
    """

    labels: NDArray[np.int8]
    integers: NDArray[np.int32]
    categories: NDArray[np.uint32]
    bad_line: bytes | None


def parse_lines(text: NDArray[np.uint8], begin: int, end: int) -> ParsedLines:
    """Parse the lines in `text[begin:end]`; stops at the first bad one.

    Args:
        text: Bytes; `text[end - 1]` is a newline.
        begin: The first byte of the first line.
        end: The byte after the last line's newline.
    """
    assert begin == end or text[end - 1] == _NEWLINE, "the last line must end in a newline"
    max_good = (end - begin) // MIN_LINE_BYTES + 1
    labels = np.empty(max_good, np.int8)
    integers = np.empty((max_good, NUM_INTEGERS), np.int32)
    categories = np.empty((NUM_CATEGORIES, max_good), np.uint32)
    num_good, stop = _parse_kernel(text, begin, end, labels, integers, categories)
    return ParsedLines(
        labels[:num_good],
        integers[:num_good],
        categories[:, :num_good],
        None if stop == end else text[stop:end].tobytes().partition(b"\n")[0],
    )


def explain(line: bytes) -> tuple[str, str] | None:
    """The rule that a line breaks, and the value that breaks it; None for a good line.

    Args:
        line: One line, with or without its newline.
    """
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    num_fields = line.count(b"\t") + 1  # a line may be 16 MiB of tabs
    if num_fields != NUM_FIELDS:
        return f"expected {NUM_FIELDS} tab-separated fields", str(num_fields)
    for number, field in enumerate(line.split(b"\t")):
        kind = (number > 0) + (number > NUM_INTEGERS)
        name, rule, pattern = _RULES[kind]
        found = re.fullmatch(pattern, field)
        if not found or (pattern == _INTEGER and not -(2**31) <= int(field or 0) < 2**31):
            shown = repr(field[:40])[1:] + "..." * (len(field) > 40)
            column = number - 1 - NUM_INTEGERS * (kind == 2)
            return f"field {number + 1} ({name.format(column)}) must be {rule}", shown
    return None


@kernel
def _parse_kernel(
    text: NDArray[np.uint8],
    position: int,
    end: int,
    labels: NDArray[np.int8],
    integers: NDArray[np.int32],
    categories: NDArray[np.uint32],
) -> tuple[int, int]:
    """Parse to `end`, or to the begin of a bad line; a newline ends every inner loop."""
    num_good = 0
    while position < end:
        line_begin = position
        char = text[position]
        position += 1
        is_good = bool(char in (_ZERO, _ONE) and text[position] == _TAB)
        labels[num_good] = char - _ZERO
        if is_good:
            position, is_good = _parse_integers(text, position, integers, num_good)
        if is_good:
            position, is_good = _parse_categories(text, position, categories, num_good)
        if not is_good:
            return num_good, line_begin
        num_good += 1
        position += 1
    return num_good, position


@inlined_part
def _parse_integers(
    text: NDArray[np.uint8],
    position: int,
    integers: NDArray[np.int32],
    sample: int,
) -> tuple[int, bool]:
    """Parse a line from the tab before its integers on; return the end, and if all are good."""
    is_good, column = True, 0
    while is_good and column < NUM_INTEGERS:
        position += 1
        char = text[position]
        is_negative = char == _MINUS
        if is_negative:
            position += 1
            char = text[position]
        digits_begin = position
        number = np.int64(0)
        while _ZERO <= char <= _NINE:
            number = number * 10 + np.int64(char - _ZERO)
            position += 1
            char = text[position]
        num_digits = position - digits_begin
        largest = 2147483648 if is_negative else 2147483647
        is_good = bool(
            char == _TAB
            and num_digits <= 10
            and number <= largest
            and not (is_negative and num_digits == 0)
        )
        if is_negative:
            number = np.int64(0)
        integers[sample, column] = number
        column += 1
    return position, is_good


@inlined_part
def _parse_categories(
    text: NDArray[np.uint8], position: int, categories: NDArray[np.uint32], sample: int
) -> tuple[int, bool]:
    """Parse a line from the tab before its categories on, as `_parse_integers` does."""
    is_good, column = True, 0
    while is_good and column < NUM_CATEGORIES:
        position += 1
        digits_begin = position
        category = np.uint32(0)
        digit = _HEX[text[position]]
        while digit < _NOT_HEX:
            category = np.uint32((category << np.uint32(4)) | np.uint32(digit))
            position += 1
            digit = _HEX[text[position]]
        is_good = position - digits_begin <= 8
        column += 1
        if column < NUM_CATEGORIES:
            is_good = is_good and text[position] == _TAB
        else:
            if text[position] == _RETURN:
                position += 1
            is_good = is_good and text[position] == _NEWLINE
        categories[column - 1, sample] = category
    return position, is_good
