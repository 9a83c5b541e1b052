"""The board of a class: a pupil gets the run and an animal, and the roster shows who trains."""

from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

import colab_swarm as cs
from colab_swarm.errors import JoinError
from colab_swarm.snapshot import PeerRow
from colab_swarm.swarm import classroom

ALONE = cs.NetworkOptions(lan=False)


@pytest.fixture
def board() -> Iterator[classroom.Board]:
    with cs.create("class", access="open", peer_name="teacher", options=ALONE) as swarm:
        board = classroom.open_board(swarm, port=0)
        yield board
        board.close()


def test_a_full_room_admits_no_more_pupils(board: classroom.Board) -> None:
    answers = [board.welcome(str(number)) for number in range(classroom.MAX_PUPILS)]
    names = [answer[1] for answer in answers if answer is not None]
    assert len(set(names)) == classroom.MAX_PUPILS  # every pupil has another animal
    assert (names[0], names[1], names[len(classroom.ANIMALS)]) == ("otter", "fox", "otter-2")
    assert board.welcome("late") is None and board.welcome("0") == answers[0]
    for who in ("late", "", "x" * 65):
        with pytest.raises(HTTPError, match="503"):
            urlopen(f"http://{board.address}/{who}", timeout=5)


def test_the_address_on_the_board_leads_into_the_run(board: classroom.Board) -> None:
    assert len(board.address) <= len("255.255.255.255:65535")
    pupil = classroom.join(board.address)
    assert pupil.name == "otter" and pupil.run_id == board.swarm.run_id
    assert classroom.join(board.address) is pupil
    pupil.leave()


def test_the_cell_that_opens_the_board_can_be_run_again(board: classroom.Board) -> None:
    assert classroom.open_board(board.swarm, port=0) is board
    board.close()
    again = classroom.open_board(board.swarm, port=0)
    assert again is not board
    again.close()


@pytest.mark.parametrize("address", ["", "192.168.1.10:8421/elsewhere", "http://192.168.1.10"])
def test_a_mistyped_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="looks like 192"):
        classroom.call_board(address)


def test_a_run_with_invitations_has_no_board() -> None:
    created = cs.create("class", peer_name="teacher", options=ALONE)
    with created as swarm, pytest.raises(PermissionError, match="access='open'"):
        classroom.Board(swarm, port=0)


def test_the_roster_shows_which_pupils_train(board: classroom.Board, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PeerRow("otter", "a1a1a1a1", "trainer", 7, 12.34, 0.0, reachable=True, me=False)
    monkeypatch.setattr(board, "pupils", lambda: [("otter", row), ("fox", None)])
    assert str(board) == f"join at {board.address}; 1 of 2 animals training"
    text, html = classroom.draw(board).text(), classroom.draw(board).html()
    assert "otter   step 7, 12.3 samples/s" in text and "fox     not here" in text
    assert all(word in html for word in (board.address, "otter", "step 7, 12.3 samples/s", "not here"))


def test_a_closed_board_shows_itself_and_says_who_calls_what_to_check(board: classroom.Board) -> None:
    board.welcome("one")
    assert repr(board) == f"Board(join at {board.address}; 0 of 1 animal training)"
    assert repr(board.panel()).startswith("Panel(join at")
    board.close()
    assert "closed" in repr(board)
    with pytest.raises(JoinError, match="same Wi-Fi"):
        classroom.call_board(board.address)
