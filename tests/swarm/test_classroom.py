"""The board of a class: who asks gets the run and an animal, and the roster tells who is there."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

import colab_swarm as cs
from colab_swarm.errors import JoinError
from colab_swarm.swarm import classroom

ALONE = cs.NetworkOptions(lan=False)


@pytest.fixture
def board() -> Iterator[classroom.Board]:
    with cs.create("class", access="open", peer_name="teacher", options=ALONE) as swarm:
        board = classroom.open_board(swarm, port=0)
        yield board
        board.close()


def test_no_two_pupils_have_the_same_animal() -> None:
    names = [classroom.animal(place) for place in range(classroom.MAX_PUPILS)]
    assert len(set(names)) == classroom.MAX_PUPILS
    assert names[0] == "otter" and names[len(classroom.ANIMALS)] == "otter-2"


def test_who_asks_again_keeps_the_animal(board: classroom.Board) -> None:
    first, second = board.welcome("one"), board.welcome("two")
    assert first is not None and second is not None
    assert (first.name, second.name) == ("otter", "fox")
    assert board.welcome("one") == first


def test_a_full_room_lets_nobody_in(board: classroom.Board) -> None:
    for number in range(classroom.MAX_PUPILS):
        assert board.welcome(str(number)) is not None
    assert board.welcome("late") is None and board.welcome("0") is not None
    with pytest.raises(HTTPError, match="503"):
        urlopen(f"http://{board.address}/late", timeout=5)


def test_the_line_on_the_board_leads_into_the_run(board: classroom.Board) -> None:
    assert len(board.address) <= len("255.255.255.255:65535")
    pupil = classroom.join(board.address)
    assert pupil.name == "otter" and pupil.run_id == board.swarm.run_id
    assert classroom.join(board.address) is pupil
    pupil.leave()


def test_the_cell_that_opens_the_board_may_be_run_again(board: classroom.Board) -> None:
    assert classroom.open_board(board.swarm, port=0) is board
    board.close()
    again = classroom.open_board(board.swarm, port=0)
    assert again is not board
    again.close()


@pytest.mark.parametrize("line", ["", "192.168.1.10:8421/elsewhere", "http://192.168.1.10"])
def test_a_mistyped_line_is_said_to_be_one(line: str) -> None:
    with pytest.raises(ValueError, match="looks like 192"):
        classroom.call_board(line)


def test_where_no_board_is_the_error_says_what_to_look_at(board: classroom.Board) -> None:
    board.close()
    with pytest.raises(JoinError, match="same Wi-Fi"):
        classroom.call_board(board.address)


def test_a_run_with_invitations_has_no_board() -> None:
    with (
        cs.create("class", peer_name="teacher", options=ALONE) as swarm,
        pytest.raises(PermissionError, match="access='open'"),
    ):
        classroom.Board(swarm, port=0)


def test_the_roster_tells_who_trains_and_who_does_not() -> None:
    pupils = (classroom.Pupil("otter", True, 7, 12.34), classroom.Pupil("fox", False, 0, 0.0))
    snapshot = classroom.BoardSnapshot("192.168.1.10:8421", pupils, closed=False)
    assert classroom.summary(snapshot) == "join at 192.168.1.10:8421; 1 of 2 animals training"
    text, html = classroom.render_text(snapshot), classroom.render_html(snapshot)
    assert "otter       step 7, 12.3 samples/s" in text and "fox         not here" in text
    assert all(word in html for word in ("192.168.1.10:8421", "otter", "step 7, 12.3 samples/s", "not here"))


def test_a_board_shows_itself(board: classroom.Board) -> None:
    board.welcome("one")
    assert repr(board) == f"Board(join at {board.address}; 0 of 1 animal training)"
    assert repr(board.panel()).startswith("Panel(join at")
    board.close()
    assert "closed" in repr(board)
