"""What an authority remembers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colab_swarm.net.membership import Grant
from colab_swarm.net.peers import PeerId, Role
from colab_swarm.trust.authority import AuthorityBook

RUN, NOW = "my-run-0badcafe", 1_750_000_000.0
ALICE, BOB, CAROL = (PeerId(name * 32) for name in (b"a", b"b", b"c"))


def grant(uses: int, key: bytes = b"k", until: float = NOW + 60) -> Grant:
    return Grant(RUN, Role.WORKER, key * 32, until, NOW + 9999, uses, False)


def test_uses_are_counted_by_peer_and_coming_again_is_free() -> None:
    book = AuthorityBook(RUN)
    assert [book.use(grant(2), peer, now=NOW) for peer in (ALICE, BOB, ALICE, CAROL, BOB)] == [
        *(True, True, True, False, True)
    ]
    assert book.use(grant(1, key=b"l"), CAROL, now=NOW)


def test_unlimited_invitations_are_not_written_down() -> None:
    assert all(AuthorityBook(RUN).use(grant(0), peer, now=NOW) for peer in (ALICE, BOB, CAROL))


def test_the_book_survives_a_restart(tmp_path: Path) -> None:
    book = AuthorityBook(RUN, tmp_path / "me.key")
    book.use(grant(1), ALICE, now=NOW)
    book.revocations = b"list"
    again = AuthorityBook("my-run-another", tmp_path / "me.key")
    assert again.run_id == RUN and again.revocations == b"list"
    assert not again.use(grant(1), BOB, now=NOW) and again.use(grant(1), ALICE, now=NOW)
    assert [path.name for path in tmp_path.iterdir()] == ["me.key.authority"]
    assert os.name != "posix" or (tmp_path / "me.key.authority").stat().st_mode & 0o077 == 0


def test_a_run_has_its_id_before_the_first_peer_joins(tmp_path: Path) -> None:
    AuthorityBook(RUN, tmp_path / "me.key")
    assert AuthorityBook("my-run-another", tmp_path / "me.key").run_id == RUN


def test_invitations_that_ended_are_forgotten() -> None:
    book = AuthorityBook(RUN)
    book.use(grant(1), ALICE, now=NOW)
    book.use(grant(1, key=b"l", until=NOW + 8000), ALICE, now=NOW + 7200)
    assert list(book._saved.used) == [(b"l" * 32).hex()]


def test_a_damaged_book_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "me.key.authority"
    path.write_bytes(b"{")
    with pytest.raises(ValueError, match="move it away to create a new run"):
        AuthorityBook(RUN, tmp_path / "me.key")
    assert path.read_bytes() == b"{"
