"""When a membership is renewed."""

import asyncio
import random
from itertools import pairwise

import pytest

from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerUnreachable
from colab_swarm.events import EventLog, Notice
from colab_swarm.invite import Invite
from colab_swarm.net.membership import Membership, MembershipAdmission
from colab_swarm.net.peers import Role
from colab_swarm.sim import SimNetwork
from colab_swarm.trust.access import MAX_RETRY_S, RETRY_S, TICK_S, RunAccess, RunMember, clock_advice

RUN, NOW, LIFE = "my-run-0badcafe", 1_750_000_000.0, 14_400.0


class Asking:
    """A member of a simulated run, and the swarm times at which it asks for a membership; nobody answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = SimNetwork().peer("alice")
        admission = MembershipAdmission(RUN, authority=b"a" * 32, own=peers.public_key)
        now = self.joined_at = peers.time()
        held = Membership(RUN, Role.WORKER, peers.public_key, "", now, now + LIFE)
        admission.membership = held.encode()
        self.asked: list[float] = []

        async def request(proof: bytes) -> Membership:
            self.asked.append(peers.time() - self.joined_at)
            raise PeerUnreachable("the authority is away")

        access = RunAccess(RUN, "invite", admission, invitation=Invite(RUN, (), NOW))
        dht, self.events, self.clock = DHT(peers, random.Random(0)), EventLog(), peers.clock
        self.member = RunMember(peers, dht, admission, self.events, access)
        monkeypatch.setattr(self.member, "_request", request)


@pytest.mark.virtual_time
async def test_renewal_begins_at_half_of_life_and_asks_ever_less(monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_a_compensated_skew_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, told = Asking(monkeypatch), list[bool]()
    for asking.clock.behind_s in (30.0, 240.0, 241.0, 570.0, 600.0, 601.0, 20.0, 600.0, 601.0, 20.0, 1.0):
        before = len(asking.events.recent(Notice))
        await asking.member.tick()
        told.append(len(asking.events.recent(Notice)) > before)
    assert told == [False, True, False, True, False, True, True, True, True, True, False]
    assert asking.events.recent(Notice)[-1].text == "this machine's clock is right again"


def test_a_skew_is_told_with_what_to_do() -> None:
    behind = "this machine's clock is 10 minutes behind the other peers': compensated, you need to do nothing"
    assert (clock_advice(-30.0), clock_advice(600.0)) == ("", behind)
    text = clock_advice(-7200.0)
    assert text.startswith("this machine's clock is 2 hours ahead of the other peers': beyond 10 minutes")
    assert "sudo timedatectl set-ntp true" in text and "restart the runtime" in text
