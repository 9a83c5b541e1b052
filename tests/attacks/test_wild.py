"""Members that delay, drop, refuse, garble, replay and equivocate at every frame: attacks nobody wrote down."""

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from colab_swarm.net.mux import FrameKind, Mux
from colab_swarm.net.peers import PeerId, Refusal, Stream
from colab_swarm.sim.network import SimLink
from colab_swarm.swarm.swarm import Swarm
from tests.attacks.town import CALM_S, Attack, attacked

MOODS = ("delay", "drop", "refuse", "garble", "replay", "equivocate")
REMEMBERED = 20
LEAST_KEPT = 0.4  # of their steps, in the median run; the figure is printed


class Wild:
    """What a hostile member does to each frame that it sends, and to each call that it answers."""

    def __init__(self, rng: random.Random, moods: list[str], rate: float, fired: Counter[str]) -> None:
        self.rng = rng
        self.moods = moods
        self.rate = rate
        self.fired = fired
        self._sent: list[tuple[bytes, bytes]] = []

    def mood(self) -> str:
        """One for the next act; empty for an honest one."""
        if asyncio.get_running_loop().time() < CALM_S or self.rng.random() > self.rate:
            return ""
        mood = self.rng.choice(self.moods)
        self.fired[mood] += 1
        return mood

    def delay_s(self) -> float:
        return float(10 ** self.rng.uniform(-1.5, 1.3))

    def spoil(self, mood: str, message: bytes, payload: bytes) -> tuple[bytes, bytes]:
        self._sent = [*self._sent[-REMEMBERED:], (message, payload)]
        if mood == "garble":
            return self.rng.randbytes(self.rng.choice((0, 1, len(message)))), self.rng.randbytes(len(payload))
        if mood == "replay":
            return self.rng.choice(self._sent)
        if mood == "equivocate" and payload and len(payload) % 4 == 0:
            factor = np.float32(self.rng.choice((1.0001, -1.0, 3.0, 0.0)))
            return message, (np.frombuffer(payload, np.float32) * factor).tobytes()
        if mood == "equivocate" and message:
            changed = bytearray(message)
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
            return bytes(changed), payload
        return message, payload


def infect(wild: dict[PeerId, Wild], patch: pytest.MonkeyPatch) -> None:
    """Let the members in ``wild`` do that at all of their links."""
    find, send, reply = SimLink.find_handler, SimLink.send_item, Mux.reply
    owners: dict[Mux, PeerId] = {}
    begin = SimLink.__init__

    def open_link(link: SimLink, network: Any, own: Any, *given: Any, **named: Any) -> None:
        begin(link, network, own, *given, **named)
        owners[link.mux] = own.id

    def find_handler(link: SimLink, services: Any, opening: memoryview) -> tuple[Callable[..., Any], Any]:
        handler, message = find(link, services, opening)
        member = wild.get(link._own.id)

        async def wildly(*given: Any) -> Any:
            mood = member.mood() if member else ""
            if mood == "refuse":
                raise Refusal("no")
            if mood == "delay" and member:
                await asyncio.sleep(member.delay_s())
            return await handler(*given)

        return wildly, message

    def send_item(link: SimLink, stream: Stream, message: bytes, payload: Any) -> None:
        member = wild.get(link._own.id)
        mood = member.mood() if member else ""
        if not member:
            send(link, stream, message, payload)
        elif mood == "refuse":
            stream.reset("no", "refused")
        elif mood == "delay":
            kept = bytes(message), bytes(payload)

            def late() -> None:
                still_open = stream.id in link.mux.streams and not stream.sent_end
                if link.lost is None and still_open and stream.credit_bytes > 0:
                    send(link, stream, *kept)

            asyncio.get_running_loop().call_later(member.delay_s(), late)
        elif mood != "drop":
            send(link, stream, *member.spoil(mood, bytes(message), bytes(payload)))

    def answer(mux: Mux, id: int, body: bytes, kind: FrameKind = FrameKind.REPLY) -> None:
        member = wild.get(owners.get(mux, PeerId(b"")))
        mood = member.mood() if member else ""
        if mood == "drop":
            mux.serving.pop(id, None)
        elif member and mood != "delay":
            reply(mux, id, member.spoil(mood, bytes(body), b"")[0], kind)
        else:
            reply(mux, id, body, kind)

    patch.setattr(SimLink, "__init__", open_link)
    patch.setattr(SimLink, "find_handler", find_handler)
    patch.setattr(SimLink, "send_item", send_item)
    patch.setattr(Mux, "reply", answer)


def wild(moods: list[str], rate: float, rng: random.Random, patch: pytest.MonkeyPatch) -> Attack:
    """The attack of a member with these moods, which trains on."""
    infected: dict[PeerId, Wild] = {}
    infect(infected, patch)

    def begin(swarm: Swarm, optimizer: Any, fired: Counter[str]) -> None:
        infected[swarm.id] = Wild(rng, moods, rate, fired)

    return begin


@pytest.mark.slow
def test_a_wild_member_ends_no_loop_and_leaves_the_others_some_of_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    for seed in range(7):
        with monkeypatch.context() as patch:
            runs.append(attacked([wild([*MOODS], 0.3, random.Random(seed), patch)], seed, 60.0))
    kept = statistics.median(run.kept for run in runs)
    print(f"the honest keep {kept:.0%} of their steps")
    assert all(run.fired.keys() == {*MOODS} and run.fired.total() >= 50 for run in runs)
    assert kept >= LEAST_KEPT


@pytest.mark.slow
@pytest.mark.ordeal
def test_two_wild_members_of_five_end_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """At rates from one act in thirty to three in five."""
    runs = []
    for seed in range(40):
        rng = random.Random(seed)
        with monkeypatch.context() as patch:
            attacks = []
            for _ in range(2):
                moods, rate = rng.sample(MOODS, 4), rng.choice((0.03, 0.1, 0.3, 0.6))
                attacks.append(wild(moods, rate, random.Random(rng.random()), patch))
            runs.append(attacked(attacks, seed, 150.0))
    assert all(run.fired.total() >= 20 for run in runs)
    kept = [run.kept for run in runs]
    print(f"the honest keep {statistics.median(kept):.0%} of their steps, {min(kept):.0%} at least")
    assert statistics.median(kept) >= LEAST_KEPT
