"""Parts of files in HTTP: the two headers that name them (RFC 9110, sections 14.2 and 14.4), one part at a time."""

from __future__ import annotations

import re

NUMBER = "(0|[1-9][0-9]{0,17})"
RANGE = re.compile(rf"bytes={NUMBER}-{NUMBER}?")
CONTENT_RANGE = re.compile(rf"bytes {NUMBER}-{NUMBER}/{NUMBER}")


def range_of(header: str, size: int) -> tuple[int, int]:
    """Begin and end of the part of a file that a ``Range`` asks for.

    Args:
        header: its value.
        size: of the file, in bytes.

    Raises:
        ValueError: there is no such part.
    """
    found = RANGE.fullmatch(header)
    start = int(found[1]) if found else size
    end = min(int(found[2]) + 1, size) if found and found[2] else size
    if start >= end:
        raise ValueError(
            f"no such range: the file has {size:,} bytes; ask for one range such as bytes=0-1023"
        )
    return start, end


def piece_of(header: str) -> tuple[int, int, int]:
    """Where a piece of an upload begins, how long it is, and how long the whole is, by its ``Content-Range``.

    Args:
        header: its value.

    Raises:
        ValueError: it is no piece of anything.
    """
    found = CONTENT_RANGE.fullmatch(header)
    start, last, whole = (int(number) for number in found.groups()) if found else (0, 0, 0)
    if not start <= last < whole:
        raise ValueError("Content-Range is missing or garbled: send one such as bytes 0-1023/4096")
    return start, last + 1 - start, whole
