"""When a membership is renewed."""

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.errors import PeerUnreachable
from colab_swarm.events import EventLog
from colab_swarm.net.membership import Grant, Membership, MembershipAdmission
from colab_swarm.net.peers import Role
from colab_swarm.sim import SimNetwork
from colab_swarm.trust.access import MAX_RETRY_S, RETRY_S, TICK_S, ClockWatch, Credentials, RunMember
from tests.net.swarm import identity

RUN, NOW, LIFE = "my-run-0badcafe", 1_750_000_000.0, 14_400.0
GRANT = Grant(RUN, Role.WORKER, b"l" * 32, NOW + LIFE, NOW + LIFE)


class Asking:
    """A member of a simulated run, and the swarm times at which it asks for a membership; nobody answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, grant: Grant | None = None) -> None:
        peers = SimNetwork().peer("alice")
        admission = MembershipAdmission(RUN, authority=b"a" * 32, own=peers.public_key)
        now = self.joined_at = peers.time()
        held = Membership(RUN, Role.WORKER, peers.public_key, "", now, now + LIFE, grant)
        admission.membership = held.encode()
        self.asked: list[float] = []

        async def request(proof: bytes, token: str) -> Membership:
            self.asked.append(peers.time() - self.joined_at)
            raise PeerUnreachable("the authority is away")

        credentials, dht = Credentials(GRANT, identity("link")), DHT(peers, DHTSettings(), random.Random(0))
        self.member = RunMember(
            peers, dht, admission, EventLog(), credentials, lambda peer, membership: Role.WORKER, lambda: 0.0
        )
        monkeypatch.setattr(self.member, "_request", request)


@pytest.mark.virtual_time
async def test_a_membership_is_renewed_at_half_of_its_life_and_an_absent_authority_asked_ever_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = Asking(monkeypatch)
    await asyncio.sleep(LIFE / 2 - 1)
    await asking.member.tick()
    assert not asking.asked
    for _ in range(int(LIFE / 2 / TICK_S)):
        await asyncio.sleep(TICK_S)
        await asking.member.tick()
    pauses = [later - sooner for sooner, later in pairwise(asking.asked)]
    assert pauses[:3] == pytest.approx([RETRY_S, 2 * RETRY_S, 4 * RETRY_S], abs=TICK_S)
    assert max(pauses) <= MAX_RETRY_S + TICK_S


@pytest.mark.virtual_time
async def test_a_self_signed_membership_is_renewed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(monkeypatch, grant=GRANT)
    await asking.member.tick()
    assert asking.asked == [0.0]


def test_a_compensated_skew_is_reported_once() -> None:
    watch = ClockWatch()
    assert watch.on_skew(30.0) is None
    assert watch.on_skew(240.0) == (
        "this machine's clock is 4 minutes behind the other peers': compensated, you need to do nothing"
    )
    assert watch.on_skew(241.0) is None and watch.on_skew(500.0) is not None  # much worse
    assert watch.on_skew(20.0) is None  # not yet clearly over
    assert watch.on_skew(1.0) == "this machine's clock is right again"
    assert watch.on_skew(2.0) is None


def test_a_skew_of_more_than_ten_minutes_comes_with_the_fix() -> None:
    watch = ClockWatch()
    watch.on_skew(-590.0)
    text = watch.on_skew(-7200.0) or ""
    assert text.startswith("this machine's clock is 2 hours ahead of the other peers': beyond 10 minutes")
    assert "sudo timedatectl set-ntp true" in text and "restart the runtime" in text


@given(st.lists(st.floats(-1e9, 1e9), max_size=30))
def test_the_same_skew_is_never_reported_twice(skews: list[float]) -> None:
    watch = ClockWatch()
    for skew in skews:
        watch.on_skew(skew)
        assert watch.on_skew(skew) is None
