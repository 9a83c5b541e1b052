"""Probes of a swarm: who is linked and trains, how fast the way to them is, how this peer's clock stands."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from colab_swarm.diagnosis.facts import Membership
from colab_swarm.diagnosis.predict import Line
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.net.speed import Speed, measure
from colab_swarm.overview import MODEL
from colab_swarm.swarm import Swarm
from colab_swarm.training.progress import ProgressRecord
from colab_swarm.training.settings import Services

TESTS = 3
"""Peers that are asked for a speed test."""
SIZE_BYTES = 4 << 20
TEST_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Trainers:
    """Who trains in the run beside this peer, with their speeds in samples/s; and how, as far as it is known."""

    speeds: dict[PeerId, float]
    target_batch_size: int | None = None
    codec: str = "float32"


def membership(swarm: Swarm, trainers: Trainers) -> Membership:
    """This peer in its swarm; tests the speed to up to three peers, one after the other: a few seconds each."""
    peers = swarm._services.peers
    linked = peers.linked()
    asked = sorted(linked, key=lambda peer: -trainers.speeds.get(peer, 0.0))[:TESTS]
    return Membership(
        run=swarm.run,
        reachability=swarm.reachability,
        linked=len(linked),
        trainers=tuple(trainers.speeds.values()),
        skew_s=_skew_s(swarm),
        line=swarm._runtime.call(_line(peers, asked)),
    )


def _skew_s(swarm: Swarm) -> float:
    presence = swarm._presence  # a simulated peer has none, and its wall clock is made up
    return 0.0 if presence is None else -presence.node.linker.clock.behind_s


async def _line(peers: Peers, asked: Sequence[PeerId]) -> Line | None:
    found = []
    for peer in asked:  # in turns: together they would share the line
        try:
            found.append(await measure(peers, peer, size_bytes=SIZE_BYTES, timeout_s=TEST_TIMEOUT_S))
        except PeerError:
            continue  # gone, busy, or too old for it
    return best(found)


def best(found: Sequence[Speed]) -> Line | None:
    """This peer's own line: the fastest test each way (a slower one was slow at the other end), the middle rtt."""
    if not found:
        return None
    rtts_s = sorted(speed.rtt_s for speed in found)
    return Line(
        max(speed.upload_bps for speed in found),
        max(speed.download_bps for speed in found),
        rtts_s[len(rtts_s) // 2],
    )


def trainers(swarm: Swarm) -> Trainers:
    """Who trains the run's model now, by their own records."""
    optimizer, target, codec = swarm._optimizer, None, Trainers.codec
    if optimizer is not None:
        with contextlib.suppress(PeerError):  # then what is known already must do
            swarm._runtime.call(optimizer.collaboration.refresh())
        records = dict(optimizer.collaboration.progress.records)
        target, codec = round(optimizer._settings.target_batch_size), optimizer._settings.codec
    else:
        records = swarm._runtime.call(_records(swarm._services, f"{swarm.run_id}/{MODEL}/progress"))
    speeds = {peer: r.samples_per_s for peer, r in records.items() if peer != swarm.id and r.samples_per_s}
    return Trainers(speeds, target, codec)


async def _records(services: Services, key: str) -> dict[PeerId, ProgressRecord]:
    records: dict[PeerId, ProgressRecord] = {}
    try:
        found = await services.dht.get(key)
    except PeerError:
        return {}
    for peer, record in found.items():
        try:
            records[PeerId(peer)] = msgspec.convert(record.value, ProgressRecord, strict=False)
        except (msgspec.ValidationError, ValueError):
            continue  # not one of this version
    return records
