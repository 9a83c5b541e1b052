"""Visitors of public pages: none may lock out another."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from colab_swarm.net import addresses
from colab_swarm.net.addresses import VisitLimit, source_of


def test_a_source_has_its_own_limit_in_each_window() -> None:
    limit = VisitLimit(2)
    assert [limit.admit("alice", 5.0) for _ in range(3)] == [True, True, False]
    assert limit.admit("bob", 5.5) and not limit.admit("alice", 5.9)
    assert limit.admit("alice", 6.0)
    limit.forgive("bob")
    assert limit.admit("bob", 6.4) and limit.admit("bob", 6.4)


def test_the_table_is_bounded_and_forgets_the_quietest_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "MAX_SOURCES", 2)
    limit = VisitLimit(1)
    assert limit.admit("alice", 0.0) and limit.admit("bob", 0.0) and not limit.admit("alice", 0.0)
    assert limit.admit("carol", 0.0)
    assert not limit.admit("alice", 0.0) and limit.admit("bob", 0.0)


@pytest.mark.parametrize(
    ("remote", "headers", "source"),
    [
        ("203.0.113.9", {}, "203.0.113.9"),
        ("203.0.113.9", {"X-Forwarded-For": "198.51.100.7"}, "203.0.113.9"),
        ("127.0.0.1", {}, "127.0.0.1"),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.1, 198.51.100.7"}, "forwarded 198.51.100.7"),
        ("::1", {"X-Forwarded-For": "127.0.0.1"}, "forwarded 127.0.0.1"),
        ("::ffff:203.0.113.9", {}, "203.0.113.9"),
        ("2001:db8::1:2:3:4", {}, "2001:db8::/64"),
        ("127.0.0.1", {"X-Forwarded-For": "x" * 9999}, "forwarded "),
        (None, {}, ""),
    ],
)
def test_the_source_is_the_visitors_network(remote: str, headers: Mapping[str, str], source: str) -> None:
    request: Any = SimpleNamespace(remote=remote, headers=CIMultiDict(headers))
    assert source_of(request) == source
