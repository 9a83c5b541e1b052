"""Catching up: a peer downloads the swarm's state, and follows the rounds meanwhile."""

import asyncio
import math
from typing import Protocol

from colab_swarm.errors import StateError, require
from colab_swarm.events import Notice
from colab_swarm.markup import count
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import CHUNK_TIMEOUT_S, Snapshot
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import Mean
from colab_swarm.training.rounds import CaughtUp
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import DonorsSilent

ATTEMPTS = 5  # downloads per branch
_BRANCHES = 4  # of trainers that died together
_PAUSE_S = 1.0  # between two attempts
_SLOW_S = 5.0  # attempts slower than this emit a Notice


class _Follower(Protocol):
    """The rounds of a trainer without the swarm's state: `LinkRounds`."""

    progress: Progress
    services: PeerServices

    async def refresh(self) -> None: ...
    def patience_s(self, donors: list[PeerId]) -> float: ...
    async def download(self, donors: list[PeerId], timeout_s: float) -> Snapshot: ...
    async def wait_called(self) -> None: ...
    async def follow_round(self) -> dict[tuple[int, bytes], Mean]: ...
    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None: ...


class CatchUp:
    """One attempt to get the swarm's state; ``capacity`` means fit in memory.

    A peer that ``has_state`` can continue with its own if no other peer can give a better one.
    """

    def __init__(self, rounds: _Follower, *, capacity: int, has_state: bool) -> None:
        self._rounds = rounds
        self._capacity = capacity
        self._has_state = has_state
        self._means: dict[tuple[int, bytes], Mean] = {}  # by the step and lineage that they are applied to
        self._between_rounds = asyncio.Lock()

    async def run(self) -> CaughtUp | None:
        follower = asyncio.create_task(self._follow(), name="follow rounds")
        try:
            return await self._run()
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _run(self) -> CaughtUp | None:
        progress = self._rounds.progress
        reasons: dict[str, None] = {}
        outdated = b""  # the last root
        attempts = 0
        # Of the present branch's donors: downloads that failed, and when the first began.
        failures = 0
        since = math.inf
        while attempts < _BRANCHES * ATTEMPTS:
            await self._rounds.refresh()
            branch = progress.election.branch()
            root = b""
            silent = False
            if not (donors := sorted(branch.peers - {progress.known.me})):
                if self._has_state or not reasons:
                    return None
                if not progress.known.donors_remain:
                    break
                progress.election.trust_all()  # they were silent, and may answer again
                await asyncio.sleep(_PAUSE_S)
                continue
            since = min(since, loop_now())
            # A peer whose own state others hold as well could train on with them.
            shared = self._has_state and progress.known.shared
            patience_s = CHUNK_TIMEOUT_S
            if shared:
                patience_s = self._rounds.patience_s(donors)
            try:
                snapshot = await self._download(branch.step, donors, patience_s)
                root = snapshot.manifest.root
                async with self._between_rounds:
                    return await self._complete(snapshot)
            except StateError as error:
                reasons[str(error)] = None
                silent = isinstance(error, DonorsSilent) and not self._has_state
            if root in (b"", outdated):  # the same again: an assistant's, as its donors are lost
                failures += 1
                if silent or failures >= ATTEMPTS or loop_now() - since >= patience_s:
                    # A false claim, such as step 10^9, or a frozen peer must not hide the others forever.
                    progress.election.distrust(donors, now=loop_now())
                    if shared:
                        return None  # the others' votes count as well, once they are back
                    failures = 0
                    since = math.inf
            outdated = root or outdated
            await asyncio.sleep(_PAUSE_S * (attempts % ATTEMPTS))
            attempts += not silent
        raise StateError(f"could not catch up with the swarm: {'; '.join(reasons)}")

    async def _download(self, step: int, donors: list[PeerId], timeout_s: float) -> Snapshot:
        text = f"waiting for the state of step {step}: {count(len(donors), 'donor')} slow or frozen"
        telling = asyncio.get_running_loop().call_later(
            _SLOW_S, lambda: self._rounds.services.events.emit(Notice(loop_now(), text))
        )
        try:
            return await self._rounds.download(donors, timeout_s)
        finally:
            telling.cancel()

    async def _complete(self, snapshot: Snapshot) -> CaughtUp:
        step = snapshot.manifest.step
        lineage = snapshot.manifest.subject
        means: list[Mean] = []
        while (mean := self._means.get((step, lineage))) is not None:
            means.append(mean)
            step = step + 1
            lineage = mean.lineage_after(lineage)
        await self._rounds.refresh()
        branch = self._rounds.progress.election.branch()
        missed = branch.step > step or any(followed > step for followed, _ in self._means)
        text = "the swarm moved on during the download"
        require(not missed and (branch.step != step or branch.lineage == lineage), text, StateError)
        self._rounds.adopt(step, lineage)
        return snapshot, means

    async def _follow(self) -> None:
        while True:
            await self._rounds.wait_called()
            async with self._between_rounds:
                self._means |= await self._rounds.follow_round()
            while len(self._means) > self._capacity:
                del self._means[min(self._means)]
