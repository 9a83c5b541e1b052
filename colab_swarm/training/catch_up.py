"""Catching up: how a late joiner, or a peer that fell behind, gets the state of a swarm that does not wait.

While the snapshot of step s downloads, the peer follows the rounds with weight 0 and collects their means. Then it
applies the means of the rounds s, s+1, … in order and has the swarm's parameters, however long the download took. It
sends nothing and reduces nothing meanwhile, so it cannot slow down a round. Donors that keep failing lose their vote,
and the branch of the other peers is tried: a peer that claims an absurd step keeps no late joiner out.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from colab_swarm.errors import StateError
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.collaboration import Collaboration
from colab_swarm.training.progress import next_lineage

CaughtUp: TypeAlias = tuple[Snapshot, list[Floats]]
"""A state to load, and the means of the rounds since, in order."""

ATTEMPTS = 5
BRANCHES = 4
"""Number of branches to try: trainers that died together may each have left a step of its own."""
PAUSE_S = 1.0
PATIENCE_S = 30.0
"""Donors may fail for this long, or `ATTEMPTS` times, before others are tried."""


async def catch_up(collaboration: Collaboration) -> CaughtUp | None:
    """Return the state of the swarm's branch, or None if this peer's own state counts.

    Raises:
        StateError: no peer on the branch could give its state, and this peer has none of its own.
    """
    found = await collaboration.begin_syncing()
    if found is None:
        return None
    keep_state = False
    try:
        capacity, has_state = found
        caught_up = await CatchUp(collaboration, capacity=capacity, has_state=has_state).run()
        keep_state = caught_up is None
    except StateError:
        collaboration.progress.trust_all()  # the next attempt tries all peers
        raise
    finally:
        collaboration.end_syncing(keep_state=keep_state)
    return caught_up


class CatchUp:
    """One attempt to get the swarm's state.

    Args:
        capacity: number of means that fit in memory.
        has_state: this peer can continue with its own state if no other peer can give a better one.
    """

    def __init__(self, collaboration: Collaboration, *, capacity: int, has_state: bool) -> None:
        self._collaboration = collaboration
        self._capacity, self._has_state = capacity, has_state
        self._means: dict[tuple[int, bytes], Floats] = {}  # by the step and lineage that they are applied to
        self._between_rounds = asyncio.Lock()
        self._failures = 0  # of one branch's donors
        self._trying_since: float | None = None
        self._outdated = b""  # root of the last snapshot that was behind the branch

    async def run(self) -> CaughtUp | None:
        """Download the state and bring it up to date.

        Raises:
            StateError: no peer on the branch could give its state in time, and this peer has none of its own.
        """
        follower = asyncio.create_task(self._follow(), name="follow rounds")
        try:
            return await self._run()
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _run(self) -> CaughtUp | None:
        reasons: dict[str, None] = {}
        for attempt in range(BRANCHES * ATTEMPTS):
            branch = await self._collaboration.refresh()
            donors = sorted(branch.peers - {self._collaboration.progress.me})
            if not donors and (self._has_state or not reasons):
                return None
            if not donors:
                break
            try:
                snapshot = await self._download(donors)
                async with self._between_rounds:
                    return await self._complete(snapshot, donors)
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
            # A false claim, such as step 10^9, must not hide the other peers forever.
            self._collaboration.progress.distrust(donors, now=now)
            self._failures, self._trying_since = 0, None

    async def _complete(self, snapshot: Snapshot, donors: list[PeerId]) -> CaughtUp:
        """Order the means after the snapshot. Runs between two rounds, so that none is missed."""
        step, lineage = snapshot.manifest.step, snapshot.manifest.subject
        means: list[Floats] = []
        while (mean := self._means.get((step, lineage))) is not None:
            means.append(mean)
            step, lineage = step + 1, next_lineage(lineage, mean)
        branch = await self._collaboration.refresh()
        missed = branch.step > step or any(followed > step for followed, _ in self._means)
        if missed or (branch.step == step and branch.lineage != lineage):
            if snapshot.manifest.root == self._outdated:  # again: an assistant's, as its donors are lost
                self._on_failure(donors)
            self._outdated = snapshot.manifest.root
            raise StateError("the swarm moved on during the download")
        await self._collaboration.adopt(step, lineage)
        return snapshot, means

    async def _follow(self) -> None:
        while True:
            await self._collaboration.wait_called()
            async with self._between_rounds:
                self._means |= await self._collaboration.follow_round()
            while len(self._means) > self._capacity:
                del self._means[min(self._means)]
