"""Headers that name parts of files."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.workunits.web import piece_of, range_of


def test_parts_of_a_file() -> None:
    assert range_of("bytes=0-0", 10) == (0, 1)
    assert range_of("bytes=3-", 10) == (3, 10)
    assert range_of("bytes=3-99", 10) == (3, 10)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "bytes=",
        "bytes=10-",
        "bytes=5-4",
        "bytes=-5",
        "bytes=0-1,3-4",
        "items=0-1",
        "bytes=٣-",
        "bytes=1-2\n",
    ],
)
def test_a_range_that_cannot_be_given_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        range_of(header, 10)


def test_pieces_of_an_upload() -> None:
    assert piece_of("bytes 0-9/10") == (0, 10, 10)
    assert piece_of("bytes 4-5/10") == (4, 2, 10)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "bytes 0-10/10",
        "bytes 5-4/10",
        "bytes */10",
        "bytes 0-1/*",
        "bytes -1-2/10",
        "bytes 00-1/10",
        "bytes 0-9/10 ",
    ],
)
def test_a_garbled_piece_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="Content-Range"):
        piece_of(header)


@settings(max_examples=50)
@given(
    st.text(max_size=40) | st.from_regex(r"bytes[ =][0-9]{0,20}-[0-9]{0,20}(/[0-9*]{0,20})?", fullmatch=True)
)
def test_whatever_a_stranger_sends_lies_within_the_file_or_is_refused(header: str) -> None:
    try:
        start, end = range_of(header, 1000)
        assert 0 <= start < end <= 1000
    except ValueError:
        pass
    try:
        start, size, whole = piece_of(header)
        assert 0 <= start < start + size <= whole
    except ValueError:
        pass
