"""The board of a class: a pupil gets the run and an animal."""

import json
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


def name_for(board: classroom.Board, pupil: str) -> str:
    with urlopen(f"http://{board.address}/{pupil}", timeout=5) as answer:
        invitation, name = json.load(answer)
    assert invitation.startswith("swarm://")
    return str(name)


def test_a_full_room_admits_no_more_pupils(board: classroom.Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classroom, "MAX_PUPILS", len(classroom.ANIMALS) + 2)
    names = [name_for(board, f"{number:x}") for number in range(classroom.MAX_PUPILS)]
    assert len(set(names)) == classroom.MAX_PUPILS  # every pupil has another animal
    assert names[:2] == ["otter", "fox"] and names[-2:] == ["otter-2", "fox-2"]
    assert name_for(board, "0") == "otter"
    with pytest.raises(HTTPError, match="this room is full"):
        name_for(board, "aaaa")


@pytest.mark.parametrize("pupil", ["", "teacher", "a" * 65])
def test_only_a_pupils_process_is_answered(board: classroom.Board, pupil: str) -> None:
    with pytest.raises(HTTPError, match="404"):
        name_for(board, pupil)


def test_the_address_on_the_board_leads_into_the_run_and_its_cell_can_be_run_again(
    board: classroom.Board,
) -> None:
    assert len(board.address) <= len("255.255.255.255:65535")
    with classroom.join(board.address) as pupil:
        assert pupil.name == "otter" and pupil.run_id == board.swarm.run_id
        assert classroom.join(f" {board.address} ") is pupil
    assert classroom.open_board(board.swarm, port=0) is board
    port = int(board.address.rpartition(":")[2])
    with cs.create("other-class", access="open", peer_name="teacher", options=ALONE) as swarm:
        other = classroom.Board(swarm, port)  # which is used
        assert other.address != board.address and classroom.join(other.address).run == "other-class"
        other.close()
    board.close()
    with pytest.raises(JoinError, match="same Wi-Fi"):
        classroom.join(board.address)
    again = classroom.open_board(board.swarm, port=0)
    assert again is not board
    again.close()


@pytest.mark.parametrize("address", ["192.168.1.10:8421:1", "http://192.168.1.10", "nowhere.invalid"])
def test_a_mistyped_address_says_what_to_check(address: str) -> None:
    with pytest.raises(JoinError, match=f"{address}.*same Wi-Fi"):
        classroom.join(address)


def test_a_run_with_invitations_has_no_board() -> None:
    created = cs.create("class", peer_name="teacher", options=ALONE)
    with created as swarm, pytest.raises(PermissionError, match="access='open'"):
        classroom.Board(swarm, port=0)
