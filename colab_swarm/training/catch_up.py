"""How a newcomer, or a peer that fell behind, gets level with a swarm that does not wait.

While the snapshot of step s is on its way, the newcomer already takes part in rounds with weight 0 and keeps their
means; then it applies the means of the rounds s, s+1, … in order and is level with everybody, however long the
download took. Its way of taking part cannot hold anybody up: it sends nothing and reduces nothing.

Donors that keep failing are distrusted, and the branch of the others is tried: a peer that tells an absurd step keeps
nobody out.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from colab_swarm.errors import StateError
from colab_swarm.net.peers import PeerId
from colab_swarm.training.progress import LINEAGE_BYTES, Branch
from colab_swarm.training.state import Snapshot

Values = NDArray[np.float32]
ATTEMPTS = 5
BRANCHES = 4
"""How many are tried: trainers that died together may each have left a step of its own behind."""
PAUSE_S = 1.0
PATIENCE_S = 30.0
"""How long donors may fail before others are asked; `ATTEMPTS` failures are enough as well."""


def next_lineage(lineage: bytes, values: Values) -> bytes:
    """Digest of the history after applying ``values``; equal on all peers that got the same mean."""
    return blake3(lineage).update(values.data.cast("B")).digest(LINEAGE_BYTES)


@dataclass(frozen=True)
class CaughtUp:
    """A state to load and the means of the rounds since, in order; no snapshot if this peer is the origin."""

    snapshot: Snapshot | None
    means: tuple[Values, ...] = ()


class Follows(Protocol):
    """What catching up needs of the collaboration."""

    async def refresh(self) -> Branch: ...
    def donors(self, branch: Branch) -> list[PeerId]: ...
    def distrust(self, donors: list[PeerId]) -> None: ...
    async def download(self, donors: list[PeerId]) -> Snapshot: ...
    async def wait_called(self) -> None: ...
    def take_call(self) -> tuple[int, bytes]: ...
    async def follow_round(self, step: int, lineage: bytes) -> Values | None: ...
    def level_with(self, step: int, lineage: bytes) -> None: ...


class CatchUp:
    """One attempt to get level.

    Args:
        room: how many means fit in memory.
        level: this peer has a state to go on with if nobody can give a better one.
    """

    def __init__(self, collaboration: Follows, *, room: int, level: bool) -> None:
        self._collaboration = collaboration
        self._room = room
        self._level = level
        self._means: dict[tuple[int, bytes], Values] = {}  # by what they are applied to
        self._between_rounds = asyncio.Lock()
        self._failures = 0  # of one branch's donors
        self._trying_since: float | None = None
        self._outdated = b""  # root of the last snapshot that was behind the branch

    async def run(self) -> CaughtUp:
        """Download the state and get level.

        Raises:
            StateError: there is a branch, but nobody on it could give its state in time, and this peer is not level.
        """
        follower = asyncio.create_task(self._follow(), name="follow rounds")
        try:
            return await self._run()
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _run(self) -> CaughtUp:
        reasons: dict[str, None] = {}
        for attempt in range(BRANCHES * ATTEMPTS):
            donors = self._collaboration.donors(await self._collaboration.refresh())
            if not donors and (self._level or not reasons):
                return CaughtUp(None)
            if not donors:
                break
            try:
                snapshot = await self._download(donors)
                async with self._between_rounds:
                    return await self._join_up(snapshot, donors)
            except StateError as error:
                reasons[str(error)] = None
                await asyncio.sleep(PAUSE_S * (attempt % ATTEMPTS))
        raise StateError(f"could not catch up with the swarm: {'; '.join(reasons)}")

    async def _download(self, donors: list[PeerId]) -> Snapshot:
        self._trying_since = self._trying_since or asyncio.get_running_loop().time()
        try:
            return await self._collaboration.download(donors)
        except StateError:
            self._on_failure(donors)
            raise

    def _on_failure(self, donors: list[PeerId]) -> None:
        now = asyncio.get_running_loop().time()
        self._failures += 1
        if self._failures >= ATTEMPTS or now - (self._trying_since or now) > PATIENCE_S:
            # What they claim to hold, such as step 10^9, must not keep us from the others for ever.
            self._collaboration.distrust(donors)
            self._failures, self._trying_since = 0, None

    async def _join_up(self, snapshot: Snapshot, donors: list[PeerId]) -> CaughtUp:
        """Put the means after the snapshot in order. Runs between two rounds, so that none slips through."""
        step, lineage = snapshot.manifest.step, snapshot.manifest.lineage
        means: list[Values] = []
        while (mean := self._means.get((step, lineage))) is not None:
            means.append(mean)
            step, lineage = step + 1, next_lineage(lineage, mean)
        branch = await self._collaboration.refresh()
        missed = branch.step > step or any(followed > step for followed, _ in self._means)
        if missed or (branch.step == step and branch.lineage != lineage):
            if snapshot.manifest.root == self._outdated:  # again: an assistant's, as its donors are gone
                self._on_failure(donors)
            self._outdated = snapshot.manifest.root
            raise StateError("the swarm moved on during the download")
        self._collaboration.level_with(step, lineage)
        return CaughtUp(snapshot, tuple(means))

    async def _follow(self) -> None:
        while True:
            await self._collaboration.wait_called()
            async with self._between_rounds:
                step, lineage = self._collaboration.take_call()
                mean = await self._collaboration.follow_round(step, lineage)
            if mean is not None:
                self._means[step, lineage] = mean
            while len(self._means) > self._room:
                del self._means[min(self._means)]
