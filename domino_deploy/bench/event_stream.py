"""Reading server-sent events as they arrive (the WHATWG's HTML standard, section "Server-sent events")."""

from __future__ import annotations

from collections.abc import Iterator

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MOST_BYTES = 4 << 20  # of one event: a chunk with all its log-probabilities is some hundred KiB


class EventReader:
    """Bytes in, the data of whole events out; a piece may end anywhere, within a character or a line end too."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._is_first_line = True

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of each event that ends in this piece.

        Raises:
            ValueError: data that is not UTF-8, or an event that does not end.
        """
        # A carriage return at the very end may be half of a line end: it waits for the next piece.
        content, waiting = self._rest + piece, b""
        if content.endswith(b"\r"):
            content, waiting = content[:-1], b"\r"
        *lines, rest = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest + waiting
        for line in lines:
            if self._is_first_line:
                line, self._is_first_line = line.removeprefix(_BYTE_ORDER_MARK), False
            if line:
                self._take(line)
            elif self._data:
                data, self._data, self._data_bytes = b"\n".join(self._data), [], 0
                yield data.decode("utf-8")
        if len(self._rest) + self._data_bytes > _MOST_BYTES:
            raise ValueError(f"an event of more than {_MOST_BYTES} bytes")

    def _take(self, line: bytes) -> None:
        """One field; comments (no name before the colon) and fields other than data say nothing here."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(line)
