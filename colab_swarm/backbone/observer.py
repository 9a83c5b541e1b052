"""What the peers of one collaboration tell, collected: progress, losses, who is there, how rounds went."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from colab_swarm.backbone.curve import LossCurve, LossPoint
from colab_swarm.backbone.journal import Journal
from colab_swarm.backbone.roster import Roster
from colab_swarm.net.peers import PeerId
from colab_swarm.training.assistant import AssistedRound
from colab_swarm.training.progress import Branch, Progress, ProgressRecord
from colab_swarm.training.records import Assistants, read_assistants, read_progress
from colab_swarm.training.settings import Services

MAX_ROUNDS = 40
SILENCE_S = 6.0
"""After which trainers that are not linked here count as gone; to be wrong costs nothing, see `keeper`."""
OnPoints = Callable[[Sequence[LossPoint]], None]


class RoundRow(msgspec.Struct, frozen=True):
    """A round that the backbone reduced in.

    Attributes:
        step: global step.
        at: when its group began to form, seconds since the epoch.
        forming_s, exchange_s, recovery_s: how long each phase took.
        peers, contributors: members, and those whose values are in the mean.
        samples: of the contributors.
        spans_lost: parts of the vector whose reducer was lost.
        moved_bytes: received and sent by the backbone.
    """

    step: int
    at: float
    forming_s: float
    exchange_s: float
    recovery_s: float
    peers: int
    contributors: int
    samples: float
    spans_lost: int
    moved_bytes: int


class Observer:
    """Watches one collaboration.

    Args:
        prefix: of the collaboration.
        folder: where its ``losses.jsonl`` is: the curve goes on after a restart.
        on_points: hears of new points of the curve.
    """

    def __init__(
        self,
        services: Services,
        prefix: str,
        folder: Path,
        on_points: OnPoints = lambda points: None,
    ) -> None:
        self._services = services
        self._prefix = prefix
        self._journal = Journal(folder / "losses.jsonl", LossPoint)
        self._on_points = on_points
        self.curve = LossCurve(self._journal.read())
        self.roster = Roster()
        self.rounds: deque[RoundRow] = deque(maxlen=MAX_ROUNDS)
        self.round_count = 0
        self.assistants = Assistants(prefix)
        nobody = ProgressRecord(0, b"", 0.0, 0.0, syncing=True, reduces=False, name="")
        self._progress = Progress(services.peers.id, nobody, target_batch_size=0.0)
        self._on_branch: Branch | None = None
        self._heard_at = float("-inf")
        self._stop_listening = services.peers.on_lost(self._on_lost)

    def close(self) -> None:
        """Watch no more."""
        self._stop_listening()

    def _on_lost(self, peer: PeerId) -> None:
        self._progress.on_lost(peer, now=asyncio.get_running_loop().time())
        self.assistants.on_lost(peer)

    async def refresh(self) -> None:
        """Read the records of all peers.

        Raises:
            PeerError: the swarm's records cannot be read now.
        """
        peers, dht = self._services.peers, self._services.dht
        told, assistants = await asyncio.gather(
            read_progress(dht, peers, self._prefix), read_assistants(dht, peers, self._prefix)
        )
        now, at = asyncio.get_running_loop().time(), time.time()
        self._progress.on_records(told, linked=peers.linked(), now=now)
        self.assistants.on_records(assistants)
        self.roster.on_records(self.trainers, self.assistants.records, at=at)
        branch = self.branch
        if branch != self._on_branch or (branch is not None and branch.peers & peers.linked()):
            self._on_branch, self._heard_at = branch, now
        points = self.curve.on_records(self.trainers, branch, at=at)
        if points:
            self._journal.append(*points)
            self._on_points(points)

    @property
    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """The live records of all trainers; what this peer tells itself is left out."""
        me = self._services.peers.id
        return {peer: record for peer, record in self._progress.records.items() if peer != me}

    @property
    def branch(self) -> Branch | None:
        """Where the swarm is; None while nobody trains."""
        branch = self._progress.branch()
        return branch if branch.peers else None

    @property
    def alive(self) -> bool:
        """Whether somebody on the branch is linked here, or moved it on lately; records outlive their writers."""
        heard_s = asyncio.get_running_loop().time() - self._heard_at
        return self.branch is not None and heard_s < SILENCE_S

    def on_round(self, helped: AssistedRound) -> None:
        """This peer reduced in a round."""
        result, group = helped.result, helped.result.group
        loop_to_epoch = time.time() - asyncio.get_running_loop().time()
        weights = {member.id: member.weight for member in group.members}
        self.round_count += 1
        self.rounds.append(
            RoundRow(
                step=group.step,
                at=helped.began_at + loop_to_epoch,
                forming_s=helped.formed_at - helped.began_at,
                exchange_s=result.seconds["exchange"],
                recovery_s=result.seconds["recovery"],
                peers=len(group.members),
                contributors=len(result.contributors),
                samples=sum(weights[peer] for peer in result.contributors),
                spans_lost=len(result.spans_lost),
                moved_bytes=result.sent_bytes + result.received_bytes,
            )
        )
