"""Follows the quotes of a text file while it is read, and finds the first one that is misplaced.

A field that begins with a quote ends with one, before a delimiter, a line break or the end of the
text; a quote between them is doubled. In other fields quotes are text. Arrow's reader accepts more:
after the closing quote it reads on as if the field had none, and so takes several rows for one.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["QuoteCheck"]

# The place in the text after a byte; after a closing quote, the next byte may double it.
_FIELD_START, _PLAIN, _QUOTED, _AFTER_QUOTE = range(4)


class QuoteCheck:
    """A stream of text that checks the quotes of what is read from it.

    Reading goes on after a fault. A block of the text without a quote is only searched for one.

    Args:
        stream: The text, decompressed; it has `read` and `close`.
        delimiter: Character between fields.
        quote: Character around fields; empty for none: nothing is checked.

    Attributes:
        opened: Offset in bytes of the quote that began the last quoted field; -1 before the first.
        fault: Offset of the byte that must not follow the closing quote of that field; -1 if there
            is no fault so far.
    """

    closed = False

    def __init__(self, stream: Any, delimiter: str, quote: str) -> None:
        self.opened = -1
        self.fault = -1
        self._stream = stream
        self._delimiter = delimiter.encode()
        self._quote = quote.encode()
        self._state = _FIELD_START
        self._num_bytes = 0
        self._is_ended = False
        self._held = b""

    @property
    def is_open(self) -> bool:
        """Whether what was read ends inside a quoted field."""
        return self._state == _QUOTED

    @property
    def is_unclosed(self) -> bool:
        """Whether the text has ended inside a quoted field."""
        return self._is_ended and self.is_open

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes, and check them.

        A carriage return that would end them waits for the next call, unless it is alone: Arrow
        drops a line feed that begins a block after one, also from a value in quotes.
        """
        held, self._held = self._held, b""
        data: bytes = held + self._stream.read(size - len(held) if size > 0 else size)
        if data.endswith(b"\r") and len(data) > 1:
            data, self._held = data[:-1], b"\r"
        if data and self._quote and self.fault < 0:
            self._follow(data)
        self._num_bytes += len(data)
        self._is_ended = not data
        return data

    def readable(self) -> bool:
        """True: it is open for reading."""
        return True

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def _follow(self, data: bytes) -> None:
        start = 0
        if not self._num_bytes and data.startswith(codecs.BOM_UTF8):
            start = len(codecs.BOM_UTF8)
        if self._quote not in data and self._state != _AFTER_QUOTE:
            if self._state != _QUOTED:
                ends_field = data[-1:] in (self._delimiter, b"\n", b"\r") or start == len(data)
                self._state = _FIELD_START if ends_field else _PLAIN
            return
        self._state, opened, fault = _follow_kernel(
            np.frombuffer(data, np.uint8, offset=start),
            self._state,
            ord(self._delimiter),
            ord(self._quote),
        )
        start += self._num_bytes
        if opened >= 0:
            self.opened = start + opened
        if fault >= 0:
            self.fault = start + fault


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
