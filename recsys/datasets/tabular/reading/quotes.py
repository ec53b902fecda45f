"""Follows the quotes of a text file while it is read, and refuses one that is misplaced.

A field that begins with a quote ends with one, before a delimiter, a line break or the end of the
text; a quote between them is doubled. In other fields quotes are text. Arrow's reader accepts more:
after the closing quote it reads on as if the field had none, and so takes several rows for one.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.jit import kernel
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["QUOTES_WAY_OUT", "QuoteCheck"]

QUOTES_WAY_OUT = (
    'double each quote that belongs to a value; or, if quotes enclose no field, set quote = "" in '
    'the schema (recsys inspect: --quote "")'
)
# The place in the text after a byte; after a closing quote, the next byte may double it.
_FIELD_START, _PLAIN, _QUOTED, _AFTER_QUOTE = range(4)


class QuoteCheck:
    """A stream of text that checks the quotes of what is read from it.

    A block of the text without a quote is only searched for one.

    Args:
        stream: The text, decompressed; it has `read` and `close`.
        path: Its file, for messages.
        delimiter: Character between fields.
        quote: Character around fields.

    Attributes:
        line: The line, from 1, of the quote that began the last quoted field.
    """

    closed = False

    def __init__(self, stream: Any, path: Path, delimiter: str, quote: str) -> None:
        self.line = self._next_line = 1
        self._stream, self._path = stream, path
        self._delimiter, self._quote = delimiter.encode(), quote.encode()
        self._state = _FIELD_START
        self._is_begun = False
        self._held = b""

    @property
    def is_open(self) -> bool:
        """Whether what was read ends inside a quoted field."""
        return self._state == _QUOTED

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes, and check them.

        A carriage return that would end them waits for the next call, unless it is alone: Arrow
        drops a line feed that begins a block after one, also from a value in quotes.

        Raises:
            DatasetFormatError: a quoted field does not end as it must.
        """
        held, self._held = self._held, b""
        data: bytes = held + self._stream.read(size - len(held) if size > 0 else size)
        if data.endswith(b"\r") and len(data) > 1:
            data, self._held = data[:-1], b"\r"
        if not data and self.is_open:
            raise self._error("a quote that begins a field here is never closed")
        text = data if self._is_begun else data.removeprefix(codecs.BOM_UTF8)
        self._is_begun = True
        if text:
            self._follow(text)
        return data

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def _follow(self, text: bytes) -> None:
        codes = np.frombuffer(text, np.uint8)
        if self._quote in text or self._state == _AFTER_QUOTE:
            self._state, opened, fault = _follow_kernel(
                codes, self._state, ord(self._delimiter), ord(self._quote)
            )
            if opened >= 0:
                self.line = self._next_line + _num_line_breaks(codes[:opened])
            if fault >= 0:
                end = self._next_line + _num_line_breaks(codes[:fault])
                rest = text[fault : fault + 30].decode("utf-8", "replace").splitlines()[0]
                raise self._error(
                    f"a field that begins with a quote must end with one, got {rest!r} after the "
                    f"closing quote in line {end}"
                )
        elif self._state != _QUOTED:
            ends_field = text[-1:] in (self._delimiter, b"\n", b"\r")
            self._state = _FIELD_START if ends_field else _PLAIN
        self._next_line += _num_line_breaks(codes)

    def _error(self, rule: str) -> DatasetFormatError:
        return DatasetFormatError(f"{self._path}, line {self.line}: {rule}; {QUOTES_WAY_OUT}")


@kernel
def _num_line_breaks(text: NDArray[np.uint8]) -> int:
    """Line feeds; or carriage returns, in text that has none."""
    num_feeds, num_returns = 0, 0
    for byte in text:
        num_feeds += byte == 10
        num_returns += byte == 13
    return num_feeds if num_feeds else num_returns


@kernel
def _follow_kernel(
    text: NDArray[np.uint8], state: int, delimiter: int, quote: int
) -> tuple[int, int, int]:
    """Follow quotes through a block of text.

    Returns:
        The state after the block; the place of the last quote that began a field, -1 for none; the
        place of the byte that must not follow a closing quote, where it stops, -1 for none.
    """
    opened = -1
    for place in range(len(text)):
        byte = text[place]
        if state == _QUOTED:
            if byte == quote:
                state = _AFTER_QUOTE
        elif byte == quote and state == _FIELD_START:
            state = _QUOTED
            opened = place
        elif byte == quote and state == _AFTER_QUOTE:
            state = _QUOTED
        elif byte == delimiter or byte == 10 or byte == 13:
            state = _FIELD_START
        elif state == _AFTER_QUOTE:
            return state, opened, place
        else:
            state = _PLAIN
    return state, opened, -1
